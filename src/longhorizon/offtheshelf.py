"""Schedules that people would guess, to compare a learnt one with."""

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from longhorizon.hypers import Hyper, argument
from longhorizon.retraining import Retrained, retrain
from longhorizon.rules import Rule
from longhorizon.task import Task

Setting = dict[str, list[float]]  # key -> one number per window


def off_the_shelf(rule: Rule, hypers: Mapping[str, Hyper], steps: int) -> dict[str, dict[str, Hyper]]:
    """Learning rate and momentum for SGD, by name; what the loss reads stays where `hypers` starts it."""
    of_loss = {key: hyper for key, hyper in hypers.items() if argument(key) not in rule.defaults}
    found = {
        "constant lr 0.1": {"lr": Hyper(0.1), "momentum": Hyper(0.0)},
        "constant lr 0.1, momentum 0.9": {"lr": Hyper(0.1), "momentum": Hyper(0.9)},
        "cosine from 0.1, momentum 0.9": {"lr": Hyper(cosine(0.1, steps), windows=steps), "momentum": Hyper(0.9)},
    }
    return {name: entries | of_loss for name, entries in found.items()}


def train_off_the_shelf(
    task: Task, rule: Rule, hypers: Mapping[str, Hyper], steps: int, seeds: int
) -> dict[str, Retrained]:
    """Each of them trained from scratch and tested, exactly as `retrain` does it with a learnt one."""
    return {
        name: retrain(task, rule, entries, starts(entries), steps=steps, seeds=seeds)
        for name, entries in off_the_shelf(rule, hypers, steps).items()
    }


def starts(hypers: Mapping[str, Hyper]) -> dict[str, Tensor]:
    """The values that entries start at, as a schedule."""
    return {key: hyper.values() for key, hyper in hypers.items()}


def cosine(first: float, steps: int) -> list[float]:
    """From `first` to nothing along half a cosine, one value per step."""
    return [first / 2 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)]


def multistep(first: float, decay: float) -> list[float]:
    """Multiplied by `decay` at 30, 60 and 80 % of the run (the paper's Appendix F), in ten windows.

    >>> multistep(1.0, 0.5)
    [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    """
    return [first * decay ** sum(window >= edge for edge in (3, 6, 8)) for window in range(10)]


def onecycle(peak: float, steps: int) -> tuple[list[float], list[float]]:
    """Learning rate and momentum of torch's `OneCycleLR`: up for 30 % of the run, down for the rest, by cosines."""
    turn, last = 0.3 * steps - 1, steps - 1
    rates, momenta = [], []
    for t in range(steps):
        if t <= turn:
            share = t / turn
            ends = (peak / 25, peak, 0.95, 0.85)
        else:
            share = (t - turn) / (last - turn)
            ends = (peak, peak / 25 / 1e4, 0.85, 0.95)
        down = (1 + math.cos(math.pi * share)) / 2
        rates.append(ends[1] + (ends[0] - ends[1]) * down)
        momenta.append(ends[3] + (ends[2] - ends[3]) * down)
    return rates, momenta


def _with_momentum(rule: Rule, rates: list[float], momenta: list[float], weight_decay: float | None = None) -> Setting:
    """A setting in the rule's own words: momentum is Adam's β₁, and Adam's rates are a hundredth of SGD's."""
    if "lr" not in rule.defaults:
        raise ValueError(f"{rule.name} has no argument 'lr': schedules off the shelf are of a learning rate.")
    adam = "beta1" in rule.defaults
    setting: Setting = {"lr": [r / 100 for r in rates] if adam else rates}
    name = "beta1" if adam else "momentum"
    if name in rule.defaults:
        setting[name] = momenta
    if weight_decay is not None and "weight_decay" in rule.defaults and not adam:
        setting["weight_decay"] = [weight_decay]
    return setting


# By name: from a rule and a number of steps to a setting.
SHELF: dict[str, Callable[[Rule, int], Setting]] = {
    "constant": lambda rule, steps: _with_momentum(rule, [0.1], [0.9]),
    "cosine": lambda rule, steps: _with_momentum(rule, cosine(0.1, steps), [0.9]),
    "multistep": lambda rule, steps: _with_momentum(rule, multistep(0.2, 0.2), [0.9], 5e-4),
    "onecycle": lambda rule, steps: _with_momentum(rule, *onecycle(0.2, steps)),
}
