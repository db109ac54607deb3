"""Hypergradient descent of several runs at once, each as `Descent` would take it alone.

A step has three parts, each one batched operation: the gradients, with the kernels that training runs side by side
have (lanes.py); the hypergradients of the step before; and the update, when the values have moved. The last two are
exact to rounding wherever the first is made.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longhorizon import cuda
from longhorizon.functional import Buffers
from longhorizon.inner import Hypers, State
from longhorizon.lanes import Lanes, in_half, stacked, together
from longhorizon.problem import Problem
from longhorizon.rivals.descent import Mover, one_step_hypergradient
from longhorizon.rivals.space import Setting
from longhorizon.rules import Params


class Moving(NamedTuple):
    """Where the runs are; with several of them, the first axis of every tensor is theirs."""

    now: State
    before: State  # the step before: from where,
    grads: Params  # with which gradient
    used: Hypers  # and which values
    values: dict[str, Tensor]
    trace: dict[str, Tensor]  # of every step


class Descents:
    """Runs of one shape, each a lane.

    Args:
        problems, count, steps: as for `Lanes`.
        start: where the runs go on; without it, their own starts.
    """

    def __init__(self, problems: Sequence[Problem], start: Moving | None = None, count: int = 0, steps: int = 0):
        self.lanes = Lanes(problems, None if start is None else start.now, count, steps)
        self.problems = self.lanes.problems
        self._mover, self._half = Mover(problems[0]), in_half(problems[0].device)
        self.state = self._start() if start is None else start

    @staticmethod
    def like(problem: Problem) -> Moving:
        """The form of one run's state."""
        keys, nothing = Mover(problem).keys, torch.zeros((), dtype=torch.float64, device=problem.device)
        trace = nothing.new_full((problem.steps,), torch.nan)
        start = problem.start
        return Moving(
            start, start, start.params, problem.hypers_at(0), dict.fromkeys(keys, nothing), dict.fromkeys(keys, trace)
        )

    def _start(self) -> Moving:
        problems = self.lanes.in_lanes
        rows: Moving = stacked([self.like(p) for p in problems])
        values = {key: torch.stack([p.values[key][0].to(p.device) for p in problems]) for key in rows.values}
        return rows._replace(values=values)

    def step(self, t: int) -> Tensor:
        """Take all runs a step further; returns the losses before it."""
        lanes, s = self.lanes, self.state
        at = [t] * len(lanes.in_lanes)
        given = lanes.given(at)
        if given is None:
            raise ValueError(f"runs of hypergradient descent differ in their batches' shapes, or models, at step {t}.")
        batch, fixed, usual = given
        hypers, values = self._hypers(fixed, s.values), s.values
        with cuda.half() if self._half else nullcontext():
            gradients = lanes.traced(together(self._gradient), "hd gradients", at, usual)
            grads, buffers, losses = gradients(s.now.params, s.now.buffers, batch, hypers)
        if t:
            found = lanes.traced(together(self._slopes), "hd slopes", at)(s.before, s.grads, s.used, grads)
            values = self._mover.moved(values, found)
            hypers = self._hypers(fixed, values)
        update = lanes.traced(together(self.problems[0].inner.pure_update), "hd update", at)
        params, memory = update(s.now.params, grads, s.now.memory, hypers)
        for key, value in values.items():
            s.trace[key][:, t] = value
        self.state = Moving(State(params, buffers, memory), s.now, grads, hypers, values, s.trace)
        lanes.state = self.state.now
        return losses[: len(self.problems)]  # type: ignore[no-any-return]

    def lane(self, i: int) -> State:
        """The model of one run."""
        return self.lanes.lane(i)

    def learnt(self, i: int, steps: int) -> Setting:
        """The values of every step that a run has taken; a long run's as window means."""
        return self._mover.learnt(self.problems[i], {key: v[i, :steps] for key, v in self.state.trace.items()})

    def _gradient(self, params: Params, buffers: Buffers, batch: Any, hypers: Hypers) -> tuple[Params, Buffers, Tensor]:
        return self.problems[0].inner.pure_gradient(params, buffers, batch, hypers)

    def _slopes(self, before: State, grads: Params, used: Hypers, slope: Params) -> dict[str, Tensor]:
        return one_step_hypergradient(self.problems[0].inner, before, grads, used, self._mover.keys, slope)

    def _hypers(self, fixed: Hypers, values: dict[str, Tensor]) -> Hypers:
        return {**fixed, **{key: v.to(self.problems[0].dtype) for key, v in values.items()}}
