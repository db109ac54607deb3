"""One outer step, all overheads included, against the double-backward loop.

    python benchmarks/end_to_end.py                          digits, MLP, 200 steps: half a minute on two cores
    python benchmarks/end_to_end.py --model wrn-16-1 --data cifar10 --batch 256 --epochs 10 --device cuda

Learns 7 learning rates, momentum and weight decay (N = 9), as the paper's Figure 1 does. The outer step is a real one:
data stream, training, tangents, validation, watch for non-finite values. The first one also traces and compiles; it is
given apart, and the second one is compared. The loop is what the published code does: one graph with create_graph, one
autograd.grad through it per column that has begun. It is measured for a number of steps in the last window, where all
columns have begun, and in the first, and extrapolated over the windows.

Results: benchmarks/results/end_to_end_MODEL_DEVICE.json.
"""

import argparse
import json
import time
from typing import Any

import torch
from environment import RESULTS, environment

import longhorizon as lh
from longhorizon import data
from longhorizon.engines.entry import compute
from longhorizon.problem import Problem, make_problem
from longhorizon.problem import environment as around

WINDOWS = 7
ENGINES = {"forward": lh.Forward(clip=10.0), "adjoint": lh.Adjoint()}


def synchronised(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def loop_step(problem: Problem, columns: int) -> None:
    """A gradient with its graph, and one pass through it per column; the elementwise recursion is left out."""
    batch, hypers = problem.batch(0), problem.hypers_at(0)
    params = {name: p.detach().requires_grad_() for name, p in problem.start.params.items()}
    grads, _, _ = problem.inner.gradient(params, problem.start.buffers, batch, hypers, create_graph=True)
    leaves = list(params.values())
    for _ in range(columns):
        torch.autograd.grad(list(grads.values()), leaves, leaves, retain_graph=True, allow_unused=True)


def loop_seconds(problem: Problem, steps: int, device: str) -> float:
    """Seconds of a whole outer step by the loop, from two measured numbers of columns."""
    took = {}
    for columns in (3, 2 + WINDOWS):  # in the first window and in the last
        loop_step(problem, columns)
        began = synchronised(device)
        for _ in range(steps):
            loop_step(problem, columns)
        took[columns] = (synchronised(device) - began) / steps
    return problem.steps * (took[3] + took[2 + WINDOWS]) / 2  # windows begin evenly


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp-64")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32"])
    parser.add_argument("--loop-steps", type=int, default=100)
    parser.add_argument("--engines", default="forward,adjoint")
    args = parser.parse_args()
    images = data.image_data(args.data, args.batch, 0.05 if args.data != "digits" else 0.2, device=args.device)
    steps = round(args.epochs * images.steps_per_epoch) or args.steps
    task = images.task(args.model)
    hypers = {
        "lr": lh.Hyper(0.05, windows=WINDOWS),
        "momentum": lh.Hyper(0.9),
        "weight_decay": lh.Hyper(5e-4),
    }
    if args.device == "cpu":
        torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    with around(args.precision):
        problem = make_problem(task, lh.sgd(), hypers, steps, 0)
        loop = loop_seconds(problem, args.loop_steps, args.device)
        for name in args.engines.split(","):
            seconds = []
            for seed in (0, 1):
                began = synchronised(args.device)
                problem = make_problem(task, lh.sgd(), hypers, steps, seed, like=problem)
                status = str(compute(problem, ENGINES[name]).status)
                seconds.append(synchronised(args.device) - began)
            rows[name] = {"first_s": seconds[0], "second_s": seconds[1], "faster_than_loop": loop / seconds[1]}
            rows[name]["status"] = status
            print(f"{name}: {seconds[1]:.2f} s, {loop / seconds[1]:.1f} times the loop ({loop:.1f} s); {status}")
    content = {
        "environment": environment(args.device),
        "settings": vars(args) | {"steps": steps, "values": 2 + WINDOWS},
        "loop_extrapolated_s": loop,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"end_to_end_{args.model}_{args.device}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
