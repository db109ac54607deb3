"""What a report shows: from the journal of a run to panels of lines, before anything is drawn.

`drawing.py` turns these into interactive figures and into pictures; nothing here knows either.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any, Literal

from longhorizon.axes import Numbers, Scale, as_percent, in_unit, log_ticks, number, scale_of, span, symlog_ticks
from longhorizon.outer_step import OuterStep, best_of

WINDOWS_APART = 12  # up to so many windows get a line each along the outer steps
LINES = 40  # so many outer steps are drawn at most where each is a line of its own
PLAIN, RING, MARK = "#2a5d8f", "#d1495b", "#c0392b"
PROGRESS = "training (%)"


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        y: its values.
        x: its places, or (first, distance) where they are evenly spaced.
        kind: how it is drawn; "steps" holds each value until the next.
        colours: one per point, where they differ.
        error: standard deviations, if known.
        labels: names of the places, for "rows" and "row bars": y is then drawn along the horizontal axis.
        band: from where to where, around it, its spread goes.
    """

    name: str
    y: Numbers
    x: Numbers | tuple[float, float] = (0.0, 1.0)
    colour: str = PLAIN
    width: float = 1.6
    kind: Literal["line", "steps", "ring", "bars", "rows", "row bars"] = "line"
    colours: list[str] | None = None
    error: Numbers | None = None
    labels: list[str] | None = None
    band: tuple[Numbers, Numbers] | None = None

    def places(self) -> Numbers:
        """All its x."""
        if isinstance(self.x, tuple):
            first, distance = self.x
            return [first + i * distance for i in range(len(self.y))]
        return self.x


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        marks: where to draw a vertical line: something went wrong there.
        linear_below: the scale "symlog" is linear between plus and minus this.
        ticks: values and their texts on the vertical axis, where the scale is not linear.
        y_range: what the vertical axis shows, where it is not left to the drawing.
        legend: colour and text, for panels with a few lines.
        whole: whether the horizontal axis counts things.
        log_x: whether the horizontal axis is a logarithm.
    """

    title: str
    x_title: str
    y_title: str
    lines: list[Line]
    scale: Scale = "linear"
    linear_below: float = 1.0
    ticks: list[tuple[float, str]] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    whole: bool = False
    log_x: bool = False

    @property
    def empty(self) -> bool:
        return all(v is None for line in self.lines for v in line.y)


@dataclass(frozen=True)
class Figure:
    """Panels that belong together.

    Attributes:
        name: of its file.
        text: one sentence or two that say how to read it.
        ramp: the outer steps, first and last, that colours stand for.
        size: of a panel in a picture, in inches.
    """

    name: str
    title: str
    text: str
    panels: list[Panel]
    ramp: tuple[int, int] | None = None
    size: tuple[float, float] = (3.7, 2.9)


def figures(
    settings: Mapping[str, Any], records: Sequence[OuterStep], result: Mapping[str, Any], kept: int | None = None
) -> list[Figure]:
    """Everything there is to draw about a run, whatever is there of it; `kept` as for `schedules`."""
    found: list[Figure] = []
    if records:
        found = [
            schedules(settings, records, kept),
            validation(records),
            hypergradients(settings, records),
            gammas(settings, records),
            times(records, result),
        ]
    return [figure for figure in [*found, held_out(result)] if figure.panels]


def schedules(settings: Mapping[str, Any], records: Sequence[OuterStep], kept: int | None = None) -> Figure:
    """The paper's Figure 4: values over training, one line per outer step.

    Args:
        kept: after how many outer steps the values are that were kept in the end; None for the last ones.
    """
    count = len(records)
    kept = count if kept is None else kept
    panels = []
    for key in learnt(settings, records):
        history = [finite(r.values[key]) for r in records] + [finite(records[-1].next[key])]
        log = settings.get("hypers", {}).get(key, {}).get("scale") == "log"
        scale: Scale = "log" if log else "linear"
        everything = [v for values in history for v in values]
        if len(history[0]) == 1:
            colours = [ramp(i, count) for i in range(count + 1)]
            lines = [Line(key, [values[0] for values in history], colour="#9aa5b1", colours=colours)]
            if kept != count:
                lines.append(Line("kept", [history[kept][0]], [float(kept)], RING, 2.0, "ring"))
            panels.append(_panel(key, "outer step", "value", lines, everything, scale, whole=True))
        else:
            lines = _by_outer_step(history, count, bold=kept)
            panels.append(_panel(key, PROGRESS, "value", lines, everything, scale, x_range=(0.0, 100.0)))
    constants = any(panel.whole for panel in panels)
    what = (
        "the last" if kept == count else f"kept: what there was after outer step {kept}" if kept else "kept: the start"
    )
    text = (
        f"Each line is a schedule over training; colour tells after which outer step, and the bold one is {what}."
        if not all(panel.whole for panel in panels)
        else "Each point is the value after an outer step" + (f"; the ring is {what}." if kept != count else ".")
    )
    if constants and not all(panel.whole for panel in panels):
        text += " A hyperparameter with a single value is drawn against the outer step."
    return Figure("schedules", "Learnt values", text + _thinned(count + 1), panels, ramp=(0, count))


def validation(records: Sequence[OuterStep]) -> Figure:
    """Validation loss and metrics against outer steps and against time."""
    best = best_of(records)
    bad = [r for r in records if diverged(r)]
    ends, unit = in_unit(list(accumulate(r.seconds for r in records)))
    quantities: list[tuple[str, list[float | None]]] = [
        ("loss", [None if diverged(r) else number(r.val_loss) for r in records])
    ]
    for name in dict.fromkeys(name for r in records for name in r.metrics):
        quantities.append((name, [number(r.metrics.get(name)) for r in records]))
    panels = []
    for name, given in quantities:
        values, label = as_percent(name, given)
        for by_time in (False, True):
            x: Numbers | tuple[float, float] = [*ends] if by_time else (1.0, 1.0)
            places = {r.index: (ends[i] if by_time else i + 1.0) for i, r in enumerate(records)}
            lines = [Line(name, values, x)]
            if best is not None:
                spot = records.index(best)
                lines.append(Line("best", [values[spot]], [places[best.index]], RING, 2.0, "ring"))
            panels.append(
                _panel(
                    f"validation {name}" + (" over time" if by_time else ""),
                    f"time ({unit})" if by_time else "outer step",
                    label,
                    lines,
                    values,
                    "linear" if label.endswith("(%)") else "auto",
                    marks=[places[r.index] for r in bad],
                    whole=not by_time,
                    x_range=(0.0, max(ends) * 1.03 or 1.0) if by_time else None,
                )
            )
    text = (
        "How each outer step's training run ended on the validation set, against outer steps and against time; "
        "the ring marks the best run, by loss."
    )
    return Figure("validation", "Validation", text + _marked(bad), panels)


def hypergradients(settings: Mapping[str, Any], records: Sequence[OuterStep]) -> Figure:
    """The paper's Appendix E: raw hypergradients, per inner step."""
    panels, ramped = _per_value(settings, records, _shown, "dL / d value", "symlog")
    text = (
        "How the final validation loss changes with each value: its hypergradient, averaged over the inner steps of "
        "its window. Below zero, raising the value lowers the loss."
    )
    if any(panel.scale == "symlog" for panel in panels):
        text += " Where values span many sizes the axis is linear near zero and logarithmic beyond."
    bad = [r for r in records if diverged(r)]
    text += _marked(bad) if any(panel.marks for panel in panels) else ""
    return Figure("hypergradients", "Hypergradients", text, panels, ramp=(1, len(records)) if ramped else None)


def _shown(record: OuterStep) -> Mapping[str, Any]:
    """Hypergradients, but of a run that diverged: they would leave no room for the others."""
    return {key: m * math.nan for key, m in record.mean.items()} if diverged(record) else record.mean


def gammas(settings: Mapping[str, Any], records: Sequence[OuterStep]) -> Figure:
    """γ, the step of each value, over outer steps; nothing for outer optimizers without one."""
    if not all(isinstance(r.outer.get("gamma"), Mapping) for r in records):
        return Figure("gamma", "", "", [])
    panels, ramped = _per_value(settings, records, lambda r: r.outer["gamma"], "γ", "log")
    text = (
        "How far each value may move in one outer step. It shrinks when the sign of the hypergradient changes (and "
        "after a run that diverged), so a falling line means that a value is settling."
    )
    return Figure("gamma", "Step sizes γ", text, panels, ramp=(1, len(records)) if ramped else None)


def times(records: Sequence[OuterStep], result: Mapping[str, Any]) -> Figure:
    """Seconds of every outer step, and of the run's parts where they were measured."""
    taken, unit = in_unit([r.seconds for r in records])
    line = Line("time", [number(t) for t in taken], (1.0, 1.0), kind="bars")
    panels = [Panel("outer steps", "outer step", f"time ({unit})", [line], whole=True)]
    text = "How long each outer step took."
    parts = parts_of(records, result)
    if parts:
        values, unit = in_unit(list(parts.values()))
        rows = Line("time", [*values], kind="row bars", labels=list(parts))
        panels.append(Panel("parts of the run", f"time ({unit})", "", [rows]))
        text = "How long each outer step took, and each part of the run."
    return Figure("time", "Time", text, panels)


def parts_of(records: Sequence[OuterStep], result: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by part, from the "seconds" of result.json: by name, or of the whole run."""
    seconds = result.get("seconds")
    if isinstance(seconds, Mapping):
        return {str(name): v for name, given in seconds.items() if (v := number(given)) is not None}
    whole, inside = number(seconds), sum(r.seconds for r in records)
    if whole is None or whole < inside:  # a run that was resumed counted only its last part
        return {}
    return {"outer steps": inside, "around them": whole - inside}


def held_out(result: Mapping[str, Any]) -> Figure:
    """Test results of the learnt schedule beside others."""
    found = scores_of(result)
    panels = []
    for name in dict.fromkeys(name for scores in found.values() for name in scores):
        rows = {method: scores[name] for method, scores in found.items() if name in scores}
        both, label = as_percent(name, [v for pair in rows.values() for v in pair])
        line = Line(name, both[::2], kind="rows", error=both[1::2], labels=list(rows))
        panels.append(Panel(f"test {name}", label, "", [line]))
    steps = number(result.get("test_steps"))
    text = (
        f"Networks trained from scratch{'' if steps is None else f' for {steps:.0f} steps'} and measured on data that "
        "nothing has seen: mean and standard deviation over several runs."
    )
    return Figure("test", "Test", text, panels)


def scores_of(result: Mapping[str, Any]) -> dict[str, dict[str, tuple[float | None, float | None]]]:
    """By method and score: mean and standard deviation, of what result.json has in readable form."""
    found: dict[str, dict[str, tuple[float | None, float | None]]] = {}
    test = result.get("test")
    for method, scores in test.items() if isinstance(test, Mapping) else ():
        for name, value in scores.items() if isinstance(scores, Mapping) else ():
            pair = value if isinstance(value, list | tuple) else [value]
            if pair and (pair[0] is None or isinstance(pair[0], int | float)):  # None or NaN: it diverged
                spread = number(pair[1]) if len(pair) > 1 else None
                found.setdefault(str(method), {})[str(name)] = (number(pair[0]), spread)
    return found


def learnt(settings: Mapping[str, Any], records: Sequence[OuterStep]) -> list[str]:
    """The keys that were learnt, in the order the user gave them."""
    keys = list(records[0].grad) if records else []
    hypers = settings.get("hypers", {})
    return [key for key in keys if key in records[0].values and hypers.get(key, {}).get("learn", True)]


def diverged(record: OuterStep) -> bool:
    """Whether training itself failed; a hypergradient alone may fail too, which `status` tells."""
    return not math.isfinite(record.val_loss) or record.exploded


def finite(values: Any) -> Numbers:
    """A tensor's numbers, None where they are not finite."""
    return [number(v) for v in values.reshape(-1).tolist()]


@cache
def ramp(index: int, count: int, colours: str = "viridis") -> str:
    """The colour of one of `count` + 1 places, from light to dark (or dark to light, for windows)."""
    import matplotlib
    from matplotlib.colors import to_hex

    share = index / count if count else 1.0
    place = 0.9 * (1 - share) if colours == "viridis" else 0.85 * share
    return str(to_hex(matplotlib.colormaps[colours](place)))


def _per_value(
    settings: Mapping[str, Any],
    records: Sequence[OuterStep],
    of: Callable[[OuterStep], Mapping[str, Any]],
    y_title: str,
    scale: Scale,
) -> tuple[list[Panel], bool]:
    """One panel per key: a line per window along the outer steps, or, of many windows, a line per outer step."""
    panels, ramped = [], False
    bad = [i + 1.0 for i, r in enumerate(records) if diverged(r)]
    for key in learnt(settings, records):
        if not all(key in of(r) for r in records):
            continue
        history = [finite(of(r)[key]) for r in records]
        everything = [v for values in history for v in values]
        windows = len(history[0])
        if windows > WINDOWS_APART:
            lines = _by_outer_step(history, len(records) - 1, first=1)
            panels.append(_panel(key, PROGRESS, y_title, lines, everything, scale, x_range=(0.0, 100.0)))
            ramped = True
            continue
        names = [span(w, windows) for w in range(windows)]
        colours = [PLAIN] if windows == 1 else [ramp(w, windows - 1, "plasma") for w in range(windows)]
        lines = [Line(names[w], [v[w] for v in history], (1.0, 1.0), colours[w]) for w in range(windows)]
        legend = list(zip(colours, names, strict=True)) if windows > 1 else []
        marks = bad if scale == "symlog" else []
        panels.append(
            _panel(key, "outer step", y_title, lines, everything, scale, legend=legend, marks=marks, whole=True)
        )
    return panels, ramped


def _by_outer_step(history: list[Numbers], count: int, first: int = 0, bold: int | None = None) -> list[Line]:
    """A stepped line over training per outer step; one of them bold."""
    windows = len(history[0])
    some = {round(i * (len(history) - 1) / max(LINES - 1, 1)) for i in range(LINES)}
    chosen = sorted(some if bold is None else some | {bold})
    if len(history) <= LINES:
        chosen = list(range(len(history)))
    return [
        Line(
            f"outer step {i + first}" if i or first else "start",
            [*history[i], history[i][-1]],  # the last window has an end too
            (0.0, 100 / windows),
            ramp(i, count),
            (3.2 if i == bold else 1.3) * (1.0 if windows <= WINDOWS_APART else 0.6),
            "steps",
        )
        for i in chosen
    ]


def _panel(
    title: str,
    x_title: str,
    y_title: str,
    lines: list[Line],
    values: Numbers,
    wish: Scale | Literal["auto"],
    **more: Any,
) -> Panel:
    """A panel whose vertical axis suits its values."""
    known = [v for v in values if v is not None]
    scale = scale_of(known, wish)
    below = 1.0
    ticks: list[tuple[float, str]] = []
    if scale == "log":
        ticks = log_ticks(min(known), max(known))
        low, high = min(*known, ticks[0][0]), max(*known, ticks[-1][0])
        more["y_range"] = (low / (high / low) ** 0.06, high * (high / low) ** 0.06)
    elif scale == "symlog":
        sizes = sorted(abs(v) for v in known if v)
        below = 10.0 ** math.floor(math.log10(sizes[len(sizes) // 10]))
        ticks = symlog_ticks(min(known), max(known), below)
    return Panel(title, x_title, y_title, lines, scale, below, ticks, **more)


def _marked(bad: Sequence[OuterStep]) -> str:
    return " Red lines mark outer steps whose training diverged." if bad else ""


def _thinned(count: int) -> str:
    return f" {LINES} of {count} are drawn." if count > LINES else ""
