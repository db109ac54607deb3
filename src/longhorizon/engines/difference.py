"""Central differences: the slow truth that the other engines are checked against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longhorizon import tree
from longhorizon.engines.base import Progress, Watch, check_repeated, finish
from longhorizon.hypers import argument, nearest
from longhorizon.inner import State
from longhorizon.problem import Problem
from longhorizon.result import Hypergradient, Status


@dataclass(frozen=True)
class FiniteDifference:
    """(L(λ + δ) − L(λ − δ)) / 2δ for every value: two whole training runs each.

    For checking, in float64. In float32 rounding drowns the difference; over long runs chaos does.

    Args:
        eps: δ as a fraction of the value, of 0.1 where the value is zero. Truncation falls with δ², rounding grows
            with 1/δ; in float64 both are near 1e-9 at the default. A mapping sets it per key.
        only: the values to shift, as windows per key; the others get NaN. By default all.
    """

    eps: float | Mapping[str, float] = 1e-4
    only: Mapping[str, Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for eps in self.eps.values() if isinstance(self.eps, Mapping) else [self.eps]:
            if not eps > 0:
                raise ValueError(f"FiniteDifference(eps={eps}): expected a positive fraction.")

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> "DifferenceRun":
        return DifferenceRun(self, problem, saved)

    def __str__(self) -> str:
        return "central differences"

    def trainings(self, values: int) -> int:
        """Training runs for so many learnt values."""
        return 1 + 2 * (values if self.only is None else sum(map(len, self.only.values())))

    def windows(self, problem: Problem, key: str) -> Sequence[int]:
        """Which values of a key are shifted."""
        every = range(problem.hypers[key].windows)
        if self.only is None:
            return every
        chosen = list(self.only.get(key, ()))
        unknown = [w for w in chosen if w not in every]
        if unknown:
            raise ValueError(f"only={{{key!r}: {unknown}}}: {key} has the windows 0 to {len(every) - 1}.")
        return chosen

    def runs(self, problem: Problem) -> list[tuple[str, int, int]]:
        """The shifted runs, as (key, window, direction)."""
        per_key = {"only": self.only or {}, "eps": self.eps if isinstance(self.eps, Mapping) else {}}
        for name, given in per_key.items():
            for key in given:
                if key not in problem.learnt:
                    raise ValueError(f"{name} has the key {key!r}, which is not learnt.{nearest(key, problem.learnt)}")
        return [(key, w, sign) for key in problem.learnt for w in self.windows(problem, key) for sign in (1, -1)]

    def shifted(self, problem: Problem, key: str, w: int, sign: int) -> Problem:
        """The run with one value shifted."""
        values = {k: v.clone() for k, v in problem.values.items()}
        values[key][w] += sign * self.distance(problem, key, float(values[key][w]))
        return replace(problem, values=values)

    def slopes(self, problem: Problem, losses: Sequence[Tensor]) -> dict[str, Tensor]:
        """Differences over their distance, from the losses of all shifted runs; NaN for values that were left out."""
        grads = {}
        for key in problem.learnt:
            grads[key] = torch.full((problem.hypers[key].windows,), torch.nan, dtype=torch.float64)
            grads[key][list(self.windows(problem, key))] = 0
        for (key, w, sign), loss in zip(self.runs(problem), losses, strict=False):
            delta = self.distance(problem, key, float(problem.values[key][w]))
            grads[key][w] += sign * loss.double().cpu() / (2 * delta)
        return grads

    def distance(self, problem: Problem, key: str, value: float) -> float:
        """δ for one value."""
        eps = self.eps.get(key, 1e-4) if isinstance(self.eps, Mapping) else self.eps
        return eps * (abs(value) or 0.1)


class DifferenceRun:
    """A row of training runs in progress: two per value, then the middle one."""

    def __init__(self, engine: FiniteDifference, problem: Problem, saved: dict[str, Any] | None):
        self.engine, self.problem = engine, problem
        self.runs = engine.runs(problem)  # the middle one comes last: its weights are at hand in the end
        self.total = len(self.runs) + 1
        self.watch = Watch(problem, saved and saved["watch"])
        self.losses: list[Tensor] = [loss.to(problem.device) for loss in saved["losses"]] if saved else []
        self.t = saved["t"] if saved else 0
        self.state: State = tree.unpack(problem.start, saved["state"]) if saved else problem.start
        self._shifted = self._problem()
        self._first: Tensor | None = None  # loss of the first step

    @property
    def done(self) -> bool:
        return len(self.losses) == self.total

    @property
    def progress(self) -> Progress:
        steps = self.problem.steps
        return Progress("train", len(self.losses) * steps + (0 if self.done else self.t), self.total * steps)

    def advance(self) -> None:
        self.state, loss = self._shifted.stepper(self.total * self.problem.steps)(self.state, self.t)
        if self.t == 0:
            self._check_first(loss)
        self.t += 1
        middle = len(self.losses) == self.total - 1
        failed = middle and self.watch.see(self.t - 1, loss) is not None
        if self.t == self.problem.steps or failed:
            self.losses.append(self._shifted.validation_loss(self.state, self.t).double())
            if not self.done:
                self.t, self.state = 0, self.problem.start
                self._shifted = self._problem()

    def save(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "t": self.t, "state": tree.pack(self.state), "watch": self.watch.save()}

    def result(self) -> Hypergradient:
        problem = self.problem
        grads = self.engine.slopes(problem, self.losses)
        status = Status() if self.watch.first is None else Status("loss", self.watch.first)
        if status.ok and self.losses[-1].isfinite() and not all(bool(loss.isfinite()) for loss in self.losses):
            status = Status("difference", problem.steps)
        return finish(problem, str(self.engine), grads, self.losses[-1], self.state, status, self.watch.losses)

    def _check_first(self, loss: Tensor) -> None:
        """All runs begin with one loss, unless it is the loss that is shifted."""
        run = len(self.losses)
        if run < len(self.runs) and argument(self.runs[run][0]) not in self.problem.rule.defaults:
            return
        self._first = loss if self._first is None else self._first
        check_repeated(0, self._first, loss)

    def _problem(self) -> Problem:
        """The run in hand: one value shifted, or none."""
        if len(self.losses) >= len(self.runs):
            return self.problem
        return self.engine.shifted(self.problem, *self.runs[len(self.losses)])
