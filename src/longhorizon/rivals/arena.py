"""What a method is given, and how it trains: the same task, ranges, clock, purse and checkpoints for all."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longhorizon.engines import Engine
from longhorizon.hypers import Hyper
from longhorizon.problem import Problem, make_problem
from longhorizon.rivals.budget import Purse
from longhorizon.rivals.ledger import Evaluation, Ledger
from longhorizon.rivals.space import Axis, Setting, axes, hypers_for
from longhorizon.rivals.training import Counter, Judged, Trains, judge
from longhorizon.rules import Rule
from longhorizon.rundir import load_tensors, save_tensors
from longhorizon.task import Task
from longhorizon.traces import Traces
from longhorizon.tuning import Gates, run_seed

PATIENCE = 3  # trials that may crash before any has gone well
STREAK = 20  # trials in a row that may crash before their first step: they cost nothing, and would go on for ever


class Stop(Exception):  # noqa: N818 - no error
    """The user asked to stop; what is in progress is saved."""


class GaveUp(RuntimeError):  # noqa: N818 - says what happened
    """A method whose first trials all crashed."""


@dataclass(frozen=True)
class Setup:
    """What is compared: everything that is the same for all methods.

    Attributes:
        horizons: training steps per outer step, for methods that take outer steps.
        epoch: training steps of an epoch, the least that Hyperband gives a trial.
        horizon: how many steps ahead `greedy` looks.
        whole: training steps of a whole run, for all other methods and the tests; 0 for the longest of `horizons`.
    """

    task: Task
    rule: Rule
    hypers: Mapping[str, Hyper]
    horizons: list[int]
    outer_steps: int
    outer: Any
    engine: Engine | Any
    seeds: int
    epoch: int
    horizon: int
    whole: int = 0
    gate: Gates = "off"

    @property
    def steps(self) -> int:
        return self.whole or max(self.horizons)

    @property
    def axes(self) -> list[Axis]:
        return axes(self.hypers, self.outer_steps)


class Arena:
    """One method with one seed: its purse, its place on disk, its line to the journal.

    Args:
        pulse: called after every training step with the arena and the steps done; raises Stop to end it.
    """

    def __init__(
        self,
        setup: Setup,
        method: str,
        seed: int,
        purse: Purse,
        ledger: Ledger,
        dir: Path,
        *,
        checkpoint_seconds: float = 30.0,
        pulse: Callable[["Arena", int], None] | None = None,
        on_evaluation: Callable[[Evaluation], None] | None = None,
    ):
        self.setup, self.method, self.seed = setup, method, seed
        self.purse, self.ledger, self.dir = purse, ledger, dir
        self.checkpoint_seconds, self._pulse, self._on_evaluation = checkpoint_seconds, pulse, on_evaluation
        self.counter = Counter()
        self.width: int | None = None  # trials at once, once it is known (rows.py)
        self.under_way = 0.0  # seconds of other trials that are at work beside the one that is written down
        self.traces = Traces()  # its own: what compiling costs is on each method's clock
        dir.mkdir(parents=True, exist_ok=True)

    def past(self) -> list[Evaluation]:
        """What this method has evaluated so far, with this seed."""
        return self.ledger.of(self.method, self.seed)

    def found(self, trial: int, steps: int) -> Evaluation | None:
        """An evaluation that is in the journal already."""
        return next((e for e in self.past() if (e.trial, e.steps) == (trial, steps)), None)

    def problem(self, setting: Setting, trial: int, steps: int = 0, replicate: int = 0) -> Problem:
        """A training run with a setting.

        Weights, split and batches go by the number of the trial, as those of FDS by the number of the outer step; a
        replicate, which is what a trial is when it is trained again for longer, has others.
        """
        steps = steps or self.setup.steps
        hypers = hypers_for(setting, self.setup.hypers, self.setup.rule, steps)
        seed = run_seed(self.seed, trial, replicate)
        return make_problem(self.setup.task, self.setup.rule, hypers, steps, seed, traces=self.traces)

    def recompile(self) -> None:
        """After a stop, compile the training step again, off the clock: it was charged when the method began."""
        setup = self.setup
        if not self.past():
            return
        problem = self.problem({key: hyper.values().tolist() for key, hyper in setup.hypers.items()}, 0)
        step = problem.stepper(setup.steps)
        if step == problem.compiled_step:
            step(problem.start, 0)

    def pulse(self, done: int) -> None:
        if self._pulse is not None:
            self._pulse(self, done)

    def record(
        self, trial: int, steps: int, cost: int, counted: int, seconds: float, judged: Judged, values: Setting
    ) -> Evaluation:
        """Pay for an evaluation and write it down, unless that was done before a kill."""
        known = self.found(trial, steps)
        if known is not None:
            return known
        self.purse.pay(cost, seconds)
        new = Evaluation(
            self.method,
            self.seed,
            trial,
            steps,
            cost,
            counted,
            seconds,
            judged.val_loss,
            judged.metrics,
            values,
            judged.status,
        )
        written = self.ledger.append(new, self.under_way)
        if self._on_evaluation is not None:
            self._on_evaluation(written)
        past = self.past()
        if len(past) >= PATIENCE and all(e.status.startswith("crashed") for e in past):
            raise GaveUp(f"its first {len(past)} trials {past[-1].status}")
        if len(past) >= STREAK and all(e.status.startswith("crashed") and not e.cost for e in past[-STREAK:]):
            raise GaveUp(f"its last {STREAK} trials {past[-1].status}")
        return written

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        save_tensors(self.dir / name, {"content": dict(content)})

    def load(self, name: str) -> dict[str, Any] | None:
        payload = load_tensors(self.dir / name)
        return None if payload is None else dict(payload["content"])


def trial_file(number: int, steps: int = 0) -> str:
    """Where a trial is saved on its way; one that is trained anew for each length, by that too."""
    return f"trial-{number:05d}-{steps}.pt" if steps else f"trial-{number:05d}.pt"


class Trial:
    """One training run of a method, in one stretch or rung by rung; saved on its way.

    Args:
        number: of the trial.
        setting: what it trains with, as far as that is known before.
        make: the training, from what was saved of it (or None).
        seconds: what it cost to choose the setting.
        file: where it is saved, if not under its number.
    """

    def __init__(
        self,
        arena: Arena,
        number: int,
        setting: Setting,
        make: Callable[[dict[str, Any] | None], Trains],
        seconds: float = 0.0,
        file: str = "",
    ):
        self.arena, self.number, self.setting, self._make = arena, number, setting, make
        self.file = file or trial_file(number)
        self.training: Trains | None = None
        self.since = 0  # the step of the last evaluation
        self.seconds, self.counted = seconds, 0  # since then

    def to(self, step: int) -> Evaluation:
        """Train up to a step, judge and write it down; what is in the journal already is not repeated.

        An error in the user's code ends the trial, not the comparison: it is written down as a crash.
        """
        known = self.arena.found(self.number, step)
        if known is not None:
            self.since = step
            return known
        self._began, self._first = time.perf_counter(), self.arena.counter.steps
        try:
            judged = self._train(step)
        except (Stop, KeyboardInterrupt):
            raise
        except Exception as error:  # a user's model, loss or data may fail in any way
            judged = Judged(status=f"crashed: {words_of(error)}")
        training = self.training
        done = self.since if training is None else max(self.since, training.t)
        crashed = judged.status.startswith("crashed")
        learnt = training.learnt() if training is not None and done and not crashed else {}
        seconds, counted = self._so_far()
        evaluation = self.arena.record(
            self.number, step, done - self.since, counted, seconds, judged, learnt or self.setting
        )
        self.since, self.seconds, self.counted = step, 0.0, 0
        return evaluation

    def keep(self) -> None:
        """Save where the training is, to go on from there later."""
        self._save(self.seconds, self.counted)

    def forget(self) -> None:
        (self.arena.dir / self.file).unlink(missing_ok=True)

    def _train(self, step: int) -> Judged:
        training, saved_at = self.begun(), time.monotonic()
        while training.t < step and training.failed is None:
            training.advance()
            try:
                self.arena.pulse(training.t)
            except Stop:
                self._checkpoint()
                raise
            if training.t < step and time.monotonic() - saved_at >= self.arena.checkpoint_seconds:
                self._checkpoint()
                saved_at = time.monotonic()
        return judge(training)

    def begun(self) -> Trains:
        """The training, from where it was saved."""
        self._began, self._first = time.perf_counter(), self.arena.counter.steps
        if self.training is not None:
            return self.training
        saved = self.arena.load(self.file)
        self.training = self._make(saved and saved["training"])
        if saved and saved["since"] == self.since:
            self.seconds, self.counted = saved["seconds"], saved["counted"]
        # Killed between an evaluation and its checkpoint: that stretch is repeated, and not charged again.
        while self.training.t < self.since and self.training.failed is None:
            self.training.advance()
            self._began, self._first = time.perf_counter(), self.arena.counter.steps
        return self.training

    def since_begun(self) -> float:
        """Seconds since `begun` was called, without what it repeated."""
        return time.perf_counter() - self._began

    def _so_far(self) -> tuple[float, int]:
        """Seconds and steps since the last evaluation."""
        seconds = self.seconds + time.perf_counter() - self._began
        return seconds, self.counted + self.arena.counter.steps - self._first

    def _save(self, seconds: float, counted: int) -> None:
        if self.training is not None:
            content = {"training": self.training.save(), "since": self.since, "seconds": seconds, "counted": counted}
            self.arena.save(self.file, content)

    def _checkpoint(self) -> None:
        """Save on the way, off the clock."""
        assert self.training is not None
        settle(self.training.problem.device)
        began = time.perf_counter()
        self._save(*self._so_far())
        self._began += time.perf_counter() - began


def settle(device: torch.device) -> None:
    """Wait for what an accelerator has been given: it is work of the method, not of whoever reads the result next."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def words_of(error: Exception) -> str:
    """An error in one short line."""
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text[:200]}"
