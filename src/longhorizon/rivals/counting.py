"""The training steps of engines, counted where they are taken, several at once where several runs go side by side."""

from dataclasses import dataclass
from typing import Any

from longhorizon.engines.base import Engine, Progress, Run, side_by_side
from longhorizon.problem import Problem
from longhorizon.result import Hypergradient
from longhorizon.rivals.training import Counter


@dataclass(frozen=True)
class Counted:
    """An engine whose runs are counted."""

    engine: Engine
    counter: Counter

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> "CountedRun":
        return CountedRun(self.engine.begin(problem, saved), self.counter)


class CountedRun:
    """A hypergradient in progress, whose training steps are counted; repeated steps and steps back are not."""

    def __init__(self, run: Run, counter: Counter):
        self.run, self.counter = run, counter

    @property
    def done(self) -> bool:
        return self.run.done

    @property
    def progress(self) -> Progress:
        return self.run.progress

    def advance(self) -> None:
        steps = side_by_side(self.run) if self.run.progress.phase == "train" else 0
        self.run.advance()
        self.counter.steps += steps

    def result(self) -> Hypergradient:
        return self.run.result()

    def save(self) -> dict[str, Any]:
        return self.run.save()
