"""One outer step, all overheads included, against the double-backward loop.

    python benchmarks/end_to_end.py                          digits, MLP, 200 steps: half a minute on two cores
    python benchmarks/end_to_end.py --model wrn-16-1 --data cifar10 --batch 256 --epochs 10 --device cuda

Learns 7 learning rates, momentum and weight decay (N = 9), as the paper's Figure 1 does. The outer step is a real one:
data stream, training, tangents, validation, watch for non-finite values. Tracing and compiling, which the first one of
a run pays, is given apart as `cold_start_s`. The loop is what the published code does: one graph with create_graph, one
autograd.grad through it per column that has begun. It is measured for a number of steps in the last window, where all
columns have begun, and in the first, and extrapolated over the windows.

Results: benchmarks/results/end_to_end_MODEL_DEVICE.json.
"""

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import torch
from environment import RESULTS, environment, folder

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


def cold_start(problem: Problem, engine: Any, device: str) -> float:
    """Seconds from a new process to a compiled step: everything that the first outer step pays once."""
    began = synchronised(device)
    compute(problem, engine)
    return synchronised(device) - began


def bookkeeping(problem: Problem, device: str) -> dict[str, float]:
    """Milliseconds of Forward's step: all of it, the batch, and the tangents' step alone (the rest is bookkeeping)."""
    repeats = min(200, problem.steps // WINDOWS - 2)
    run = replace(ENGINES["forward"], compile=True).begin(problem)
    run.t = problem.steps - repeats - 2
    run.advance()
    took = {}
    began = synchronised(device)
    for _ in range(repeats):
        run.advance()
    took["step"] = synchronised(device) - began
    began = synchronised(device)
    for t in range(repeats):
        batch = problem.batch(t)
    took["batch"] = synchronised(device) - began
    step, hypers, ones = run._step(0), problem.hypers_at(run.t), run._ones(run.t, len(run.tangents[0]))
    began = synchronised(device)
    for _ in range(repeats):
        step(run.state, batch, hypers, run.tangents, ones)
    took["bare_step"] = synchronised(device) - began
    return {f"{name}_ms": round(seconds / repeats * 1e3, 4) for name, seconds in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp-64")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32"])
    parser.add_argument("--loop-steps", type=int, default=100)
    parser.add_argument("--engines", default="adjoint,forward")
    parser.add_argument("--to", type=folder, default=RESULTS, help="folder of the result")
    args = parser.parse_args()
    began = time.perf_counter()
    share = 0.05 if args.data != "digits" else 0.2
    images = data.image_data(args.data, args.batch, share, root=args.data_root, device=args.device)
    steps = round(args.epochs * images.steps_per_epoch) or args.steps
    task = images.task(args.model)
    hypers = {
        "lr": lh.Hyper(0.05, windows=WINDOWS),
        "momentum": lh.Hyper(0.9),
        "weight_decay": lh.Hyper(5e-4),
    }
    if args.device == "cpu":
        torch.set_num_threads(1)
    settings = {key: value for key, value in vars(args).items() if key not in ("to", "data_root")}
    settings |= {"steps": steps, "values": 2 + WINDOWS}
    content: dict[str, Any] = {"environment": environment(args.device), "settings": settings}
    content["reading_data_s"] = time.perf_counter() - began
    rows: dict[str, Any] = {}
    with around(args.precision):
        traces = lh.Traces()
        short = make_problem(task, lh.sgd(), hypers, WINDOWS, 0, traces=traces)
        for name in args.engines.split(","):
            cold = cold_start(short, replace(ENGINES[name], compile=True), args.device)
            if args.device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            began = synchronised(args.device)
            problem = make_problem(task, lh.sgd(), hypers, steps, 0, traces=traces)
            found = compute(problem, ENGINES[name])
            took = synchronised(args.device) - began
            rows[name] = {"engine": found.engine, "outer_step_s": took, "ms_per_step": took / steps * 1e3}
            rows[name] |= {"cold_start_s": cold, "val_loss": found.val_loss, "status": str(found.status)}
            if args.device == "cuda":
                rows[name]["peak_gb"] = torch.cuda.max_memory_reserved() / 1e9
            print(f"{name}: outer step {took:.2f} s, cold start {cold:.1f} s; {found.status}", flush=True)
        if "forward" in rows:
            rows["forward"] |= bookkeeping(problem, args.device)
        loop = loop_seconds(problem, args.loop_steps, args.device)
    for name, row in rows.items():
        row["faster_than_loop"] = loop / row["outer_step_s"]
        row["faster_than_loop_with_cold_start"] = loop / (row["outer_step_s"] + row["cold_start_s"])
        print(f"{name}: {row['faster_than_loop']:.1f} times the loop ({loop:.1f} s)")
    content |= {"loop_extrapolated_s": loop, "rows": rows}
    name = f"end_to_end_{args.model}_{args.device}{'_tf32' if args.precision == 'tf32' else ''}.json"
    (args.to / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
