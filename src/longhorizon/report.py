"""The report of a run: one HTML page that needs nothing else, and its figures as pictures.

It reads run.json and journal.jsonl, and result.json where there is one, so it works while a run goes on and after it
was killed.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longhorizon.axes import number, short, span
from longhorizon.confirming import Confirmed, kept_in
from longhorizon.extras import need
from longhorizon.figures import Figure, diverged, figures, finite, scores_of
from longhorizon.html_page import (
    data_of,
    drawn,
    duration,
    environment_section,
    escaped,
    page,
    score,
    section,
    settings_section,
    table,
    write,
)
from longhorizon.outer_step import OuterStep, best_of
from longhorizon.rundir import CONFIRMED, RunDirectory
from longhorizon.trust import gathered, remedy


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
        f"<p class='note'>{escaped(stale)}</p>" if stale else "",
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
        + "".join(
            f"<div><dt>{escaped(a)}</dt><dd>{escaped(b)}</dd><dd class='small'>{escaped(c)}</dd></div>"
            for a, b, c in tiles
        )
        + "</dl>"
    )


def _test_table(result: Mapping[str, Any]) -> str:
    found = scores_of(result)
    names = list(dict.fromkeys(name for scores in found.values() for name in scores))
    rows = [
        [escaped(method), *(escaped(score(name, *scores[name])) if name in scores else "–" for name in names)]
        for method, scores in found.items()
    ]
    return table(["trained with", *(escaped(f"test {name}") for name in names)], rows, numeric=range(1, len(names) + 1))


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
            part = f"<span class='whole'>{escaped(span(window, len(last)))}</span>"
            shown = {"best": short(good[window]), "last": short(value)}
            shown[kept] = f"<b>{shown[kept]}</b>"
            rows.append([escaped(key) + kind, part, short(start[window]), *shown.values()])
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
    head = ["step", "status", "inner steps", "runs", "validation loss", *map(escaped, names), "time"]
    head += ["engine"] * (len(engines) > 1)
    best = best_of(records)
    rows, classes = [], []
    for r in records:
        ok = r.status == "ok"
        classes.append("" if ok else "bad" if diverged(r) else "partly")
        kind = "diverged" if diverged(r) else "in part"
        status = "ok" if ok else f"<div class='long'><b>{kind}</b> · {escaped(r.status)}</div>"
        scores = [escaped(score(name, number(r.metrics.get(name)))) for name in names]
        mark = " <span title='best run'>★</span>" if r is best else ""
        loss = short(number(r.val_loss)) + mark
        cells = [str(r.index + 1), status, str(r.steps), str(len(r.seeds)), loss, *scores, duration(r.seconds)]
        rows.append([*cells, escaped(r.engine)] if len(engines) > 1 else cells)
    numeric = [0, *range(2, 6 + len(names))]
    return section(
        "Outer steps",
        table(head, rows, numeric, classes),
        "Each outer step trains from a fresh start with the values that the step before it left; ★ is the best run."
        + (f" Hypergradients by: {engines[0]}." if len(engines) == 1 else ""),
    )


def _doubts_table(records: Sequence[OuterStep]) -> str:
    rows = [
        [str(r.index + 1), escaped(values), escaped(reason), _became(r, key, reason), escaped(remedy(reason))]
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
