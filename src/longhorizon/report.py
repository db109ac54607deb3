"""The report of a run: one HTML page that needs nothing else, and its figures as pictures.

It reads run.json and journal.jsonl, and result.json where there is one, so it works while a run goes on and after it
was killed. The page carries plotly.js and asks the network for nothing; a content security policy makes sure of that.
"""

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from longhorizon.axes import as_percent, in_unit, number, short, span
from longhorizon.confirming import Confirmed, kept_in
from longhorizon.extras import need
from longhorizon.figures import Figure, Panel, diverged, figures, finite, ramp, scores_of
from longhorizon.files import write_aside
from longhorizon.outer_step import OuterStep, best_of
from longhorizon.rundir import CONFIRMED, RunDirectory, RunError
from longhorizon.trust import gathered, remedy

ROWS = 24  # a longer table is folded


def write_report(dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write `report.html` and, in a folder beside it, the figures as pictures: `report/schedules.png` and more.

    Args:
        dir: a run's directory; the run may be unfinished.
        out: the directory to write into, or the page itself if it ends in ".html". Default: `dir`.

    Returns:
        The page.

    Raises:
        RunError: if there is no run to read, or no way to write.
        ImportError: without plotly or matplotlib, naming the extra to install.
    """
    need("report", "plotly", "matplotlib")
    directory = RunDirectory(dir)
    about, records = directory.describe(), directory.journal()
    result, stale = _current(directory.result(), records)
    chosen = _kept(directory.result("schedule.json"), records)
    confirmed = _confirmed(directory.result(CONFIRMED), records, chosen)
    best = best_of(records)
    shown = figures(about["settings"], records, result, best.index if best is not None and chosen == "best" else None)
    text = _page(directory.path.resolve().name, about, records, result, (chosen, confirmed), stale, shown)
    page = write(text, shown, directory.path if out is None else Path(out))
    if stale:
        (page.with_suffix("") / "test.png").unlink(missing_ok=True)  # of an earlier report
    return page


def write(text: str, shown: Sequence[Figure], target: Path) -> Path:
    """Write a page, and its figures as pictures in a folder beside it."""
    from longhorizon.drawing import save_picture

    if target.suffix != ".html":
        target = target / "report.html"
    try:
        pictures = target.with_suffix("")
        pictures.mkdir(parents=True, exist_ok=True)
        for figure in shown:
            save_picture(figure, pictures / f"{figure.name}.png")
        write_aside(target, text)
    except OSError as error:
        raise RunError(f"cannot write {target}: {error.strerror or error}.") from error
    return target


def _current(result: dict[str, Any], records: Sequence[OuterStep]) -> tuple[dict[str, Any], str]:
    """result.json as far as it is about the last values, and a word about one that is of earlier ones."""
    tested = result.get("last", result.get("schedule"))  # older ones have no other
    if not records or not isinstance(tested, Mapping):
        return result, ""
    last = records[-1].next
    if all(list(finite(last[key])) == values for key, values in tested.items() if key in last):
        return result, ""
    step = result.get("outer_steps")
    when = f"after outer step {step}" if isinstance(step, int) else "of an earlier outer step"
    return {}, (
        f"What result.json holds, its test too, is about the values {when}, not about these; it is left out here. "
        "The test of these comes when the run has ended: longhorizon resume goes on."
    )


def _kept(content: Mapping[str, Any], records: Sequence[OuterStep]) -> str:
    """Which values schedule.json has, the last or the best."""
    best = best_of(records)
    entries = content.get("hypers")
    if best is None or not isinstance(entries, Mapping):
        return "last"

    def has(values: Mapping[str, Any]) -> bool:
        own = {key: entry.get("values") if isinstance(entry, Mapping) else None for key, entry in entries.items()}
        return all(own.get(key) == v.tolist() for key, v in values.items())

    return "best" if has(best.values) and not has(records[-1].next) else "last"


def _confirmed(content: Mapping[str, Any], records: Sequence[OuterStep], kept: str) -> Confirmed | None:
    """What confirmed.json says of the last values and the best ones, if that is why these were kept."""
    values, losses = content.get("values"), kept_in(content)
    seeds = content.get("seeds")  # there only when all is decided
    if not (records and isinstance(seeds, list) and isinstance(values, Mapping)):
        return None
    if any(seed not in losses.get(name, {}) for name in ("last", "best") for seed in seeds):
        return None
    last = values.get("last")
    if not isinstance(last, Mapping) or any(last.get(key) != v.tolist() for key, v in records[-1].next.items()):
        return None
    found = Confirmed(seeds, {name: [own[seed] for seed in seeds] for name, own in losses.items()})
    return found if found.chosen == kept else None


def _page(
    name: str,
    about: Mapping[str, Any],
    records: Sequence[OuterStep],
    result: Mapping[str, Any],
    kept: tuple[str, Confirmed | None],
    stale: str,
    shown: list[Figure],
) -> str:
    data = data_of(shown)
    by_name = {figure.name: drawn(figure, _test_table(result) if figure.name == "test" else "") for figure in shown}
    settings = about["settings"]
    parts = [
        _summary(records, result),
        f"<p class='note'>{_e(stale)}</p>" if stale else "",
        by_name.get("schedules", ""),
        by_name.get("validation", ""),
        by_name.get("test", ""),
        _schedule_table(settings, records, *kept),
        by_name.get("hypergradients", ""),
        by_name.get("gamma", ""),
        by_name.get("time", ""),
        _steps_table(records),
        _doubts_table(records),
        settings_section(settings, about.get("recipe")),
        environment_section(about.get("environment")),
    ]
    return page(name, "tuning", [part for part in parts if part], data)


def page(title: str, kind: str, parts: Sequence[str], data: str) -> str:
    """The whole page around its parts, with the figures' data and the script that draws them."""
    from plotly.offline import get_plotlyjs

    template = resources.files("longhorizon").joinpath("report.html").read_text(encoding="utf-8")
    pieces = {
        "TITLE": _e(title),
        "KIND": _e(kind),
        "BODY": "\n".join(parts),
        "DATA": data.replace("<", "\\u003c"),  # nothing in it can end the script
        "PLOTLY": get_plotlyjs(),
    }
    before, *rest = template.split("@@")  # TEXT@@NAME@@TEXT@@…: nothing inserted is read again
    return before + "".join(pieces[part] if i % 2 == 0 else part for i, part in enumerate(rest))


def data_of(shown: Sequence[Figure]) -> str:
    """All panels for the page's script."""
    from longhorizon.drawing import LAYOUT, interactive

    panels = {_id(figure, i): interactive(panel) for figure in shown for i, panel in enumerate(figure.panels)}
    return json.dumps({"layout": LAYOUT, "panels": panels}, allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def drawn(figure: Figure, more: str = "") -> str:
    """A figure's section of the page."""
    pairs = " pairs" if figure.name == "validation" else ""
    panels = "".join(_panel(figure, panel, i) for i, panel in enumerate(figure.panels))
    return section(figure.title, f"{_ramp(figure)}<div class='panels{pairs}'>{panels}</div>{more}", figure.text)


def _panel(figure: Figure, panel: Panel, index: int) -> str:
    chips = "".join(f"<li><i style='background:{colour}'></i>{_e(text)}</li>" for colour, text in panel.legend)
    legend = f"<ul class='chips' aria-label='windows, as parts of training'>{chips}</ul>" if chips else ""
    label = _e(f"{panel.title}: {panel.y_title} against {panel.x_title}".replace(":  against", ":"))
    plot = f"<div class='plot' id='{_id(figure, index)}' role='img' aria-label='{label}'></div>"
    return f"<figure><figcaption>{_e(panel.title)}</figcaption>{legend}{plot}</figure>"


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


def _summary(records: Sequence[OuterStep], result: Mapping[str, Any]) -> str:
    if not records:
        return "<p class='note'>No outer step has finished yet; come back when one has.</p>"
    bad = sum(diverged(r) for r in records)
    how = [f"{bad} diverged" if bad else "none diverged", *["converged"] * (result.get("converged") is True)]
    tiles = [("outer steps", str(len(records)), ", ".join(how))]
    best = best_of(records)
    if best is not None:
        first = f"{short(number(records[0].val_loss))} at the start"
        tiles.append(("best validation loss", short(best.val_loss), first))
        for name, value in list(best.metrics.items())[:1]:
            tiles.append((f"validation {name}", score(name, number(value)), f"in outer step {best.index + 1}"))
    scores = next(iter(scores_of(result).items()), None)
    if scores is not None:
        name, (mean, deviation) = list(scores[1].items())[-1]
        tiles.append((f"test {name}", score(name, mean, deviation), scores[0]))
    tiles.append(("time", duration(sum(r.seconds for r in records)), "in outer steps"))
    return (
        "<dl class='tiles'>"
        + "".join(f"<div><dt>{_e(a)}</dt><dd>{_e(b)}</dd><dd class='small'>{_e(c)}</dd></div>" for a, b, c in tiles)
        + "</dl>"
    )


def _test_table(result: Mapping[str, Any]) -> str:
    found = scores_of(result)
    names = list(dict.fromkeys(name for scores in found.values() for name in scores))
    rows = [
        [_e(method), *(_e(score(name, *scores[name])) if name in scores else "–" for name in names)]
        for method, scores in found.items()
    ]
    return table(["trained with", *(_e(f"test {name}") for name in names)], rows, numeric=range(1, len(names) + 1))


def _schedule_table(
    settings: Mapping[str, Any], records: Sequence[OuterStep], kept: str, confirmed: Confirmed | None
) -> str:
    hypers = settings.get("hypers", {})
    best = best_of(records)
    rows = []
    for key, hyper in hypers.items():
        start = [number(v) for v in hyper.get("start", [])]
        last = finite(records[-1].next[key]) if records and key in records[-1].next else start
        good = finite(best.values[key]) if best is not None and key in best.values else [None] * len(last)
        kind = "" if hyper.get("learn", True) else " (fixed)"
        for window, value in enumerate(last):
            part = f"<span class='whole'>{_e(span(window, len(last)))}</span>"
            shown = {"best": short(good[window]), "last": short(value)}
            shown[kept] = f"<b>{shown[kept]}</b>"
            rows.append([_e(key) + kind, part, short(start[window]), *shown.values()])
    why = f"Kept are the {kept} ones ({confirmed}). " if confirmed else f"schedule.json has the {kept} ones. "
    head = ["name", "part of training", "start", "best run", "last"]
    return section(
        "Values in numbers",
        table(head, rows, numeric=range(2, 5)),
        "Values to train with: those after the last outer step, and those of the run with the lowest validation "
        f"loss. {why}They stretch to a training run of any length.",
    )


def _steps_table(records: Sequence[OuterStep]) -> str:
    if not records:
        return ""
    names = list(dict.fromkeys(name for r in records for name in r.metrics))
    engines = list(dict.fromkeys(r.engine for r in records))
    head = ["step", "status", "inner steps", "runs", "validation loss", *map(_e, names), "time"]
    head += ["engine"] * (len(engines) > 1)
    best = best_of(records)
    rows, classes = [], []
    for r in records:
        ok = r.status == "ok"
        classes.append("" if ok else "bad" if diverged(r) else "partly")
        kind = "diverged" if diverged(r) else "in part"
        status = "ok" if ok else f"<div class='long'><b>{kind}</b> · {_e(r.status)}</div>"
        scores = [_e(score(name, number(r.metrics.get(name)))) for name in names]
        mark = " <span title='best run'>★</span>" if r is best else ""
        loss = short(number(r.val_loss)) + mark
        cells = [str(r.index + 1), status, str(r.steps), str(len(r.seeds)), loss, *scores, duration(r.seconds)]
        rows.append([*cells, _e(r.engine)] if len(engines) > 1 else cells)
    numeric = [0, *range(2, 6 + len(names))]
    return section(
        "Outer steps",
        table(head, rows, numeric, classes),
        "Each outer step trains from a fresh start with the values that the step before it left; ★ is the best run."
        + (f" Hypergradients by: {engines[0]}." if len(engines) == 1 else ""),
    )


def _doubts_table(records: Sequence[OuterStep]) -> str:
    rows = [
        [str(r.index + 1), _e(values), _e(reason), _became(r, key, reason), _e(remedy(reason))]
        for r in records
        for key, reasons in r.doubts.items()
        for values, reason in gathered({key: reasons})
    ]
    if not rows:
        return ""
    return section(
        "Hypergradients not to be trusted",
        table(["step", "values (windows from 1)", "why", "they were", "what helps"], rows, [0]),
        "Where training amplifies changes, a thousandth of a product or more was clipped, or the standard error is as "
        "large as the slope, the sign of a hypergradient says little.",
    )


def _became(record: OuterStep, key: str, reason: str) -> str:
    """What was done with the values of a key that are doubted for a reason."""
    windows = [w for w, other in enumerate(record.doubts[key]) if other == reason]
    if record.held:
        return "held"
    return "moved" if bool((record.next[key] != record.values[key])[windows].any()) else "left"


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
                _e(key) + ("" if hyper.get("learn", True) else " (fixed)"),
                _e(_some([short(number(v)) for v in hyper.get("start", [])])),
                _e(hyper.get("windows", "")),
                "usual" if step is None else short(number(step)),
                "none" if bounds == ["–", "–"] else f"{bounds[0]} … {bounds[1]}",
                _e(hyper.get("scale", "")),
                _e("all" if hyper.get("params") is None else hyper["params"]),
            ]
        )
    others = {key: value for key, value in settings.items() if key not in ("hypers", "rule")}
    rule = settings.get("rule")
    if isinstance(rule, Mapping):
        fixed = ", ".join(filter(None, (_words(rule.get(part)) for part in ("defaults", "options"))))
        others = {"rule": f"{rule.get('name', '')} (by default {fixed})", **others}
    text = f"<h3>Recipe</h3><pre>{_e(recipe)}</pre>" if recipe else ""
    return section("Settings", table(head, rows, numeric=range(1, 4)) + _definitions(others) + text)


def environment_section(environment: object) -> str:
    """What it ran on."""
    known = environment if isinstance(environment, Mapping) else {}
    return section("Environment", _definitions(known)) if known else ""


def section(title: str, content: str, text: str = "") -> str:
    """A title, a sentence or two, and what follows."""
    sentence = f"<p>{_e(text)}</p>" if text else ""
    return f"<section><h2>{_e(title)}</h2>{sentence}{content}</section>"


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
    rows = "".join(f"<div><dt>{_e(key)}</dt><dd>{_e(_words(value))}</dd></div>" for key, value in content.items())
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


def _e(text: object) -> str:
    return html.escape(str(text), quote=True)
