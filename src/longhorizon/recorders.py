"""A run for other eyes: TensorBoard events, or an Optuna study. Both take one record per outer step.

Give `recorder.step` to `tune(on_step=…)`, or drive `steps(…)` and call it. Both may be told of a step again, after a
run was killed and resumed, or from a journal; it is shown once.
"""

import math
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from longhorizon.extras import need
from longhorizon.outer_step import OuterStep

REACH = 10.0  # what values are said to range over if nobody says better


class TensorBoardRecorder:
    """Scalars per outer step: every value, its γ and its hypergradient (window mean), validation loss and metrics.

    Args:
        dir: where the event files go.

    Raises:
        ImportError: without tensorboard, naming the extra to install.
    """

    def __init__(self, dir: str | os.PathLike[str]):
        need("tensorboard", "tensorboard")
        self.dir = Path(dir)
        self._writer: Any = None

    def step(self, record: OuterStep) -> None:
        """Add a record, at the number of outer steps taken before it; it replaces what was there from that step on."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.dir, purge_step=record.index)
        for tag, value in scalars(record).items():
            self._writer.add_scalar(tag, value, record.index)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class OptunaRecorder:
    """Every outer step as a trial of a study, so that `optuna-dashboard` shows a run beside black-box ones.

    A trial's parameters are the values, one per window ("lr[0]", "lr[1]", …; "lr" if it has only one), its objective is
    the validation loss. Hypergradients, metrics, status, and what the step cost are user attributes. A run that
    diverged is a failed trial. A step that the study has already is left alone.

    Args:
        storage: a database's URL ("sqlite:///study.db"), or the path of a journal file.
        study_name: of a new study, or of one to go on with.
        ranges: per key the lowest and highest value that the search can reach (`search_range` tells), for the
            dashboard's axes and importances.

    Raises:
        ImportError: without optuna, naming the extra to install.
        ValueError: if the storage cannot be opened, or the study there does not minimize one number.
    """

    def __init__(self, storage: str, study_name: str, ranges: Mapping[str, tuple[float, float]] | None = None):
        need("optuna", "optuna")
        import optuna

        self.ranges = dict(ranges or {})
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # it would tell of every new study, into our progress
        try:
            self._storage = _storage(storage)
            self.study = optuna.create_study(
                storage=self._storage, study_name=study_name, direction="minimize", load_if_exists=True
            )
        except Exception as error:  # of the database, its driver, or the file system
            first = str(error).splitlines()[0] if str(error) else ""
            raise ValueError(f"cannot open the Optuna storage ({type(error).__name__}: {first}).") from error
        finally:
            optuna.logging.set_verbosity(before)
        if [d.name for d in self.study.directions] != ["MINIMIZE"]:
            raise ValueError(f"study {study_name!r} does not minimize one number: choose another study_name.")
        self._known = {t.user_attrs.get("outer_step"): t for t in self.study.get_trials(deepcopy=False)}

    def step(self, record: OuterStep) -> None:
        """Add a record as a trial, unless it is there.

        Raises:
            ValueError: if the study has this step of another run.
        """
        params = {name: value for _, name, value in _named(record.values)}
        if record.index in self._known:
            there = self._known[record.index]
            if there.user_attrs.get("seeds") != record.seeds or there.params != params:
                raise ValueError(
                    f"study {self.study.study_name!r} holds another run: its outer step {record.index + 1} began at "
                    "other values or with another seed. Choose another study name, or another storage."
                )
            return
        from optuna.distributions import FloatDistribution
        from optuna.trial import TrialState, create_trial

        fine = math.isfinite(record.val_loss)
        trial = create_trial(
            state=TrialState.COMPLETE if fine else TrialState.FAIL,
            value=record.val_loss if fine else None,
            params=params,
            distributions={
                name: FloatDistribution(*self._range(key, value)) for key, name, value in _named(record.values)
            },
            user_attrs=_attributes(record),
        )
        if trial.datetime_start is not None:
            trial.datetime_start -= timedelta(seconds=record.seconds)
        self.study.add_trial(trial)
        self._known[record.index] = trial

    def close(self) -> None:
        """Let go of the storage."""
        self._storage.remove_session()
        if hasattr(self._storage, "engine"):
            self._storage.engine.dispose()

    def _range(self, key: str, value: float) -> tuple[float, float]:
        low, high = self.ranges.get(key, (-REACH, REACH))
        return min(low, value), max(high, value)


def scalars(record: OuterStep) -> dict[str, float]:
    """What TensorBoard draws, by tag."""
    found = {"validation/loss": record.val_loss}
    found |= {f"validation/{name}": value for name, value in record.metrics.items()}
    groups = {"value": record.values, "hypergradient": record.mean, "gamma": record.outer.get("gamma")}
    for group, values in groups.items():
        for _, name, value in _named(values) if isinstance(values, Mapping) else ():
            found[f"{group}/{name.replace('[', '/').rstrip(']')}"] = value  # a tag holds no brackets
    found["seconds"] = record.seconds
    return {tag: value for tag, value in found.items() if math.isfinite(value)}


def _named(values: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Key, name and number of every single value."""
    for key, tensor in values.items():
        numbers = tensor.reshape(-1).tolist()
        for window, value in enumerate(numbers):
            yield key, key if len(numbers) == 1 else f"{key}[{window}]", value


def _attributes(record: OuterStep) -> dict[str, Any]:
    """What a trial says besides its parameters, as plain JSON."""
    content = record.to_dict()
    kept = {"outer_step": record.index, "status": record.status, "hypergradient": content["mean"]}
    if isinstance(content["outer"].get("gamma"), Mapping):
        kept["gamma"] = content["outer"]["gamma"]
    return kept | {name: content[name] for name in ("metrics", "seeds", "steps", "engine", "seconds")}


def _storage(storage: str) -> Any:
    """A database for a URL; anything else is a journal file."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if "://" in storage:
        return RDBStorage(storage)
    Path(storage).parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(storage))
