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
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from longhorizon import cuda, kernels
from longhorizon.kernels import KINDS, Plan, Size

CHANNELS = (*range(1, 9), 16, 32, 64)
OUTPUTS = (16, 32, 64)
SIDES = (8, 16, 32)
ENOUGH = 2**14  # pixels of the smaller image that pay

Pairs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def suits(kind: int, count: int, channels: int, outputs: int, sides: tuple[int, ...], like: Tensor) -> bool:
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
        and _room_for(Size(1, count, channels, outputs, sides[0], kind, False, True, True), like.device)
    )


def suits_layer(layer: nn.Conv2d) -> bool:
    """Whether a layer is of a form that these kernels are for, whatever the size of its images."""
    forms = {(form[:1] * 2, form[1:2] * 2, form[2:] * 2) for form in KINDS}
    return (
        (layer.kernel_size, layer.padding, layer.stride) in forms
        and layer.dilation == (1, 1)
        and layer.groups == 1
        and layer.bias is None
        and layer.in_channels in CHANNELS
        and layer.out_channels in OUTPUTS
    )


@cache
def available() -> bool:
    """Whether there are kernels here."""
    return cuda.can_build()


@cache
def _room_for(size: Size, device: torch.device) -> bool:
    """Whether the strips of all kernels of a size fit into the device's shared memory."""
    most: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    plans = [kernels.convolve(size), kernels.weigh(size), kernels.precise(size)]
    plans += [kernels.spread(size)] if KINDS[size.kind][2] == 2 and size.channels >= 16 else []
    return all(4 * plan.floats <= most for plan in plans)


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
    """The four of them in this order, such as can stand in a graph."""
    return tuple(_registered(*item) for item in OPERATIONS.items())


def _registered(name: str, operation: "Operation") -> Callable[..., Tensor]:
    def compute(*args: Any) -> Tensor:
        return OPERATIONS[name].compute(*args)

    def shaped(*args: Any) -> Tensor:
        like: Tensor = next(x for x in args if isinstance(x, Tensor))
        return like.new_empty(operation.shape(operation.size(*args)))

    full = f"longhorizon::{name}"
    torch.library.custom_op(full, compute, mutates_args=(), schema=operation.schema).register_fake(shaped)
    op: Callable[..., Tensor] = getattr(torch.ops.longhorizon, name).default
    return op


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
    of: dict[Any, Operation] = dict(zip(operations(), OPERATIONS.values(), strict=True))
    for node in nodes:
        if operation := of.get(node.target):
            given = [x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args]
            device = next(x.device for x in given if isinstance(x, Tensor))
            kernels.prepare(operation.plan(operation.size(*given)), device)


@dataclass(frozen=True)
class Operation:
    """An operation in a graph: what it computes, with which kernel, and the shape of the result."""

    compute: Callable[..., Tensor]
    size: Callable[..., Size]  # of its arguments
    plan: Callable[[Size], Plan]
    shape: Callable[[Size], tuple[int, ...]]
    schema: str = "(Tensor? images, Tensor? other, Tensor? image, Tensor? others, int kind, bool tf32) -> Tensor"


def _convolve(*args: Any) -> Tensor:
    size = _size_of_convolution(*args)
    result = read(args[:4])[0].new_empty(_shape_of_convolution(size))
    kernels.run(kernels.convolve(size), _each(args[:4], arranged), [result, size.columns, size.count])
    return result


def _size_of_convolution(*args: Any) -> Size:
    image, weight, columns = read(args[:4])
    count, channels, side = image.shape[-4], image.shape[-3], image.shape[-1] // KINDS[args[4]][2]
    return _size(args, columns, count, channels, weight.shape[-4], side)


def _shape_of_convolution(size: Size) -> tuple[int, ...]:
    return (size.columns, size.count, size.outputs, size.side, size.side)


def _spread(*args: Any) -> Tensor:
    size = _size_of_spread(*args)
    result = read(args[:4])[0].new_empty(_shape_of_spread(size))
    turned = _each(args[:4], lambda weight: arranged(weight.transpose(-4, -3)))
    kernels.run(kernels.spread(size), turned, [result, size.columns, size.count])
    return result


def _size_of_spread(*args: Any) -> Size:
    grad, weight, columns = read(args[:4])
    return _size(args, columns, grad.shape[-4], weight.shape[-3], weight.shape[-4], grad.shape[-1])


def _shape_of_spread(size: Size) -> tuple[int, ...]:
    return (size.columns, size.count, size.channels, 2 * size.side, 2 * size.side)


def _weigh(*args: Any) -> Tensor:
    size = _size_of_weigh(*args)
    plan = kernels.weigh(size)
    parts = read(args[:4])[0].new_empty(plan.parts, *_shape_of_weigh(size))
    kernels.run(plan, args[:4], [parts, size.columns, size.count, plan.per_part])
    return parts.sum(0)


def _size_of_weigh(*args: Any) -> Size:
    image, grad, columns = read(args[:4])
    return _size(args, columns, image.shape[-4], image.shape[-3], grad.shape[-3], grad.shape[-1])


def _shape_of_weigh(size: Size) -> tuple[int, ...]:
    taps = KINDS[size.kind][0]
    return (size.columns, size.outputs, size.channels, taps, taps)


def _precise(image: Tensor, weight: Tensor, kind: int) -> Tensor:
    size = _size_of_precise(image, weight, kind)
    result = image.new_empty(_shape_of_convolution(size)[1:])
    padded = F.pad(weight, (0, 0, 0, 0, 0, -size.channels % 4))
    parts = padded.reshape(size.outputs // 8, 8, -(-size.channels // 4), 4, weight.shape[-1] ** 2)
    kernels.run(kernels.precise(size), (image, parts.permute(4, 2, 0, 1, 3)), [result, size.count])
    return result


def _size_of_precise(image: Tensor, weight: Tensor, kind: int) -> Size:
    return _size_of_convolution(image[None], weight, None, None, kind, False)


def _size(args: tuple[Any, ...], columns: int, count: int, channels: int, outputs: int, side: int) -> Size:
    images, other, image, _, kind, tf32 = args
    each = images is not None and other.ndim == 5
    return Size(columns, count, channels, outputs, side, kind, tf32, images is not None, image is not None, each)


def _each(pairs: Pairs, change: Callable[[Tensor], Tensor]) -> Pairs:
    """Both weights changed, where they are."""
    images, weight, image, weights = pairs
    return images, weight if weight is None else change(weight), image, weights if weights is None else change(weights)


OPERATIONS = {
    "column_convolution": Operation(_convolve, _size_of_convolution, kernels.convolve, _shape_of_convolution),
    "column_input_gradient": Operation(_spread, _size_of_spread, kernels.spread, _shape_of_spread),
    "column_weight_gradient": Operation(_weigh, _size_of_weigh, kernels.weigh, _shape_of_weigh),
    "precise_convolution": Operation(
        _precise,
        _size_of_precise,
        kernels.precise,
        lambda size: _shape_of_convolution(size)[1:],
        "(Tensor image, Tensor weight, int kind) -> Tensor",
    ),
}
