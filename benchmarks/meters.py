"""What the meters cost: a hypergradient with them and without, by turns.

    python benchmarks/meters.py            writes benchmarks/results/meters.json; five minutes on one core

LeNet on random images of MNIST's size, batch 128, seven values. Without meters nothing is read off the tangents or the
adjoint; that a tangent is still finite is looked at either way. Both are timed by turns, in processor time on one
thread, and the median of the ratios counts: whatever else the machine does falls on both.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from environment import RESULTS, environment

import longhorizon as lh
from longhorizon import models
from longhorizon.engines import forward, reader

HYPERS = {"lr": lh.Hyper(0.05, windows=5), "momentum": lh.Hyper(0.5), "weight_decay": lh.Hyper(1e-3)}
ENGINES = {
    "forward": lh.Forward(compile=False),
    "forward, clipped": lh.Forward(clip=10.0, compile=False),
    "adjoint": lh.Adjoint("all", compile=False),
}


@contextmanager
def without_meters() -> Iterator[None]:
    """Nothing is read: no size of dθ/dλ, no row of a reader."""
    largest, due = forward._largest, reader.Reader.due
    seen: list[int] = []

    def only_all(leaves: list[torch.Tensor]) -> torch.Tensor:
        """The first of two calls in a step is the meter's, the second looks for what is not finite."""
        seen.append(0)
        return leaves[0].new_zeros(len(leaves[0])) if len(seen) % 2 else largest(leaves)

    forward._largest, reader.Reader.due = only_all, lambda self, step: False  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        forward._largest, reader.Reader.due = largest, due  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a size for tests; writes nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps, repeats = (5, 3) if args.quick else (10, 21)
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

    def seconds(engine: lh.Forward | lh.Adjoint) -> float:
        began = time.process_time()
        lh.hypergradient(task, lh.sgd(), HYPERS, steps=steps, engine=engine)
        return time.process_time() - began

    shares: dict[str, dict[str, float]] = {}
    for name, engine in ENGINES.items():
        seconds(engine)
        ratios, times = [], []
        for turn in range(repeats):
            first_with = turn % 2 == 0
            if first_with:
                metered = seconds(engine)
            with without_meters():
                plain = seconds(engine)
            if not first_with:
                metered = seconds(engine)
            ratios.append(metered / plain - 1)
            times.append(metered)
        low, _, high = statistics.quantiles(ratios, n=4)
        shares[name] = {"share": statistics.median(ratios), "low": low, "high": high}
        shares[name]["ms_per_step"] = 1000 * statistics.median(times) / steps
        print(f"{name}: meters take {100 * shares[name]['share']:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f})")
    if not args.quick:
        content = {"environment": environment(), "model": "lenet", "batch": 128, "steps": steps, "engines": shares}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "meters.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
