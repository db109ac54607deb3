"""Drawing a report's panels: as interactive plotly figures, and as pictures."""

import html
import math
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from longhorizon.figures import MARK, Figure, Line, Panel, ramp

COLUMNS = 3  # panels beside each other in a picture
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
GRID, INK = "#e6e9ed", "#3b4652"

# What all interactive panels share; the page merges each panel's own layout into it.
LAYOUT: dict[str, Any] = {
    "font": {"family": FONT, "size": 12, "color": INK},
    "margin": {"l": 56, "r": 14, "t": 10, "b": 44},
    "height": 280,
    "showlegend": False,
    "hovermode": "closest",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "xaxis": {"gridcolor": GRID, "zeroline": False, "linecolor": "#aab4be", "ticks": "outside", "tickcolor": "#aab4be"},
    "yaxis": {"gridcolor": GRID, "zerolinecolor": "#aab4be", "automargin": True, "exponentformat": "power"},
}


_BELOW: dict[str, Any] = {  # a legend that covers no line
    "loc": "upper center",
    "bbox_to_anchor": (0.5, -0.2),
    "ncols": 3,
    "fontsize": 7.5,
    "frameon": False,
    "handlelength": 1.4,
}


def interactive(panel: Panel) -> dict[str, Any]:
    """A panel for plotly.js: its traces, its layout, and where its axis turns linear.

    On the "symlog" scale, which plotly has not, the page's script maps y and the ticks; raw values travel only once.
    """
    rows = panel.lines[0].labels if panel.lines else None
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": _plain(panel.x_title), "standoff": 8}},
        "yaxis": {"title": {"text": _plain(panel.y_title), "standoff": 6}},
    }
    if panel.whole:
        low, high = _counted(panel)
        layout["xaxis"] |= {"dtick": _every(high - low), "tick0": 0, "range": [low, high]}
    elif panel.x_range is not None:
        layout["xaxis"]["range"] = list(panel.x_range)
    if panel.log_x:
        layout["xaxis"] |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    if panel.scale != "linear":
        layout["yaxis"] |= {"tickvals": [v for v, _ in panel.ticks], "ticktext": [t for _, t in panel.ticks]}
    if panel.scale == "log":
        layout["yaxis"]["type"] = "log"
        if panel.y_range is not None:
            layout["yaxis"]["range"] = [math.log10(v) for v in panel.y_range]
    if rows is not None:
        layout["yaxis"] = {"range": [len(rows) - 0.5, -0.5], "type": "category"}
        layout["height"] = 64 + 40 * len(rows)
    if panel.marks:
        layout["shapes"] = [
            {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "layer": "above"}
            | {"line": {"color": MARK, "width": 1, "dash": "dot"}}
            for x in panel.marks
        ]
    if panel.empty:
        note = {"text": "no finite value", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
        layout["annotations"] = [note]
    bands = [_band(line, panel) for line in panel.lines if line.band is not None]
    made: dict[str, Any] = {"data": [*bands, *(_trace(line, panel) for line in panel.lines)], "layout": layout}
    return made | ({"symlog": panel.linear_below} if panel.scale == "symlog" else {})


def _band(line: Line, panel: Panel) -> dict[str, Any]:
    """The area around a line, held until the next place as the line is: there and back again."""
    assert line.band is not None
    low, high = line.band
    places = line.places()
    x, there, back = [places[0]], [low[0]], [high[0]]
    for i in range(1, len(places)):
        x += [places[i], places[i]]
        there += [low[i - 1], low[i]]
        back += [high[i - 1], high[i]]
    y = [_rounded(v) for v in [*there, *reversed(back)]]
    around = {"x": [_rounded(v) for v in [*x, *reversed(x)]], "y": y, "hoverinfo": "skip", "name": _plain(line.name)}
    return around | {"type": "scatter", "mode": "none", "fill": "toself", "fillcolor": f"{line.colour}22"}


def _trace(line: Line, panel: Panel) -> dict[str, Any]:
    y = [_rounded(v) for v in line.y]
    name = _plain(line.name)
    if line.labels is not None:
        labels = ["<br>".join(_plain(part) for part in _wrapped(label)) for label in line.labels]
        trace: dict[str, Any] = {"x": y, "y": labels, "hovertemplate": "%{y}: %{x:.4g}<extra></extra>"}
        if line.kind == "row bars":
            return trace | {"type": "bar", "orientation": "h", "marker": {"color": line.colour}}
        trace |= {"type": "scatter", "mode": "markers", "marker": {"color": line.colour, "size": 9}}
        if line.error is not None:
            error = [_rounded(v) or 0 for v in line.error]
            trace["error_x"] = {"type": "data", "array": error, "thickness": 1.4, "width": 4}
            spread = "%{y}: %{x:.4g} ± %{error_x.array:.2g}<extra></extra>"
            trace["hovertemplate"] = [trace["hovertemplate"] if v is None else spread for v in line.error]
        return trace
    place = {"x0": line.x[0], "dx": line.x[1]} if isinstance(line.x, tuple) else {"x": [_rounded(x) for x in line.x]}
    shown = "%{customdata:.4g}" if panel.scale == "symlog" else "%{y:.4g}"
    at = f"{panel.x_title} %{{x:.4g}}"
    trace = {"name": name, "y": y, **place, "hovertemplate": f"{at}: {shown}<extra>{name}</extra>"}
    if line.kind == "bars":
        return trace | {"type": "bar", "marker": {"color": line.colour}}
    trace["type"] = "scatter"
    if line.kind == "ring":
        marker = {"size": 13, "symbol": "circle-open", "color": line.colour, "line": {"width": line.width}}
        return trace | {"mode": "markers", "marker": marker, "hoverinfo": "skip", "hovertemplate": None}
    trace["line"] = {"color": line.colour, "width": line.width}
    if line.kind == "steps":
        trace["line"]["shape"] = "hv"
        return trace | {"mode": "lines"}
    trace["mode"] = "lines+markers"
    trace["marker"] = {"size": 5 if line.colours is None else 8, "color": line.colours or line.colour}
    return trace


def save_picture(figure: Figure, path: Path) -> None:
    """A figure as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    columns = min(COLUMNS, len(figure.panels))
    if figure.name == "validation" or len(figure.panels) == 4:  # pairs, by outer step and by time; a square
        columns = 2
    elif len(figure.panels) in (7, 8):  # two rows rather than three, the last of which would be nearly empty
        columns = 4
    rows = math.ceil(len(figure.panels) / columns)
    wide, high = figure.size
    sheet = Sheet(figsize=(wide * columns + 0.6, high * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(sheet)
    axes = [sheet.add_subplot(rows, columns, i + 1) for i in range(len(figure.panels))]
    for panel, ax in zip(figure.panels, axes, strict=True):
        _draw(panel, ax)
    if figure.ramp is not None:
        _colour_bar(sheet, axes, figure.ramp)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        sheet.savefig(path)


def _draw(panel: Panel, ax: Any) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, MultipleLocator, NullLocator

    ax.set_title(_literal(panel.title), fontsize=10)
    ax.set_xlabel(_literal(panel.x_title), fontsize=9)
    ax.set_ylabel(_literal(panel.y_title), fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    for x in panel.marks:
        ax.axvline(x, color=MARK, linewidth=1, linestyle=":", zorder=1)
    for line in panel.lines:
        _draw_line(line, ax)
    if panel.log_x:
        ax.set_xscale("log")
    if panel.scale == "log":
        ax.set_yscale("log")
        if panel.y_range is not None:
            ax.set_ylim(*panel.y_range)
    elif panel.scale == "symlog":
        ax.set_yscale("function", functions=_symlog(panel.linear_below))
        if panel.y_range is not None:
            ax.set_ylim(*panel.y_range)
    if panel.scale != "linear":
        ax.yaxis.set_major_locator(FixedLocator([v for v, _ in panel.ticks]))
        ax.yaxis.set_major_formatter(FixedFormatter([t for _, t in panel.ticks]))
        ax.yaxis.set_minor_locator(NullLocator())
    if panel.whole:
        low, high = _counted(panel)
        ax.set_xlim(low, high)
        ax.xaxis.set_major_locator(MultipleLocator(_every(high - low)))
    elif panel.x_range is not None:
        ax.set_xlim(*panel.x_range)
    if panel.legend:
        handles = [_swatch(colour) for colour, _ in panel.legend]
        ax.legend(handles, [text for _, text in panel.legend], **_BELOW)
    if panel.empty:
        ax.text(0.5, 0.5, "no finite value", transform=ax.transAxes, ha="center", color=INK, fontsize=9)


def _draw_line(line: Line, ax: Any) -> None:
    y = [math.nan if v is None else v for v in line.y]
    x = [math.nan if v is None else v for v in line.places()]
    if line.labels is not None:
        labels = ["\n".join(_literal(part) for part in _wrapped(label)) for label in line.labels]
        if line.kind == "row bars":
            ax.barh(range(len(y)), y, color=line.colour)
        else:
            error = None if line.error is None else [v or 0.0 for v in line.error]
            ax.errorbar(y, range(len(y)), xerr=error, fmt="o", color=line.colour, capsize=3, markersize=5)
        ax.set_yticks(range(len(y)), labels)
        ax.set_ylim(len(y) - 0.5, -0.5)
    elif line.kind == "bars":
        ax.bar(x, y, color=line.colour)
    elif line.kind == "steps":
        if line.band is not None:
            low, high = ([math.nan if v is None else v for v in side] for side in line.band)
            ax.fill_between(x, low, high, color=line.colour, alpha=0.13, linewidth=0, step="post")
        ax.plot(x, y, color=line.colour, linewidth=line.width * 0.8, drawstyle="steps-post")
    elif line.kind == "ring":
        ax.plot(x, y, "o", markersize=10, markerfacecolor="none", markeredgecolor=line.colour, zorder=5)
    else:
        ax.plot(x, y, color=line.colour, linewidth=line.width * 0.8, marker=None if line.colours else "o", markersize=3)
        if line.colours:
            ax.scatter(x, y, c=line.colours, s=26, zorder=3)


def _colour_bar(sheet: Any, axes: list[Any], steps: tuple[int, int]) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    first, last = steps
    colours = LinearSegmentedColormap.from_list("outer", [ramp(i, 32) for i in range(33)])
    known = ScalarMappable(Normalize(first, last if last > first else first + 1), colours)
    bar = sheet.colorbar(known, ax=axes, aspect=30, pad=0.01, ticks=MaxNLocator(integer=True, nbins=6))
    bar.set_label("outer step", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def _symlog(linear_below: float) -> tuple[Any, Any]:
    """The map of the page's script, and its inverse."""

    def there(v: Any) -> Any:
        return np.sign(v) * np.log10(1 + np.abs(v) / linear_below)

    def back(v: Any) -> Any:
        with np.errstate(over="ignore"):  # matplotlib asks far outside the axis too
            return np.sign(v) * linear_below * (10 ** np.abs(v) - 1)

    return there, back


def _swatch(colour: str) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linewidth=2)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _counted(panel: Panel) -> tuple[float, float]:
    """What an axis that counts shows: all there is, and a little room."""
    places = [x for line in panel.lines for x in line.places() if x is not None]
    low, high = min(places, default=0.0), max(places, default=1.0)
    room = 0.6 if panel.lines[0].kind == "bars" else max(0.04 * (high - low), 0.25)
    return low - room, high + room


def _every(count: float) -> int:
    """The distance of ticks on an axis that counts to `count`."""
    return next((size for size in (1, 2, 5) if count <= 8 * size), None) or 10 * _every(count / 10)


def _wrapped(label: str) -> list[str]:
    return textwrap.wrap(label, 24) or [""]


def _plain(text: str) -> str:
    """Text that plotly shows as it is: it reads a little HTML."""
    return html.escape(text, quote=False).replace("%{", "%\u200b{")


def _literal(text: str) -> str:
    """Text that matplotlib shows as it is: it reads mathematics between dollars."""
    return text.replace("$", r"\$")
