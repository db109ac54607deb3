"""Several trials of a grid side by side: they are known beforehand, and all of one length.

On a GPU a small network's step leaves most of the device idle. One batched step that takes a row of trainings further
(lanes.py) costs less than they cost one after the other. Grids and hypergradient descent train so, and searches in a
crew (crew.py); a trial's seconds are its share of the row's. On the CPU trials run one by one: there a search is
repeated to the last bit, which a batched step, whose sums run in another order, would not do.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from longhorizon import tree
from longhorizon.engines.base import CHECK_EVERY
from longhorizon.inner import State
from longhorizon.lanes import Lanes, at_once
from longhorizon.problem import Problem
from longhorizon.rivals.arena import Arena, Stop, Trial, settle, trial_file
from longhorizon.rivals.ledger import Evaluation
from longhorizon.rivals.space import Setting
from longhorizon.rivals.training import Counter, Judged, Training, Trains, judged
from longhorizon.rundir import RunError

FILES = "row-*.pt"  # rows in progress, each named by its trials: several processes may share the folder, or a row
WIDTH = 8  # trials at once; a number of its own is a compilation of its own


class Several(Protocol):
    """Trials in progress side by side."""

    state: Any  # with the trials along the first axis of every tensor

    def step(self, t: int) -> Tensor:
        """Take all of them a step further; returns their losses before it."""
        ...

    def lane(self, i: int) -> State:
        """The model of one of them."""
        ...


@dataclass(frozen=True)
class Kind:
    """How the trials of a method train.

    Attributes:
        one: begins a training or goes on with what was saved of it.
        several: begins trainings side by side or goes on with their state; from problems, state, count and steps, as
            `Lanes`.
        like: the form of one training's state.
        learnt: the setting that one of several turned out to be trained with, after so many steps, if that was not
            known before.
    """

    one: Callable[[Problem, Counter, dict[str, Any] | None], Trains] = Training
    several: Callable[..., Several] = Lanes
    like: Callable[[Problem], Any] = lambda problem: problem.start
    learnt: Callable[[Any, int, int], Setting] = lambda several, i, steps: {}


PLAIN = Kind()


@dataclass(frozen=True)
class Job:
    """A trial to train from scratch."""

    number: int
    setting: Setting
    replicate: int = 0  # other weights and batches for the same number


def width(arena: Arena, runs: int = WIDTH) -> int:
    """How many trials of this method are trained at once, of so many; 1 for one after the other.

    It is decided once, when it is first asked for.
    """
    if arena.width is None and torch.cuda.is_available():
        problem = _any(arena)
        arena.width = at_once(problem, runs) if problem.worth_compiling(arena.setup.steps) else 1
    return arena.width or 1


def evaluate(arena: Arena, jobs: Sequence[Job], steps: int, kind: Kind = PLAIN) -> None:
    """Train and judge each that is not in the journal, in rows; it ends before the last one if the purse does."""
    todo = {job.number: job for job in jobs if arena.found(job.number, steps) is None}
    for job in jobs:
        if job.number not in todo:  # killed after it was written down, it has left its file
            (arena.dir / trial_file(job.number, steps)).unlink(missing_ok=True)
    lone = [job for job in todo.values() if width(arena) > 1 and (arena.dir / trial_file(job.number, steps)).exists()]
    for job in lone:  # begun where there was no row for it
        if not arena.purse.allows(steps):
            return
        alone(arena, todo.pop(job.number), steps, kind)
    rows = []
    for _, saved in _interrupted(arena, steps):  # these go on as they were
        rows.append([todo.pop(number) for number in saved["numbers"] if number in todo])
    rest = list(todo.values())
    rows += [rest[i : i + width(arena)] for i in range(0, len(rest), width(arena))]
    for row in rows:
        while row:
            size = min(len(row), width(arena))  # a saved row may come from a device with room for more
            while size and not arena.purse.allows(size * steps):
                size -= 1
            if not size:
                return
            if width(arena) > 1:
                _row(arena, row[:size], steps, kind)
            else:
                alone(arena, row[0], steps, kind)
            row = row[size:]


def _interrupted(arena: Arena, steps: int) -> list[tuple[str, dict[str, Any]]]:
    """Rows of this length that were saved on their way, by the name of their file; the furthest first."""
    found = []
    for path in sorted(arena.dir.glob(FILES)):
        try:
            saved = arena.load(path.name)
        except RunError:
            if path.exists():
                raise
            continue  # another process has just finished it
        if saved is not None and saved["steps"] == steps:
            found.append((path.name, saved))
    return sorted(found, key=lambda row: -row[1]["t"])


def recompile(arena: Arena, kind: Kind = PLAIN) -> None:
    """After a stop, compile the row's step again, off the clock: it was charged when the method began."""
    if width(arena) == 1:
        if kind is PLAIN:
            arena.recompile()
    elif arena.past() or any(arena.dir.glob("*-[0-9]*.pt")):  # a row, or trials
        several = kind.several([_any(arena)], None, width(arena), arena.setup.steps)
        for t in range(min(2, arena.setup.steps)):  # what looks back begins with the second
            several.step(t)


def _any(arena: Arena) -> Problem:
    return arena.problem({key: hyper.values().tolist() for key, hyper in arena.setup.hypers.items()}, 0)


def alone(arena: Arena, job: Job, steps: int, kind: Kind = PLAIN) -> Evaluation:
    """Train one with its setting from scratch, and judge."""
    one = Trial(
        arena,
        job.number,
        job.setting,
        lambda saved: kind.one(arena.problem(job.setting, job.number, steps, job.replicate), arena.counter, saved),
        file=trial_file(job.number, steps),
    )
    found = one.to(steps)
    one.forget()
    return found


def _row(arena: Arena, jobs: list[Job], steps: int, kind: Kind) -> None:
    """Train these together. If anything fails, each is tried alone, which says whose fault it is."""
    row = None
    try:
        row = _Row(arena, jobs, steps, kind)
        verdicts = row.train()
    except (Stop, KeyboardInterrupt):
        raise
    except Exception:  # a user's model, loss or data may fail in any way
        for job in jobs:
            alone(arena, job, steps, kind)
    else:
        seconds = row.seconds() / len(jobs)
        for i, (job, (taken, verdict)) in enumerate(zip(jobs, verdicts, strict=True)):
            arena.counter.steps += taken
            arena.under_way = (len(jobs) - 1 - i) * seconds
            setting = kind.learnt(row.several, i, taken) or job.setting
            arena.record(job.number, steps, taken, taken, seconds, verdict, setting)
        arena.under_way = 0.0
    if row is not None:
        row.forget()


class _Row:
    """Trainings side by side, saved on their way."""

    def __init__(self, arena: Arena, jobs: list[Job], steps: int, kind: Kind = PLAIN):
        self._began, self._kind = time.perf_counter(), kind
        self.arena, self.steps, self.numbers = arena, steps, [job.number for job in jobs]
        self.problems = [arena.problem(job.setting, job.number, steps, job.replicate) for job in jobs]
        device = self.problems[0].device
        self.t, self._before = 0, 0.0
        self._bad = torch.full((len(jobs),), -1, dtype=torch.int64, device=device)  # the first step that was not finite
        self.several = kind.several(self.problems, None, width(arena), arena.setup.steps)
        # Other trials of the row that it is taken up from may be another process's: that file stays as it is.
        self.file = FILES.replace("*", "-".join(f"{number:05d}" for number in self.numbers))
        self._from: tuple[str, list[int]] = self.file, self.numbers
        for name, saved in _interrupted(arena, steps):
            if set(self.numbers) <= set(saved["numbers"]):
                self._from = name, saved["numbers"]
                self._take_up(saved)
                break

    def _take_up(self, saved: dict[str, Any]) -> None:
        """Go on from where a row was that held these trials, and perhaps others that are done."""
        places = [saved["numbers"].index(number) for number in self.numbers]
        lanes = [*places, *[places[-1]] * (width(self.arena) - len(places))]
        state = tree.unpack(self._kind.like(self.problems[0]), saved["state"])
        chosen = tree.map(lambda x: x[lanes] if isinstance(x, Tensor) else x, state)
        self.several = self._kind.several(self.problems, chosen, width(self.arena), self.arena.setup.steps)
        self.t, self._bad = saved["t"], saved["bad"][places].to(self._bad.device)
        self._before = saved["seconds"] * len(places) / len(saved["numbers"])  # the others are charged theirs

    def train(self) -> list[tuple[int, Judged]]:
        """Steps taken and verdict of each."""
        saved_at = time.monotonic()
        while self.t < self.steps:
            losses = self.several.step(self.t)
            self._bad = torch.where((self._bad < 0) & ~losses.isfinite(), self.t, self._bad)
            self.t += 1
            try:
                self.arena.pulse(self.t)
            except Stop:
                self._save()
                raise
            if self.t % CHECK_EVERY == 0 and bool((self._bad >= 0).all()):
                break
            if time.monotonic() - saved_at >= self.arena.checkpoint_seconds:
                self._save()
                saved_at = time.monotonic()
        found = []
        for i, (problem, bad) in enumerate(zip(self.problems, self._bad.tolist(), strict=True)):
            verdict = judged(problem, partial(self.several.lane, i), self.steps, bad if bad >= 0 else None)
            found.append((self.steps if bad < 0 else bad + 1, verdict))
        return found

    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._began

    def forget(self) -> None:
        """Remove its file, and that of the row it was taken up from when nobody needs it any more."""
        (self.arena.dir / self.file).unlink(missing_ok=True)
        name, numbers = self._from
        if all(self.arena.found(number, self.steps) is not None for number in numbers):
            (self.arena.dir / name).unlink(missing_ok=True)

    def _save(self) -> None:
        """Save on the way, off the clock."""
        settle(self._bad.device)
        began, seconds = time.perf_counter(), self.seconds()
        content = {"numbers": self.numbers, "steps": self.steps, "t": self.t, "bad": self._bad.clone()}
        self.arena.save(self.file, content | {"state": tree.pack(self.several.state), "seconds": seconds})
        self._began += time.perf_counter() - began
