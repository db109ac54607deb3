"""The convolutions of columns (kernels.cu) against cuDNN's, for the sizes of WRN-16-1.

    python benchmarks/convolutions.py                     a minute on an H200

One tangent of each convolution, for ten columns and 256 images: both products and their sum. `cudnn` is what torch does
without our kernels: columns folded into the batch for one product and into the channels for the other, with the copies
that takes. `error` is against float64, of one column. Times on the device, replayed from a CUDA graph. Result:
benchmarks/results/convolutions.json.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from environment import RESULTS, environment, folder
from torch import Tensor
from torch.nn import functional as F

from longhorizon import convolution, kernels
from longhorizon.cuda import precision

COLUMNS, COUNT = 10, 256
SIZES = [  # channels, outputs, side of the result, kind
    (3, 16, 32, 0),
    (16, 16, 32, 0),
    (16, 32, 16, 1),
    (16, 32, 16, 2),
    (32, 32, 16, 0),
    (32, 64, 8, 1),
    (32, 64, 8, 2),
    (64, 64, 8, 0),
]


def milliseconds(fn: Callable[[], Any]) -> float:
    """On the device, without what launching costs."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        fn()
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 5)
    return round(statistics.median(times), 4)


def folded(x: Tensor) -> Tensor:
    """(columns, images, channels, …) with columns in the channels."""
    return x.transpose(0, 1).flatten(1, 2)


def products(channels: int, outputs: int, side: int, kind: int) -> dict[str, tuple[Any, Callable[[Any], Tensor], Any]]:
    """Per operation: ours, cuDNN's way, and the tensors."""
    taps, padding, stride = kernels.KINDS[kind]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    large, small = (channels, side * stride, side * stride), (outputs, side, side)
    how: Any = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    images, image = draw(COLUMNS, COUNT, *large), draw(COUNT, *large)
    grads, grad = draw(COLUMNS, COUNT, *small), draw(COUNT, *small)
    weight, weights = draw(outputs, channels, taps, taps), draw(COLUMNS, outputs, channels, taps, taps)
    back = torch.ops.aten.convolution_backward

    def convolved(t: Any) -> Tensor:
        images, weight, image, weights = t
        one = F.conv2d(images.flatten(0, 1), weight, padding=padding, stride=stride).unflatten(0, (-1, len(image)))
        other = F.conv2d(image, weights.flatten(0, 1), padding=padding, stride=stride)
        return one + other.unflatten(1, (len(weights), -1)).transpose(0, 1)

    def spread(t: Any) -> Tensor:
        grads, weight, grad, weights = t
        like, wide = image.new_empty(1).expand(len(grads) * len(grad), *large), folded(weights)
        one = back(grads.flatten(0, 1), like.to(grads), weight, None, *how, [True, False, False])[0]
        like = image.new_empty(1).expand(len(grad), len(grads) * channels, *large[1:])
        other = back(grad, like.to(grads), wide, None, *how, [True, False, False])[0]
        return one.unflatten(0, (len(grads), -1)) + other.unflatten(1, (len(grads), -1)).transpose(0, 1)

    def weighed(t: Any) -> Tensor:
        images, grad, image, grads = t
        mask, columns = [False, True, False], len(grads)
        one = back(grad, folded(images), folded(weights[:columns]).to(grad), None, *how, mask)[1]
        other = back(folded(grads), image, weights[:columns].flatten(0, 1).to(grad), None, *how, mask)[1]
        return one.unflatten(1, (columns, -1)).transpose(0, 1) + other.unflatten(0, (columns, -1))

    convolve_op, spread_op, weigh_op, _ = convolution.operations()
    found = {
        "convolution": (convolve_op, convolved, (images, weight, image, weights)),
        "weight gradient": (weigh_op, weighed, (images, grad, image, grads)),
    }
    if stride == 2:
        found["input gradient"] = (spread_op, spread, (grads, weight, grad, weights))
    return found


def one_column(t: Any) -> Any:
    """The last column alone, in float64."""
    return tuple(x.double() if x.ndim == 4 else x[-1:].double() for x in t)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=folder, default=RESULTS, help="folder of the result")
    args = parser.parse_args()
    rows = []
    for channels, outputs, side, kind in SIZES:
        for name, (op, torchs, tensors) in products(channels, outputs, side, kind).items():
            exact = torchs(one_column(tensors))[0]
            for kind_of in ("float32", "tf32"):
                with precision(kind_of):  # type: ignore[arg-type]
                    ways = {
                        "ours": lambda op=op, t=tensors, tf=kind_of == "tf32": op(*t, kind, tf),  # noqa: B023
                        "cudnn": lambda torchs=torchs, t=tensors: torchs(t),
                    }
                    row: dict[str, Any] = {"operation": name, "channels": channels, "outputs": outputs, "side": side}
                    row |= {"taps": kernels.KINDS[kind][0], "stride": kernels.KINDS[kind][2]}
                    row["precision"] = kind_of
                    for way, run in ways.items():
                        error = float((run()[-1] - exact).norm() / exact.norm())
                        row |= {f"{way}_ms": milliseconds(run), f"{way}_error": float(f"{error:.1e}")}
                    row["ratio"] = round(row["cudnn_ms"] / row["ours_ms"], 2)
                    rows.append(row)
                    print(row, flush=True)
    content = {"environment": environment("cuda"), "settings": {"columns": COLUMNS, "images": COUNT}, "rows": rows}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (args.to / "convolutions.json").write_text(text)


if __name__ == "__main__":
    main()
