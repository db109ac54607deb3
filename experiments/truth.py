"""Hypergradients against the truth: how often the sign of one estimate is right.

    python experiments/truth.py                     digits and MNIST, calm to hot; 40 minutes for digits on two cores
    python experiments/truth.py --task digits-hot   one of them
    python experiments/truth.py --task cifar-5      WRN-16-1 on CIFAR-10, 5 or 10 epochs (cifar-10), on a GPU

MNIST and CIFAR-10 need `--data-root` or LONGHORIZON_DATA. MNIST's tasks take 5 to 25 minutes each on one core.

The truth is the central difference of the final validation loss averaged over 48 seeds (MNIST with a perceptron, and
CIFAR-10: 16, digits-long: 24, mnist-edge: 192), each value shifted by what a user would feel (learning rates
±30 %, momentum ±5 %, weight decay ±50 %). An estimate is what one outer step would have seen; on CIFAR-10 estimators.py
makes them all. Scores: `longhorizon.truth.Score`. `amplified` is how much the meter says a change at the end of a
window is amplified until the end of the run; it is what a warning can be based on.

Result: experiments/results/truth-TASK.json.
"""

import json
import statistics
import time
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from record import Work, arguments, finish, known, parse, rounded, run, say, turn, write

import longhorizon as lh
from longhorizon import data
from longhorizon.truth import score, truth

DISTANCE = {"lr": 0.3, "momentum": 0.05, "weight_decay": 0.5}


class Setting(NamedTuple):
    """One task: a schedule to judge hypergradients at."""

    steps: int
    lr: list[float]  # of its windows
    momentum: float
    model: str = "mlp-64"
    data: str = "digits"
    seeds: int = 48  # of the truth
    estimates: int = 48  # of each estimator
    val_fraction: float = 0.2
    batch: int = 64
    decay: float = 1e-3


MNIST = {"data": "mnist", "seeds": 16, "estimates": 12, "val_fraction": 1 / 30}
# One epoch, near where figure1.py --data mnist ends.
EPOCH: dict[str, Any] = {"model": "mlp-32", "data": "mnist", "seeds": 192, "estimates": 24, "val_fraction": 0.05}
EPOCH |= {"batch": 128}
# A schedule that trains to 89 % in 50 epochs.
CIFAR: dict[str, Any] = {"lr": [0.1, 0.2, 0.3, 0.2, 0.1, 0.04, 0.008], "momentum": 0.9, "decay": 5e-4, "batch": 256}
CIFAR |= {"model": "wrn-16-1", "data": "cifar10", "seeds": 16, "estimates": 6, "val_fraction": 0.05}
TASKS: dict[str, Setting] = {
    "digits-calm": Setting(200, [0.05] * 5, 0.5),
    "digits-edge": Setting(200, [0.4, 0.4, 0.4, 0.3, 0.15], 0.5),
    "digits-hot": Setting(200, [0.6, 0.6, 0.6, 0.4, 0.2], 0.9),
    "digits-long": Setting(5000, [0.1, 0.1, 0.1, 0.05, 0.02], 0.9, seeds=24, estimates=12),
    "mnist-calm": Setting(100, [0.05] * 5, 0.5, **MNIST),  # type: ignore[arg-type]
    "mnist-hot": Setting(600, [0.2, 0.2, 0.2, 0.1, 0.05], 0.9, **MNIST),  # type: ignore[arg-type]
    "mnist-edge": Setting(445, [0.2, 0.3, 0.35, 0.3, 0.25, 0.15, 0.05], 0.4, **EPOCH),
    "lenet-edge": Setting(100, [0.1] * 5, 0.5, "lenet", **(MNIST | {"seeds": 48, "estimates": 24})),  # type: ignore[arg-type]
    "cifar-5": Setting(5 * 185, **CIFAR),
    "cifar-10": Setting(10 * 185, **CIFAR),
}
FOR_A_GPU = ("cifar-5", "cifar-10")
HELD_OUT = ("mnist-edge",)  # no bound was chosen by it
ENGINES: dict[str, Any] = {  # every seed is a run of its own, too short to pay for tracing
    "exact": lh.Forward(compile=False),
    "clip 100": lh.Forward(clip=100.0, compile=False),
    "clip 10": lh.Forward(clip=10.0, compile=False),
    "clip 1": lh.Forward(clip=1.0, compile=False),
}
SLOW: dict[str, Any] = {  # for MNIST and long runs; the adjoint gives the same exact numbers in less time
    "exact": lh.Adjoint(),
    "clip 10": lh.Forward(clip=10.0, compile=False),
}
JUDGES = 1000  # the first seed of the truth: an estimate must not be judged by its own run
MEANS = (2, 4)  # estimates that average this many seeds


def engines_of(name: str) -> dict[str, Any]:
    """The estimators that are scored with the truth of a task."""
    if name in FOR_A_GPU:  # one that is dear is made once, by estimators.py
        return {}
    return ENGINES if TASKS[name].data == "digits" and TASKS[name].steps < 1000 else SLOW


def estimate(
    task: lh.Task,
    hypers: dict[str, lh.Hyper],
    steps: int,
    engine: Any,
    seed: int,
    traces: lh.Traces,
    precision: Any = "float32",
) -> dict[str, Any]:
    """One hypergradient, with what its meter says of every window."""
    how: Any = {"engine": engine, "seed": seed, "traces": traces, "precision": precision}
    began = time.perf_counter()
    h = lh.hypergradient(task, lh.sgd(), hypers, steps=steps, **how)
    found: dict[str, Any] = {"grad": {key: rounded(g) for key, g in h.grad.items()}, "status": str(h.status)}
    found["took"] = rounded(time.perf_counter() - began, 4)
    if h.error is not None:
        found["error"] = {key: rounded(e) for key, e in h.error.items()}
    if h.exact is not None:
        found["exact"] = {key: rounded(e) for key, e in h.exact.items()}
    if h.meter is None:
        return found | {"engine": h.engine}
    ends = [steps * (w + 1) // len(h.grad["lr"]) for w in range(len(h.grad["lr"]))]
    columns = [0] * len(ends) if h.meter.of == "adjoint" else range(len(ends))
    found["amplified"] = rounded([h.meter.growth(end, steps, c) for c, end in zip(columns, ends, strict=True)])
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


def setting(args: Any, name: str) -> tuple[lh.Task, dict[str, lh.Hyper]]:
    """A task and where its hypergradients are taken; with `--smoke` digits in place of others."""
    chosen = TASKS[name]
    hypers = {
        "lr": lh.Hyper(chosen.lr, windows=len(chosen.lr)),
        "momentum": lh.Hyper(chosen.momentum),
        "weight_decay": lh.Hyper(chosen.decay),
    }
    model = "mlp-64" if args.smoke else chosen.model
    where = "digits" if args.smoke else chosen.data
    batch, share, device = chosen.batch, chosen.val_fraction, on_device(args, name)
    return data.image_data(where, batch, share, root=args.data_root, device=device).task(model), hypers


def on_device(args: Any, name: str) -> str:
    """Small tasks have no use for a GPU."""
    device: str = args.device
    return device if name in FOR_A_GPU else "cpu"


def one(args: Any, name: str) -> None:
    chosen = TASKS[name]
    seeds = args.seeds or (4 if args.smoke else chosen.seeds)
    estimates = min(seeds, chosen.estimates)
    steps = 30 if args.smoke else chosen.steps
    if on_device(args, name) == "cpu":
        torch.set_num_threads(1)
    task, hypers = setting(args, name)
    traces = lh.Traces()
    rough = {} if args.precision == "float32" else {"precision": args.precision}
    work = Work(args, f"truth-{name}", {"task": name, "steps": steps, "distance": DISTANCE} | rough)
    path, taken = work.folder / "truth.seeds", None
    kept, like = known(f"truth-{name}", args), {"steps": steps, "precision": args.precision}
    if not path.exists() and kept and "by_seed" in kept and _same(kept["settings"], like):
        write(path, kept["by_seed"])  # measured on another machine: more seeds go on from there
        taken = kept

    def told(done: int, total: int) -> None:
        if done % 8 == 0 or name in FOR_A_GPU:
            say(f"{name}: truth of {done} of {total} seeds")

    with turn(args, on_device(args, name)):
        true = truth(
            task,
            lh.sgd(),
            hypers,
            steps=steps,
            distance=DISTANCE,
            seeds=range(JUDGES, JUDGES + seeds),
            path=path,
            progress=told,
            precision=args.precision,
        )
    scores, rows = {}, {}
    for label, engine in engines_of(name).items():
        rows[label] = [
            work.unit(f"{label}-{seed}", lambda e=engine, s=seed: estimate(task, hypers, steps, e, s, traces))
            for seed in range(estimates)
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
            "settings": {
                "data": chosen.data,
                "model": chosen.model,
                "batch": chosen.batch,
                "steps": steps,
                "seeds": seeds,
                "first_seed": JUDGES,
                "lr": chosen.lr,
                "momentum": chosen.momentum,
                "weight_decay": chosen.decay,
            }
            | rough,
            "distance": DISTANCE,
            "truth": {
                key: {"mean": rounded(true.mean[key]), "error": rounded(true.error[key])} for key in true.differences
            },
            "val_loss": statistics.fmean(true.val_loss.tolist()),
            "by_seed": json.loads(path.read_text()),
            "scores": {label: rounded_score(s) for label, s in scores.items()},
            "estimates": rows,
            "seconds": work.seconds(),
        },
        taken,
    )


def _same(settings: dict[str, Any], like: dict[str, Any]) -> bool:
    """Whether a result was made with these settings; older ones have no precision."""
    return like.items() <= ({"precision": "float32"} | settings).items()


def rounded_score(values: dict[str, Any]) -> dict[str, Any]:
    return {key: v if isinstance(v, int) else rounded(v, 4) for key, v in values.items()}


def main() -> None:
    parser = arguments(__doc__, "truth")
    parser.add_argument("--task", choices=TASKS, help="one of them; without it all that a CPU can do")
    parser.add_argument("--seeds", type=int, help="of the truth; 48 for digits, 16 for MNIST and CIFAR-10 without it")
    parser.add_argument(
        "--precision",
        choices=["float32", "bf16"],
        default="float32",
        help="of the plain training runs of the truth, on a GPU; estimates by derivatives are in float32",
    )
    args = parse(parser)
    if args.precision != "float32" and args.task not in FOR_A_GPU:
        raise SystemExit(f"--precision {args.precision}: is for --task {' or '.join(FOR_A_GPU)}, on a GPU.")
    for name in [args.task] if args.task else [name for name in TASKS if name not in FOR_A_GPU]:
        one(args, name)


if __name__ == "__main__":
    run(main)
