"""An HTML page that needs nothing else: figures, tables and facts, for a tuning run and for a comparison.

It carries plotly.js and asks the network for nothing; a content security policy makes sure of that.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from longhorizon import drawing
from longhorizon.axes import as_percent, in_unit, number, short
from longhorizon.figures import Figure, Panel, ramp
from longhorizon.files import write_aside
from longhorizon.rundir import RunError

ROWS = 24  # a longer table is folded


def write(text: str, shown: Sequence[Figure], target: Path) -> Path:
    """Write a page, and its figures as pictures in a folder beside it."""
    if target.suffix != ".html":
        target = target / "report.html"
    try:
        pictures = target.with_suffix("")
        pictures.mkdir(parents=True, exist_ok=True)
        for figure in shown:
            drawing.save_picture(figure, pictures / f"{figure.name}.png")
        write_aside(target, text)
    except OSError as error:
        raise RunError(f"cannot write {target}: {error.strerror or error}.") from error
    return target


def page(title: str, kind: str, parts: Sequence[str], data: str) -> str:
    """The whole page around its parts, with the figures' data and the script that draws them."""
    from plotly.offline import get_plotlyjs

    template = resources.files("longhorizon").joinpath("report.html").read_text(encoding="utf-8")
    pieces = {
        "TITLE": escaped(title),
        "KIND": escaped(kind),
        "BODY": "\n".join(parts),
        "DATA": data.replace("<", "\\u003c"),  # nothing in it can end the script
        "PLOTLY": get_plotlyjs(),
    }
    before, *rest = template.split("@@")  # TEXT@@NAME@@TEXT@@…: nothing inserted is read again
    return before + "".join(pieces[part] if i % 2 == 0 else part for i, part in enumerate(rest))


def data_of(shown: Sequence[Figure]) -> str:
    """All panels for the page's script."""
    panels = {_id(figure, i): drawing.interactive(panel) for figure in shown for i, panel in enumerate(figure.panels)}
    return json.dumps(
        {"layout": drawing.LAYOUT, "panels": panels}, allow_nan=False, separators=(",", ":"), ensure_ascii=False
    )


def drawn(figure: Figure, more: str = "") -> str:
    """A figure's section of the page."""
    pairs = " pairs" if figure.name == "validation" else ""
    panels = "".join(_panel(figure, panel, i) for i, panel in enumerate(figure.panels))
    return section(figure.title, f"{_ramp(figure)}<div class='panels{pairs}'>{panels}</div>{more}", figure.text)


def _panel(figure: Figure, panel: Panel, index: int) -> str:
    chips = "".join(f"<li><i style='background:{colour}'></i>{escaped(text)}</li>" for colour, text in panel.legend)
    legend = f"<ul class='chips' aria-label='windows, as parts of training'>{chips}</ul>" if chips else ""
    label = escaped(f"{panel.title}: {panel.y_title} against {panel.x_title}".replace(":  against", ":"))
    plot = f"<div class='plot' id='{_id(figure, index)}' role='img' aria-label='{label}'></div>"
    return f"<figure><figcaption>{escaped(panel.title)}</figcaption>{legend}{plot}</figure>"


def _ramp(figure: Figure) -> str:
    if figure.ramp is None:
        return ""
    stops = ",".join(ramp(i, 8) for i in range(9))
    first, last = figure.ramp
    start = "start" if first == 0 else f"outer step {first}"
    return (
        f"<p class='ramp'>{start}<i style='background:linear-gradient(90deg,{stops})'></i>"
        f"{'after ' if first == 0 else ''}outer step {last}</p>"
    )


def _id(figure: Figure, index: int) -> str:
    return f"{figure.name}-{index}"


def settings_section(settings: Mapping[str, Any], recipe: object) -> str:
    """What a run was begun with."""
    hypers = settings.get("hypers", {})
    head = ["name", "start", "windows", "first γ", "bounds", "scale", "applies to"]
    rows = []
    for key, hyper in hypers.items():
        bounds = [short(number(hyper.get(end))) for end in ("low", "high")]
        step = hyper.get("step")
        rows.append(
            [
                escaped(key) + ("" if hyper.get("learn", True) else " (fixed)"),
                escaped(_some([short(number(v)) for v in hyper.get("start", [])])),
                escaped(hyper.get("windows", "")),
                "usual" if step is None else short(number(step)),
                "none" if bounds == ["–", "–"] else f"{bounds[0]} … {bounds[1]}",
                escaped(hyper.get("scale", "")),
                escaped("all" if hyper.get("params") is None else hyper["params"]),
            ]
        )
    others = {key: value for key, value in settings.items() if key not in ("hypers", "rule")}
    rule = settings.get("rule")
    if isinstance(rule, Mapping):
        fixed = ", ".join(filter(None, (_words(rule.get(part)) for part in ("defaults", "options"))))
        others = {"rule": f"{rule.get('name', '')} (by default {fixed})", **others}
    text = f"<h3>Recipe</h3><pre>{escaped(recipe)}</pre>" if recipe else ""
    return section("Settings", table(head, rows, numeric=range(1, 4)) + _definitions(others) + text)


def environment_section(environment: object) -> str:
    """What it ran on."""
    known = environment if isinstance(environment, Mapping) else {}
    return section("Environment", _definitions(known)) if known else ""


def section(title: str, content: str, text: str = "") -> str:
    """A title, a sentence or two, and what follows."""
    sentence = f"<p>{escaped(text)}</p>" if text else ""
    return f"<section><h2>{escaped(title)}</h2>{sentence}{content}</section>"


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Iterable[int] = (), classes: Sequence[str] = ()
) -> str:
    """A table of cells that are HTML already; a long one is folded."""
    right = set(numeric)
    cells = ["<td class='n'>" if i in right else "<td>" for i in range(len(head))]
    headed = "".join(f"<th class='n'>{h}</th>" if i in right else f"<th>{h}</th>" for i, h in enumerate(head))
    body = "".join(
        (f"<tr class='{classes[r]}'>" if classes and classes[r] else "<tr>")
        + "".join(f"{cell}{content}</td>" for cell, content in zip(cells, row, strict=True))
        + "</tr>"
        for r, row in enumerate(rows)
    )
    table = f"<div class='scroll'><table><thead><tr>{headed}</tr></thead><tbody>{body}</tbody></table></div>"
    if len(rows) <= ROWS:
        return table
    return f"<details><summary>{len(rows)} rows</summary>{table}</details>"


def _definitions(content: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<div><dt>{escaped(key)}</dt><dd>{escaped(_words(value))}</dd></div>" for key, value in content.items()
    )
    return f"<dl class='facts'>{rows}</dl>"


def _words(value: object) -> str:
    """A setting without brackets and quotes."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_words(v)}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_words(v) for v in value)
    return str(value)


def _some(items: list[str]) -> str:
    if len(set(items)) <= 1:
        return items[0] if items else ""
    return ", ".join(items[:6]) + (" …" if len(items) > 6 else "")


def score(name: str, mean: float | None, deviation: float | None = None) -> str:
    """A loss or a metric with its deviation, an accuracy in per cent."""
    (shown, spread), label = as_percent(name, [mean, deviation])
    if shown is None:
        return "–"
    if label.endswith("(%)"):
        return f"{shown:.2f} %" if spread is None else f"{shown:.2f} ± {spread:.2f} %"
    return short(shown) if spread is None else f"{short(shown)} ± {spread:.2g}"


def duration(seconds: float) -> str:
    """Seconds in words."""
    (value,), unit = in_unit([seconds])
    return f"{value:.3g} {unit}"


def escaped(text: object) -> str:
    """Text as HTML."""
    return html.escape(str(text), quote=True)
