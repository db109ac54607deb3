"""The elementwise bound on Hessian products, set by hand as in the paper or by itself.

A bound set by hand has the unit of what it bounds: 10 is tight for the tangent of a weight decay and loose for that of
a learning rate. The automatic one is relative, per column and step: no entry of H·z may exceed `AUTO` times the largest
entry of z, as if no curvature were larger. It needs no unit, and a tangent is not cut off for having grown.
"""

from typing import Literal

import torch
from torch import Tensor

Clip = float | Literal["auto"] | None

AUTO = 1.0


def check_clip(engine: str, clip: Clip) -> None:
    """Refuse what is no bound."""
    if clip is None or clip == "auto":
        return
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0:
        raise ValueError(
            f"{engine}(clip={clip!r}): expected a positive bound, 'auto', or None for the exact hypergradient."
        )


def clipped(product: list[Tensor], along: list[Tensor], clip: Clip) -> list[Tensor]:
    """A Hessian product, bounded.

    Args:
        product: H·z, tensor by tensor.
        along: z.
    """
    if clip is None:
        return product
    bound = level(product, along, clip)
    return [torch.minimum(torch.maximum(h, -bound), bound) for h in product]


def level(product: list[Tensor], along: list[Tensor], clip: Clip) -> Tensor:
    """The bound itself."""
    if clip == "auto":
        return AUTO * torch.stack([z.abs().amax() for z in along if z.numel()]).amax()
    assert clip is not None
    return product[0].new_full((), clip)


def share(product: list[Tensor], along: list[Tensor], clip: Clip) -> Tensor:
    """The share of entries that the bound cuts off."""
    bound = level(product, along, clip)
    over = torch.stack([(h.abs() > bound).sum() for h in product]).sum()
    return over.to(product[0].dtype) / sum(h.numel() for h in product)


def in_words(product: str, clip: Clip) -> str:
    """For an engine's name."""
    return "" if clip is None else f", {product} clipped {'by itself' if clip == 'auto' else f'at {clip:g}'}"
