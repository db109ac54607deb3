"""The methods by name."""

from collections.abc import Sequence

from longhorizon.extras import need
from longhorizon.hypers import nearest
from longhorizon.rivals.blackbox import BlackBox
from longhorizon.rivals.fixed import Grid, GridHalving, OffTheShelf
from longhorizon.rivals.methods import Fds, GreedyScheme, HypergradientDescent, Method
from longhorizon.rivals.packaged import OPTIMIZERS, Packaged

_ALL: list[Method] = [
    Fds(),
    BlackBox("random", "random"),
    BlackBox("bo", "gp"),
    BlackBox("hyperband", "random", early=True),
    BlackBox("bohb", "tpe", early=True),
    HypergradientDescent(),
    GreedyScheme(),
    Grid(),
    GridHalving(),
    *(OffTheShelf(name) for name in ("constant", "cosine", "multistep", "onecycle")),
    *(Packaged(name) for name in OPTIMIZERS),
]
METHODS = {method.name: method for method in _ALL}

# What section 5.4 and common practice compare; the others are named.
USUAL = (
    "fds",
    "random",
    "bo",
    "hyperband",
    "bohb",
    "hd",
    "grid-halving",
    "constant",
    "cosine",
    "multistep",
    "onecycle",
)


def chosen(names: Sequence[str]) -> list[Method]:
    """The methods of these names ("all" for every one); each must be known, and its package there."""
    wanted = list(METHODS) if list(names) == ["all"] else list(dict.fromkeys(names))
    if not wanted:
        raise ValueError(f"methods is empty: name at least one of {', '.join(METHODS)}.")
    for name in wanted:
        if name not in METHODS:
            raise ValueError(f"unknown method {name!r}.{nearest(name, list(METHODS))}")
        need("compare", *METHODS[name].packages)
    return [METHODS[name] for name in wanted]
