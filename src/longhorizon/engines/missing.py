"""Whether an engine's derivative of a training step is that of the step: one look before a run.

Autograd differentiates what it is shown. A weight behind `detach`, a target under `no_grad`, a gradient that is
reversed or changed by a hook: it trains as its author means it, but the gradient's own derivative then lacks a part,
without a word. Central differences lack nothing. So the two are compared along a random direction, near the start
and in float64, where a shift can be so small that next to no ReLU changes sides.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from longhorizon import tree
from longhorizon.engines.vjp import pulled_back
from longhorizon.functional import Buffers, PlainLosses
from longhorizon.hypers import argument
from longhorizon.inner import busy
from longhorizon.problem import Problem
from longhorizon.rules import Params

SHIFTS = (1e-10, 1e-9)  # in units of the parameters' size; what changes from one to the other is noise, or a kink
TOLERANCE = 1e-3
FEW = 16  # examples of the batch that are enough
FLOOR = 1e-4  # of a part: smaller differences are taken for none
GRADIENT, JUDGEMENT = "the gradient of Task.loss", "the validation loss"

Parts = dict[str, Tensor]  # what a step makes, each part as one vector, by what it is called


class MissingDerivative(UserWarning):
    """Hypergradients that are meant to be exact leave out a part of the derivative."""


def check_derivative(problem: Problem, tangents: bool) -> None:
    """Warn, once per model and loss, of a derivative that lacks a part.

    Nothing is said where it cannot be known: the model does not run in float64, or differences do not settle.

    Args:
        tangents: whether the step is differentiated forwards, which sees through `no_grad`; otherwise backwards.
    """
    if tangents in problem.inner.probed:
        return
    problem.inner.probed.add(tangents)
    found: dict[str, float] = {}
    for count in (FEW, None):
        try:
            found = _missing(problem, tangents, count)
            break
        except Exception:  # whatever a model says to a part of a batch, or to float64
            continue
    cut = _missing_in_rule(problem, tangents)
    if cut:
        shown = " and ".join(f"by {off:.1%} for {name}" for name, off in cut.items())
        warnings.warn(
            f"the rule {problem.rule.name!r} leaves out a part of its derivative: one update is off {shown}, against "
            "central differences. Likely it has a detach, a no_grad, an item() or float(), or works in place. Write it "
            "without, or use engine=lh.Factorial() or lh.FiniteDifference(), which need no derivative.",
            MissingDerivative,
            stacklevel=2,
        )
    if found:
        engine, other = ("Forward", "") if tangents else ("Adjoint", "lh.Forward(), which sees through no_grad, or ")
        shown = " and ".join(f"by {off:.1%} for {name}" for name, off in found.items())
        warnings.warn(
            f"{engine} leaves out a part of the derivative: at the first step it is off {shown}, against central "
            "differences. Likely there is a detach, a no_grad, an autograd.Function with a gradient of its own "
            "(reversed, straight through) or a hook in Task.loss or the model. Write it without, or use engine="
            f"{other}lh.Factorial() or lh.FiniteDifference(), which need no derivative.",
            MissingDerivative,
            stacklevel=2,
        )


def _missing(problem: Problem, tangents: bool, count: int | None = None) -> dict[str, float]:
    """The parts of a step whose derivative is off along two directions, and by how much."""
    found = _Probe(problem, tangents, 0, count).off()
    again = _Probe(problem, tangents, 1, count).off() if found else {}
    return {name: off for name, off in found.items() if name in again}


class _Probe:
    """A step as a function of the parameters and of the buffers that carry their influence on, along one direction."""

    def __init__(self, problem: Problem, tangents: bool, seed: int, count: int | None):
        self.problem, self.inner, self.tangents = problem, problem.inner, tangents
        module, start = problem.inner.functional.module, problem.start
        frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        self.params, self.buffers = tree.doubled(start.params), tree.doubled(start.buffers | frozen)
        self.batch, self.val = tree.doubled((_first(problem.batch(0), count), _first(problem.val[0], count)))
        self.hypers = tree.doubled(problem.hypers_at(0))
        self.losses: list[Tensor] = []
        generator = torch.Generator().manual_seed(seed)
        self.size = torch.cat([p.flatten() for p in self.params.values()]).square().mean().sqrt()

        def random(x: Tensor) -> Tensor:
            return self.size * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)

        moves = self._moves()
        self.params = {name: p + 0.01 * moves[name] * random(p) for name, p in self.params.items()}  # no bias is 0 then
        self.direction = {name: moves[name] * random(p) for name, p in self.params.items()}
        self.direction |= {name: random(self.buffers[name]) for name in self._carriers()}

    def _moves(self) -> Params:
        """1 for every parameter that training moves, by its gradient or a learnt value; nothing goes along others."""
        self.problem.seed_step(0)
        params = {name: p.detach().requires_grad_() for name, p in self.params.items()}
        grads, _, _ = self.inner.gradient(params, self.buffers, self.batch, self.hypers)
        hypers = self.hypers | {key: self.hypers[key] + 0.01 for key in self.problem.learnt}
        moved, _ = self.inner.update(self.params, grads, tree.doubled(self.problem.start.memory), hypers)
        return {name: (moved[name] != p).double() for name, p in self.params.items()}

    def off(self) -> dict[str, float]:
        """The parts whose derivative is not that of central differences, by how much of it."""
        slope, differences = self._slope(), self._differences(SHIFTS[0])
        if not self._off(slope, differences, list(differences)):  # of all together
            return {}
        found = {name: self._off(slope, differences, [name]) for name in differences}
        other = self._differences(SHIFTS[1])
        found = {
            name: off
            for name, off in found.items()
            if off and self._off(slope, other, [name]) and _apart(differences[name], other[name]) < 0.1 * min(1.0, off)
        }
        if not found:
            return {}
        with _Casts() as casts:
            self._at(0.0)
        steady = torch.stack(self.losses)
        if casts.seen or not torch.allclose(steady, steady[0], rtol=1e-4):  # too rough, or random beyond its seed
            return {}
        return {name: off for name, off in found.items() if name in self.across or self._is_read(name)}

    def _off(self, slope: Callable[[Parts], Tensor], differences: Parts, names: list[str]) -> float:
        """How far off the slopes of some parts are, weighted so that each should be 1 by its differences.

        Where differences see no slope at all, it should be 0 in units of the part itself. 0 also for near enough.
        """
        weights, expected = {}, 0
        for name in names:
            d = differences[name]
            size = d.square().sum()
            if not size.isfinite():  # too large to be judged
                return 0.0
            if d.any():
                weights[name], expected = d / size, expected + 1
            elif name in self.across:
                weights[name] = self.across[name]
        off = float((slope(weights) - expected).abs()) if weights else 0.0
        if not off > TOLERANCE:  # nor is NaN
            return 0.0
        return off if expected else 1.0

    def _differences(self, shift: float) -> Parts:
        """Central differences of all parts; exactly zero where they are lost in rounding."""
        above, below = self._at(shift), self._at(-shift)
        found = {name: (x - below[name]) / (2 * shift) for name, x in above.items()}
        sizes = {name: x.norm() for name, x in above.items()}
        along = torch.cat([self.direction[name].flatten() for name in self.params])
        self.across = {GRADIENT: along / along.norm() / sizes[GRADIENT], JUDGEMENT: 1 / sizes[JUDGEMENT].reshape(1)}
        floor = {name: size if name in self.across else size.clamp_min(self.size) for name, size in sizes.items()}
        return {name: d if d.norm() > FLOOR * floor[name] else torch.zeros_like(d) for name, d in found.items()}

    def _at(self, shift: float, only: str = "") -> Parts:
        """All parts, some way along the direction or one buffer's part of it, as plain training sees them."""
        params, buffers = self._moved(shift, only)
        with torch.no_grad():
            self.problem.seed_step(0)
            judged = self.inner.functional.loss(params, buffers, self.val, self.hypers, "val")[0]
        params = {name: p.requires_grad_() for name, p in params.items()}
        self.problem.seed_step(0)
        grads, after, loss = self.inner.gradient(params, buffers, self.batch, self.hypers)
        self.losses.append(loss.detach())
        return {name: part.detach() for name, part in self._parts(grads, after, judged).items()}

    def _parts(self, grads: Params, after: Buffers, judged: Tensor) -> Parts:
        parts = {GRADIENT: torch.cat([g.flatten() for g in grads.values()]), JUDGEMENT: judged.reshape(1)}
        return parts | {_buffer(name): after[name].flatten() for name in self.direction if name in after}

    def _moved(self, shift: float, only: str = "") -> tuple[Params, Buffers]:
        moving = {name: d for name, d in self.direction.items() if not only or name == only}

        def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: x + shift * moving[name] if name in moving else x.clone() for name, x in tensors.items()}

        return moved(self.params), moved(self.buffers)

    def _slope(self) -> Callable[[Parts], Tensor]:
        """The derivative along the direction, as the engine takes it: a weighted sum over parts."""
        params, buffers = self._moved(0.0)
        own = {name: b for name, b in buffers.items() if name in self.direction}
        inputs = [x.requires_grad_() for x in (*params.values(), *own.values())]
        along = [self.direction[name] for name in (*params, *own)]
        functional = self.inner.functional

        def dot(slopes: list[Tensor]) -> Tensor:
            return torch.stack([(s * d).sum() for s, d in zip(slopes, along, strict=True)]).sum()

        self.problem.seed_step(0)
        with torch.enable_grad():
            judged = functional.loss(params, buffers, self.val, self.hypers, "val")[0]
        with functional.again(params, buffers):
            judgement = dot(pulled_back([judged], inputs, [torch.ones_like(judged)]))
        self.problem.seed_step(0)
        if self.tangents:
            slopes = self._tangents(tree.detach(params), tree.detach(own)) | {JUDGEMENT: judgement.reshape(1)}
            return lambda weights: torch.stack([(w * slopes[name]).sum() for name, w in weights.items()]).sum()
        grads, after, loss = self.inner.gradient(params, buffers, self.batch, self.hypers, create_graph=True)
        self.losses.append(loss.detach())
        parts = self._parts(grads, after, judged)

        def slope(weights: Parts) -> Tensor:
            by_hand = weights.get(JUDGEMENT, judgement.new_zeros(1)).sum() * judgement
            names = [name for name in weights if name != JUDGEMENT]
            with functional.again(params, buffers):
                return by_hand + dot(pulled_back([parts[n] for n in names], inputs, [weights[n] for n in names], True))

        return slope

    def _tangents(self, params: Params, own: Buffers) -> Parts:
        """The tangents of all parts but the validation loss."""

        def step(params: Params, own: Buffers) -> tuple[Parts, Tensor]:
            def loss(params: Params) -> tuple[Tensor, tuple[Tensor, Buffers]]:
                with PlainLosses():
                    value, after = self.inner.functional.loss(params, self.buffers | own, self.batch, self.hypers)
                return value, (value, after)

            grads, (value, after) = grad(loss, has_aux=True)(params)
            return self._parts(grads, after, value), value

        along = tuple({name: self.direction[name] for name in part} for part in (params, own))
        found: Any = jvp(step, (params, own), along, has_aux=True)
        self.losses.append(found[2])
        tangents: Parts = found[1]
        return tangents

    def _carriers(self) -> list[str]:
        """The buffers that a step writes and that depend on the parameters, whether autograd sees it or not.

        Those of BatchNorm are left out: they are written by functional.py.
        """
        own = [name for name, part in self.inner.functional.module.named_modules() if isinstance(part, _BatchNorm)]
        names = [name for name, b in self.problem.start.buffers.items() if tree.is_real(b)]
        names = [name for name in names if name.rpartition(".")[0] not in own]
        if not names:
            return []

        def after(shift: float) -> Buffers:
            self.problem.seed_step(0)
            with torch.no_grad():
                return self.inner.functional.loss(*self._moved(shift), self.batch, self.hypers)[1]

        here, there = after(0.0), after(1e-3)
        written = [name for name in names if not tree.equal(here[name], self.buffers[name])]
        return [name for name in written if not tree.equal(here[name], there[name])]

    def _is_read(self, part: str) -> bool:
        """Whether a buffer has an influence on anything but itself."""
        here, there = self._at(0.0), self._at(1e-3, next(n for n in self.direction if part == _buffer(n)))
        return any(_apart(x, there[name]) > 1e-9 for name, x in here.items() if name != part)


def _missing_in_rule(problem: Problem, tangents: bool) -> dict[str, float]:
    """The learnt values, and gradients and memory, whose derivative the rule cuts off; and how much of it."""
    try:
        probe = _RuleProbe(problem)
        learnt = [key for key in problem.learnt if argument(key) in problem.rule.defaults]
        found = {repr(key): probe.off(key, tangents) for key in learnt}
        found["gradients and memory"] = probe.off("", tangents)
    except Exception:  # a rule that does not run in float64, or fails: the run itself says why
        return {}
    return {name: off for name, off in found.items() if off}


class _RuleProbe:
    """One update of the rule, at gradients and memory of every kind, as a function of all that it reads."""

    SHIFTS = (1e-6, 1e-5)

    def __init__(self, problem: Problem):
        self.problem = problem
        state = busy(problem.start)
        generator = torch.Generator().manual_seed(0)

        def random(x: Tensor) -> Tensor:
            return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)

        grads = {name: random(p) for name, p in state.params.items()}
        leaves, self.spec = tree_flatten((tree.doubled(state.params), grads, tree.doubled(state.memory)))
        self.leaves = [x.detach() for x in leaves]
        fixed = len(state.params)  # weights come first, and mostly pass through
        self.along = [random(x) if i >= fixed and tree.is_real(x) else None for i, x in enumerate(leaves)]
        hypers = tree.doubled(problem.hypers_at(0))
        self.hypers = {k: torch.where(v == 0, 0.01, v) if k in problem.learnt else v for k, v in hypers.items()}

    def off(self, key: str, tangents: bool) -> float:
        """How far off the derivative with respect to a value is, or to gradients and memory; 0 for near enough."""
        near, far = (self._differences(key, shift) for shift in self.SHIFTS)
        worst = 0.0
        for part, difference in enumerate(near):
            if not difference.any() or _apart(difference, far[part]) > 1e-3:  # no influence, or one that jumps
                continue
            slope = self._slope(key, part, difference / difference.square().sum(), tangents)
            worst = max(worst, abs(float(slope) - 1))
        return worst if worst > TOLERANCE else 0.0

    def _update(self, leaves: list[Tensor], hypers: dict[str, Tensor]) -> list[Tensor]:
        """New weights, and new memory, each as one vector."""
        params, grads, memory = tree_unflatten(leaves, self.spec)
        new: Any = self.problem.inner.update(params, grads, memory, hypers)
        real = [[x.flatten() for x in tree.leaves(part) if tree.is_real(x)] for part in new]
        return [torch.cat(part) for part in real if part]

    def _moved(self, key: str, shift: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        if key:
            size = self.hypers[key].abs()
            return self.leaves, self.hypers | {key: self.hypers[key] + shift * size}
        return [x if d is None else x + shift * d for x, d in zip(self.leaves, self.along, strict=True)], self.hypers

    def _differences(self, key: str, shift: float) -> list[Tensor]:
        """Central differences of an update; zero where they are lost in rounding."""
        with torch.no_grad():
            above, below = (self._update(*self._moved(key, sign * shift)) for sign in (1, -1))
        found = [(x - y) / (2 * shift) for x, y in zip(above, below, strict=True)]
        return [d if d.norm() * shift > 1e-11 * x.norm() else 0 * d for d, x in zip(found, above, strict=True)]

    def _slope(self, key: str, part: int, weights: Tensor, tangents: bool) -> Tensor:
        """The derivative along the same, as the engine takes it, a weighted sum."""
        here = torch.zeros((), dtype=torch.float64, device=weights.device)
        if tangents:
            found: Any = jvp(lambda x: self._update(*self._moved(key, x))[part], (here,), (torch.ones_like(here),))
            slopes: Tensor = found[1]
            return (weights * slopes).sum()
        with torch.enable_grad():
            made = self._update(*self._moved(key, here.requires_grad_()))[part]
        return pulled_back([made], [here], [weights])[0]


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for float64 that becomes a type in which so small a shift is lost."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if any(x.dtype == torch.float64 for x in tree.leaves((args, kwargs))):
            self.seen |= any(tree.is_real(x) and x.dtype != torch.float64 for x in tree.leaves(result))
        return result


def _first(batch: Any, count: int | None) -> Any:
    """So many examples of a batch, if its tensors look like examples: any of them show what is differentiated."""
    if len({len(x) for x in tree.leaves(batch) if x.ndim}) != 1:
        return batch
    return tree.map(lambda x: x[:count] if isinstance(x, Tensor) and x.ndim else x, batch)


def _buffer(name: str) -> str:
    return f"buffer {name!r}"


def _apart(one: Tensor, other: Tensor) -> float:
    """The distance of two vectors, in units of the longer one."""
    size = torch.maximum(one.norm(), other.norm())
    return float((one - other).norm() / size) if size else 0.0
