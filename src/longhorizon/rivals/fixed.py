"""Settings that are known beforehand: schedules off the shelf, and the paper's grid around common practice."""

import itertools
import math
from dataclasses import dataclass

import numpy as np

from longhorizon import seeds
from longhorizon.hypers import argument
from longhorizon.offtheshelf import SHELF, multistep
from longhorizon.rivals import rows
from longhorizon.rivals.arena import Arena, Setup
from longhorizon.rivals.hyperband import ETA
from longhorizon.rivals.methods import Method
from longhorizon.rivals.space import FINEST, Setting

# Appendix F: first learning rate, decay at 30, 60 and 80 % of the run, momentum, weight decay; 135 settings.
RATES = (0.05, 0.1, 0.2, 0.4, 0.6)
DECAYS = (0.1, 0.2, 0.4)
MOMENTA = (0.45, 0.9, 0.99)
WEIGHT_DECAYS = (2.5e-4, 5e-4, 1e-3)
HALVINGS = 3  # rungs below the whole run: 1/27, 1/9 and 1/3 of it


def appendix_f() -> list[Setting]:
    """The 135 settings.

    >>> len(appendix_f()), appendix_f()[0]["momentum"]
    (135, [0.45])
    """
    return [
        {"lr": multistep(rate, decay), "momentum": [momentum], "weight_decay": [weight_decay]}
        for rate, decay, momentum, weight_decay in itertools.product(RATES, DECAYS, MOMENTA, WEIGHT_DECAYS)
    ]


@dataclass(frozen=True)
class OffTheShelf:
    """One schedule that people would guess, trained once."""

    name: str
    packages: tuple[str, ...] = ()

    def check(self, setup: Setup) -> None:
        SHELF[self.name](setup.rule, setup.steps)

    def warm(self) -> None: ...

    def least(self, setup: Setup) -> int:
        return setup.steps

    def run(self, arena: Arena) -> None:
        setup = arena.setup
        if not arena.past() and arena.purse.allows(setup.steps):
            job = rows.Job(0, SHELF[self.name](setup.rule, min(setup.steps, FINEST)))
            rows.alone(arena, job, setup.steps)


class Grid(Method):
    """Appendix F's 135 settings, each trained once, in an order by the seed, as far as the purse goes."""

    name = "grid"

    def check(self, setup: Setup) -> None:
        _check_sgd(self.name, setup)

    def least(self, setup: Setup) -> int:
        return setup.steps

    def run(self, arena: Arena) -> None:
        settings = appendix_f()
        purse, steps = arena.purse, arena.setup.steps
        most = max(1, int(purse.whole // steps)) if purse.unit == "steps" else len(settings)
        rows.width(arena, min(most, len(settings)))  # all are alike, so that a wide row has no lane to spare
        rows.recompile(arena)
        jobs = [rows.Job(trial, settings[trial]) for trial in order(arena.seed, len(settings))]
        rows.evaluate(arena, jobs, arena.setup.steps)


class GridHalving(Method):
    """A shortcut of the grid, successive halving: all settings shortly, the best third longer, up to the whole run.

    Each rung trains from scratch, with the schedule stretched to its length: its decays are what a setting is about.
    """

    name = "grid-halving"

    def check(self, setup: Setup) -> None:
        _check_sgd(self.name, setup)

    def least(self, setup: Setup) -> int:
        return halvings(setup.steps)[0]

    def run(self, arena: Arena) -> None:
        settings = appendix_f()
        rows.recompile(arena)
        alive = order(arena.seed, len(settings))
        for rung, steps in enumerate(halvings(arena.setup.steps)):
            rows.evaluate(arena, [rows.Job(trial, settings[trial], rung) for trial in alive], steps)
            found = [e for trial in alive if (e := arena.found(trial, steps)) is not None]
            if len(found) < len(alive):
                return  # the purse is empty
            good = [e for e in found if math.isfinite(e.val_loss)]
            alive = [e.trial for e in sorted(good, key=lambda e: e.val_loss)[: max(1, len(found) // ETA)]]


def order(seed: int, count: int) -> list[int]:
    """All numbers below `count`, shuffled, so that a grid cut short is not cut on one side."""
    return [int(i) for i in np.random.default_rng(seeds.mix(seed, count)).permutation(count)]


def halvings(steps: int) -> list[int]:
    """Lengths of training, rung by rung.

    >>> halvings(270)
    [10, 30, 90, 270]
    """
    return sorted({max(1, steps // ETA**i) for i in range(HALVINGS + 1)})


def _check_sgd(name: str, setup: Setup) -> None:
    missing = {"lr", "momentum", "weight_decay"} - set(setup.rule.defaults)
    if missing:
        raise ValueError(
            f"{name}: the paper's grid is one of SGD's learning rate, momentum and weight decay, and "
            f"{setup.rule.name} has no {sorted(missing)[0]!r}; leave {name} out."
        )
    labelled = [key for key in setup.hypers if "/" in key and argument(key) in setup.rule.defaults]
    if labelled:
        raise ValueError(f"{name}: it sets one value for all parameters, and {labelled[0]!r} is one of several.")
