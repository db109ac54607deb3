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
MOVE = 0.1  # of 0.05, 0.1 and 0.2 the one with which most signs were right on digits and a LeNet (docs/trust.md)
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
    return _cut(product, level(product, along, clip))


def clipped_back(product: list[Tensor], adjoint: list[Tensor], clip: Clip) -> list[Tensor]:
    """A Hessian product that is added to the adjoint, bounded."""
    if clip != "auto":
        return clipped(product, adjoint, clip)
    bound = MOVE * _largest(adjoint)
    return _cut(product, torch.where(_share(product, bound) > FEW, torch.inf, bound))


def _cut(product: list[Tensor], bound: Tensor) -> list[Tensor]:
    return [torch.minimum(torch.maximum(h, -bound), bound) for h in product]


def level(product: list[Tensor], along: list[Tensor], clip: Clip) -> Tensor:
    """The bound itself."""
    if clip == "auto":
        return AUTO * _largest(along)
    assert clip is not None
    return product[0].new_full((), clip)


def share(product: list[Tensor], along: list[Tensor], clip: Clip) -> Tensor:
    """The share of entries that the bound cuts off."""
    return _share(product, level(product, along, clip))


def _share(product: list[Tensor], bound: Tensor) -> Tensor:
    over = torch.stack([(h.abs() > bound).sum() for h in product]).sum()
    return over.to(product[0].dtype) / sum(h.numel() for h in product)


def uncut(before: list[Tensor], product: list[Tensor], bounded: list[Tensor]) -> Tensor:
    """How much larger a sum would be if a product in it had not been bounded: of the largest entries, at least 1."""
    whole, kept = (_largest([a + b for a, b in zip(before, part, strict=True)]) for part in (product, bounded))
    return torch.where(whole > kept, whole / kept, 1.0)


def _largest(tensors: list[Tensor]) -> Tensor:
    return torch.stack([z.abs().amax() for z in tensors if z.numel()]).amax()


def in_words(product: str, clip: Clip) -> str:
    """For an engine's name."""
    return "" if clip is None else f", {product} clipped {'by itself' if clip == 'auto' else f'at {clip:g}'}"
