"""What BOHB tries next (Falkner, Klein and Hutter, ICML 2018): drawn from where the longest runs did well.

The model is of the results of one length of training, the longest that has enough of them. They are split into the best
and the rest, a density is estimated for each, and of 64 draws from the first the one is taken where the first is
largest against the second. One proposal in three is drawn uniformly, whatever the model says. The split and the
densities are those of Optuna's tree-structured Parzen estimator: the best are a tenth, and at most 25.

Optuna's own TPE under its Hyperband is another method: it ranks trials by how far they got before it looks at their
losses, so that one that diverged in a long run counts for more than a good one in a short run, and every bracket has a
model of its own.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from longhorizon import seeds
from longhorizon.rivals.ledger import Evaluation
from longhorizon.rivals.space import Axis, numbers_of, uniform

AT_RANDOM = 1 / 3
DRAWS = 64


def propose(space: Sequence[Axis], past: Iterable[Evaluation], seed: int) -> dict[str, float]:
    """A number for every axis, by what was found so far; the same for the same seed and past."""
    results = model_of(space, past)
    if not results or np.random.default_rng(seed).random() < AT_RANDOM:
        return uniform(space, seeds.mix(seed, 1))  # not the number that has just decided
    import optuna

    where: Any = {a.name: optuna.distributions.FloatDistribution(a.low, a.high, log=a.log) for a in space}
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=0, n_ei_candidates=DRAWS, multivariate=True, seed=seed % 2**32
    )
    study = optuna.create_study(sampler=sampler)
    for e in results:
        loss, numbers = min(e.val_loss, sys.float_info.max), numbers_of(e.values, space)
        study.add_trial(optuna.trial.create_trial(value=loss, params=numbers, distributions=where))
    return dict(study.ask(fixed_distributions=where).params)


def model_of(space: Sequence[Axis], past: Iterable[Evaluation]) -> list[Evaluation]:
    """The results that the densities are made from: of the longest runs with at least three more than values."""
    by_length: dict[int, list[Evaluation]] = {}
    for e in past:
        if not e.status.startswith("crashed"):
            by_length.setdefault(e.steps, []).append(e)
    enough = [steps for steps, found in by_length.items() if len(found) >= len(space) + 3]
    return by_length[max(enough)] if enough else []
