"""Hypergradients against the truth: how often the sign of one estimate is right.

    python experiments/truth.py                     digits, perceptron: calm, edge and hot; 25 minutes on two cores
    python experiments/truth.py --task digits-hot   one of them

The truth is the central difference of the final validation loss averaged over 48 seeds, each value shifted by what a
user would feel (learning rates ±30 %, momentum ±5 %, weight decay ±50 %). An estimate is what one outer step would have
seen. Scores: `longhorizon.truth.Score`. `amplified` is how much the meter says a change at the end of a window is
amplified until the end of the run; it is what a warning can be based on.

Result: experiments/results/truth-TASK.json.
"""

import statistics
from dataclasses import asdict
from typing import Any

import torch
from record import Work, arguments, finish, parse, rounded, run, say

import longhorizon as lh
from longhorizon import data
from longhorizon.truth import score, truth

DISTANCE = {"lr": 0.3, "momentum": 0.05, "weight_decay": 0.5}
# steps, learning rates of five windows, momentum, weight decay
TASKS: dict[str, tuple[int, list[float], float, float]] = {
    "digits-calm": (200, [0.05] * 5, 0.5, 1e-3),
    "digits-edge": (200, [0.4, 0.4, 0.4, 0.3, 0.15], 0.5, 1e-3),
    "digits-hot": (200, [0.6, 0.6, 0.6, 0.4, 0.2], 0.9, 1e-3),
    "digits-long": (600, [0.3, 0.3, 0.3, 0.2, 0.1], 0.9, 1e-3),
}
ENGINES: dict[str, Any] = {
    "exact": lh.Forward(),
    "clip 100": lh.Forward(clip=100.0),
    "clip 10": lh.Forward(clip=10.0),
    "clip 1": lh.Forward(clip=1.0),
}
MEANS = (2, 4)  # estimates that average this many seeds


def estimate(task: lh.Task, hypers: dict[str, lh.Hyper], steps: int, engine: Any, seed: int) -> dict[str, Any]:
    """One hypergradient, with what its meter says of every window."""
    h = lh.hypergradient(task, lh.sgd(), hypers, steps=steps, engine=engine, seed=seed)
    found: dict[str, Any] = {"grad": {key: rounded(g) for key, g in h.grad.items()}, "status": str(h.status)}
    if h.meter is None:
        return found
    ends = [steps * (w + 1) // len(h.grad["lr"]) for w in range(len(h.grad["lr"]))]
    found["amplified"] = rounded([h.meter.growth(end, steps, column) for column, end in enumerate(ends)])
    if h.meter.clipped is not None:
        found["clipped"] = rounded(h.meter.clipped[:, : len(ends)].mean(0))
    return found


def stacked(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def numbers(values: list[float | None]) -> list[float]:
        return [float("nan") if v is None else v for v in values]

    return {key: torch.tensor([numbers(r["grad"][key]) for r in rows], dtype=torch.float64) for key in rows[0]["grad"]}


def averaged(estimates: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Means of `count` seeds each, over those that are finite."""
    return {
        key: torch.stack([part.nanmean(0) for part in g.split(count) if len(part) == count])
        for key, g in estimates.items()
    }


def one(args: Any, name: str) -> None:
    steps, lr, momentum, decay = TASKS[name]
    seeds = 4 if args.smoke else args.seeds
    if args.smoke:
        steps = 30
    hypers = {
        "lr": lh.Hyper(lr, windows=len(lr)),
        "momentum": lh.Hyper(momentum),
        "weight_decay": lh.Hyper(decay),
    }
    torch.set_num_threads(1)
    task = data.image_data("digits", 64, 0.2).task("mlp-64")
    work = Work(args, f"truth-{name}", {"task": name, "steps": steps, "seeds": seeds, "distance": DISTANCE})

    def told(done: int, total: int) -> None:
        if done % 8 == 0:
            say(f"{name}: truth of {done} of {total} seeds")

    true = truth(
        task,
        lh.sgd(),
        hypers,
        steps=steps,
        distance=DISTANCE,
        seeds=seeds,
        path=work.folder / "truth.seeds",
        progress=told,
    )
    scores, rows = {}, {}
    for label, engine in ENGINES.items():
        rows[label] = [
            work.unit(f"{label}-{seed}", lambda e=engine, s=seed: estimate(task, hypers, steps, e, s))
            for seed in range(seeds)
        ]
        given = stacked(rows[label])
        scores[label] = asdict(score(given, true))
        for count in MEANS:
            scores[f"{label}, mean of {count}"] = asdict(score(averaged(given, count), true))
        say(f"{name}: {label}: sign {scores[label]['sign']:.2f} ± {scores[label]['sign_error']:.2f}")
    finish(
        args,
        f"truth-{name}",
        {
            "settings": {"steps": steps, "seeds": seeds, "lr": lr, "momentum": momentum, "weight_decay": decay},
            "distance": DISTANCE,
            "truth": {
                key: {"mean": rounded(true.mean[key]), "error": rounded(true.error[key])} for key in true.differences
            },
            "val_loss": statistics.fmean(true.val_loss.tolist()),
            "scores": {label: rounded_score(s) for label, s in scores.items()},
            "estimates": rows,
            "seconds": work.seconds(),
        },
    )


def rounded_score(values: dict[str, Any]) -> dict[str, Any]:
    return {key: v if isinstance(v, int) else rounded(v, 4) for key, v in values.items()}


def main() -> None:
    parser = arguments(__doc__, "truth")
    parser.add_argument("--task", choices=TASKS, help="one of them; without it all")
    parser.add_argument("--seeds", type=int, default=48)
    args = parse(parser)
    for name in [args.task] if args.task else TASKS:
        one(args, name)


if __name__ == "__main__":
    run(main)
