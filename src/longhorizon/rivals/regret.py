"""How far each method is from the best known setting, over time, and the table of what came out.

The best known setting is the best of all that were tested, of any method and seed; or what one method chose in the end
(`against`, the grid of the paper's Figure 1), and then regret may be below zero. A method's score at a time is that
of the setting it would have chosen then, by validation loss. Scores are test scores where every such setting was
tested, and validation scores otherwise; of accuracy if there is one, else of the loss.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal

from longhorizon.rivals.ledger import Evaluation, incumbents
from longhorizon.rivals.testing import Tested

Clock = Literal["seconds", "steps"]


@dataclass(frozen=True)
class Scores:
    """Every incumbent's score, higher is better.

    Attributes:
        name: of the score, "test accuracy".
        of: by the evaluation's key; minus infinity where training diverged.
        best: of all of them, or the mean over seeds of what the method `against` chose in the end.
        tolerance: one standard deviation between single trainings of the best: what regret counts as zero.
        lower: whether it is a loss, with its sign turned.
    """

    name: str
    of: Mapping[tuple[str, int, int, int], float]
    best: float
    tolerance: float
    lower: bool


@dataclass(frozen=True)
class Curve:
    """A method's regret: mean and standard deviation over its seeds, each holding until the next time."""

    method: str
    times: list[float]
    mean: list[float]
    spread: list[float]


@dataclass(frozen=True)
class Row:
    """One method in the table."""

    method: str
    score: float | None  # of what it chose in the end, mean over seeds and trainings; None if any seed has nothing
    deviation: float | None  # between single trainings, of all seeds; None for a single one
    score_name: str
    regret: float | None
    seconds_to_zero: float | None  # until its regret was zero and stayed so, mean over seeds; None if any never was
    zero: int  # how many seeds got there
    seeds: int
    seconds: float  # spent, mean over seeds
    steps: float
    counted: float
    trials: float
    failed: float  # evaluations that diverged or crashed


def scores(evaluations: Sequence[Evaluation], tests: Sequence[Tested], against: str | None = None) -> Scores | None:
    """Scores of all incumbents, or None if there is none yet."""
    chosen = incumbents(evaluations)
    if not chosen:
        return None
    tested = {t.key: t for t in tests if t.scores}
    complete = all(e.key in tested for e in chosen)
    if complete:
        names = list(dict.fromkeys(name for e in chosen for name in tested[e.key].scores))
    else:
        names = ["loss", *dict.fromkeys(name for e in chosen for name in e.metrics)]
    name = next((n for n in names if "accuracy" in n.lower()), "loss")
    lower = name == "loss"
    of, singles = {}, {}
    for e in chosen:
        found = tested[e.key].single(name) if complete else [e.val_loss if lower else e.metrics.get(name)]
        known = [v for v in found if v is not None and math.isfinite(v)]
        diverged = len(known) < len(found) or not known
        of[e.key] = -math.inf if diverged else -mean(known) if lower else mean(known)
        singles[e.key] = known
    if against is None:
        tops = [max(of, key=lambda key: of[key])]
    else:
        tops = list({e.seed: e.key for e in chosen if e.method == against}.values())
        seeds = {e.seed for e in evaluations if e.method == against}
        if not tops or len(tops) < len(seeds) or not all(math.isfinite(of[key]) for key in tops):
            raise ValueError(
                f"against={against!r}: it has chosen nothing that trains, or not with every seed; run it, or measure "
                "from the best."
            )
    single = [v for key in tops for v in singles[key]]
    tolerance = stdev(single) if len(single) > 1 else 0.0
    return Scores(f"{'test' if complete else 'validation'} {name}", of, mean(of[key] for key in tops), tolerance, lower)


def paths(evaluations: Sequence[Evaluation], clock: Clock) -> dict[str, dict[int, list[tuple[float, Evaluation]]]]:
    """By method and seed, its incumbents with the time each came at."""
    found: dict[str, dict[int, list[tuple[float, Evaluation]]]] = {}
    for e in incumbents(evaluations):
        at = e.total_seconds if clock == "seconds" else float(e.total_steps)
        found.setdefault(e.method, {}).setdefault(e.seed, []).append((at, e))
    return found


def curves(
    evaluations: Sequence[Evaluation],
    tests: Sequence[Tested],
    clock: Clock = "seconds",
    against: str | None = None,
) -> list[Curve]:
    """Regret of every method against time, from where all its seeds have a setting to where its last evaluation was."""
    known = scores(evaluations, tests, against)
    if known is None:
        return []
    ends: dict[str, float] = {}
    seeds: dict[str, set[int]] = {}
    for e in evaluations:
        at = e.total_seconds if clock == "seconds" else float(e.total_steps)
        ends[e.method] = max(ends.get(e.method, 0.0), at)
        seeds.setdefault(e.method, set()).add(e.seed)
    made = []
    for method, by_seed in paths(evaluations, clock).items():
        if len(by_seed) < len(seeds[method]):  # a mean over those that found something would flatter it
            made.append(Curve(method, [], [], []))
            continue
        begin = max(path[0][0] for path in by_seed.values())
        events = {at for path in by_seed.values() for at, _ in path if at >= begin}
        times = sorted(events | {ends[method]})
        rows = [[known.best - known.of[_at(path, t).key] for path in by_seed.values()] for t in times]
        kept = [(t, row) for t, row in zip(times, rows, strict=True) if all(map(math.isfinite, row))]
        spread = [stdev(row) if len(row) > 1 else 0.0 for _, row in kept]
        made.append(Curve(method, [t for t, _ in kept], [mean(row) for _, row in kept], spread))
    return made


def table(evaluations: Sequence[Evaluation], tests: Sequence[Tested], against: str | None = None) -> list[Row]:
    """A row per method, the best first."""
    known = scores(evaluations, tests, against)
    by_key = {t.key: t for t in tests}
    rows = []
    for method in dict.fromkeys(e.method for e in evaluations):
        own = [e for e in evaluations if e.method == method]
        seeds = list(dict.fromkeys(e.seed for e in own))
        by_seed = paths(own, "seconds").get(method, {})
        finals = [by_seed[s][-1][1] for s in seeds if s in by_seed]
        score = deviation = regret = None
        zero_at: list[float] = []
        if known is not None and finals:
            single = _single(finals, by_key, known)
            good = [v for v in single if v is not None]
            # Seeds that found nothing, and choices that diverge, have no score; a mean over the others would flatter.
            if good and len(good) == len(single) and len(finals) == len(seeds):
                score, deviation = mean(good), stdev(good) if len(good) > 1 else None
                regret = known.best - mean(known.of[e.key] for e in finals)
            for path in by_seed.values():
                zero_at += _zero(path, known)
        count = len(seeds)
        rows.append(
            Row(
                method,
                score,
                deviation,
                known.name if known is not None else "",
                regret,
                mean(zero_at) if zero_at and len(zero_at) == count else None,
                len(zero_at),
                count,
                sum(e.seconds for e in own) / count,
                sum(e.cost for e in own) / count,
                sum(e.counted for e in own) / count,
                len({(e.seed, e.trial) for e in own}) / count,
                sum(e.status.startswith(("diverged", "crashed")) for e in own) / count,
            )
        )
    return sorted(rows, key=lambda row: (row.regret is None, row.regret or 0.0))


def _zero(path: Sequence[tuple[float, Evaluation]], known: Scores) -> list[float]:
    """From when on a seed's regret is zero, within the tolerance, and stays so; nothing if it is not in the end."""
    at: list[float] = []
    for time, e in path:
        if known.best - known.of[e.key] > known.tolerance:
            at = []
        elif not at:
            at = [time]
    return at


def _single(
    finals: Sequence[Evaluation], tests: Mapping[tuple[str, int, int, int], Tested], known: Scores
) -> list[float | None]:
    """The score of every single training of what a method chose in the end; None where one diverged."""
    what, name = known.name.split(" ", 1)
    if what == "test":
        return [v for e in finals for v in tests[e.key].single(name) or [None]]
    return [e.val_loss if name == "loss" else e.metrics.get(name) for e in finals]


def _at(path: Sequence[tuple[float, Evaluation]], time: float) -> Evaluation:
    return path[max(0, bisect_right([at for at, _ in path], time) - 1)][1]
