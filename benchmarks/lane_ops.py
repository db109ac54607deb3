"""Every operation of a bfloat16 step of training runs side by side, alone: WRN-16-1, batch 256, images like CIFAR-10's.

    python benchmarks/lane_ops.py        a minute on an H200, most of it building kernels
    python benchmarks/lane_ops.py --lanes 25 --only convolve

Microseconds for one run (median of several goes, inputs larger than the cache), how often a step does it, and the rate
at which it moves the least bytes that it has to move, against that of a copy. No result is kept: it is for looking.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longhorizon import lane_kernels, norm_kernels
from longhorizon.kernels import KINDS


class Case(NamedTuple):
    """An operation on images of a size."""

    name: str
    times: int  # in a step
    run: Callable[[], Tensor]
    bytes: int


# channels, outputs, side of the smaller image, kind, times in a step: with and without a gradient of the image
CONVOLUTIONS = (
    (3, 16, 32, 0, 1),
    (16, 16, 32, 0, 4),
    (16, 32, 16, 1, 1),
    (16, 32, 16, 2, 1),
    (32, 32, 16, 0, 3),
    (32, 64, 8, 1, 1),
    (32, 64, 8, 2, 1),
    (64, 64, 8, 0, 3),
)
AT_ONCE = 5  # runs in a recording
NORMS = ((16, 32, 5), (32, 16, 4), (64, 8, 4))  # channels, side, times


def cases(lanes: int, count: int, device: str) -> Iterator[Case]:
    """All of them, one after the other; what they read is made when it is asked for."""
    convolution, gradient = lane_kernels.operations()
    norm = norm_kernels.operations()

    def made(side: int, channels: int) -> Tensor:
        return torch.randn(lanes, count, side, side, channels, device=device).to(torch.bfloat16)

    for channels, outputs, side, kind, times in CONVOLUTIONS:
        taps, _, stride = KINDS[kind]
        image, grad = made(side * stride, max(8, channels)), made(side, outputs)
        weights = torch.randn(lanes, outputs, channels, taps, taps, device=device)
        both = (image.nbytes + grad.nbytes) // lanes
        what = f"{channels} → {outputs}, side {side}, {KINDS[kind]}"
        yield Case(
            f"convolve {what}", times, lambda i=image, w=weights, k=kind: convolution(i, w, None, k, False), both
        )
        if channels >= 16:
            yield Case(
                f"turned   {what}", times, lambda g=grad, w=weights, k=kind: convolution(g, w, None, k, True), both
            )
        yield Case(f"weigh    {what}", times, lambda i=image, g=grad, k=kind, c=channels: gradient(i, g, k, c), both)
    for channels, side, times in NORMS:
        x, g, other = made(side, channels), made(side, channels), made(side, channels)
        a, b, c, d = (torch.randn(lanes, channels, device=device) for _ in range(4))
        one, what = x.nbytes // lanes, f"{channels}, side {side}"
        yield Case(f"moments  {what}", times, lambda x=x: norm.moments(x), one)
        yield Case(f"scaled   {what}", times, lambda x=x, a=a, b=b: norm.scaled(x, a, b, True), 2 * one)
        yield Case(f"slopes   {what}", times, lambda x=x, g=g, a=a, b=b, c=c: norm.slopes(x, g, a, b, c, True), 2 * one)
        yield Case(
            f"unscaled {what}",
            times,
            lambda x=x, g=g, o=other, a=a, b=b, c=c, d=d: norm.unscaled(x, g, o, a, b, c, d, True),
            4 * one,
        )


def microseconds(run: Callable[[], Tensor], goes: int) -> float:
    """Of one run, as a step does it: recorded, so that nothing waits for Python."""
    run()  # builds what it needs
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for _ in range(AT_ONCE):
            run()
    recorded.replay()
    taken = []
    for _ in range(goes):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        recorded.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / AT_ONCE)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=25)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--goes", type=int, default=15, help="that are timed; the median counts")
    parser.add_argument("--only", default="", help="operations whose name begins so")
    args = parser.parse_args()
    large = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    rate = 2 * large.nbytes / microseconds(large.clone, args.goes)
    print(f"a copy moves {rate / 1e6:.2f} TB/s")
    total = least = 0.0
    for case in cases(args.lanes, args.batch, "cuda"):
        if not case.name.startswith(args.only):
            continue
        one = microseconds(case.run, args.goes) / args.lanes
        total, least = total + case.times * one, least + case.times * case.bytes / rate
        share = 100 * case.bytes / one / rate
        print(f"{case.times} × {one:6.2f} µs  {share:4.0f} % of a copy's rate  {case.name}", flush=True)
    print(f"{total:.0f} µs a step of one run; {least:.0f} if all of it ran at a copy's rate")


if __name__ == "__main__":
    main()
