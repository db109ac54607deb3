"""The elementwise bound on Hessian products, set by hand as in the paper or by itself.

A bound set by hand has the unit of what it bounds: 10 is tight for the tangent of a weight decay and loose for that of
a learning rate. The automatic one is relative, and needs no unit. On the way forth, per column and step, no entry of
H·z may exceed `AUTO` times the largest entry of z, as if no curvature were larger. On the way back no entry of the
adjoint may move by more than `MOVE` times its largest one within a step, whatever the learning rate is; but only where
few would: these are what a steep batch does to one seed, and what most of them do is how training goes. In either case
nothing is cut off for having grown.
"""

from typing import Literal

import torch
from torch import Tensor

Clip = float | Literal["auto"] | None

AUTO = 1.0
MOVE = 0.1  # experiments/trust_bound.py has the signs that are right with half and twice as much
FEW = 0.2  # share of all entries


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


def clipped_back(
    product: list[Tensor], adjoint: list[Tensor], before: list[Tensor], clip: Clip
) -> tuple[list[Tensor], list[Tensor]]:
    """A Hessian product that is added to the adjoint, bounded.

    Args:
        product: H·q, tensor by tensor.
        adjoint: after the step.
        before: what the product is added to, for the adjoint before the step.

    Returns:
        The product; and by what factor its bound has kept the adjoint's largest entry from growing, nothing without.
    """
    if clip is None:
        return product, []
    flat, start, whole = (torch.cat([x.flatten() for x in part]) for part in (product, before, adjoint))
    if clip == "auto":
        bound = MOVE * whole.abs().amax()
        over = (flat.abs() > bound).to(flat.dtype).mean()
        bound = torch.where(over > FEW, torch.inf, bound)
    else:
        bound = flat.new_full((), clip)
    kept = torch.minimum(torch.maximum(flat, -bound), bound)
    pieces = torch.split(kept, [x.numel() for x in product])
    bounded = [piece.view(x.shape).to(x.dtype) for piece, x in zip(pieces, product, strict=True)]
    return bounded, [kept_from_growing(start, flat, kept)]


def kept_from_growing(start: Tensor, product: Tensor, bounded: Tensor) -> Tensor:
    """The factor by which a bound on what is added keeps the largest entry of a sum from growing, at least 1."""
    free, held = (start + product).abs().amax(), (start + bounded).abs().amax()
    return torch.where(free > held, free / held, 1.0)


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
