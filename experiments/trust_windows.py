"""Many windows: what an outer step is worth there that follows an estimate's signs, alone or shared by neighbours.

    python experiments/trust_windows.py                      digits, calm, at the edge and hot, with 40 learning rates
    python experiments/trust_windows.py --task digits-hot    one of them

The schedules are those of truth.py, each learning rate written out for eight windows, so that there are 42 values. The
hybrid then lets neighbouring windows share a slope where more than 21 values are doubted. All values move against the
signs of an estimate, as in trust_steps.py, and the schedules are trained with seeds that no estimate had.

Result: experiments/results/trust_windows.json; docs/trust.md shows it.
"""

import statistics
from typing import Any

import torch
from record import Work, arguments, finish, known, parse, rounded, run, say
from trust_steps import ESTIMATES, FIRST, JUDGES, summary
from truth import DISTANCE, TASKS, setting

import longhorizon as lh

TIMES = 8  # windows for each of a task's own
SHOWN = ("digits-calm", "digits-edge", "digits-hot")


def engines(hypers: dict[str, lh.Hyper]) -> dict[str, Any]:
    """Smoothed ones shift by what a step moves."""
    far = {key: [DISTANCE[key] * v for v in hyper.values().tolist()] for key, hyper in hypers.items()}
    return {
        "exact": lh.Adjoint(),
        "adjoint, clip auto": lh.Adjoint(clip="auto"),
        "hybrid": lh.Hybrid(distance=far),
        "smoothed, shared": lh.Factorial(far, most=21),
    }


def one(args: Any, name: str, work: Work) -> dict[str, Any]:
    """Every step's change of the loss, by estimator."""
    task, few = setting(args, name)
    lr = [v for v in few["lr"].values().tolist() for _ in range(TIMES)]
    hypers = few | {"lr": lh.Hyper(lr, windows=len(lr))}
    steps = 50 if args.smoke else TASKS[name].steps
    count, judges = (2, 2) if args.smoke else (ESTIMATES, JUDGES)
    seeds, traces = range(FIRST, FIRST + judges), lh.Traces()

    def losses(schedules: dict[str, Any]) -> dict[str, list[float]]:
        return lh.confirm(task, lh.sgd(), hypers, schedules, steps=steps, seeds=seeds).losses

    def stepped(engine: Any, seed: int) -> dict[str, Any]:
        how: Any = {"steps": steps, "engine": engine, "seed": seed, "traces": traces}
        found = lh.hypergradient(task, lh.sgd(), hypers, **how)
        moved = {
            key: (hyper.values() * (1 - DISTANCE[key] * found.grad[key].nan_to_num().sign())).tolist()
            for key, hyper in hypers.items()
        }
        measured = 0 if found.error is None else sum(int(e.isfinite().sum()) for e in found.error.values())
        return {"values": moved, "smoothed": measured}

    stay = {key: hyper.values().tolist() for key, hyper in hypers.items()}
    before = work.unit(f"{name}-before", lambda: losses({"stay": stay}))["stay"]
    told: dict[str, Any] = {}
    for label, engine in engines(hypers).items():
        rows = [work.unit(f"{name}-{label}-{s}", lambda e=engine, s=s: stepped(e, s)) for s in range(count)]
        schedules = {str(seed): row["values"] for seed, row in enumerate(rows)}
        after = work.unit(f"{name}-{label}", lambda given=schedules: losses(given))
        measured = statistics.fmean(row["smoothed"] for row in rows)
        told[label] = part = summary(before, after) | {"smoothed": rounded(measured)}
        say(f"{name}: {label}: {part['change']:+.4f} ± {part['error']:.4f}, {measured:.0f} of {len(lr) + 2} smoothed")
    return {"stay": statistics.fmean(before), "values": len(lr) + 2, "steps": told}


def main() -> None:
    parser = arguments(__doc__, "trust_windows")
    parser.add_argument("--task", choices=SHOWN, help="one of them; without it all")
    args = parse(parser)
    torch.set_num_threads(1)
    settings = {"distance": DISTANCE, "times": TIMES, "estimates": ESTIMATES, "judges": JUDGES, "first_seed": FIRST}
    work, kept = Work(args, "trust_windows", settings), known("trust_windows", args, settings)
    found: dict[str, Any] = kept["tasks"] if kept else {}
    before = kept["seconds"] - work.seconds() if kept else 0.0
    for name in [args.task] if args.task else SHOWN:
        found[name] = one(args, name, work)
        order = {task: found[task] for task in SHOWN if task in found}
        content = {"settings": settings, "tasks": order, "seconds": before + work.seconds()}
        finish(args, "trust_windows", content, kept)


if __name__ == "__main__":
    run(main)
