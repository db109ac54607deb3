"""BatchNorm of training runs side by side, in bfloat16: its passes over all pixels, as operations of a graph.

Images lie with their channels last, (lanes, images, side, side, channels), as for the convolutions of lane_kernels.py.
A step reads them six times (seven with `other`) and writes them twice for one BatchNorm, which is all that takes time:

    lane_moments     mean and variance of every lane and channel
    lane_scaled      images · scale + offset, cut off at zero if there is a ReLU behind it
    lane_slopes      sums of the gradients g of that, and of g · (images − mean)
    lane_unscaled    g · scale + images · slope + rest (+ other): the gradient of the images
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from longhorizon import kernels
from longhorizon.kernels import Plan

SOURCE = "kernels_norm.cu"
_THREADS = 256  # as in the kernels
_PROCESSORS = 132  # of an H200
_CHUNK = 2048  # times eight channels that a program of a pass without sums takes


class Operations(NamedTuple):
    """Such as can stand in a graph."""

    moments: Callable[..., Tensor]
    scaled: Callable[..., Tensor]
    slopes: Callable[..., Tensor]
    unscaled: Callable[..., Tensor]


@dataclass(frozen=True)
class Size:
    """Lanes, pixels of all images of a lane, and channels."""

    lanes: int
    pixels: int
    channels: int

    @classmethod
    def of(cls, images: Tensor) -> "Size":
        lanes, *shape, channels = images.shape
        return cls(lanes, torch.Size(shape).numel(), channels)


def over_pixels(name: str, s: Size, sums: bool, relu: bool = False, added: bool = False) -> Plan:
    """A pass over all pixels; one with sums is made by as many programs as run at a time."""
    per_part = -(-s.pixels // max(1, _PROCESSORS * 4 // s.lanes)) if sums else -(-_CHUNK * 8 // s.channels)
    parts = -(-s.pixels // per_part)
    macros = (("C", s.channels), ("RELU", int(relu)), ("ADDED", int(added)))
    return Plan(name, macros, (parts, s.lanes, 1), _THREADS, 0, parts, per_part, source=SOURCE)


def over_parts(name: str, s: Size, count: int) -> Plan:
    """What is left to be done with the sums of its parts: so many numbers."""
    macros = (("C", s.channels), ("RELU", 0), ("ADDED", 0))
    return Plan(name, macros, (-(-count // _THREADS), 1, 1), _THREADS, 0, source=SOURCE)


@cache
def operations() -> Operations:
    """All of them."""
    schemas: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], str]] = {
        "moments": (_moments, _shape_of_sums, "(Tensor images) -> Tensor"),
        "scaled": (_scaled, _shape_of_images, "(Tensor images, Tensor scale, Tensor offset, bool relu) -> Tensor"),
        "slopes": (
            _slopes,
            _shape_of_sums,
            "(Tensor images, Tensor grads, Tensor scale, Tensor offset, Tensor mean, bool relu) -> Tensor",
        ),
        "unscaled": (
            _unscaled,
            _shape_of_images,
            "(Tensor images, Tensor grads, Tensor? other, Tensor scale, Tensor offset, Tensor slope, Tensor rest, "
            "bool relu) -> Tensor",
        ),
    }
    for name, (compute, shape, schema) in schemas.items():
        torch.library.custom_op(f"longhorizon::lane_{name}", compute, mutates_args=(), schema=schema)
        torch.library.register_fake(f"longhorizon::lane_{name}", shape)
    return Operations(*(getattr(torch.ops.longhorizon, f"lane_{name}").default for name in schemas))


def like(operation: Any, *args: Any) -> Tensor:
    """An empty result of an operation."""
    sums = operation in (operations().moments, operations().slopes)
    return (_shape_of_sums if sums else _shape_of_images)(*args)


def prepare(nodes: Iterable[fx.Node]) -> None:
    """Begin to build the kernels of a graph's operations."""
    ops = operations()
    for node in nodes:
        if node.target not in ops:
            continue
        given: Any = [x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args]
        size, device, relu = Size.of(given[0]), given[0].device, given[-1] is True
        if node.target is ops.moments:
            plans = [over_pixels("moments", size, True), over_parts("mean_and_variance", size, 1)]
        elif node.target is ops.slopes:
            plans = [over_pixels("slopes", size, True, relu), over_parts("totals", size, 1)]
        elif node.target is ops.scaled:
            plans = [over_pixels("scaled", size, False, relu)]
        else:
            plans = [over_pixels("unscaled", size, False, relu, given[2] is not None)]
        for plan in plans:
            kernels.prepare(plan, device)


def _shape_of_sums(images: Tensor, *_: Any) -> Tensor:
    return images.new_empty(2, images.shape[0], images.shape[-1], dtype=torch.float32)


def _shape_of_images(images: Tensor, *_: Any) -> Tensor:
    return images.new_empty(images.shape)


def _moments(images: Tensor) -> Tensor:
    if not kernels.take(images):
        var, mean = torch.var_mean(images.float(), (1, 2, 3), correction=0)
        return torch.stack((mean, var))
    s, result = Size.of(images), _shape_of_sums(images)
    plan = over_pixels("moments", s, sums=True)
    parts = result.new_empty(plan.parts, s.lanes, 2, s.channels)
    kernels.run(plan, (images,), [parts, s.pixels, plan.per_part])
    last = over_parts("mean_and_variance", s, s.lanes * s.channels)
    kernels.run(last, (images, parts), [result, s.lanes, plan.parts, s.pixels])
    return result


def _scaled(images: Tensor, scale: Tensor, offset: Tensor, relu: bool) -> Tensor:
    if not kernels.take(images):
        made = images.float() * _spread(scale) + _spread(offset)
        return (made.relu() if relu else made).to(images.dtype)
    s, result = Size.of(images), _shape_of_images(images)
    plan = over_pixels("scaled", s, sums=False, relu=relu)
    kernels.run(plan, (images, scale, offset), [result, s.pixels, plan.per_part])
    return result


def _slopes(images: Tensor, grads: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, relu: bool) -> Tensor:
    if not kernels.take(images):
        grads = _kept(images, grads, scale, offset, relu)
        return torch.stack((grads.sum((1, 2, 3)), (grads * (images.float() - _spread(mean))).sum((1, 2, 3))))
    s, result = Size.of(images), _shape_of_sums(images)
    plan = over_pixels("slopes", s, sums=True, relu=relu)
    parts = result.new_empty(plan.parts, s.lanes, 2, s.channels)
    kernels.run(plan, (images, grads, scale, offset, mean), [parts, s.pixels, plan.per_part])
    last = over_parts("totals", s, 2 * s.lanes * s.channels)
    kernels.run(last, (parts,), [result, s.lanes, plan.parts])
    return result


def _unscaled(
    images: Tensor,
    grads: Tensor,
    other: Tensor | None,
    scale: Tensor,
    offset: Tensor,
    slope: Tensor,
    rest: Tensor,
    relu: bool,
) -> Tensor:
    if not kernels.take(images):
        kept = _kept(images, grads, scale, offset, relu)
        made = kept * _spread(scale) + images.float() * _spread(slope) + _spread(rest)
        return (made if other is None else made + other.float()).to(images.dtype)
    s, result = Size.of(images), _shape_of_images(images)
    plan = over_pixels("unscaled", s, sums=False, relu=relu, added=other is not None)
    kernels.run(plan, (images, grads, other, scale, offset, slope, rest), [result, s.pixels, plan.per_part])
    return result


def _kept(images: Tensor, grads: Tensor, scale: Tensor, offset: Tensor, relu: bool) -> Tensor:
    """Gradients of what was scaled, in float32; none where that was cut off at zero."""
    if not relu:
        return grads.float()
    return torch.where(images.float() * _spread(scale) + _spread(offset) <= 0, 0.0, grads.float())


def _spread(value: Tensor) -> Tensor:
    """A number per lane and channel, for all pixels."""
    return value[:, None, None, None]
