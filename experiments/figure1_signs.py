"""How many of the signs that FDS followed in Figure 1 were right, outer step by outer step of an entrant.

Shows: at the values of chosen outer steps, the slope of the validation loss that a user would feel, with its standard
    error, beside the way in which FDS moved each value. It says which hypergradients were wrong, and, with another
    length of the runs (--epochs-of 50), whether what is good for a short run is good for a long one.
Command: python experiments/figure1.py --data-root DATA --methods fds --engine forward      first
         python experiments/figure1_signs.py --data-root DATA --label fds-forward-clip10 --at 1,9
Time:    a point is 2 · pairs training runs, many at once.
Ours:
    signs that FDS followed and that are right: fds-forward-clip10-growth1.5, outer step 10, on 10 epochs: 9 of 11 that
        are sure, 8 of 10 where it did not doubt its own (2 seeds of 9 values); fds-hybrid-growth1.5-bf16, outer step
        10, on 10 epochs: 2 of 4 that are sure, 2 of 4 where it did not doubt its own (1 seed of 9 values);
        fds-smoothed-growth1.5-bf16, outer step 10, on 10 epochs: 10 of 14 that are sure, 8 of 9 where it did not doubt
        its own (3 seeds of 9 values); 12 min, NVIDIA H200
Paper:   nothing of the kind.

The truth is a slope over a finite distance (learning rates by 30 %, at least 0.01; momentum by 0.1; weight decay by a
half, at least 1e-4), from a factorial design of 24 pairs, each with a seed of its own (docs/trust.md), none of them
FDS's. One that is less than two standard errors from zero is not counted. Points that are in the result stay there,
and are not measured again.
"""

from typing import Any

import contest
import record
from figure1 import numbers
from record import rounded, say

import longhorizon as lh
from longhorizon.engines.design import hadamard
from longhorizon.rivals.ledger import Evaluation

SURE = 2.0  # standard errors
SEED = 1_000_003  # far from those of tuning


def main() -> None:
    parser = record.arguments(__doc__ or "", "figure1_signs")
    contest.options(parser)
    parser.add_argument("--label", default="fds-forward-clip10", help="entrants of figure1.py, with commas")
    parser.add_argument("--seeds", default="0", help="of each entrant, with commas between them")
    parser.add_argument("--at", help="outer steps, from 0, with commas between them; 1,9 without it")
    parser.add_argument("--epochs-of", type=float, help="of the runs; without it, as long as that outer step's")
    parser.add_argument("--pairs", type=int, default=24, help="of runs per point; at least as many as values")
    args = record.parse(parser)
    if args.epochs_of is not None and not args.epochs_of > 0:
        raise SystemExit(f"--epochs-of {args.epochs_of:g}: expected more than nothing.")
    if args.pairs < 1:
        raise SystemExit(f"--pairs {args.pairs}: expected at least 1.")
    one = contest.Contest(args, "figure1", windows=7)
    values = sum(hyper.windows for hyper in one.hypers.values())
    pairs = len(hadamard(max(values, 1 if args.smoke else args.pairs)))  # the size that there is a design for
    seeds, at = numbers("--seeds", args.seeds, int), numbers("--at", args.at or ("1,2" if args.smoke else "1,9"), int)
    labels = args.label.split(",")
    one.smoke_first(labels, seeds)
    wanted = [
        Point(label, seed, index, own, args.epochs_of, one.epoch, pairs)
        for label in labels
        for seed in seeds
        for own in [one.outer_steps_of(label, seed)]
        for index in at
    ]
    found, traces = one.gathered(), lh.Traces()
    work = record.Work(args, "figure1_signs", one.settings)
    kept = record.known("figure1_signs", args, one.settings)
    before = kept["seconds"] - work.seconds() if kept else 0.0
    there = {_which(point): point for point in kept["points"]} if kept else {}
    try:
        for point in wanted:
            if point.which in there:
                say(f"{point.name}: in the result already")
                continue
            say(f"{point.name}: {2 * pairs} training runs")
            row = work.unit(point.name, lambda p=point: measured(one, p, found, traces))
            say(f"{point.name}: {row['right']} of {row['sure']} signs right, of {row['values']} values")
    finally:  # also when it is stopped: the result is of what is there
        made = [work.unit(path.stem, dict) for path in sorted(work.folder.glob("fds*.json"))]
        there |= {_which(point): point for point in made}
        points = [told(there[key], found) for key in sorted(there)]
        if points:
            content = {"settings": one.settings, "seconds": before + work.seconds(), "points": points}
            record.finish(args, "figure1_signs", content, kept)


class Point:
    """Where signs are judged: what an entrant was at before an outer step, and what it did there.

    Args:
        label, seed: the entrant.
        index: of the outer step.
        own: all outer steps of the entrant.
        epochs: of the training runs; None for as long as that outer step's.
        epoch: steps of one.
        pairs: of runs.
    """

    def __init__(
        self, label: str, seed: int, index: int, own: list[Evaluation], epochs: float | None, epoch: int, pairs: int
    ):
        if index + 1 >= len(own):
            raise SystemExit(f"--at {index}: {label} has the outer steps 0 to {len(own) - 2}.")
        self.index, self.pairs = index, pairs
        self.at, self.after = own[index], own[index + 1]
        self.steps = self.at.steps if epochs is None else max(7, round(epochs * epoch))
        self.which = label, seed, index, self.steps, pairs
        self.name = f"{label}-{seed}-at{index}-of{self.steps}-pairs{pairs}"


def _which(point: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(point[name] for name in ("method", "seed", "index", "steps", "pairs"))


def measured(one: contest.Contest, point: Point, found: contest.Gathered, traces: lh.Traces) -> dict[str, Any]:
    """The truth at the values of an outer step, and what FDS did there."""
    at, after, index = point.at, point.after, point.index
    hypers = {
        key: lh.Hyper(list(at.values[key]), windows=hyper.windows, step=hyper.step) for key, hyper in one.hypers.items()
    }
    distance = {key: [apart(key, v) for v in values] for key, values in at.values.items()}
    truth = lh.hypergradient(
        one.task,
        one.rule,
        hypers,
        steps=point.steps,
        engine=lh.Factorial(distance, point.pairs),
        seed=SEED + index,
        precision=one.args.precision,
        traces=traces,
    )
    assert truth.error is not None
    seen = next((s for s in found.outer_steps.get((at.method, at.seed), []) if s["index"] == index), None)
    rows = {}
    for key in hypers:
        slopes, errors = (part[key].tolist() for part in (truth.grad, truth.error))
        rows[key] = [
            {
                "value": at.values[key][w],
                "slope": rounded(slope),
                "error": rounded(error),
                "sure": bool(abs(slope) > SURE * error),
                "followed": followed(at, after, seen, key, w),
            }
            for w, (slope, error) in enumerate(zip(slopes, errors, strict=True))
        ]
    every = _every(rows)
    counted = [row for row in every if row["sure"] and row["followed"]]
    return {
        "method": at.method,
        "seed": at.seed,
        "index": index,
        "steps": point.steps,
        "steps_of_fds": at.steps,
        "pairs": point.pairs,
        "val_loss": rounded(truth.val_loss),
        "values": len(every),
        "sure": len(counted),
        "right": sum(row["followed"] * row["slope"] > 0 for row in counted),
        "rows": rows,
    }


def told(point: dict[str, Any], found: contest.Gathered) -> dict[str, Any]:
    """The same with what FDS doubted there, and how many of the values that it did not doubt it moved the right way."""
    steps = found.outer_steps.get((point["method"], point["seed"]), [])
    seen = next((step for step in steps if step["index"] == point["index"]), None)
    if seen is None:
        return point
    for key, rows in point["rows"].items():
        for window, row in enumerate(rows):
            doubts = seen["doubts"].get(key)
            row["doubt"] = doubts[window] if doubts else ""
    calm = [row for row in _every(point["rows"]) if row["sure"] and row["followed"] and not row["doubt"]]
    return point | {"undoubted": len(calm), "undoubted_right": sum(r["followed"] * r["slope"] > 0 for r in calm)}


def _every(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row for part in rows.values() for row in part]


def apart(key: str, value: float) -> float:
    """How far a value is shifted to either side."""
    if key == "lr":
        return max(0.3 * abs(value), 0.01)
    return 0.1 if key == "momentum" else max(0.5 * abs(value), 1e-4)


def followed(at: Evaluation, after: Evaluation, seen: dict[str, Any] | None, key: str, window: int) -> int:
    """The sign of FDS's hypergradient of a value: as it was written down, or else by where the value went.

    Nothing where the gate held the value.
    """
    if seen and window in seen["held"].get(key, []):
        return 0
    sign = seen["mean"][key][window] if seen else at.values[key][window] - after.values[key][window]
    return (sign > 0) - (sign < 0) if sign is not None else 0  # none where it was not finite


if __name__ == "__main__":
    record.run(main)
