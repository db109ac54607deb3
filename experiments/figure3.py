"""Figure 3: learning rates of a LeNet over one epoch of MNIST and of SVHN, learnt from zero in three ways.

Shows: the schedules after 50 outer steps, and the test accuracy of a LeNet trained with them from scratch:
    greedy      H = 1, one learning rate per step, each learnt by 50 outer steps before the next step is taken
    greedy_last the same with the last learning rate of each 50, where greedy has the best; only if asked for
    together    H = 1, one learning rate per step, 50 outer steps of all of them at once
    non_greedy  through the whole run, one learning rate per step
    fds         through the whole run, learning rates shared over W ≈ 50 steps
    cosine      off the shelf, from 0.01, 0.03 and 0.1, for comparison
Command: python experiments/figure3.py --data-root DATA     writes experiments/results/figure3.json
    It goes on where it stopped. `--data` and `--methods` do some of it; what is in the result besides stays there.
    `--keep` does only what is not in the result yet.
Time:    in the result file.
Ours:
    MNIST, greedy, each rate before the next step: rates 0 to 0.77, test 19.6 ± 9.0 %; 142 s, NVIDIA H200
    MNIST, the same, the last of each 50 rates instead of the best: rates -0.077 to 0.77, test 26.9 ± 16.2 %; 149 s,
        NVIDIA H200
    MNIST, greedy, all rates at once: rates -0.18 to 0.32, test 9.8 ± 0.0 % (after all outer steps 10.1 ± 0.7 %); 349 s
        for all of its call, NVIDIA H200
    MNIST, non-greedy, one rate per step: rates -0.05 to 0.23, test 97.7 ± 0.1 % (after all outer steps 27.4 ± 38.4 %);
        349 s for all of its call, NVIDIA H200
    MNIST, FDS, W ≈ 50: rates 0.12 to 0.13, test 97.4 ± 0.4 % (after all outer steps 97.5 ± 0.2 %); 349 s for all of its
        call, NVIDIA H200
    MNIST, cosine from 0.01: test 89.9 ± 0.3 %; 349 s for all of its call, NVIDIA H200
    MNIST, cosine from 0.03: test 94.7 ± 0.5 %; 349 s for all of its call, NVIDIA H200
    MNIST, cosine from 0.1: test 97.2 ± 0.2 %; 349 s for all of its call, NVIDIA H200
    SVHN, greedy, each rate before the next step: not run yet
    SVHN, greedy, all rates at once: rates 0.016 to 0.097, test 80.5 ± 0.6 % (after all outer steps 66.1 ± 3.6 %); 478 s
        for all of its call, NVIDIA H200
    SVHN, non-greedy, one rate per step: rates 0.016 to 0.097, test 80.4 ± 0.6 % (after all outer steps 9.3 ± 5.8 %);
        478 s for all of its call, NVIDIA H200
    SVHN, FDS, W ≈ 50: rates 0.016 to 0.09, test 83.1 ± 0.4 % (after all outer steps 83.1 ± 0.5 %); 30 min, AMD EPYC, 1
        threads
    SVHN, cosine from 0.01: test 26.8 ± 4.2 %; 86 s, AMD EPYC, 1 threads
    SVHN, cosine from 0.03: test 69.4 ± 2.3 %; 86 s, AMD EPYC, 1 threads
    SVHN, cosine from 0.1: test 81.9 ± 0.9 %; 84 s, AMD EPYC, 1 threads
Paper:   greedy learns rates that are too small on both; without sharing, non-greedy works on MNIST and fails on SVHN
    with rates far too high; FDS finds sensible ones, on SVHN better than cosine. The figure has no table.

Settings: batches of 128, one epoch (T = 445 and 543 with 5 % held out), 50 outer steps of Algorithm 1 (rate 0.1),
hypergradients clipped at ±3, early stopping by validation accuracy (Appendix C); both that schedule and the last one
are tested. The paper leaves open whether ±3 bounds hypergradients or the gradients of batches (we do the first), and
the momentum, 0 here: from zero and with rate 0.1, momentum 0.9 makes the first outer step ten times larger, every rate
jumps to 0.3 at once and the network dies (`--momentum 0.9`). "50 outer steps per hyperparameter" is 50 at each step
for the greedy ones (`longhorizon.rivals.stepwise`), and early stopping means the best of each 50 there.
"""

import shutil
import time
from pathlib import Path
from typing import Any

import record
import torch
from record import rounded, say

import longhorizon as lh
from longhorizon import data
from longhorizon.problem import Problem, environment, make_problem
from longhorizon.rivals.stepwise import Stepwise

METHODS = ("greedy", "greedy_last", "together", "non_greedy", "fds")
ALL = (*METHODS, "cosine")
USUAL = [method for method in ALL if method != "greedy_last"]
EVERY = 50  # steps between two saves of the greedy run
TOGETHER = {"cuda": 4000, "cpu": 500}  # validation images at a time: a CPU is faster with what fits into its caches
PEAKS = (0.01, 0.03, 0.1)


def main() -> None:
    parser = record.arguments(__doc__ or "", "figure3")
    parser.add_argument("--data", choices=["mnist", "svhn"], help="only this one")
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=3.0, help="bound of a hypergradient in the outer step")
    parser.add_argument("--rate", type=float, default=0.1, help="of the outer step")
    parser.add_argument("--seed", type=int, default=0, help="of the tuning runs")
    parser.add_argument("--compile", choices=["auto", "yes", "no"], default="auto", help="the adjoint's step")
    parser.add_argument("--methods", default=",".join(USUAL), help="names, with commas between them")
    parser.add_argument("--keep", action="store_true", help="do not run again what is in the result already")
    args = record.parse(parser)
    if unknown := [name for name in args.methods.split(",") if name not in ALL]:
        raise SystemExit(f"--methods {args.methods}: {unknown[0]!r} is none of {', '.join(ALL)}.")
    settings: dict[str, Any] = {
        "model": "lenet",
        "batch_size": 128,
        "val_fraction": 0.05,
        "outer_steps": 50,
        "rate": args.rate,
        "clip": args.clip,
        "momentum": args.momentum,
        "window": 50,
        "seed": args.seed,
        "test_seeds": 5,
        "peaks": list(PEAKS),
    }
    if args.smoke:
        settings |= {"batch_size": 64, "outer_steps": 3, "window": 5, "test_seeds": 2, "peaks": [0.03]}
    variant = "".join(
        f"-{key}{value:g}"
        for key, value, usual in (("momentum", args.momentum, 0), ("clip", args.clip, 3), ("rate", args.rate, 0.1))
        if value != usual
    ) + (f"-seed{args.seed}" if args.seed else "")
    sets = [args.data] if args.data else ["mnist", "svhn"]
    result = f"figure3{variant}" + (f"-{args.data}" if args.data else "")
    kept = record.known(result, args, settings)
    found: dict[str, Any] = kept["sets"] if kept else {}
    works = {name: record.Work(args, f"figure3{variant}-{name}", settings) for name in sets}
    before = kept["seconds"] - sum(work.seconds() for work in works.values()) if kept else 0.0
    try:
        for name, work in works.items():
            one_set(name, args, settings, work, found.setdefault(name, {"methods": {}}))
    finally:  # also when it is stopped: the result is of what is there
        done = {name: one for name, one in found.items() if one["methods"]}
        if done:
            seconds = before + sum(work.seconds() for work in works.values())
            record.finish(args, result, {"settings": settings, "seconds": seconds, "sets": done}, kept)
    for name, one in found.items():
        for method, row in one["methods"].items():
            test = row["test"]
            say(f"{name}, {method:<12} test accuracy {100 * test['mean']:.2f} ± {100 * test['deviation']:.2f} %")


def one_set(name: str, args: Any, settings: dict[str, Any], work: record.Work, found: dict[str, Any]) -> None:
    """The methods that are asked for on one data set, into what was found before."""
    images = record.images(name, args)
    at_once = TOGETHER["cpu" if args.device == "cpu" else "cuda"]
    made = data.image_data(
        images, settings["batch_size"], settings["val_fraction"], val_batch_size=at_once, device=args.device
    )
    task, rule = made.task(settings["model"]), lh.sgd(momentum=settings["momentum"])
    steps, full = made.steps_per_epoch, len(made.train_set) // made.batch_size
    outer = lh.GradientDescent(settings["rate"], clip=settings["clip"])
    found |= {"data": record.title(images, args), "steps": steps}
    methods, traces = found["methods"], lh.Traces()
    for method in METHODS:
        if (args.keep and method in methods) or method not in args.methods.split(","):
            continue
        windows = steps if method != "fds" else max(1, round(steps / settings["window"]))
        hypers = {"lr": lh.Hyper(0.0, windows=windows)}
        folder = work.folder / f"tune-{method}"

        def learnt(method: str = method, hypers: Any = hypers, folder: Any = folder) -> Any:
            if method.startswith("greedy"):
                problem = make_problem(task, rule, hypers, steps, settings["seed"], traces=traces)
                keep: Any = "best" if method == "greedy" else "last"
                return step_by_step(name, problem, settings["outer_steps"], outer, folder / "greedy.pt", keep)
            compiled = record.compiles(args.compile, args.device)
            engine: Any = lh.Greedy(compile=compiled) if method == "together" else lh.Adjoint(compile=compiled)
            tuned = lh.tune(
                task,
                rule,
                hypers,
                steps=steps,
                outer_steps=settings["outer_steps"],
                outer=outer,
                engine=engine,
                seed=settings["seed"],
                traces=traces,
                dir=folder,
                confirm=0,  # last means last here
                on_step=lambda step: say(f"{name}, {method}, {told(step, settings['outer_steps'])}"),
            )
            return summary(tuned)

        before = work.seconds()
        unit = "greedy_best" if method == "greedy" else method  # work folders from when it kept the last
        row = work.unit(f"learnt-{unit}", learnt)
        shutil.rmtree(folder, ignore_errors=True)  # a journal of so many values is large, and all that matters is here
        tests = {
            "test": record.tested(
                work, f"{unit}-stopped", task, rule, hypers, row["stopped"], full, settings["test_seeds"], traces
            ),
            "test_last": record.tested(
                work, f"{unit}-last", task, rule, hypers, row["last"], full, settings["test_seeds"], traces
            ),
        }
        row |= {"last": rounded(row["last"]["lr"]), "stopped": rounded(row["stopped"]["lr"])}
        methods[method] = {"windows": windows} | row | tests | made_here(args, work, before)
    peaks = [peak for peak in settings["peaks"] if "cosine" in args.methods.split(",")]
    for peak in peaks:
        if args.keep and f"cosine {peak:g}" in methods:
            continue
        before, lr = work.seconds(), [peak * x for x in record.cosine(full)]
        hypers = {"lr": lh.Hyper(lr, windows=full)}
        test = record.tested(
            work, f"cosine-{peak:g}", task, rule, hypers, {"lr": lr}, full, settings["test_seeds"], traces
        )
        methods[f"cosine {peak:g}"] = {"peak": peak, "test": test} | made_here(args, work, before)
    order = (*METHODS, *(f"cosine {p:g}" for p in settings["peaks"]))
    found["methods"] = {name: methods[name] for name in order if name in methods}


def made_here(args: Any, work: record.Work, before: float) -> dict[str, Any]:
    """Where a part of the result comes from, if all of it was made now: other calls may have made the other parts."""
    if before and work.seconds() == before:  # it was in the work folder already
        return {}
    env = record.environment(args.device.split(":")[0])
    where = {name: env.get(name) for name in ("date", "commit", "cpu", "threads", "gpu")}
    where |= {"commit": args.commit} if args.commit else {}
    return {"made": where | {"command": args.command, "seconds": work.seconds() - before}}


def step_by_step(name: str, problem: Problem, outer_steps: int, outer: Any, path: Path, keep: Any) -> dict[str, Any]:
    """The greedy scheme, from where it was saved."""
    began = time.perf_counter()
    with environment():
        saved = torch.load(path, weights_only=True) if path.exists() else None
        run = Stepwise(problem, outer_steps, outer, saved and saved["run"], keep)
        before = saved["seconds"] if saved else 0.0
        while run.t < problem.steps and run.failed is None:
            run.advance()
            if run.t % EVERY == 0 or run.t == problem.steps:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_suffix(".part")
                torch.save({"run": run.save(), "seconds": before + time.perf_counter() - began}, partial)
                partial.replace(path)
                lr, loss = run.learnt["lr"][max(0, run.t - EVERY) : run.t], run.val_losses[run.t - 1]
                rates = f"lr {lr.min():.3g} to {lr.max():.3g}"
                say(f"{name}, greedy, step {run.t} of {problem.steps}: {rates}, val loss {loss:.4f}")
    lr = run.learnt["lr"].nan_to_num(0.0).tolist()  # no step after one that failed
    return {
        "seconds": before + time.perf_counter() - began,
        "last": {"lr": lr},
        "stopped": {"lr": lr},
        "stopped_at": None,
        "val_loss": rounded(run.val_losses.tolist()),
    }


def summary(tuned: lh.Tuned) -> dict[str, Any]:
    """What is kept of a tuning run; schedules with all their digits."""
    history = tuned.history
    stopped = max(history, key=lambda step: (step.metrics.get("accuracy", -1.0), -step.val_loss))
    some = history[:: max(1, len(history) // 10)]
    return {
        "seconds": sum(step.seconds for step in history),
        "last": {"lr": tuned.schedule["lr"]},
        "stopped": {"lr": stopped.values["lr"]},
        "stopped_at": stopped.index,
        "val_loss": rounded([step.val_loss for step in history]),
        "val_accuracy": rounded([step.metrics.get("accuracy", float("nan")) for step in history]),
        "status": [step.status for step in history],
        "history": {str(step.index): rounded(step.values["lr"], 4) for step in some},
    }


def told(step: lh.OuterStep, count: int) -> str:
    lr = step.values["lr"]
    return (
        f"outer step {step.index + 1} of {count}: lr {lr.min():.3g} to {lr.max():.3g}, val loss {step.val_loss:.4f}, "
        f"accuracy {100 * step.metrics.get('accuracy', float('nan')):.2f} %, {step.status}, {step.seconds:.1f} s"
    )


if __name__ == "__main__":
    record.run(main)
