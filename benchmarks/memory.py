"""Peak memory of a hypergradient against the length of the run: our engines, plain backpropagation, and two peers.

    python benchmarks/memory.py                  all cells, about 25 minutes; what the result file has is skipped
    python benchmarks/memory.py --fresh          all of them again; with --methods, those
    python benchmarks/memory.py --quick          T = 100 and 1000 only, nothing written

The job is the same for all: a perceptron with 2,762 parameters, batches of 16, SGD with momentum 0.9, and the
derivative of the final validation loss with respect to four learning rates, one per quarter of the run. Data are read
by step number, so nothing has to be kept. Each cell runs in a process of its own, on one thread; the parent watches
it and stops it at a limit of memory or processor time, which is then the result. Memory is the resident set:

    before_mb       when all is imported and one step of T = 8 has been differentiated by the same method (which loads
                    torch's tracer and kernels)
    peak_mb         its highest value during the run
    run_mb          their difference: what the run needed
    seconds         of processor time

Methods: Forward, Adjoint(store="sqrt"), Adjoint(store="all"); `graph`, torch.autograd through the whole graph of the
run, in plain torch; `higher` and `torchopt` from PyPI (pip install "longhorizon[bench]").

Results: benchmarks/results/memory.json.
"""

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, environment
from torch import Tensor, nn

STEPS = (100, 1_000, 10_000, 100_000)
WINDOWS, LR, MOMENTUM = 4, 0.01, 0.9
INPUTS, HIDDEN, CLASSES, BATCH, EXAMPLES = 32, 64, 10, 16, 1024
POLL = 0.05  # seconds between looks at a running cell


class Batches:
    """Batches by step number, cut out of one random data set."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(EXAMPLES, INPUTS, generator=generator)
        self.y = (self.x @ torch.randn(INPUTS, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        low = step * BATCH % EXAMPLES
        return self.x[low : low + BATCH], self.y[low : low + BATCH]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# Methods: steps -> the derivative with respect to each window's learning rate.


def ours(engine: Callable[[Any], Any]) -> Callable[[int], list[float]]:
    def method(steps: int) -> list[float]:
        import longhorizon as lh

        batches = Batches()
        task = lh.Task(make_model, loss, lambda seed: batches, lambda seed: [(batches.x, batches.y)])
        hypers = {"lr": lh.Hyper(LR, windows=WINDOWS)}
        h = lh.hypergradient(task, lh.sgd(momentum=MOMENTUM), hypers, steps=steps, engine=engine(lh))
        if not h.status:
            raise RuntimeError(str(h.status))
        return h.grad["lr"].tolist()

    return method


def graph(steps: int) -> list[float]:
    """Training as one differentiable program."""
    batches, model = Batches(), make_model()
    lrs = torch.full((WINDOWS,), LR, requires_grad=True)
    params = dict(model.named_parameters())
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    for step in range(steps):
        x, y = batches[step]
        value = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
        velocity = {name: MOMENTUM * v + g for (name, v), g in zip(velocity.items(), grads, strict=True)}
        lr = lrs[step * WINDOWS // steps]
        params = {name: p - lr * velocity[name] for name, p in params.items()}
    final = F.cross_entropy(torch.func.functional_call(model, params, (batches.x,)), batches.y)
    return torch.autograd.grad(final, lrs)[0].tolist()


def with_higher(steps: int) -> list[float]:
    import higher

    batches, model = Batches(), make_model()
    lrs = torch.full((WINDOWS,), LR, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    with higher.innerloop_ctx(model, optimizer) as (functional, stepper):
        for step in range(steps):
            stepper.step(loss(functional, batches[step]), override={"lr": [lrs[step * WINDOWS // steps]]})
        return torch.autograd.grad(loss(functional, (batches.x, batches.y)), lrs)[0].tolist()


def with_torchopt(steps: int) -> list[float]:
    import torchopt

    batches, model = Batches(), make_model()
    lrs = torch.full((WINDOWS,), LR, requires_grad=True)

    def schedule(count: Tensor) -> Tensor:
        return lrs[min(int(count) * WINDOWS // steps, WINDOWS - 1)]

    optimizer = torchopt.sgd(lr=schedule, momentum=MOMENTUM, moment_requires_grad=True)
    params = dict(model.named_parameters())
    state = optimizer.init(params)
    for step in range(steps):
        x, y = batches[step]
        value = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
        grads = torch.autograd.grad(value, list(params.values()), create_graph=True)
        updates, state = optimizer.update(dict(zip(params, grads, strict=True)), state, params=params, inplace=False)
        params = torchopt.apply_updates(params, updates, inplace=False)
    final = F.cross_entropy(torch.func.functional_call(model, params, (batches.x,)), batches.y)
    return torch.autograd.grad(final, lrs)[0].tolist()


METHODS: dict[str, Callable[[int], list[float]]] = {
    "forward": ours(lambda lh: lh.Forward(compile=True)),
    "adjoint sqrt": ours(lambda lh: lh.Adjoint(store="sqrt")),
    "adjoint all": ours(lambda lh: lh.Adjoint(store="all")),
    "graph": graph,
    "higher": with_higher,
    "torchopt": with_torchopt,
}


# One cell, in a process of its own.


def resident(key: str, pid: int | str = "self") -> float:
    """VmRSS (now) or VmHWM (the highest so far) of a process, in MB; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next(int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith(key))
    except (OSError, StopIteration):
        return 0.0


def processor_time(pid: int) -> float:
    """Seconds that a process has computed so far; 0 when it has ended. A busy machine does not count against it."""
    try:
        user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    except OSError:
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def forget_peak() -> None:
    """Hand freed memory back and start the record of the highest resident set anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def cell(name: str, steps: int) -> None:
    """Run and print one JSON line."""
    torch.set_num_threads(1)
    try:
        METHODS[name](8)
        forget_peak()
        before, start = resident("VmRSS"), time.process_time()
        grad = METHODS[name](steps)
        seconds = time.process_time() - start
        record = {"status": "ok", "before_mb": before, "peak_mb": resident("VmHWM"), "seconds": seconds, "grad": grad}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].name
        record = {"status": f"{type(error).__name__} in {where}: {str(error).splitlines()[0][:200]}"}
    print(json.dumps(record))


def watched(name: str, steps: int, limit_gb: float, limit_s: float) -> dict[str, Any]:
    """A cell under limits."""
    env = dict(os.environ, OMP_NUM_THREADS="1", MALLOC_ARENA_MAX="1")
    command = [sys.executable, __file__, "--cell", name, str(steps)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    stopped, seconds = "", 0.0
    while child.poll() is None and not stopped:
        seconds = max(seconds, processor_time(child.pid))
        if resident("VmRSS", child.pid) > limit_gb * 1e3:
            stopped = f"over {limit_gb:g} GB"
        elif seconds > limit_s:
            stopped = f"over {limit_s:g} s"
        else:
            time.sleep(POLL)
    if stopped:
        child.kill()
        child.communicate()
        return {"status": stopped, "seconds": round(seconds, 1)}
    out = child.communicate()[0]
    record: dict[str, Any] = json.loads(out) if out.strip() else {"status": f"ended with code {child.returncode}"}
    if record["status"] == "ok":
        record["run_mb"] = record["peak_mb"] - record["before_mb"]
        record |= {key: round(record[key], 2) for key in ("before_mb", "peak_mb", "run_mb", "seconds")}
    return record


# The table.


def summary(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Growth between lengths, and how far the methods' hypergradients are apart."""
    found: dict[str, Any] = {}
    for name in METHODS:
        rows = {int(key.split("T=")[1]): c for key, c in cells.items() if key.startswith(f"{name}, ")}
        done = {steps: c for steps, c in sorted(rows.items()) if c["status"] == "ok"}
        if not done:
            continue
        entry: dict[str, Any] = {"longest": max(done)}
        peaks = [c["peak_mb"] for c in done.values()]
        entry["peak_spread_percent"] = round(100 * (max(peaks) / min(peaks) - 1), 2)
        (low, a), (high, b) = list(done.items())[-2:] if len(done) > 1 else [(1, {}), (1, {})]
        if low < high and a["run_mb"] > 0 and b["run_mb"] > 0:
            entry["exponent"] = round(math.log(b["run_mb"] / a["run_mb"]) / math.log(high / low), 2)
            entry["exponent_between"] = [low, high]
        found[name] = entry
    for steps in STEPS:
        grads = {
            name: torch.tensor(c["grad"], dtype=torch.float64)
            for name in METHODS
            if (c := cells.get(f"{name}, T={steps}", {})).get("status") == "ok"
        }
        if len(grads) > 1:
            first = next(iter(grads.values()))
            worst = max(float((g - first).norm() / first.norm()) for g in grads.values())
            found.setdefault("largest_disagreement", {})[f"T={steps}"] = float(f"{worst:.1e}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="measure again what the result file has")
    parser.add_argument("--quick", action="store_true", help="T = 100 and 1000, nothing written")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--limit-gb", type=float, default=4.0)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--cell", nargs=2, metavar=("METHOD", "T"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        cell(args.cell[0], int(args.cell[1]))
        return
    path = RESULTS / "memory.json"
    result: dict[str, Any] = {"cells": {}}
    if path.exists() and not args.quick:
        result = json.loads(path.read_text())
    cells = {k: c for k, c in result["cells"].items() if not (args.fresh and k.split(", ")[0] in args.methods)}
    for name in args.methods:
        for steps in STEPS[:2] if args.quick else STEPS:
            key = f"{name}, T={steps}"
            shorter = [cells.get(f"{name}, T={t}", {}).get("status", "ok") for t in STEPS if t < steps]
            stopped = [status for status in shorter if status != "ok"]
            if key in cells and cells[key]["status"].startswith(("ok", "over")):
                continue
            record = {"status": f"not run: a shorter run was {stopped[0]}"} if stopped else None
            record = record or watched(name, steps, args.limit_gb, args.limit_s)
            cells[key] = record
            shown = {k: v for k, v in record.items() if k != "grad"}
            print(key, json.dumps(shown), flush=True)
            if not args.quick:
                settings = {"limit_gb": args.limit_gb, "limit_s": args.limit_s}
                result = {"environment": environment(), "settings": settings, "summary": summary(cells), "cells": cells}
                path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(summary(cells), indent=1))


if __name__ == "__main__":
    main()
