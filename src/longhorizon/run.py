"""`tune`: the outer loop with a directory, a clock and signals around it."""

import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from longhorizon.accuracy import rounding_error
from longhorizon.confirming import Confirmed
from longhorizon.cuda import Precision
from longhorizon.deciding import check_model, decide
from longhorizon.engines import Engine, Hybrid
from longhorizon.hypers import Hyper
from longhorizon.outer import TorchOuter
from longhorizon.outer_step import OuterStep, best_of, went_well
from longhorizon.problem import environment
from longhorizon.rules import Rule
from longhorizon.rundir import RunDirectory, RunError
from longhorizon.schedule import Schedule
from longhorizon.stopping import Interrupted, stop_signals
from longhorizon.task import Task
from longhorizon.traces import Traces
from longhorizon.tuning import Gates, Tuning

MEASURED = "hessian_product_error"  # in the record of the environment


@dataclass(frozen=True)
class Tuned:
    """A finished tuning run.

    Attributes:
        schedule: the values to train with: the last ones or the best ones, whichever were confirmed.
        last: the values after the last outer step.
        best: the values whose run had the lowest validation loss, among runs of the longest horizon.
        history: one record per outer step.
        converged: whether the outer optimizer's steps had become small before the last one.
        dir: where the run is on disk, if anywhere.
        untrained: the validation loss of fresh weights, of the first run; None where it is not known (any more).
        confirmed: the training runs that decided between the last and the best values; None if there were none.
    """

    schedule: Schedule
    last: Schedule = field(repr=False)
    best: Schedule = field(repr=False)
    history: list[OuterStep] = field(repr=False)
    converged: bool
    dir: Path | None = None
    untrained: float | None = None
    confirmed: Confirmed | None = None

    @property
    def seconds(self) -> float:
        """What outer steps and confirming took, in all processes."""
        return sum(record.seconds for record in self.history) + (self.confirmed.seconds if self.confirmed else 0.0)

    @property
    def found_nothing(self) -> bool:
        """Whether no training run, of outer steps or of confirming, ended better than fresh weights."""
        losses = [record.val_loss for record in self.history]
        losses += [] if self.confirmed is None else [loss for own in self.confirmed.losses.values() for loss in own]
        best = min(filter(math.isfinite, losses), default=math.inf)
        return self.untrained is not None and bool(self.history) and best >= self.untrained


def tune(
    task: Task,
    rule: Rule,
    hypers: Mapping[str, Hyper],
    *,
    steps: int | Sequence[int],
    outer_steps: int = 10,
    outer: Any = None,
    engine: Engine | Literal["auto"] = "auto",
    seed: int = 0,
    seeds: int = 1,
    gate: Gates = "off",
    precision: Precision = "float32",
    traces: Traces | None = None,
    dir: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 30.0,
    recipe: str | None = None,
    confirm: int = 3,
    on_step: Callable[[OuterStep], None] | None = None,
    progress: Callable[[Tuning], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Tuned:
    """Learn hyperparameters: train, differentiate the validation loss through the whole run, move, and again.

    Each outer step starts from fresh weights and, through the seed given to `task.train` and `task.val`, a fresh split.

    Args:
        task: what is trained and judged.
        rule: the optimizer.
        hypers: what is learnt.
        steps: inner steps of each training run; a list gives one number per outer step, the last one repeating
            (`[200, 2000]`: a short first run). Schedules stretch, so horizons may differ.
        outer_steps: how many hypergradients to take at most.
        outer: how values move: `SignDescent()` (default), `GradientDescent()`, or a function from parameters to a
            `torch.optim` optimizer.
        engine: how to differentiate. "auto" takes derivatives, by a bounded adjoint where it fits into memory, and
            smoothed differences for values whose derivative cannot be trusted (see `Hybrid`). On a GPU with
            `precision="bf16"` it takes smoothed differences for all (see `Factorial`), where the model's training runs
            can stand side by side. With more than 21 values it takes the exact engine that `hypergradient` would.
        seed: of everything.
        seeds: training runs to average each hypergradient over.
        gate: what a value does whose hypergradient is doubted (see `OuterStep.doubts`): "off" moves it all the same,
            "wait" leaves it where it is for this outer step, "shrink" also halves its γ.
        precision: of products, "float32", "tf32", "bf16" or "float64"; see `hypergradient`.
        traces: a `Traces` to share with other calls, so that the step is traced and compiled once for all of them.
        dir: where to keep the run. If the same run is there already it goes on where it stopped.
        checkpoint_seconds: how often to save inside a training run.
        recipe: a text to keep with the run.
        confirm: at the end, so many plain training runs with the last values and with the best ones decide which of
            them become the schedule (see `confirm`). 0 takes the last ones.
        on_step: called with the record of every outer step.
        progress: called with the run's state before the first inner step and after every one within an outer step.
        note: told in words what is done when outer steps are over.

    Returns:
        The learnt schedule and how it came about.

    Raises:
        Interrupted: after Ctrl-C or SIGTERM, when all is saved; call again to go on.
        RunError: if `dir` cannot be used, in one sentence.
    """
    _check_hooks(checkpoint_seconds, on_step=on_step, progress=progress, note=note)
    if isinstance(confirm, bool) or not isinstance(confirm, Integral) or confirm < 0:
        raise ValueError(f"confirm={confirm!r}: expected a number of training runs, 0 for none.")
    given = {
        "steps": steps,
        "outer_steps": outer_steps,
        "outer": outer,
        "engine": engine,
        "seed": seed,
        "seeds": seeds,
        "gate": gate,
        "traces": traces,
    }
    if dir is None:
        tuning = Tuning(task, rule, hypers, **given)
        history: list[OuterStep] = []
        with environment(precision):
            tuning.prepare()
            _drive(tuning, None, history, checkpoint_seconds, on_step, progress, [])
        return _tuned(tuning, history, None, decide(tuning, None, confirm, precision, note, []))
    first = Tuning(task, rule, hypers, **given)  # checks before anything is written
    if not RunDirectory(dir).begun:
        with environment(precision):
            first.prepare()
    with RunDirectory(dir) as directory:
        directory.begin(settings_of(first) | {"precision": precision}, recipe)
        history = directory.journal()
        saved = _where(directory, history, first)
        tuning = first if saved is None else Tuning(task, rule, hypers, **given, saved=saved)
        if len({record.index for record in history} & set(range(tuning.index))) < tuning.index:
            raise RunError(
                f"{directory.path / 'journal.jsonl'} knows less than the checkpoint, which is at outer step "
                f"{tuning.index + 1}: part of it was deleted. Put it back, or delete checkpoint.pt to go on from it."
            )
        history = [record for record in history if record.index < tuning.index]
        with environment(precision):
            if not tuning.done:
                check_model(directory, tuning.made())
        with stop_signals(True) as asked:
            with environment(precision):
                _drive(tuning, directory, history, checkpoint_seconds, on_step, progress, asked)
            found = decide(tuning, directory, confirm, precision, note, asked)
            tuned = _tuned(tuning, history, directory.path, found)
            _save_schedules(directory, tuning, tuned.schedule)
        if asked:  # what the caller does next was not to begin
            raise Interrupted(
                f"stopped when tuning was done; all is saved in {directory.path}", "the same call goes on"
            )
        return tuned


def _check_hooks(checkpoint_seconds: object, **hooks: object) -> None:
    """Refuse what would fail only when it is first used."""
    number = isinstance(checkpoint_seconds, Real) and not isinstance(checkpoint_seconds, bool)
    if not number or not checkpoint_seconds >= 0:  # type: ignore[operator]
        raise ValueError(f"checkpoint_seconds={checkpoint_seconds!r}: expected a number of seconds, at least 0.")
    for name, hook in hooks.items():
        if hook is not None and not callable(hook):
            raise TypeError(f"{name}={hook!r}: expected a function or None.")


def settings_of(tuning: Tuning) -> dict[str, Any]:
    """What defines a run: change one of these and it is another. `outer_steps` is not among them: it may grow."""
    outer = tuning.outer.settings(tuning.given) if isinstance(tuning.outer, TorchOuter) else str(tuning.outer)
    engine = tuning.engine
    return {
        "rule": {"name": tuning.rule.name, "defaults": tuning.rule.defaults, "options": tuning.rule.options},
        "hypers": {key: _hyper_settings(hyper) for key, hyper in tuning.given.items()},
        "steps": tuning.horizons,
        "outer": re.sub(r" at 0x\w+", "", outer) if isinstance(outer, str) else outer,
        "engine": engine if isinstance(engine, str) else {"kind": type(engine).__name__, **_fields(engine)},
        "seed": tuning.seed,
        "seeds": tuning.seeds,
    } | ({} if tuning.gate == "off" else {"gate": tuning.gate})  # older runs have none


def _drive(
    tuning: Tuning,
    directory: RunDirectory | None,
    history: list[OuterStep],
    checkpoint_seconds: float,
    on_step: Callable[[OuterStep], None] | None,
    progress: Callable[[Tuning], None] | None,
    asked: list[int],  # to stop
) -> None:
    saved_at = time.monotonic()
    if progress is not None and not tuning.done:
        progress(tuning)
    measured = directory is None or MEASURED in (directory.describe().get("environment") or {})
    while not tuning.done:
        try:
            record = tuning.advance()
        except Exception as error:
            if directory is not None and directory.begun and tuning.run is not None:  # within a training run
                error.add_note(
                    f"{directory.path} has what was done up to the last checkpoint: put this right, and the same "
                    "call (or longhorizon resume) goes on from there."
                )
            raise
        if not measured and directory is not None and tuning.problem is not None:
            directory.measured("dtype", str(tuning.problem.dtype).removeprefix("torch."))
            directory.measured(MEASURED, rounding_error(tuning.problem))
            measured = True
        if record is not None:
            history.append(record)
            if directory is not None:
                directory.append(record)  # before the checkpoint: a record is never lost
                _save_schedules(directory, tuning)
            if on_step is not None:
                on_step(record)
        elif progress is not None:
            progress(tuning)
        due = record is not None or asked or time.monotonic() - saved_at >= checkpoint_seconds
        if directory is not None and due:
            directory.checkpoint(tuning.save())
            saved_at = time.monotonic()
        if asked and not tuning.done:
            where = f"at outer step {tuning.index + 1} of {tuning.outer_steps}"
            place = directory.path if directory else ""
            raise Interrupted(f"stopped {where}; all is saved in {place}", "the same call goes on")


def _where(directory: RunDirectory, history: list[OuterStep], first: Tuning) -> dict[str, Any] | None:
    """Where to go on: at the checkpoint, or without one at the last line of the journal."""
    saved = directory.load()
    if saved is not None or not history:
        return saved
    if isinstance(first.outer, TorchOuter):
        raise RunError(
            f"{directory.path} has lost its checkpoint, and with it the state of its torch.optim outer optimizer; "
            "start again in another directory."
        )
    return from_journal(first, history)


def from_journal(first: Tuning, history: list[OuterStep]) -> dict[str, Any]:
    """Where a run goes on whose checkpoint is lost: behind the last line of its journal, as `Tuning.save` has it.

    Args:
        first: the run at its beginning. The state of a torch optimizer is in no journal.
        history: the journal, not empty.
    """
    good = [record for record in history if went_well(record)]
    best, last = best_of(history), history[-1]
    return first.save() | {
        "index": last.index + 1,
        "values": {**last.next, **{key: v for key, v in first.values.items() if key not in last.next}},  # in its order
        "outer": last.outer,
        "good": (good[-1].val_loss, good[-1].values) if good else None,
        "best": None if best is None else (best.val_loss, best.steps, best.values),
    }


def _save_schedules(directory: RunDirectory, tuning: Tuning, confirmed: Schedule | None = None) -> None:
    last = Schedule.of(tuning.hypers, tuning.values, tuning.rule)
    directory.save_schedule("schedule.json", confirmed or last)
    if tuning.best is not None:
        directory.save_schedule("best.json", Schedule.of(tuning.hypers, tuning.best[2], tuning.rule))


def _tuned(tuning: Tuning, history: list[OuterStep], dir: Path | None, confirmed: Confirmed | None) -> Tuned:
    last = Schedule.of(tuning.hypers, tuning.values, tuning.rule)
    best = last if tuning.best is None else Schedule.of(tuning.hypers, tuning.best[2], tuning.rule)
    kept = best if confirmed is not None and confirmed.chosen == "best" else last
    return Tuned(kept, last, best, history, tuning.converged, dir, tuning.untrained, confirmed)


def _hyper_settings(hyper: Hyper) -> dict[str, Any]:
    """As plain numbers and lists: how numpy writes a number, and the order of a set, are no part of a run."""
    settings = asdict(hyper) | {"start": hyper.values().tolist(), "windows": int(hyper.windows)}
    for name in ("step", "low", "high"):
        settings[name] = None if settings[name] is None else float(settings[name])
    params = hyper.params
    if callable(params):
        return settings | {"params": "a function"}
    return settings | {"params": sorted(params) if isinstance(params, AbstractSet) else params}


def _fields(engine: Any) -> dict[str, Any]:
    found = asdict(engine) if is_dataclass(engine) and not isinstance(engine, type) else {}
    if isinstance(engine, Hybrid) and engine.clip is None:
        del found["clip"]  # older ones had none
    return found
