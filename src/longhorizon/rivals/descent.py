"""Hypergradient descent (Baydin et al., ICLR 2018): hyperparameters that move while the network trains.

With u the optimizer's update, the run so far held constant, the objective of step t's hyperparameters λ is the
training loss of the NEXT batch right after that step:

    θ_t = u(θ_{t-1}, g_{t-1}, memory, λ_{t-1})        h_t = ∂L_t(θ_t)/∂λ_{t-1} = ∇L_t(θ_t) · ∂θ_t/∂λ_{t-1}
    λ_t = λ_{t-1} − rate · clip(h_t)                  and only then the step from θ_t, with the gradient just taken

∇L_t(θ_t) is the gradient that the next step needs anyway, and ∂θ_t/∂λ is that of the rule alone, so a step costs about
one gradient. It is taken by autograd through `Inner.update`, so it holds for every rule, at zero too. On a GPU both
halves of a step, before and after the values move, are compiled where a run is long enough.
Hyperparameters of the loss have no such derivative and keep their start.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longhorizon import compile, tree
from longhorizon.engines.base import Watch
from longhorizon.functional import Buffers
from longhorizon.hypers import argument
from longhorizon.inner import Hypers, Inner, State
from longhorizon.outer import GradientDescent
from longhorizon.problem import Problem
from longhorizon.rivals.space import Setting, thinned
from longhorizon.rivals.training import Counter
from longhorizon.rules import Params

RATE, CLIP = 0.2, 1.0  # the paper's Appendix C


def one_step_hypergradient(
    inner: Inner, state: State, grads: Params, hypers: Hypers, keys: list[str], slope: Params
) -> dict[str, Tensor]:
    """∂L_next/∂λ of one step: the next loss's gradient, pulled back through the rule's update.

    Args:
        state: before the step.
        grads: the gradient that the step used.
        hypers: all values that the step used.
        keys: which of them to differentiate.
        slope: the next batch's gradient at the parameters after the step.
    """

    def after(learnt: Hypers) -> Params:
        return inner.update(state.params, grads, state.memory, {**hypers, **learnt})[0]

    back: Any = torch.func.vjp(after, {key: hypers[key] for key in keys})[1]
    found: dict[str, Tensor] = back(slope)[0]
    return found


class Mover:
    """How hyperparameters move, of one run or, with an entry for each, of several.

    Args:
        problem: what is learnt, and its bounds.
        rate: of the outer SGD.
        clip: elementwise bound on the hypergradient.
    """

    def __init__(self, problem: Problem, rate: float = RATE, clip: float = CLIP):
        self.keys = [key for key in problem.learnt if argument(key) in problem.rule.defaults]
        self._hypers = {key: replace(problem.hypers[key], windows=1) for key in self.keys}
        self._outer, self._clip = GradientDescent(rate), clip
        self._rates = self._outer.init(self._hypers)

    def moved(self, values: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Tensor]:
        """The values after a hypergradient."""
        mean = {key: g.double().clamp(-self._clip, self._clip).reshape(values[key].shape) for key, g in found.items()}
        return self._outer.update(values, mean, self._rates, self._hypers)[0]

    def learnt(self, problem: Problem, trace: dict[str, Tensor]) -> Setting:
        """The values of every step so far; a long run's as window means."""
        fixed = {key: problem.values[key].tolist() for key in problem.hypers if key not in self.keys}
        return fixed | {key: thinned(v.tolist()) for key, v in trace.items()}


class Descent:
    """A training run whose hyperparameters follow their one-step hypergradients.

    Args:
        problem: its values are the starts; a schedule begins with its first window and moves from there.
        rate, clip: as for `Mover`.
    """

    def __init__(
        self,
        problem: Problem,
        counter: Counter,
        rate: float = RATE,
        clip: float = CLIP,
        saved: dict[str, Any] | None = None,
    ):
        self.problem, self.counter = problem, counter
        self._mover = Mover(problem, rate, clip)
        self.keys = self._mover.keys
        self.watch = Watch(problem, saved and saved["watch"])
        self.failed = self.watch.first
        self.compiles = problem.stepper(problem.steps) == problem.compiled_step
        self.t: int = saved["t"] if saved else 0
        self.state: State = tree.unpack(problem.start, saved["state"]) if saved else problem.start
        device = problem.device
        first = {key: problem.values[key][:1].to(device) for key in self.keys}
        self.values: dict[str, Tensor] = {k: v.to(device) for k, v in saved["values"].items()} if saved else first
        size = (problem.steps,)
        self.trace = {key: torch.full(size, torch.nan, dtype=torch.float64, device=device) for key in self.keys}
        self._last: tuple[State, Params, Hypers] | None = None  # the step before: from where, gradient, values
        if saved:
            self.trace = {key: v.to(device, copy=True) for key, v in saved["trace"].items()}
            if saved["last"]:
                like = (problem.start, problem.start.params, problem.hypers_at(0))
                self._last = tree.unpack(like, saved["last"])

    def advance(self) -> None:
        problem, step, inner = self.problem, self.t, self.problem.inner
        batch = problem.batch(step)
        problem.seed_step(step)
        now = self._at(step)
        grads, buffers, loss, found = self._first_half(self.state, batch, now, self._last, step)
        if found:
            self.values = self._mover.moved(self.values, found)
            now = self._at(step)
        before = self.state
        update = self._traced(inner.update, "hd update", step)
        with torch.no_grad():
            moved, memory = update(before.params, grads, before.memory, now)
        self.state = State(moved, buffers, memory)
        self._last = (before, grads, now)
        for key, value in self.values.items():
            self.trace[key][step] = value[0]
        self.counter.steps += 1
        self.failed = self.watch.see(step, loss.detach())
        self.t += 1

    def _first_half(
        self, state: State, batch: Any, hypers: Hypers, last: tuple[State, Params, Hypers] | None, step: int
    ) -> tuple[Params, Buffers, Tensor, dict[str, Tensor]]:
        """The gradient here, the buffers after it, the loss, and the hypergradient of the step before."""
        inner = self.problem.inner

        def before(last: tuple[State, Params, Hypers], slope: Params) -> dict[str, Tensor]:
            state, grads, used = last
            return one_step_hypergradient(inner, state, grads, used, self.keys, slope)

        def plain(state: State, batch: Any, hypers: Hypers, last: Any) -> Any:
            params = {name: p.detach().requires_grad_() for name, p in state.params.items()}
            grads, buffers, loss = inner.gradient(params, state.buffers, batch, hypers)
            grads, buffers = tree.map(torch.Tensor.detach, grads), tree.map(torch.Tensor.detach, buffers)
            return grads, buffers, loss.detach(), before(last, grads) if last else {}

        def pure(state: State, batch: Any, hypers: Hypers, last: Any) -> Any:
            grads, buffers, loss = inner.pure_gradient(state.params, state.buffers, batch, hypers)
            return grads, buffers, loss, before(last, grads)

        if last is None:
            return plain(state, batch, hypers, last)  # type: ignore[no-any-return]
        return self._traced(pure, "hd gradient", step, plain)(state, batch, hypers, last)  # type: ignore[no-any-return]

    def _traced(
        self, fn: Callable[..., Any], key: str, step: int, plain: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """A half of a step, compiled where that pays."""
        problem = self.problem
        if not self.compiles:
            return plain or fn

        def pure(*args: Any) -> Any:  # make_fx counts a method's self
            return fn(*args)

        return compile.traced(pure, problem.inner.cache, key, lambda: problem.seed_step(step), plain)

    def weights(self) -> State:
        return self.state

    def learnt(self) -> Setting:
        """The values of every step so far; a long run's as window means."""
        return self._mover.learnt(self.problem, {key: v[: self.t] for key, v in self.trace.items()})

    def save(self) -> dict[str, Any]:
        return {
            "t": self.t,
            "state": tree.pack(self.state),
            "values": {key: v.clone() for key, v in self.values.items()},
            "trace": {key: v.clone() for key, v in self.trace.items()},
            "last": tree.pack(self._last) if self._last is not None else [],
            "watch": self.watch.save(),
        }

    def _at(self, step: int) -> Hypers:
        moving = {key: v[0].to(self.problem.dtype) for key, v in self.values.items()}
        return {**self.problem.hypers_at(step), **moving}
