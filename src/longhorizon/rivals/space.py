"""Where to search: one range per value, the same for every method.

The range is the one that FDS can reach: from a hyperparameter's start, its step γ in every outer step, up to its
bounds. A setting is a plain dictionary from key to one number per window.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from longhorizon.hypers import Hyper, argument, window_of
from longhorizon.outer import search_range
from longhorizon.rules import Rule

Setting = dict[str, list[float]]  # key -> one number per window

FINEST = 1000  # windows that a setting of one value per step is written down with, at most


@dataclass(frozen=True)
class Axis:
    """One number to choose."""

    name: str  # "lr[2]"
    key: str
    low: float
    high: float
    log: bool


def axes(hypers: Mapping[str, Hyper], outer_steps: int) -> list[Axis]:
    """Every learnt number with its range.

    >>> [(a.name, a.low, a.high) for a in axes({"lr": Hyper(0.0, windows=2, step=0.1, low=0.0)}, 10)]
    [('lr[0]', 0.0, 1.0), ('lr[1]', 0.0, 1.0)]
    """
    found = []
    for key, (low, high) in search_range(hypers, outer_steps).items():
        count, log = hypers[key].windows, hypers[key].scale == "log"
        names = [key] if count == 1 else [f"{key}[{w}]" for w in range(count)]
        found += [Axis(name, key, low, high, log) for name in names]
    return found


def setting_of(hypers: Mapping[str, Hyper], chosen: Mapping[str, float], where: Sequence[Axis]) -> Setting:
    """The numbers by name as a setting; what is not learnt keeps its start."""
    setting: Setting = {key: hyper.values().tolist() for key, hyper in hypers.items()}
    for key in dict.fromkeys(axis.key for axis in where):
        setting[key] = [float(chosen[axis.name]) for axis in where if axis.key == key]
    return setting


def numbers_of(setting: Setting, where: Sequence[Axis]) -> dict[str, float]:
    """The numbers of a setting by name.

    >>> numbers_of({"lr": [0.1, 0.2]}, axes({"lr": Hyper(0.0, windows=2, step=0.1)}, 10))
    {'lr[0]': 0.1, 'lr[1]': 0.2}
    """
    left = {key: iter(numbers) for key, numbers in setting.items()}
    return {axis.name: next(left[axis.key]) for axis in where}


def uniform(where: Sequence[Axis], seed: int) -> dict[str, float]:
    """A number for every axis at random, uniform in its hyperparameter's own scale."""
    chance = np.random.default_rng(seed)
    numbers = {}
    for axis in where:
        ends = (math.log(axis.low), math.log(axis.high)) if axis.log else (axis.low, axis.high)
        number = float(chance.uniform(*ends))
        number = math.exp(number) if axis.log else number
        numbers[axis.name] = min(max(number, axis.low), axis.high)  # exp may round beyond an end
    return numbers


def draw(hypers: Mapping[str, Hyper], where: Sequence[Axis], seed: int) -> Setting:
    """A setting at random."""
    return setting_of(hypers, uniform(where, seed), where)


def hypers_for(setting: Setting, hypers: Mapping[str, Hyper], rule: Rule, steps: int) -> dict[str, Hyper]:
    """The entries that train with a setting for `steps` steps.

    What the setting names takes its numbers, and the parameters that the user's entry applies to. A hyperparameter of
    the loss that it does not name keeps its start; an argument of the optimizer keeps the rule's default.
    """
    made = {key: hyper for key, hyper in hypers.items() if argument(key) not in rule.defaults}
    for key, numbers in setting.items():
        numbers = squeezed(numbers, steps)
        known = hypers.get(key, Hyper(0.0))
        low, high = known.low, known.high
        if (low is not None and min(numbers) < low) or (high is not None and max(numbers) > high):
            low = high = None  # common practice may lie outside the user's bounds
        made[key] = replace(known, start=numbers, windows=len(numbers), low=low, high=high)
    return {key: made[key] for key in [*(k for k in hypers if k in made), *(k for k in made if k not in hypers)]}


def squeezed(numbers: Sequence[float], steps: int) -> list[float]:
    """A schedule for a run that has fewer steps than it has windows: every window that a step lies in.

    >>> squeezed([1.0, 2.0, 3.0, 4.0], 2)
    [1.0, 3.0]
    """
    if len(numbers) <= steps:
        return list(numbers)
    return [numbers[window_of(step, steps, len(numbers))] for step in range(steps)]


def thinned(numbers: Sequence[float]) -> list[float]:
    """One value per step as at most `FINEST` windows, each the mean of its steps."""
    if len(numbers) <= FINEST:
        return [float(v) for v in numbers]
    edges = [round(w * len(numbers) / FINEST) for w in range(FINEST + 1)]
    return [float(np.clip(np.mean(part := numbers[a:b]), min(part), max(part))) for a, b in pairwise(edges)]
