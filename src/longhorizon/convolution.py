"""Convolutions for few channels on a GPU: all columns of a tangent at once, on tensor cores.

cuDNN's kernels are made for many channels. The tangents of a small network are convolutions of thousands of images with
16 to 64 channels, where they leave most of the device idle; and each tangent of a convolution is a sum of
two, each of which wants the columns folded into another axis. The kernels here (kernels.cu) take columns as they are
and make both products in one go, nearly as accurate as float32. Each operation takes two pairs, either of which may be
missing: every column's own image with what all share, and the image that all share with what is each column's own.

    column_convolution       result[n, i] = images[n, i] * weight + image[i] * weights[n]
    column_input_gradient    the same, from gradients of the result, at stride two (at stride one it is a convolution)
    column_weight_gradient   result[n] = images[n] by grad + image by grads[n]

Measured by benchmarks/convolutions.py.
"""

import importlib.resources
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CHANNELS = (*range(1, 9), 16, 32, 64)
OUTPUTS = (16, 32, 64)
SIDES = (8, 16, 32)
KINDS = ((3, 1, 1), (3, 1, 2), (1, 0, 2))  # taps, padding, stride
ENOUGH = 2**14  # pixels of the smaller image that pay

_ROWS = 8  # of a strip of an image that one program deals with
_PROGRAMS = 528  # of a weight gradient: four for each multiprocessor of an H200

Pairs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def suits(count: int, channels: int, outputs: int, sides: tuple[int, ...], like: Tensor) -> bool:
    """Whether these kernels take a convolution of `KINDS`. `count` images; `sides` of the smaller one."""
    return (
        like.device.type == "cuda"
        and like.dtype == torch.float32
        and channels in CHANNELS
        and outputs in OUTPUTS
        and len(sides) == 2
        and sides[0] == sides[1]
        and sides[0] in SIDES
        and count * sides[0] ** 2 >= ENOUGH
        and available()
    )


@cache
def available() -> bool:
    """Whether this torch can build kernels, on a device that has TF32."""
    return hasattr(torch.cuda, "_compile_kernel") and torch.cuda.get_device_capability() >= (8, 0)


def arranged(weight: Tensor) -> Tensor:
    """Weights (…, outputs, channels, taps, taps) in the order in which a tensor core wants them."""
    *columns, outputs, channels, taps, _ = weight.shape
    if channels % 8:
        weight = F.pad(weight, (0, 0, 0, 0, 0, -channels % 8))
    n = len(columns)
    parts = weight.reshape(*columns, outputs // 16, 2, 8, -(-channels // 8), 2, 4, taps * taps)
    return parts.permute(*range(n), n + 6, n + 3, n, n + 2, n + 5, n + 4, n + 1).contiguous()


@cache
def operations() -> tuple[Callable[..., Tensor], ...]:
    """`column_convolution`, `column_input_gradient` and `column_weight_gradient`, such as can stand in a graph."""

    @torch.library.custom_op("longhorizon::column_convolution", mutates_args=())
    def convolve(
        images: Tensor | None, weight: Tensor | None, image: Tensor | None, weights: Tensor | None, how: int, tf32: bool
    ) -> Tensor:
        return _convolve((images, weight, image, weights), how, tf32)

    @convolve.register_fake
    def _(
        images: Tensor | None, weight: Tensor | None, image: Tensor | None, weights: Tensor | None, how: int, tf32: bool
    ) -> Tensor:
        first, kernel, columns = read((images, weight, image, weights))
        side = first.shape[-1] // KINDS[how][2]
        return first.new_empty(columns, first.shape[-4], kernel.shape[-4], side, side)

    @torch.library.custom_op("longhorizon::column_input_gradient", mutates_args=())
    def spread(
        images: Tensor | None, weight: Tensor | None, image: Tensor | None, weights: Tensor | None, how: int, tf32: bool
    ) -> Tensor:
        return _spread((images, weight, image, weights), how, tf32)

    @spread.register_fake
    def _(
        images: Tensor | None, weight: Tensor | None, image: Tensor | None, weights: Tensor | None, how: int, tf32: bool
    ) -> Tensor:
        first, kernel, columns = read((images, weight, image, weights))
        side = first.shape[-1] * 2
        return first.new_empty(columns, first.shape[-4], kernel.shape[-3], side, side)

    @torch.library.custom_op("longhorizon::column_weight_gradient", mutates_args=())
    def weigh(
        images: Tensor | None, grad: Tensor | None, image: Tensor | None, grads: Tensor | None, how: int, tf32: bool
    ) -> Tensor:
        return _weigh((images, grad, image, grads), how, tf32)

    @weigh.register_fake
    def _(
        images: Tensor | None, grad: Tensor | None, image: Tensor | None, grads: Tensor | None, how: int, tf32: bool
    ) -> Tensor:
        first, other, columns = read((images, grad, image, grads))
        return first.new_empty(columns, other.shape[-3], first.shape[-3], KINDS[how][0], KINDS[how][0])

    ops: Any = torch.ops.longhorizon
    return (
        ops.column_convolution.default,
        ops.column_input_gradient.default,
        ops.column_weight_gradient.default,
    )


def read(pairs: Pairs) -> tuple[Tensor, Tensor, int]:
    """An image and its partner, to read shapes from, and the number of columns."""
    images, shared, image, own = pairs
    if images is not None and shared is not None:
        return images, shared, images.shape[0]
    assert image is not None
    assert own is not None
    return image, own, own.shape[0]


def _convolve(pairs: Pairs, how: int, tf32: bool) -> Tensor:
    first, kernel, columns = read(pairs)
    taps, _, stride = KINDS[how]
    count, channels, side = first.shape[-4], first.shape[-3], first.shape[-1] // stride
    outputs = kernel.shape[-4]
    tiles, pixels = min(2, outputs // 16), 4
    lines = (_ROWS - 1) * stride + 3
    plane = _plane(lines, side * stride, (8, 24) if stride == 1 else (16,), 32)
    run = _kernel("convolve", pairs, taps, stride, side, channels, outputs, lines, plane, tiles, pixels, tf32)
    result = first.new_empty(columns, count, outputs, side, side)
    threads = 32 * (outputs // 16 // tiles) * (_ROWS * side // 8 // pixels)
    memory = _padded(channels) * plane
    run((columns * side // _ROWS * count, 1, 1), threads, memory, _arranged(pairs), [result, columns, count])
    return result


def _spread(pairs: Pairs, how: int, tf32: bool) -> Tensor:
    first, kernel, columns = read(pairs)
    taps, _, stride = KINDS[how]
    count, channels, side = first.shape[-4], first.shape[-3], first.shape[-1]
    outputs = kernel.shape[-3]
    tiles = min(2, outputs // 16)
    pixels = 4 // tiles
    plane = _plane(_ROWS + 2, side, (8, 24), 32)
    run = _kernel("spread", pairs, taps, stride, side, channels, outputs, _ROWS + 2, plane, tiles, pixels, tf32)
    result = first.new_empty(columns, count, outputs, side * stride, side * stride)
    threads = 32 * (outputs // 16 // tiles) * (_ROWS * side // 8 // pixels)
    images, weight, image, weights = pairs
    turned = _arranged((images, _turned(weight), image, _turned(weights)))
    memory = _padded(channels) * plane
    run((columns * side // _ROWS * count, 1, 1), threads, memory, turned, [result, columns, count])
    return result


def _weigh(pairs: Pairs, how: int, tf32: bool) -> Tensor:
    first, other, columns = read(pairs)
    taps, _, stride = KINDS[how]
    count, channels, side = first.shape[-4], first.shape[-3], other.shape[-1]
    outputs = other.shape[-3]
    group = min(_padded(channels), 32 if outputs <= 32 else 16)
    tiles, across = min(2, outputs // 16), 2 if outputs == 16 and group == 16 and not tf32 else 1
    warps = (outputs // 16 // tiles) * (group // 8 // across)
    shares = 4 if outputs == 16 else max(1, 4 // warps)
    lines = (_ROWS - 1) * stride + 3
    plane = _plane(lines, side * stride, (4,), 8)
    more = (("GROUP", group), ("SHARES", shares))
    run = _kernel("weigh", pairs, taps, stride, side, channels, outputs, lines, plane, tiles, across, tf32, more)
    groups = -(-channels // group)
    per_part = -(-count // max(1, min(count, _PROGRAMS // (columns * groups))))
    parts = -(-count // per_part)
    result = first.new_empty(parts * shares, columns, outputs, channels, taps, taps)
    memory = group * plane + outputs * (_ROWS * side + 4)
    run((parts, columns, groups), 32 * warps * shares, memory, pairs, [result, columns, count, per_part])
    return result.sum(0)


def _arranged(pairs: Pairs) -> Pairs:
    images, weight, image, weights = pairs
    return (
        images,
        weight if weight is None else arranged(weight),
        image,
        weights if weights is None else arranged(weights),
    )


def _turned(weight: Tensor | None) -> Tensor | None:
    """Channels and outputs change places."""
    return weight if weight is None else weight.transpose(-4, -3)


def _padded(channels: int) -> int:
    return -(-channels // 8) * 8


def _plane(lines: int, side: int, wanted: tuple[int, ...], modulo: int) -> int:
    """Floats of one channel of a strip in shared memory, so that the lanes of a warp read from different banks."""
    enough = lines * (side + 4) + 4
    while enough % modulo not in wanted:
        enough += 4
    return enough


def _kernel(
    name: str,
    pairs: Pairs,
    taps: int,
    stride: int,
    side: int,
    channels: int,
    outputs: int,
    lines: int,
    plane: int,
    tiles: int,
    across: int,
    tf32: bool,
    more: tuple[tuple[str, int], ...] = (),
) -> Callable[..., None]:
    """A kernel built for these sizes: `run(grid, threads, floats of shared memory, tensors, other arguments)`."""
    sizes = (("C", channels), ("O", outputs), ("SIDE", side), ("TAPS", taps), ("STRIDE", stride), ("ROWS", _ROWS))
    form = (("LINES", lines), ("PLANE", plane), ("TERMS", 1 if tf32 else 3), ("M", tiles), ("T", across), *more)
    which = (("OWN", int(pairs[0] is not None)), ("SHARED", int(pairs[2] is not None)))
    return _built(name, (*sizes, *form, *which))


@cache
def _built(name: str, macros: tuple[tuple[str, int], ...]) -> Callable[..., None]:
    source = importlib.resources.files("longhorizon").joinpath("kernels.cu").read_text("utf-8")
    defined = "".join(f"#define {macro} {value}\n" for macro, value in (*macros, (name.upper(), 1)))
    kernel: Any = torch.cuda._compile_kernel(defined + source, name)
    configured = 0

    def run(grid: tuple[int, int, int], threads: int, floats: int, tensors: Pairs, others: list[Any]) -> None:
        nonlocal configured
        if floats * 4 >= 48 * 1024 and configured < floats:
            kernel.set_shared_memory_config(floats * 4)
            configured = floats
        there = next(x for x in tensors if x is not None)
        given = [there if x is None else x.contiguous() for x in tensors]  # one that is missing is not read
        kernel(grid, (threads, 1, 1), [*given, *others], shared_mem=floats * 4)

    return run
