"""Nested dicts, tuples and NamedTuples of tensors, handled as one vector.

Only floating-point leaves can carry a derivative. `split` takes them out of a tree as a list, with a
function that puts a list like it back; step counters and other integers stay where they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # torch's own functional transforms use this module

Tree = Any  # a nested structure whose leaves are tensors


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of `tree`, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map(fn: Callable[..., Any], first: Tree, *others: Tree) -> Tree:
    """`fn` over the corresponding leaves of trees of one structure."""
    return pytree.tree_map(fn, first, *others)


def is_real(leaf: object) -> bool:
    """Whether a leaf can carry a derivative."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def doubled(tree: Tree) -> Tree:
    """The same tree with its floating-point leaves in float64."""
    return map(lambda leaf: leaf.double() if is_real(leaf) else leaf, tree)


def split(tree: Tree) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Tree]]:
    """The floating-point leaves of `tree`, and how to rebuild the tree around new ones.

    >>> real, rebuild = split({"w": torch.ones(2), "count": torch.tensor(3)})
    >>> rebuild([2 * real[0]])
    {'w': tensor([2., 2.]), 'count': tensor(3)}
    """
    flat, spec = pytree.tree_flatten(tree)
    places = [i for i, leaf in enumerate(flat) if is_real(leaf)]

    def rebuild(real: Sequence[Tensor]) -> Tree:
        new = list(flat)
        for place, leaf in zip(places, real, strict=True):
            new[place] = leaf
        return pytree.tree_unflatten(new, spec)

    return [flat[i] for i in places], rebuild


def random(tree: Tree) -> Tree:
    """The same tree with normal random numbers in its floating-point leaves, the same ones at every call."""
    generator = torch.Generator().manual_seed(0)
    real, rebuild = split(tree)
    return rebuild([torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) for x in real])


def detach(tree: Tree) -> Tree:
    """The same numbers with no history."""
    return map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def pack(tree: Tree) -> list[Any]:
    """Copies of all leaves, as a plain list that any file format can hold."""
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(tree)]


def unpack(like: Tree, packed: Sequence[Any]) -> Tree:
    """The inverse of `pack`, for a tree of the structure of `like`, or for rows of such trees, one per run.

    >>> unpack({"w": torch.zeros(2)}, pack({"w": torch.ones(2)}))
    {'w': tensor([1., 1.])}
    """
    flat, spec = pytree.tree_flatten(like)
    if len(flat) != len(packed):
        raise ValueError(f"saved state has {len(packed)} parts, this run's has {len(flat)}: another model or rule.")
    for x, y in zip(packed, flat, strict=True):
        if isinstance(y, Tensor) and not _fits(x, y):
            raise ValueError(f"saved state has {_shown(x)} where this run's has {_shown(y)}: another model or rule.")
    moved = [x.to(y.device) if isinstance(x, Tensor) else x for x, y in zip(pack(list(packed)), flat, strict=True)]
    return pytree.tree_unflatten(moved, spec)


def _fits(saved: Any, like: Tensor) -> bool:
    """Whether a saved leaf can take the place of another; rows of runs have one dimension more."""
    if not isinstance(saved, Tensor) or saved.dtype != like.dtype:
        return False
    return saved.shape == like.shape or (saved.shape[1:] == like.shape and saved.ndim == like.ndim + 1)


def _shown(leaf: Any) -> str:
    return f"{list(leaf.shape)} of {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)


def equal(one: Tree, other: Tree) -> bool:
    """Whether two trees hold the same numbers, bit for bit (NaN equals NaN)."""
    first, second = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(first) == len(second) and all(map(_same, first, second))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        same: Any = a == b
        return bool(same.all() if hasattr(same, "all") else same) or bool(a != a and b != b)  # NaN is not itself
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def nbytes(tree: Tree) -> int:
    """Memory that the leaves occupy."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(tree))
