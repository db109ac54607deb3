"""The greedy scheme step by step: every step's hyperparameters are learnt before the next step is taken.

The paper's section 3.2 with H = 1, as in its section 5.2: the run is a row of problems of one step each. At step t the
state is held, λ_t begins where all begin, and goes down the validation loss right after the step, again and again:

    θ' = u(θ_{t-1}, g, memory, λ_t)        λ_t ← outer(λ_t, ∂L_val(θ')/∂λ_t)        then θ_t = θ'

Of the λ_t along the way the one with the lowest validation loss is taken (early stopping): with a fixed rate the last
one may be anywhere, at the beginning for instance, where λ_t goes back and forth between two values.

`Greedy` with `tune` has the same fixed points, but moves all λ_t at once: a step's λ then answers to a run that the
others are about to change. The gradient g is taken once per step, a pass over the validation set once per outer step.
"""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from longhorizon import tree
from longhorizon.engines.base import Watch
from longhorizon.hypers import argument
from longhorizon.inner import Hypers, State
from longhorizon.outer import Outer, Values
from longhorizon.problem import Problem
from longhorizon.rivals.descent import one_step_hypergradient


class Stepwise:
    """A training run that learns the hyperparameters of each step when it comes to it.

    Args:
        problem: its values are where each step's begin. Hyperparameters of the loss keep theirs.
        outer_steps: for every step.
        outer: how λ_t moves.
        saved: what `save` returned.
        keep: which λ_t is taken, the best or the last.
    """

    def __init__(
        self,
        problem: Problem,
        outer_steps: int,
        outer: Outer,
        saved: dict[str, Any] | None = None,
        keep: Literal["best", "last"] = "best",
    ):
        if saved is not None and saved.get("keep", "last") != keep:
            raise ValueError(
                f"Stepwise(keep={keep!r}): what was saved keeps the {saved.get('keep', 'last')}; begin anew."
            )
        self.problem, self.outer_steps, self.outer, self.keep = problem, outer_steps, outer, keep
        self.keys = [key for key in problem.learnt if argument(key) in problem.rule.defaults]
        self._hypers = {key: replace(problem.hypers[key], windows=1) for key in self.keys}
        self.watch = Watch(problem, saved and saved["watch"])
        self.failed = self.watch.first
        self.t: int = saved["t"] if saved else 0
        self.state: State = tree.unpack(problem.start, saved["state"]) if saved else problem.start
        nothing = torch.full((problem.steps,), torch.nan, dtype=torch.float64)
        self.learnt = {key: nothing.clone() for key in self.keys}
        self.val_losses = nothing.clone()  # after every step
        if saved:
            self.learnt, self.val_losses = {k: v.clone() for k, v in saved["learnt"].items()}, saved["val"].clone()

    def advance(self) -> None:
        """Learn the values of a step, and take it."""
        problem, step, inner = self.problem, self.t, self.problem.inner
        batch, now = problem.batch(step), problem.hypers_at(step)
        problem.seed_step(step)
        params = {name: p.detach().requires_grad_() for name, p in self.state.params.items()}
        grads, buffers, loss = inner.gradient(params, self.state.buffers, batch, now)
        grads, buffers = tree.detach(grads), tree.detach(buffers)
        values = {key: self._start(key, step) for key in self.keys}
        rates = self.outer.init(self._hypers)

        def after(hypers: Hypers) -> State:
            with torch.no_grad():
                moved, memory = inner.update(self.state.params, grads, self.state.memory, hypers)
            return State(moved, buffers, memory)

        def look(values: Values) -> tuple[float, Values]:
            used = now | self._as_hypers(values)
            val_loss, slope, _ = problem.validate(after(used), step + 1, compiled=True)
            found = one_step_hypergradient(inner, self.state, grads, used, self.keys, slope.params)
            return float(val_loss.detach()), {key: g.detach().double().cpu().reshape(1) for key, g in found.items()}

        tried: list[tuple[float, Values]] = []
        seen: dict[tuple[float, ...], tuple[float, Values]] = {}
        for _ in range(self.outer_steps):
            where = tuple(float(value) for value in values.values())
            if where not in seen:  # rates that go back and forth come by the same values again
                seen[where] = look(values)
            val_loss, mean = seen[where]
            tried.append((val_loss, values))
            values, rates = self.outer.update(values, mean, rates, self._hypers)
        last = problem.validate(after(now | self._as_hypers(values)), step + 1, compiled=True)[0]
        tried.append((float(last.detach()), values))
        fine = [one for one in tried if math.isfinite(one[0])] if self.keep == "best" else []
        self.val_losses[step], values = min(fine, key=lambda one: one[0]) if fine else tried[-1]
        self.state = after(now | self._as_hypers(values))
        for key, value in values.items():
            self.learnt[key][step] = value[0]
        self.failed = self.watch.see(step, loss.detach())
        self.t += 1

    def save(self) -> dict[str, Any]:
        return {
            "t": self.t,
            "state": tree.pack(self.state),
            "learnt": {key: v.clone() for key, v in self.learnt.items()},
            "val": self.val_losses.clone(),
            "watch": self.watch.save(),
            "keep": self.keep,
        }

    def _start(self, key: str, step: int) -> Tensor:
        return self.problem.values[key][self.problem.window(key, step)].detach().cpu().double().reshape(1)

    def _as_hypers(self, values: dict[str, Tensor]) -> Hypers:
        return {key: v[0].to(self.problem.device, self.problem.dtype) for key, v in values.items()}
