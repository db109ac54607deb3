"""The report of a comparison: regret over time and the table of methods, as one HTML page and as a picture."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from longhorizon.axes import as_percent, in_unit, scale_of, short, symlog_ticks
from longhorizon.extras import need
from longhorizon.figures import Figure, Line, Panel
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
    write,
)
from longhorizon.html_page import table as html_table
from longhorizon.rivals.ledger import Evaluation, Ledger
from longhorizon.rivals.regret import Clock, Row, curves, scores, table
from longhorizon.rivals.testing import Tested, read_tests
from longhorizon.rundir import RunDirectory

# Far apart in hue or in lightness, and kept by a method whatever else is compared.
COLOURS = {
    "fds": "#d1495b",
    "random": "#7a8793",
    "bo": "#2a5d8f",
    "hyperband": "#3b9c6f",
    "bohb": "#e0912f",
    "hd": "#7b4fa0",
    "greedy": "#b08fd0",
    "grid": "#1f2933",
    "grid-halving": "#5d4037",
    "constant": "#9fb6c9",
    "cosine": "#6fb3c9",
    "multistep": "#a5b86c",
    "onecycle": "#c9a66f",
    "schedulefree": "#d47fb0",
    "prodigy": "#8c9a2b",
}
OTHER = "#000000"


def write_page(dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write `report.html` and, in a folder beside it, `report/regret.png`; the comparison may be unfinished.

    Args:
        dir: its directory.
        out: the directory to write into, or the page itself if it ends in ".html". Default: `dir`.
    """
    need("report", "plotly", "matplotlib")
    directory = RunDirectory(dir)
    about = directory.describe()
    evaluations = Ledger(directory.path / "journal.jsonl").all()
    tests = read_tests(directory.path / "tests.jsonl")
    shown = [figure for figure in [regret_figure(evaluations, tests)] if figure.panels]
    parts = [
        *(drawn(figure) for figure in shown),
        _methods(table(evaluations, tests)),
        _failures(evaluations, tests),
    ]
    parts += [
        settings_section(about["settings"], about.get("recipe")),
        environment_section(about.get("environment")),
    ]
    if any(t.crashed for t in tests):
        parts.insert(
            0,
            "<p class='note'>Tests failed with an error (see What went wrong), so scores are those of validation. They "
            "are tried again when the comparison is resumed.</p>",
        )
    if not shown:
        parts.insert(0, "<p class='note'>No evaluation has finished yet; come back when one has.</p>")
    title = directory.path.resolve().name
    text = page(title, "comparison", [part for part in parts if part], data_of(shown))
    return write(text, shown, directory.path if out is None else Path(out))


def regret_figure(evaluations: Sequence[Evaluation], tests: Sequence[Tested]) -> Figure:
    """The paper's Figure 1: regret against time and against training steps, on logarithmic axes of time."""
    known = scores(evaluations, tests)
    if known is None:
        return Figure("regret", "", "", [])
    panels = [_panel(evaluations, tests, known.name, clock) for clock in ("seconds", "steps")]
    seeds = len({e.seed for e in evaluations})
    spread = f" Lines are means over {seeds} seeds, bands one standard deviation." if seeds > 1 else ""
    text = (
        f"How much {known.name} each method's choice so far falls short of the best setting that any of them found, "
        f"against the time it had worked by then.{spread} A line that ends had finished, or spent its budget. A choice "
        "is made by validation loss, so its test score may also get worse."
    )
    return Figure("regret", "Regret over time", text, panels, size=(5.4, 4.4))


def _panel(evaluations: Sequence[Evaluation], tests: Sequence[Tested], name: str, clock: Clock) -> Panel:
    found = [curve for curve in curves(evaluations, tests, clock) if curve.times]
    factor = 100.0 if as_percent(name, [0.0])[1].endswith("(%)") else 1.0
    lines, legend = [], []
    for curve in found:
        colour = COLOURS.get(curve.method, OTHER)
        y = [factor * v for v in curve.mean]
        wide = [factor * v for v in curve.spread]
        band = ([max(0.0, a - b) for a, b in zip(y, wide, strict=True)], [a + b for a, b in zip(y, wide, strict=True)])
        times: list[float | None] = [*curve.times]
        if len(times) == 1:  # a single evaluation: a short dash, to be seen
            assert times[0] is not None
            times, y, band = [times[0], times[0] * 1.15], y * 2, (band[0] * 2, band[1] * 2)
        lines.append(
            Line(
                curve.method,
                [*y],
                times,
                colour,
                3.0 if curve.method == "fds" else 1.8,
                "steps",
                band=([*band[0]], [*band[1]]) if any(wide) else None,
            )
        )
        legend.append((colour, curve.method))
    known = [v for line in lines for v in line.y if v is not None]
    scale = scale_of(known, "symlog")  # regret is zero in the end, and large at first
    sizes = sorted(v for v in known if v > 0)
    below = 10.0 ** math.floor(math.log10(sizes[len(sizes) // 10])) if sizes else 1.0
    unit = "points of per cent" if factor == 100.0 else ""
    return Panel(
        "by time" if clock == "seconds" else "by training steps",
        "time (s)" if clock == "seconds" else "inner steps",
        f"regret in {name}{f' ({unit})' if unit else ''}",
        lines,
        scale,
        below,
        symlog_ticks(0.0, max(known), below) if scale == "symlog" else [],
        legend=legend,
        y_range=(0.0, 1.3 * max(known, default=1.0)) if scale == "symlog" else None,
        log_x=True,
    )


def words(row: Row) -> list[str]:
    """A row of the table in words: score, regret, time to zero regret, time, steps, trials, failures."""
    name = row.score_name.partition(" ")[2]
    (regret,), label = as_percent(name, [row.regret])
    if row.seconds_to_zero is not None:
        (value,), unit = in_unit([row.seconds_to_zero])
        zero = f"{value:.3g} {unit}"
    else:
        zero = f"{row.zero} of {row.seeds} seeds" if row.zero else "–"
    digits = f"{regret:.2f}" if label.endswith("(%)") and regret is not None else short(regret)
    counts = [f"{v:.0f}" for v in (row.steps, row.trials, row.failed)]
    return [row.method, score(name, row.score, row.deviation), digits, zero, duration(row.seconds), *counts]


def head(rows: Sequence[Row]) -> list[str]:
    """What the columns are."""
    name = rows[0].score_name if rows else "score"
    return ["method", name, "regret", "regret ≈ 0 after", "time", "inner steps", "trials", "failed"]


def _methods(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    cells = [[escaped(cell) for cell in words(row)] for row in rows]
    return section(
        "Methods",
        html_table([escaped(h) for h in head(rows)], cells, numeric=range(1, 8)),
        "What each method's last choice is worth after training on all training data: mean and standard deviation "
        "between single trainings. Regret counts as zero within one standard deviation of the best setting. Time, "
        "inner steps, trials and failures (diverged or crashed) are means over seeds. A dash for the score: with some "
        "seed nothing was found that trains, or a training of its choice diverged.",
    )


def _failures(evaluations: Sequence[Evaluation], tests: Sequence[Tested]) -> str:
    bad: list[tuple[Evaluation | Tested, str]] = [(e, e.status) for e in evaluations if e.status != "ok"]
    bad += [(t, f"test {t.status}") for t in tests if t.crashed]
    rows = [[escaped(e.method), str(e.seed), str(e.trial), str(e.steps), escaped(said)] for e, said in bad]
    if not rows:
        return ""
    return section("What went wrong", html_table(["method", "seed", "trial", "steps", "status"], rows, range(1, 4)))
