"""From where on a hypergradient is to be doubted, and how far an adjoint may move: three bounds, and the truth.

    python experiments/trust_bound.py         half an hour on one core, after truth.py; the LeNet needs MNIST

Looks at the truth of experiments/truth.py (its results are read). First, of the exact estimates there: how often the
sign of a learning rate is right, by how much a change grows from the beginning of its window to the end of the run; and
of the clipped ones, by the share of H·Z that was cut off from then on. Second, how often the signs of a hybrid that is
not clipped are right when values are doubted from 1.5-, 2-, 3- or 10-fold growth on, on digits at the edge and hot,
with the same seeds for every bound. Third, how often those of an adjoint are right that may move by 0.05, 0.1 or 0.2 of
its largest entry a step, and fourth, those of the hybrid that begins with it, when values are doubted from 3-, 10-, 30-
or 100-fold growth on but for that; on digits and a LeNet.

Result: experiments/results/trust_bound.json; docs/trust.md tells of it.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from estimators import as_truth
from record import RESULTS, Work, arguments, finish, parse, rounded, run, say
from truth import DISTANCE, FOR_A_GPU, HELD_OUT, TASKS, estimate, setting, stacked

import longhorizon as lh
from longhorizon.truth import score

EDGES = (1.0, 2.0, 3.0, 5.0, 10.0, 100.0)
SHARES = (1e-6, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
BOUNDS = (1.5, 2.0, 3.0, 10.0)
LOOKED_AT = ("digits-edge", "digits-hot")
MOVES = (0.05, 0.1, 0.2)
UNCUT = (3.0, 10.0, 30.0, 100.0)
CLIPPED = ("digits-calm", "digits-edge", "digits-hot", "lenet-edge")


def exact_signs(found: dict[str, Any]) -> Iterator[tuple[float, bool]]:
    """(growth, whether the sign is right) of learning rates whose truth is known, from the second window on.

    A result has the growth from the end of every window, which is the beginning of the next one.
    """
    truth = found["truth"]["lr"]
    for row in found["estimates"]["exact"]:
        windows = list(zip(row["grad"]["lr"], truth["mean"], truth["error"], strict=True))
        for growth, (slope, mean, error) in zip(row.get("amplified", []), windows[1:], strict=False):
            if None not in (growth, slope, mean) and abs(mean) > 2 * error:
                yield growth, slope * mean > 0


def clipped_signs(found: dict[str, Any]) -> Iterator[tuple[float, bool]]:
    """(share that was cut off from when its window began, whether the sign is right) of clipped learning rates.

    A result has the mean share of the whole run, in which a window that has not begun has none.
    """
    truth = found["truth"]["lr"]
    count = len(truth["mean"])
    for name, rows in found["estimates"].items():
        for row in rows if name.startswith("clip") else []:
            windows = zip(row["grad"]["lr"], truth["mean"], truth["error"], row.get("clipped", []), strict=False)
            for w, (slope, mean, error, share) in enumerate(windows):
                if None not in (slope, mean, share) and abs(mean) > 2 * error:
                    yield share * count / (count - w), slope * mean > 0


def binned(
    results: Path, signs_of: Callable[[dict[str, Any]], Iterator[tuple[float, bool]]], edges: tuple[float, ...]
) -> dict[str, dict[str, int]]:
    """Signs and how many of them are right, of all small tasks but the held-out one, by what may speak against them."""
    paths = [results / f"truth-{name}.json" for name in TASKS if name not in (*FOR_A_GPU, *HELD_OUT)]
    signs = [pair for path in paths if path.exists() for pair in signs_of(json.loads(path.read_text()))]
    found = {}
    for low, high in zip((0.0, *edges), (*edges, float("inf")), strict=True):
        right = [ok for size, ok in signs if low <= size < high]
        found[f"{low:g} to {high:g}"] = {"signs": len(right), "right": sum(right)}
    return found


def judged(
    args: Any,
    work: Work,
    name: str,
    engine_of: Callable[[Any], Any],
    what: str,
    values: tuple[float, ...],
    count: int,
    unit: str = "",
) -> dict[str, Any]:
    """The score of an engine on a task, with a constant of the library at each of some values.

    Args:
        engine_of: from the distances that the truth has.
        what: the constant, in longhorizon.
        unit: begins the names of its files.
    """
    found = json.loads((RESULTS / f"truth-{name}.json").read_text())
    true, steps = as_truth(found), 30 if args.smoke else TASKS[name].steps
    task, hypers = setting(args, name)
    engine = engine_of({key: [DISTANCE[key] * v for v in hyper.values().tolist()] for key, hyper in hypers.items()})
    traces, table = lh.Traces(), {}

    def one(seed: int) -> dict[str, Any]:
        return estimate(task, hypers, steps, engine, seed, traces)

    for value in values:
        with patch(f"longhorizon.{what}", value):
            rows = [work.unit(f"{unit}{name}-{value:g}-{seed}", partial(one, seed)) for seed in range(count)]
        said = score(stacked(rows), true)
        table[f"{value:g}"] = {
            "sign": rounded(said.sign),
            "error": rounded(said.sign_error),
            "smoothed": sum(e is not None for row in rows for part in row.get("error", {}).values() for e in part),
            "values": sum(len(part) for row in rows for part in row["grad"].values()),
        }
        say(f"{name}, {what} at {value:g}: sign {said.sign:.3f} ± {said.sign_error:.3f}")
        traces = lh.Traces()  # a trace has the value in it
    return table


def main() -> None:
    args = parse(arguments(__doc__ or "", "trust_bound"))
    torch.set_num_threads(1)
    args.device = "cpu"
    bounds, count = (BOUNDS[2:], 2) if args.smoke else (BOUNDS, 24)
    moves, uncut = (MOVES[1:2], UNCUT[2:3]) if args.smoke else (MOVES, UNCUT)
    settings = {"estimates": count, "bounds": list(bounds), "moves": list(moves), "uncut": list(uncut)}
    work = Work(args, "trust_bound", settings)
    looks: dict[str, Any] = {
        "hybrid": (LOOKED_AT, lambda far: lh.Hybrid(distance=far, clip=None), "trust.AMPLIFIED", bounds),
        "move": (CLIPPED, lambda far: lh.Adjoint(clip="auto"), "engines.clipping.MOVE", moves),
        "uncut": (CLIPPED, lambda far: lh.Hybrid(distance=far), "trust.AMPLIFIED_UNCUT", uncut),
    }
    content: dict[str, Any] = {
        "settings": settings,
        "exact_by_growth": binned(RESULTS, exact_signs, EDGES),
        "clipped_by_share": binned(RESULTS, clipped_signs, SHARES),
    }
    for look, (names, engine_of, what, values) in looks.items():
        unit = "" if look == "hybrid" else f"{look}-"
        content[look] = {name: judged(args, work, name, engine_of, what, values, count, unit) for name in names}
    finish(args, "trust_bound", content | {"seconds": work.seconds()})


if __name__ == "__main__":
    run(main)
