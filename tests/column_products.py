"""What the operations of convolution.py mean, column by column, with torch's own convolutions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longhorizon import kernels


def stacked(pairs: Any, one: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The sum of both products, column by column; what is shared may have columns, too."""
    images, shared, image, own = pairs
    parts = []
    if images is not None:
        others = shared if shared.ndim == 5 else [shared] * len(images)
        parts.append(torch.stack([one(x, y) for x, y in zip(images, others, strict=True)]))
    parts += [] if image is None else [torch.stack([one(image, x) for x in own])]
    return sum(parts[1:], parts[0])


def convolved(pairs: Any, how: int, tf32: bool) -> Tensor:
    """What column_convolution means."""
    _, padding, stride = kernels.KINDS[how]
    return stacked(pairs, lambda x, w: F.conv2d(x, w, padding=padding, stride=stride))


def spread(pairs: Any, how: int, tf32: bool) -> Tensor:
    """What column_input_gradient means."""
    _, padding, stride = kernels.KINDS[how]
    return stacked(pairs, lambda g, w: F.conv_transpose2d(g, w, padding=padding, stride=stride, output_padding=1))


def weighed(pairs: Any, how: int, tf32: bool) -> Tensor:
    """What column_weight_gradient means."""
    taps, padding, stride = kernels.KINDS[how]

    def one(x: Tensor, g: Tensor) -> Tensor:
        shape = (g.shape[1], x.shape[1], taps, taps)
        return torch.nn.grad.conv2d_weight(x, shape, g, padding=padding, stride=stride)  # type: ignore[no-any-return, no-untyped-call]

    return stacked(pairs, one)


def precise(image: Tensor, weight: Tensor, how: int) -> Tensor:
    """What precise_convolution means."""
    _, padding, stride = kernels.KINDS[how]
    return F.conv2d(image.double(), weight.double(), padding=padding, stride=stride).to(image.dtype)
