"""BatchNorm of training runs side by side, as one operation of their step.

A step in bfloat16 is a plain training step: it is differentiated once. So BatchNorm need not be written out for a
compiler, as in normalise.py, but can stay one operation, and its derivative another, until lane_graph.py puts kernels
in their place (norm_kernels.py). Here they are in plain operations, in float32, which is what kernels are compared to.

    lane_norm             result, mean, variance of a batch (lanes, images, channels, height, width)
    lane_norm_gradient    of the batch, of weight and of bias, from that of the result
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longhorizon import cuda

MOST = 256  # channels


def suits(x: Tensor) -> bool:
    """Whether there are kernels for a batch (images, channels, height, width), where it is."""
    there = not x.is_cuda or cuda.can_build()
    return x.ndim == 4 and x.dtype == torch.float32 and takes(x.shape[1]) and there


def takes(channels: int) -> bool:
    """Whether the kernels take so many: eight at a time, and a power of two of these."""
    return 8 <= channels <= MOST and channels & (channels - 1) == 0


def lane_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm of the batch of a run (images, channels, height, width) that `vmap` puts beside others.

    Returns the result, and the batch's mean and variance (that divides by n).
    """
    weight = x.new_ones(x.shape[1]) if weight is None else weight
    bias = x.new_zeros(x.shape[1]) if bias is None else bias
    found: tuple[Tensor, Tensor, Tensor] = _Norm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return found


@cache
def operations() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Both of them, such as can stand in a graph."""
    norm = "(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)"
    torch.library.custom_op("longhorizon::lane_norm", _normed, mutates_args=(), schema=norm)
    torch.library.register_fake("longhorizon::lane_norm", _shapes_of_norm)
    gradient = "(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor var, float eps) -> (Tensor, Tensor, Tensor)"
    torch.library.custom_op("longhorizon::lane_norm_gradient", _differentiated, mutates_args=(), schema=gradient)
    torch.library.register_fake("longhorizon::lane_norm_gradient", _shapes_of_gradient)
    ops = torch.ops.longhorizon
    return ops.lane_norm.default, ops.lane_norm_gradient.default


class _Norm(torch.autograd.Function):
    """What `vmap` of a gradient makes the two operations of."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return _of_one(_normed, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.eps = inputs
        _, mean, var = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, var)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *of_statistics: Tensor | None) -> Any:
        if any(g is not None for g in of_statistics):
            raise NotImplementedError("a loss that depends on the statistics of a batch has no such BatchNorm.")
        if grad is None:
            return None, None, None, None
        x, weight, mean, var = ctx.saved_tensors
        return *_Gradient.apply(grad, x, weight, mean, var, ctx.eps), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        return operations()[0](*_lanes_first(info, dims, args)), (0, 0, 0)


class _Gradient(torch.autograd.Function):
    """Its derivative, which has none of its own: who asks for one gets no silent zero."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return _of_one(_differentiated, *args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("a step that is differentiated twice has no such BatchNorm.")

    @staticmethod
    def vmap(info: Any, dims: Any, *args: Any) -> Any:
        return operations()[1](*_lanes_first(info, dims, args)), (0, 0, 0)


def _lanes_first(info: Any, dims: Any, args: Any) -> list[Any]:
    """Arguments with the axis of lanes in front; those that all lanes share are repeated."""
    return [
        x if not isinstance(x, Tensor) else x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]


def _of_one(operation: Callable[..., tuple[Tensor, ...]], *args: Any) -> tuple[Tensor, ...]:
    """The same for a run alone."""
    return tuple(x[0] for x in operation(*(x[None] if isinstance(x, Tensor) else x for x in args)))


def _normed(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    var, mean = torch.var_mean(x, (1, 3, 4), correction=0)
    scale = (var + eps).rsqrt() * weight
    return ((x - _spread(mean)) * _spread(scale) + _spread(bias)).contiguous(), mean, var


def _differentiated(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    by = (var + eps).rsqrt()
    normed = (x - _spread(mean)) * _spread(by)
    of_bias, of_weight = grad.sum((1, 3, 4)), (grad * normed).sum((1, 3, 4))
    n = x.numel() // mean.numel()
    of_x = (grad - _spread(of_bias / n) - normed * _spread(of_weight / n)) * _spread(by * weight)
    return of_x.contiguous(), of_weight, of_bias


def _spread(value: Tensor) -> Tensor:
    """A number per lane and channel, for all pixels."""
    return value[:, None, :, None, None]


def _shapes_of_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _shapes_of_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _shapes_of_norm(x, weight, weight, eps)
