"""Optimizers that need no tuning, from other packages: trained once with their own defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from longhorizon.cuda import Precision
from longhorizon.hypers import argument
from longhorizon.problem import environment, make_problem
from longhorizon.retraining import whole_of
from longhorizon.rivals.arena import Arena, Setup, Trial
from longhorizon.rivals.space import Setting, hypers_for
from longhorizon.rivals.training import Counter, TorchTraining, judge

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def _schedule_free(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    import schedulefree

    made: torch.optim.Optimizer = schedulefree.AdamWScheduleFree(params)  # lr 0.0025, betas 0.9 and 0.999
    return made


def _prodigy(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    import prodigyopt

    made: torch.optim.Optimizer = prodigyopt.Prodigy(params)  # lr 1, no weight decay
    return made


OPTIMIZERS: Mapping[str, tuple[str, Make]] = {
    "schedulefree": ("schedulefree", _schedule_free),
    "prodigy": ("prodigyopt", _prodigy),
}


@dataclass(frozen=True)
class Packaged:
    """An optimizer of another package, trained once. It takes the place of the recipe's rule."""

    name: str

    @property
    def packages(self) -> tuple[str, ...]:
        return (OPTIMIZERS[self.name][0],)

    def check(self, setup: Setup) -> None: ...

    def warm(self) -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = OPTIMIZERS[self.name][1]([weight])
        weight.grad = torch.ones(1)
        getattr(optimizer, "train", lambda: None)()
        optimizer.step()

    def least(self, setup: Setup) -> int:
        return setup.steps

    def run(self, arena: Arena) -> None:
        setup = arena.setup
        if arena.past() or not arena.purse.allows(setup.steps):
            return
        make = OPTIMIZERS[self.name][1]
        plain = own_settings(setup)
        one = Trial(
            arena,
            0,
            {},
            lambda saved: TorchTraining(arena.problem(plain, 0), arena.counter, make, saved),
        )
        one.to(setup.steps)
        one.forget()


def own_settings(setup: Setup) -> Setting:
    """What the loss reads, at its start; some entry is needed even if nothing reads it."""
    in_loss = {k: h.values().tolist() for k, h in setup.hypers.items() if argument(k) not in setup.rule.defaults}
    return in_loss or {next(iter(setup.rule.defaults)): [next(iter(setup.rule.defaults.values()))]}


def retrain_packaged(
    setup: Setup,
    name: str,
    seeds: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
    precision: Precision = "float32",
) -> dict[str, list[float | None]]:
    """Test loss and metrics after training on all data but the test set, per seed, as `retrain` does it.

    A training that diverged has an infinite loss, and None for every metric.
    """
    whole, called = whole_of(setup.task)
    hypers = hypers_for(own_settings(setup), setup.hypers, setup.rule, setup.steps)
    judgements = []
    with environment(precision):
        for number, seed in enumerate(seeds):
            problem = make_problem(whole, setup.rule, hypers, setup.steps, seed, called=called)
            training = TorchTraining(problem, Counter(), OPTIMIZERS[name][1])
            while training.t < setup.steps and training.failed is None:
                training.advance()
                if progress is not None:
                    progress(number * setup.steps + training.t, len(seeds) * setup.steps)
            judgements.append(judge(training))
    names = dict.fromkeys(name for judged in judgements for name in judged.metrics)
    return {
        "loss": [judged.val_loss for judged in judgements],
        **{name: [judged.metrics.get(name) for judged in judgements] for name in names},
    }
