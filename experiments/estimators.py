"""Estimators of hypergradients against the truth, at their cost in plain training runs.

    python experiments/estimators.py                     all tasks whose truth is there
    python experiments/estimators.py --task digits-hot   one of them; cifar-5 and cifar-10 on a GPU
    python experiments/estimators.py --keep              scores those of the result once more, and makes what is missing
    python experiments/estimators.py --keep --estimates 48 --make hybrid    more of one kind than the result has
    python experiments/estimators.py --task cifar-10 --precision bf16 --keep --make "smoothed, half the distance"
    python experiments/estimators.py --task cifar-5 --precision bf16 --make hybrid
        only makes these estimates: several calls with one --work compile side by side and take turns with what is timed

The truth is that of experiments/truth.py, read from its result; so are its estimates (exact, and the paper's clip set
by hand). This script adds the estimators that are meant to be better, scores them all in one way, and measures what
each costs: its processor time over that of a plain training run, one measured right after the other, the mean over
estimates that smoothed something and such that did not; on a GPU, the median of its estimates' seconds over those of a
plain training run. "adjoint, clip auto" is what the hybrid begins with; on CIFAR-10 exact ones are those that the
hybrid begins with that is not clipped.

Result: experiments/results/estimators-TASK.json; docs/trust.md shows them.
"""

import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prototypes import NonExpansive
from record import RESULTS, Work, arguments, finish, known, parse, rounded, run, say, turn
from truth import (
    DISTANCE,
    FOR_A_GPU,
    TASKS,
    averaged,
    estimate,
    on_device,
    rounded_score,
    setting,
    stacked,
)

import longhorizon as lh
from longhorizon.problem import environment, make_problem
from longhorizon.truth import Truth, score

CLOCKED = {"digits": 2, "mnist": 1, "cifar10": 1}  # times that each estimator is timed; the median counts
ASKED_FOR = "smoothed, half the distance"  # on CIFAR-10 made only if it is named
FEWER = {"clip 10": 4}  # estimates on CIFAR-10, where one takes longest


def engines(hypers: dict[str, lh.Hyper], name: str, smoke: bool = False) -> dict[str, Any]:
    """The estimators by name; all of them where they differ on digits, the best elsewhere.

    Smoothed ones shift by what the truth shifts by.
    """
    far = {key: [DISTANCE[key] * v for v in hyper.values().tolist()] for key, hyper in hypers.items()}
    half = {key: [d / 2 for d in distances] for key, distances in far.items()}
    every = {
        "clip auto": lh.Forward(clip="auto", compile=False),
        "adjoint that may not grow": NonExpansive(),
        "truncated, 50 steps": lh.Greedy(50),
        "smoothed": lh.Factorial(far),
        "smoothed, half the distance": lh.Factorial(half),
        "smoothed, fewest pairs": lh.Factorial(far, pairs=1),
        "smoothed, one seed": lh.Factorial(far, seeds="one"),
        "hybrid": lh.Hybrid(distance=far),
        "hybrid, not clipped": lh.Hybrid(distance=far, clip=None),
    }
    few = {label: every[label] for label in ("smoothed", "hybrid", "hybrid, not clipped")}
    if name in FOR_A_GPU:
        return few | {"clip 10": lh.Forward(clip=10.0), ASKED_FOR: every[ASKED_FOR]}
    return few if smoke or name not in ("digits-edge", "digits-hot") else every


TIMED: dict[str, Any] = {  # those of truth.py, and what "exact" costs where the adjoint computes it
    "exact": lh.Forward(compile=False),
    "clip 10": lh.Forward(clip=10.0, compile=False),
    "exact, adjoint": lh.Adjoint(),
    "adjoint, clip auto": lh.Adjoint(clip="auto"),
}


def as_truth(found: dict[str, Any]) -> Truth:
    """Two rows with the mean and the standard error of a result."""
    nan = float("nan")
    rows = {}
    for key, part in found["truth"].items():
        mean, error = (torch.tensor([nan if v is None else v for v in part[name]]) for name in ("mean", "error"))
        rows[key] = torch.stack([mean + error, mean - error]).double()
    return Truth(rows, torch.tensor([found["val_loss"]] * 2))


def voted(estimates: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Medians of `count` seeds each: an estimate that no single seed can spoil."""
    return {
        key: torch.stack([part.nanmedian(0).values for part in g.split(count) if len(part) == count])
        for key, g in estimates.items()
    }


def clock(on: str) -> float:
    """Of the processor; of the wall, when all is done, on a GPU."""
    if on != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def plain_seconds(task: lh.Task, hypers: dict[str, lh.Hyper], steps: int, traces: lh.Traces | None = None) -> float:
    """One training run without derivatives, and its validation; what compiling takes is left out."""
    with environment():
        problem = make_problem(task, lh.sgd(), hypers, steps, 0, traces=traces)
        on, step, state = problem.device.type, problem.stepper(steps), problem.start
        if on == "cuda":
            step(state, 0)
        began = clock(on)
        for t in range(steps):
            state, _ = step(state, t)
        problem.validation_loss(state, steps)
        return clock(on) - began


def cost(
    task: lh.Task,
    hypers: dict[str, lh.Hyper],
    steps: int,
    engine: Any,
    times: int,
    traces: lh.Traces,
    on: str,
    rows: list[dict[str, Any]] | None = None,
) -> dict[str, float]:
    """What an estimate costs in plain runs, on average.

    Args:
        times: that one is timed; the median counts.
        rows: the estimates by seed. Those that smoothed something cost more than the others: both kinds are timed.
    """
    kinds: dict[bool, list[int]] = {}
    for seed, row in enumerate(rows or [{}] * times):
        kinds.setdefault("error" in row, []).append(seed)
    how: Any = {"steps": steps, "engine": engine, "traces": traces}
    few = how | {"steps": max(hyper.windows for hyper in hypers.values()), "traces": None}
    lh.hypergradient(task, lh.sgd(), hypers, **few)  # what torch loads at first use is on nobody's clock
    shared = {"runs": 0.0, "estimate_seconds": 0.0}
    for seeds in kinds.values():
        ratios, seconds = [], []
        for seed in seeds[:times]:
            plain = plain_seconds(task, hypers, steps, traces)
            began = clock(on)
            lh.hypergradient(task, lh.sgd(), hypers, seed=seed, **how)
            seconds.append(clock(on) - began)
            ratios.append(seconds[-1] / plain)
        share = len(seeds) / sum(map(len, kinds.values()))
        for name, found in (("runs", ratios), ("estimate_seconds", seconds)):
            shared[name] += share * statistics.median(found)
    return shared


def names_of(name: str, smoke: bool) -> list[str]:
    return list(engines({"lr": lh.Hyper(0.1), "momentum": lh.Hyper(0.1), "weight_decay": lh.Hyper(0.1)}, name, smoke))


def median_costs(rows: dict[str, list[dict[str, Any]]], plain: float) -> dict[str, dict[str, float]]:
    """The same from estimates that were timed; those that compiled first, at most every other one, are outliers."""
    took = {label: [row["took"] for row in made if "took" in row] for label, made in rows.items()}
    middle = {label: statistics.median_low(seconds) for label, seconds in took.items() if seconds}
    return {label: {"runs": seconds / plain, "estimate_seconds": seconds} for label, seconds in middle.items()}


def sure(rows: list[dict[str, Any]], true: Truth, z: float) -> dict[str, float]:
    """Of the values with a known sign, the share that is `z` standard errors from zero, and how often it is right."""
    known, kept, right = true.significant(), [], []
    for row in rows:
        for key, mean in true.mean.items():
            for w in range(len(mean)):
                error, slope = row["error"][key][w], row["grad"][key][w]
                if known[key][w] and error is not None and slope is not None:
                    kept.append(abs(slope) > z * error)
                    right.append(kept[-1] and slope * mean[w] > 0)
    share = sum(kept) / len(kept) if kept else float("nan")
    return {"share": share, "right": sum(right) / sum(kept) if sum(kept) else float("nan")}


def begun_with(row: dict[str, Any]) -> dict[str, Any]:
    """What a hybrid estimate began with."""
    grad = row.get("exact", row["grad"])
    fine = all(g is not None for values in grad.values() for g in values)
    return {"grad": grad, "status": "ok" if fine else "non-finite adjoint", "amplified": row["amplified"]}


def one(args: Any, name: str) -> None:
    path = args.truth or RESULTS / f"truth-{name}.json"
    if args.smoke:
        path = args.work / f"truth-{name}-smoke.json"
    if not path.exists() and (args.keep or not args.make):
        say(f"{name}: no truth yet, run python experiments/truth.py --task {name}" + " --smoke" * args.smoke)
        return
    task, hypers = setting(args, name)
    steps = 30 if args.smoke else TASKS[name].steps
    rough = args.precision  # of plain training runs, as for the truth
    traces = lh.Traces()
    on = on_device(args, name).partition(":")[0]
    if on == "cpu":
        torch.set_num_threads(1)
    count = args.estimates or (2 if args.smoke else min(24, TASKS[name].estimates))
    clocked = 1 if args.smoke else CLOCKED[TASKS[name].data]
    of = {} if rough == "float32" else {"precision": rough}
    work = Work(args, f"estimators-{name}", {"task": name, "steps": steps, "distance": DISTANCE} | of)

    def made(label: str, engine: Any, there: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those that are there, and the seeds after them."""
        asked = bool(args.estimates and label in (args.make or ()))  # for this one by name
        several = min(count, FEWER.get(label, count)) if name in FOR_A_GPU and not asked else count
        rows = list(there)
        for seed in range(len(there), several):
            with nullcontext() if seed == len(there) else turn(args, on):  # the first one compiles
                unit = work.unit(
                    f"{label}-{seed}", lambda s=seed: estimate(task, hypers, steps, engine, s, traces, rough)
                )
            rows.append(unit)
        return rows

    if args.make and not args.keep:
        for label in args.make:
            made(label, engines(hypers, name, args.smoke)[label], [])
            say(f"{name}: {label}: made")
        return
    found = json.loads(path.read_text())
    if found["settings"]["steps"] != steps or found["settings"].get("precision", "float32") != rough:
        raise SystemExit(f"{path}: has other steps, or another precision than {rough}; give its --precision.")
    true = as_truth(found)
    kept = known(f"estimators-{name}", args, found["settings"]) if args.keep else None
    since = {k: kept["environment"][k] for k in ("date", "commit")} if kept else None  # when they were made
    from_before = {"estimates_from": kept.get("estimates_from", since)} if kept else {}
    kept = kept or {"estimates": {}, "cost": {}, "seconds": work.seconds()}
    before = kept["seconds"] - work.seconds()
    rows: dict[str, Any] = dict(found["estimates"])
    sureness = {}
    for label, engine in engines(hypers, name, args.smoke).items():
        there = kept["estimates"].get(label, [])
        if name in FOR_A_GPU and label == ASKED_FOR and not there and label not in (args.make or []):
            continue
        more = not there or (args.estimates and label in (args.make or [label]))
        rows[label] = rows.get(label) or (made(label, engine, there) if more else there)
        if all("error" in row for row in rows[label]):
            sureness[label] = {str(z): sure(rows[label], true, z) for z in (1.0, 2.0)}
        said = score(stacked(rows[label]), true)
        say(f"{name}: {label}: sign {said.sign:.2f} ± {said.sign_error:.2f}")
    rows.setdefault("adjoint, clip auto", [begun_with(row) for row in rows["hybrid"]])
    if name in FOR_A_GPU:
        rows.setdefault("exact", [begun_with(row) for row in rows["hybrid, not clipped"]])
        with turn(args, on):
            plain = work.unit("plain", lambda: plain_seconds(task, hypers, steps, traces))
        costs = median_costs(rows, plain)
    else:
        costs = {}
        for label, engine in (TIMED | engines(hypers, name, args.smoke)).items():
            if not (args.smoke and label in TIMED):
                timed = partial(cost, task, hypers, steps, engine, clocked, traces, on, rows.get(label))
                costs[label] = kept["cost"].get(label) or work.unit(f"cost-{label}", timed)
    scores = {label: asdict(score(stacked(given), true)) for label, given in rows.items()}
    for label in ("hybrid", "hybrid, not clipped"):
        if len(rows[label]) >= 2:
            scores[f"{label}, mean of 2"] = asdict(score(averaged(stacked(rows[label]), 2), true))
    for label in ("exact", "clip 10"):
        if label in rows and len(rows[label]) >= 4:
            scores[f"{label}, mean of 4"] = asdict(score(averaged(stacked(rows[label]), 4), true))
            scores[f"{label}, median of 4"] = asdict(score(voted(stacked(rows[label]), 4), true))
    finish(
        args,
        f"estimators-{name}",
        {
            "settings": found["settings"],
            "distance": DISTANCE,
            "truth_commit": found["environment"]["commit"],
            "scores": {label: rounded_score(s) for label, s in scores.items()},
            "estimates_made": {label: len(given) for label, given in rows.items()},
            "cost": {label: {k: rounded(v, 4) for k, v in c.items()} for label, c in costs.items()},
            "sure": {label: {z: rounded_score(s) for z, s in by.items()} for label, by in sureness.items()},
            "estimates": {
                label: made
                for label, made in rows.items()
                if label not in found["estimates"] and label != "adjoint, clip auto"  # they are in the hybrid's
            },
            "seconds": before + work.seconds(),
        }
        | from_before,
    )


def main() -> None:
    parser = arguments(__doc__, "estimators")
    parser.add_argument("--task", choices=TASKS, help="one of them; without it all")
    parser.add_argument(
        "--estimates",
        type=int,
        help="of each that this script adds; 24 for digits, 12 for MNIST, 6 for CIFAR-10 without it; those kept count",
    )
    parser.add_argument("--keep", action="store_true", help="take what is in the result already from there")
    parser.add_argument(
        "--make",
        action="append",
        metavar="LABEL",
        help="only make the estimates of this name, of --task; with --keep more",
    )
    parser.add_argument(
        "--precision", choices=["float32", "bf16"], default="float32", help="of plain training runs, as for the truth"
    )
    parser.add_argument("--truth", type=Path, metavar="FILE", help="truth.py's result; where it writes it without this")
    args = parse(parser)
    if args.make and args.task is None:
        raise SystemExit(f"--make {args.make[0]}: is an estimator of one task; give --task, too.")
    there = names_of(args.task, args.smoke) if args.task else []
    if bad := [label for label in args.make or [] if label not in there]:
        raise SystemExit(f"--make {bad[0]}: --task {args.task} has {', '.join(there)}.")
    if args.truth and not args.task:
        raise SystemExit(f"--truth {args.truth}: is the truth of one task; give --task, too.")
    for name in [args.task] if args.task else [name for name in TASKS if name not in FOR_A_GPU]:
        one(args, name)


if __name__ == "__main__":
    run(main)
