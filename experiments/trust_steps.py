"""What an outer step is worth that follows an estimate's signs, measured: the judge that needs no slope.

    python experiments/trust_steps.py                     the small tasks whose estimates are there
    python experiments/trust_steps.py --task mnist-edge   one of them

A slope can be defined for one value alone or while the others move, too, and where values depend on each other the two
differ (docs/trust.md). A tuning step moves all of them. So here all values move at once, each against the sign of its
estimate by as much as the truth shifts it (learning rates 30 %, momentum 5 %, weight decay 50 %), a schedule for each
estimate; and these are trained with seeds that no estimate had. The change of the mean validation loss is what the step
was worth. "the truth's" is the step by the signs of truth.py, of values one at a time.

The estimates are those of truth.py's and estimators.py's results. Result: experiments/results/trust_steps.json.
"""

import json
import math
import statistics
from typing import Any

import torch
from estimators import begun_with
from record import RESULTS, Work, arguments, finish, known, parse, rounded, run, say
from truth import DISTANCE, FOR_A_GPU, TASKS, setting

import longhorizon as lh

LABELS = ("exact", "clip 10", "adjoint, clip auto", "smoothed", "hybrid")
TRUTH = "the truth's"
FIRST = 5000  # seed of the judges
ESTIMATES, JUDGES = 12, 8


def stepped(name: str, grad: dict[str, list[float | None]]) -> dict[str, list[float]]:
    """The values of a task after a step against these signs; what is no number moves nothing."""
    chosen = TASKS[name]
    starts = {"lr": chosen.lr, "momentum": [chosen.momentum], "weight_decay": [chosen.decay]}
    moved = {}
    for key, values in starts.items():
        signs = [0 if g is None else (g > 0) - (g < 0) for g in grad[key]]
        moved[key] = [v * (1 - DISTANCE[key] * sign) for v, sign in zip(values, signs, strict=True)]
    return moved


def one(args: Any, name: str, work: Work) -> dict[str, Any] | None:
    """Every step's change of the loss, by estimator."""
    true, made = (RESULTS / f"{kind}-{name}.json" for kind in ("truth", "estimators"))
    if not (true.exists() and made.exists()):
        say(f"{name}: run truth.py and estimators.py first")
        return None
    found, added = json.loads(true.read_text()), json.loads(made.read_text())["estimates"]
    rows = found["estimates"] | added
    rows["adjoint, clip auto"] = [begun_with(row) for row in rows["hybrid"]]
    count, judges = (2, 2) if args.smoke else (ESTIMATES, JUDGES)
    steps = 30 if args.smoke else TASKS[name].steps
    task, hypers = setting(args, name)
    seeds = range(FIRST, FIRST + judges)

    def losses(schedules: dict[str, Any]) -> dict[str, list[float]]:
        return lh.confirm(task, lh.sgd(), hypers, schedules, steps=steps, seeds=seeds).losses

    stay = {key: hyper.values().tolist() for key, hyper in hypers.items()}
    by_truth = {key: part["mean"] for key, part in found["truth"].items()}
    before = work.unit(f"{name}-before", lambda: losses({"stay": stay, TRUTH: stepped(name, by_truth)}))
    told: dict[str, Any] = {}
    for label in (TRUTH, *LABELS):
        if label == TRUTH:
            after = {TRUTH: before[TRUTH]}
        else:
            schedules = {str(i): stepped(name, row["grad"]) for i, row in enumerate(rows[label][:count])}
            after = work.unit(f"{name}-{label}", lambda s=schedules: losses(s))
        told[label] = summary(before["stay"], after)
        part = told[label]
        say(f"{name}: {label}: {part['change']:+.4f} ± {part['error']:.4f}, {100 * part['lower']:.0f} % lower the loss")
    return {"stay": statistics.fmean(before["stay"]), "steps": told}


def summary(stay: list[float | None], after: dict[str, list[float | None]]) -> dict[str, Any]:
    """The mean change over estimates and its standard error over them (over seeds, of a single one).

    A run that diverges counts as the loss of guessing among ten classes, as does one that ends above it.
    """
    worst = math.log(10)

    def bounded(losses: list[float | None]) -> list[float]:
        return [worst if loss is None else min(loss, worst) for loss in losses]

    changes = [[b - a for a, b in zip(bounded(stay), bounded(own), strict=True)] for own in after.values()]
    means = [statistics.fmean(change) for change in changes]
    spread = means if len(means) > 1 else changes[0]
    return {
        "change": rounded(statistics.fmean(means)),
        "error": rounded(statistics.stdev(spread) / len(spread) ** 0.5),
        "lower": statistics.fmean(mean < 0 for mean in means),
        "changes": rounded(means, 4),
    }


def main() -> None:
    parser = arguments(__doc__, "trust_steps")
    small = [name for name in TASKS if name not in FOR_A_GPU]
    parser.add_argument("--task", choices=small, help="one of them; without it all")
    args = parse(parser)
    torch.set_num_threads(1)
    settings = {"distance": DISTANCE, "estimates": ESTIMATES, "judges": JUDGES, "first_seed": FIRST}
    work, kept = Work(args, "trust_steps", settings), known("trust_steps", args, settings)
    found: dict[str, Any] = kept["tasks"] if kept else {}
    before = kept["seconds"] - work.seconds() if kept else 0.0
    for name in [args.task] if args.task else small:
        told = one(args, name, work)
        if told is not None:
            found[name] = told
            order = {task: found[task] for task in small if task in found}
            finish(
                args,
                "trust_steps",
                {"settings": settings, "tasks": order, "seconds": before + work.seconds()},
                kept,
            )


if __name__ == "__main__":
    run(main)
