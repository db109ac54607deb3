"""Schedules that people would guess, to compare a learnt one with."""

import math

from longhorizon.hypers import Hyper
from longhorizon.retraining import Retrained, retrain
from longhorizon.rules import Rule
from longhorizon.task import Task


def off_the_shelf(steps: int) -> dict[str, dict[str, Hyper]]:
    """Learning rate and momentum for SGD, by name."""
    cosine = [0.05 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)]
    return {
        "constant lr 0.1": {"lr": Hyper(0.1), "momentum": Hyper(0.0)},
        "constant lr 0.1, momentum 0.9": {"lr": Hyper(0.1), "momentum": Hyper(0.9)},
        "cosine from 0.1, momentum 0.9": {"lr": Hyper(cosine, windows=steps), "momentum": Hyper(0.9)},
    }


def train_off_the_shelf(task: Task, rule: Rule, steps: int, seeds: int) -> dict[str, Retrained]:
    """Each of them trained from scratch and tested, exactly as `retrain` does it with a learnt one."""
    return {
        name: retrain(task, rule, hypers, {key: h.values() for key, h in hypers.items()}, steps=steps, seeds=seeds)
        for name, hypers in off_the_shelf(steps).items()
    }
