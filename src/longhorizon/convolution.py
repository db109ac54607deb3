"""Convolutions for few channels on a GPU: all columns of a tangent at once, on tensor cores.

cuDNN's kernels are made for many channels. The tangents of a small network are convolutions of thousands of images with
16 to 64 channels, where they leave most of the device idle; and each tangent of a convolution is a sum of
two, each of which wants the columns folded into another axis. The kernels here (kernels.cu) take columns as they are
and make both products in one go, nearly as accurate as float32. Each operation takes two pairs, either of which may be
missing: every column's own image with what all share, and the image that all share with what is each column's own. In
the first, what is shared may have columns, too: training runs side by side (lanes.py).

    column_convolution       result[n, i] = images[n, i] * weight + image[i] * weights[n]
    column_input_gradient    the same, from gradients of the result, at stride two (at stride one it is a convolution)
    column_weight_gradient   result[n] = images[n] by grad + image by grads[n]
    precise_convolution      image * weight of the model itself, summed in float64

Measured by benchmarks/convolutions.py.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from longhorizon import kernels
from longhorizon.kernels import KINDS, Size

CHANNELS = (*range(1, 9), 16, 32, 64)
OUTPUTS = (16, 32, 64)
SIDES = (8, 16, 32)
ENOUGH = 2**14  # pixels of the smaller image that pay

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
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "_compile_kernel"):
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


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

    @torch.library.custom_op("longhorizon::precise_convolution", mutates_args=())
    def precise(image: Tensor, weight: Tensor, how: int) -> Tensor:
        return _precise(image, weight, how)

    @precise.register_fake
    def _(image: Tensor, weight: Tensor, how: int) -> Tensor:
        side = image.shape[-1] // KINDS[how][2]
        return image.new_empty(image.shape[0], weight.shape[0], side, side)

    ops: Any = torch.ops.longhorizon
    return (
        ops.column_convolution.default,
        ops.column_input_gradient.default,
        ops.column_weight_gradient.default,
        ops.precise_convolution.default,
    )


def read(pairs: Pairs) -> tuple[Tensor, Tensor, int]:
    """An image and its partner, to read shapes from, and the number of columns."""
    images, shared, image, own = pairs
    if images is not None and shared is not None:
        return images, shared, images.shape[0]
    assert image is not None
    assert own is not None
    return image, own, own.shape[0]


def prepare(nodes: Iterable[fx.Node]) -> None:
    """Begin to build the kernels of a graph's operations; it takes seconds, and there is other work meanwhile."""
    convolve, spread, weigh, precise = operations()
    for node in nodes:
        given: Any = [x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args]
        if node.target is convolve:
            kernels.prepare(kernels.convolve(_size_of_convolution(tuple(given[:4]), *given[4:])))
        elif node.target is spread:
            kernels.prepare(kernels.spread(_size_of_spread(tuple(given[:4]), *given[4:])))
        elif node.target is weigh:
            kernels.prepare(kernels.weigh(_size_of_weigh(tuple(given[:4]), *given[4:])))
        elif node.target is precise:
            kernels.prepare(kernels.precise(_size_of_precise(*given)))


def _size(
    pairs: Pairs, columns: int, count: int, channels: int, outputs: int, side: int, kind: int, tf32: bool
) -> Size:
    images, other, image, _ = pairs
    each = images is not None and other is not None and other.ndim == 5
    return Size(columns, count, channels, outputs, side, kind, tf32, images is not None, image is not None, each)


def _size_of_convolution(pairs: Pairs, kind: int, tf32: bool) -> Size:
    image, weight, columns = read(pairs)
    count, channels, side = image.shape[-4], image.shape[-3], image.shape[-1] // KINDS[kind][2]
    return _size(pairs, columns, count, channels, weight.shape[-4], side, kind, tf32)


def _size_of_precise(image: Tensor, weight: Tensor, kind: int) -> Size:
    return _size_of_convolution((image[None], weight, None, None), kind, False)


def _size_of_spread(pairs: Pairs, kind: int, tf32: bool) -> Size:
    grad, weight, columns = read(pairs)
    return _size(pairs, columns, grad.shape[-4], weight.shape[-3], weight.shape[-4], grad.shape[-1], kind, tf32)


def _size_of_weigh(pairs: Pairs, kind: int, tf32: bool) -> Size:
    image, grad, columns = read(pairs)
    return _size(pairs, columns, image.shape[-4], image.shape[-3], grad.shape[-3], grad.shape[-1], kind, tf32)


def _convolve(pairs: Pairs, kind: int, tf32: bool) -> Tensor:
    size = _size_of_convolution(pairs, kind, tf32)
    result = read(pairs)[0].new_empty(size.columns, size.count, size.outputs, size.side, size.side)
    kernels.run(kernels.convolve(size), _arranged(pairs), [result, size.columns, size.count])
    return result


def _spread(pairs: Pairs, kind: int, tf32: bool) -> Tensor:
    size = _size_of_spread(pairs, kind, tf32)
    result = read(pairs)[0].new_empty(size.columns, size.count, size.channels, 2 * size.side, 2 * size.side)
    images, weight, image, weights = pairs
    turned = _arranged((images, _turned(weight), image, _turned(weights)))
    kernels.run(kernels.spread(size), turned, [result, size.columns, size.count])
    return result


def _weigh(pairs: Pairs, kind: int, tf32: bool) -> Tensor:
    size = _size_of_weigh(pairs, kind, tf32)
    plan, taps = kernels.weigh(size), KINDS[kind][0]
    result = read(pairs)[0].new_empty(plan.parts, size.columns, size.outputs, size.channels, taps, taps)
    kernels.run(plan, pairs, [result, size.columns, size.count, plan.per_part])
    return result.sum(0)


def _precise(image: Tensor, weight: Tensor, kind: int) -> Tensor:
    size = _size_of_precise(image, weight, kind)
    result = image.new_empty(size.count, size.outputs, size.side, size.side)
    padded = F.pad(weight, (0, 0, 0, 0, 0, -size.channels % 4))
    parts = padded.reshape(size.outputs // 8, 8, -(-size.channels // 4), 4, weight.shape[-1] ** 2)
    ready = parts.permute(4, 2, 0, 1, 3).contiguous()
    kernels.run(kernels.precise(size), (image, ready), [result, size.count])
    return result


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
