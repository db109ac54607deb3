"""What the meters cost: their own work, as a share of the step that they watch.

    python benchmarks/meters.py            writes benchmarks/results/meters.json; a minute on one core

LeNet on random images of MNIST's size, batch 128, seven values, one thread, processor time. The difference between a
run with meters and one without is smaller than the noise of either, so the work of the meters is timed by itself, on
the tangents of a real run: the largest entry of dθ/dλ per column (Forward) or of dL/dθ (Adjoint), the share of H·Z that
a clip cuts off, how much larger the adjoint would be without one, and writing a row of readings. That a tangent is
still finite is looked at with or without meters. Every step is charged one reading, though long runs are read at 256
steps only.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, environment
from torch.func import vmap

import longhorizon as lh
from longhorizon import models
from longhorizon.engines import clipping, forward, reader
from longhorizon.problem import environment as surroundings
from longhorizon.problem import make_problem

HYPERS = {"lr": lh.Hyper(0.05, windows=5), "momentum": lh.Hyper(0.5), "weight_decay": lh.Hyper(1e-3)}


def seconds(work: Callable[[], Any], repeats: int) -> float:
    """Processor time of one call, the median over several."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a size for tests; writes nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps, repeats = (6, 5) if args.quick else (40, 200)
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(128, 1, 28, 28, generator=generator), torch.randint(10, (128,), generator=generator))
        for _ in range(steps)
    ]
    task = lh.Task(
        lambda: models.make("lenet", channels=1, size=28),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda seed: batches,
        lambda seed: batches[:1],
    )
    found: dict[str, dict[str, float]] = {}
    with surroundings():
        problem = make_problem(task, lh.sgd(), HYPERS, steps, 0)
        run = lh.Forward(compile=False).begin(problem)
        for _ in range(steps - 3):  # all windows have begun
            run.advance()
        step = statistics.median(seconds(run.advance, 1) for _ in range(3))
        tangents = run.tangents[: len(problem.start.params)]
        size = forward._largest(tangents)
        rows = reader.Reader("tangents", problem, len(size), clips=True)

        def taken() -> None:
            rows._steps.clear()
            rows.take(1, size, size)

        reading = seconds(lambda: forward._largest(tangents), repeats) + seconds(taken, repeats)
        cut = seconds(lambda: vmap(lambda z: clipping.share(z, z, 10.0))(tangents), repeats)
        found["forward"] = {"share": reading / step, "step_ms": 1000 * step}
        found["forward, clipped"] = {"share": (reading + cut) / step, "step_ms": 1000 * step}
        back = lh.Adjoint("all", compile=False).begin(problem)
        while back.phase == "train":
            back.advance()
        count = min(5, steps - 1)
        step = statistics.median(seconds(back.advance, 1) for _ in range(count))
        assert back.cotangent is not None
        adjoint = list(back.cotangent.params.values())
        reading = seconds(lambda: reader.largest(adjoint), repeats) + seconds(taken, repeats)
        found["adjoint"] = {"share": reading / step, "step_ms": 1000 * step}
        back = lh.Adjoint("all", clip="auto", compile=False).begin(problem)
        while back.phase == "train":
            back.advance()
        step = statistics.median(seconds(back.advance, 1) for _ in range(count))
        whole = torch.cat([x.flatten() for x in adjoint])
        uncut = seconds(lambda: clipping.kept_from_growing(whole, whole, whole).double().log(), repeats)
        found["adjoint, clipped by itself"] = {"share": (reading + uncut) / step, "step_ms": 1000 * step}
    for name, row in found.items():
        print(f"{name}: meters take {100 * row['share']:.2f} % of a step of {row['step_ms']:.0f} ms")
    if not args.quick:
        content = {"environment": environment(), "model": "lenet", "batch": 128, "values": 7, "engines": found}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "meters.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
