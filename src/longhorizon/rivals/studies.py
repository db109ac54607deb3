"""Optuna's studies: where they are kept, what they are told, and how a trial is taken up again."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

from longhorizon.rivals.arena import Arena
from longhorizon.rivals.space import Setting
from longhorizon.rivals.training import Trains

STUDY = "study.log"
CEILING = 2.0  # times the loss of an untrained network
LEAST = 1e-3  # above that loss, where it is zero or nearly


def opened(arena: Arena, name: str = STUDY) -> Any:
    """The study in a file of a method's folder, made if there is none."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(arena.dir / name))),
        study_name=f"{arena.method}-{arena.seed}",
        direction="minimize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.NopPruner(),  # who goes on is decided by hyperband.py
        load_if_exists=True,
    )


def mend(arena: Arena) -> None:
    """Drop a last line that was torn by a full disk, say: Optuna would write on behind it."""
    path = arena.dir / STUDY
    if path.exists() and not (whole := path.read_bytes()).endswith(b"\n") and whole:
        os.truncate(path, whole.rfind(b"\n") + 1)


def catch_up(study: Any, trial: Any, saved: Any, names: Sequence[str]) -> None:
    """Of a trial that was killed between two axes, draw the first ones again, unused: the sampler's stream goes on."""
    if all(name in saved.params for name in names):
        return
    relative = trial.relative_params  # drawn before all others, together
    for name, distribution in saved.distributions.items():
        if name not in relative and not distribution.single():
            study.sampler.sample_independent(study, saved, name, distribution)


def ceiling(study: Any, arena: Arena, setting: Setting, number: int, training: Trains | None = None) -> float:
    """The most that a search is told, from the first trial that got so far."""
    if "ceiling" not in study.user_attrs:
        problem = arena.problem(setting, number) if training is None else training.problem
        untrained = float(problem.validation_loss(problem.start, 1))
        study.set_user_attr("ceiling", untrained + (CEILING - 1) * max(abs(untrained), LEAST))  # above it, if negative
    return float(study.user_attrs["ceiling"])


class quiet:  # noqa: N801 - reads as a word
    """Optuna without its log lines, and without warnings about what is meant."""

    def __enter__(self) -> None:
        import optuna

        self._before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        for text in (".*experimental.*", ".*multivariate.*", ".*constant_liar.*", ".*non-finite.*", ".*infinite.*"):
            warnings.filterwarnings("ignore", message=text)

    def __exit__(self, *what: Any) -> None:
        import optuna

        self._warnings.__exit__(*what)
        optuna.logging.set_verbosity(self._before)
