"""The outer step: from hypergradients to new values.

All three see the hypergradient's window mean (g/W), so that one setting serves any horizon, and move in the coordinate
that the hyperparameter's scale names: the value itself, or its logarithm. Bounds are kept by projection.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from longhorizon.hypers import Hyper, step_size
from longhorizon.inner import fitted
from longhorizon.rules import Rule

Values = dict[str, Tensor]  # key -> one number per window, float64
State = dict[str, Any]  # plain numbers and tensors, so that it can be saved


class Outer(Protocol):
    """How values move from one outer step to the next."""

    def init(self, hypers: Mapping[str, Hyper]) -> State: ...

    def update(self, values: Values, mean: Values, state: State, hypers: Mapping[str, Hyper]) -> tuple[Values, State]:
        """New values from the window means of a hypergradient; a NaN moves nothing."""
        ...

    def shrink(self, state: State) -> State:
        """Smaller steps, after a run that diverged."""
        ...

    def converged(self, state: State) -> bool: ...


@dataclass(frozen=True)
class SignDescent:
    """The paper's Algorithm 2: each value moves by its own γ against the sign of its hypergradient.

        λ ← λ − sign(g) · γ,  and γ ← γ · factor first if the sign differs from the last one

    γ starts at `Hyper.step`. Together with the number of outer steps it bounds the search, which `search_range` tells.
    A hypergradient that is zero or not finite moves nothing and halves nothing.

    Args:
        factor: what γ is multiplied by when a sign flips.
        tolerance: the run has converged when every γ is at most this fraction of its start.
        growth: what γ is multiplied by when a sign is the same again, up to where it started, as in Rprop (there 1.2):
            a value that went back and forth at first can still go somewhere. The paper has none, which is 1. With it, a
            step that would take a value through zero ends at zero: halved steps from zero never go through it again,
            grown ones would, and a learning rate just below it makes a run explode.
    """

    factor: float = 0.5
    tolerance: float = 0.05
    growth: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.factor) or not 0 < self.factor < 1:
            raise ValueError(f"SignDescent(factor={self.factor!r}): expected a number between 0 and 1.")
        if not _is_number(self.tolerance) or not 0 <= self.tolerance < 1:
            raise ValueError(f"SignDescent(tolerance={self.tolerance!r}): expected a fraction from 0 to below 1.")
        if not _is_number(self.growth) or not 1 <= self.growth < math.inf:
            raise ValueError(f"SignDescent(growth={self.growth!r}): expected 1, which is no growth, or more.")

    def __repr__(self) -> str:  # a run directory knows its outer optimizer by this text; older ones have no growth
        growth = "" if self.growth == 1 else f", growth={float(self.growth)!r}"
        return f"SignDescent(factor={float(self.factor)!r}, tolerance={float(self.tolerance)!r}{growth})"

    def init(self, hypers: Mapping[str, Hyper]) -> State:
        gamma = {k: torch.full((h.windows,), step_size(k, h), dtype=torch.float64) for k, h in _learnt(hypers).items()}
        sign = {key: torch.zeros_like(g) for key, g in gamma.items()}
        return {"gamma": gamma, "first": {key: g.clone() for key, g in gamma.items()}, "sign": sign}

    def update(self, values: Values, mean: Values, state: State, hypers: Mapping[str, Hyper]) -> tuple[Values, State]:
        new, gammas, signs = dict(values), dict(state["gamma"]), dict(state["sign"])
        for key, hyper in _learnt(hypers).items():
            sign = torch.where(mean[key].isfinite(), mean[key], 0.0).sign()
            last = state["sign"][key]
            grown = (gammas[key] * self.growth).minimum(state["first"][key]).maximum(gammas[key])
            again = torch.where(sign * last > 0, grown, gammas[key])
            gammas[key] = torch.where(sign * last < 0, gammas[key] * self.factor, again)
            signs[key] = torch.where(sign == 0, last, sign)
            moved = move(values[key], -sign * gammas[key], hyper)
            new[key] = torch.where(values[key] * moved < 0, 0.0, moved) if self.growth > 1 else moved
        return new, {**state, "gamma": gammas, "sign": signs}

    def shrink(self, state: State) -> State:
        return {**state, "gamma": {key: g * self.factor for key, g in state["gamma"].items()}}

    def converged(self, state: State) -> bool:
        # γ against its own start. Against λ, a value near zero never converges and a negative one always has.
        pairs = [(g, state["first"][key]) for key, g in state["gamma"].items()]
        return all(bool((g <= self.tolerance * first).all()) for g, first in pairs)


@dataclass(frozen=True)
class GradientDescent:
    """The paper's Algorithm 1: λ ← λ − rate · g / W.

    Args:
        rate: one for all, or one per key.
        clip: bound on each g / W, so that no value moves further than rate · clip in one outer step.
    """

    rate: float | Mapping[str, float] = 0.1
    clip: float | None = None

    def __post_init__(self) -> None:
        for rate in self.rate.values() if isinstance(self.rate, Mapping) else [self.rate]:
            if not _is_number(rate) or not 0 < rate < math.inf:
                raise ValueError(f"GradientDescent(rate={self.rate!r}): expected positive numbers.")
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise ValueError(f"GradientDescent(clip={self.clip!r}): expected a positive bound, or None for no clip.")

    def __repr__(self) -> str:  # a run directory knows its outer optimizer by this text; older ones have no clip
        return f"GradientDescent(rate={self.rate!r}{'' if self.clip is None else f', clip={self.clip!r}'})"

    def init(self, hypers: Mapping[str, Hyper]) -> State:
        rates = self.rate if isinstance(self.rate, Mapping) else dict.fromkeys(hypers, self.rate)
        for key in _learnt(hypers):
            if key not in rates:
                raise ValueError(f"GradientDescent(rate={dict(rates)}): no rate for hyperparameter {key!r}.")
        return {"rate": {key: float(rates[key]) for key in _learnt(hypers)}}

    def update(self, values: Values, mean: Values, state: State, hypers: Mapping[str, Hyper]) -> tuple[Values, State]:
        new = dict(values)
        for key, hyper in _learnt(hypers).items():
            slope = _in_scale(mean[key], values[key], hyper)
            slope = torch.where(slope.isfinite(), slope, 0.0)
            if self.clip is not None:
                slope = slope.clamp(-self.clip, self.clip)
            new[key] = move(values[key], -state["rate"][key] * slope, hyper)
        return new, state

    def shrink(self, state: State) -> State:
        return {"rate": {key: rate / 2 for key, rate in state["rate"].items()}}

    def converged(self, state: State) -> bool:
        return False


@dataclass(frozen=True)
class TorchOuter:
    """Any `torch.optim` optimizer as the outer one, on g/W.

    Args:
        make: `(parameters) -> optimizer`, for instance `functools.partial(torch.optim.Adam, lr=0.02)`.
    """

    make: Callable[[Any], torch.optim.Optimizer]

    def init(self, hypers: Mapping[str, Hyper]) -> State:
        made = self._made(hypers)
        closure = signature(made.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"outer={type(made).__name__}: its step evaluates the loss anew, which here is a whole training run; "
                "use one that takes a gradient as it is, e.g. torch.optim.Adam."
            )
        return {"optimizer": None, "shrink": 1.0}

    def settings(self, hypers: Mapping[str, Hyper]) -> dict[str, Any]:
        """What the optimizer is; its function's name would not tell, and a saved state would hide another one's."""
        made = self._made(hypers)
        groups = [{name: v for name, v in group.items() if name != "params"} for group in made.param_groups]
        alike = all(group == groups[0] for group in groups)
        chosen = groups[0] if alike else {"groups": groups}
        return {"kind": type(made).__qualname__, "with": {**made.defaults, **chosen}}

    def _made(self, hypers: Mapping[str, Hyper]) -> torch.optim.Optimizer:
        made: object = self.make([torch.nn.Parameter(h.values()) for h in _learnt(hypers).values()])
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"outer returned {made!r}: expected a torch.optim optimizer.")
        return made

    def update(self, values: Values, mean: Values, state: State, hypers: Mapping[str, Hyper]) -> tuple[Values, State]:
        learnt = _learnt(hypers)
        points = {key: values[key].log() if hyper.scale == "log" else values[key] for key, hyper in learnt.items()}
        leaves = [torch.nn.Parameter(p.clone()) for p in points.values()]
        optimizer = self.make(leaves)
        if state["optimizer"] is not None:
            optimizer.load_state_dict(state["optimizer"])
        for leaf, (key, hyper) in zip(leaves, learnt.items(), strict=True):
            slope = _in_scale(mean[key], values[key], hyper)
            leaf.grad = torch.where(slope.isfinite(), slope, 0.0)
        optimizer.step()
        new = dict(values)
        for leaf, (key, hyper) in zip(leaves, learnt.items(), strict=True):
            moved = (leaf.detach() - points[key]) * state["shrink"]
            frozen = ~mean[key].isfinite()  # an optimizer with momentum would move it all the same
            new[key] = move(values[key], torch.where(frozen, 0.0, moved), hyper)
        return new, {"optimizer": optimizer.state_dict(), "shrink": state["shrink"]}

    def shrink(self, state: State) -> State:
        return {**state, "shrink": state["shrink"] / 2}

    def converged(self, state: State) -> bool:
        return False


def as_outer(outer: Any) -> Outer:
    """An outer optimizer from what the user gave."""
    if callable(outer) and not hasattr(outer, "update"):
        return TorchOuter(outer)
    if not hasattr(outer, "update") or isinstance(outer, type):
        shown = f"an {type(outer).__name__} object" if isinstance(outer, torch.optim.Optimizer) else repr(outer)
        raise ValueError(
            f"outer={shown}: expected lh.SignDescent(), lh.GradientDescent(), or a function from parameters to a "
            "torch.optim optimizer, e.g. functools.partial(torch.optim.Adam, lr=0.02)."
        )
    return outer  # type: ignore[no-any-return]


def move(values: Tensor, by: Tensor, hyper: Hyper) -> Tensor:
    """Values moved in their own scale, then put back inside the bounds; one that would be no value stays."""
    moved = _projected(values, by, hyper)
    fine = moved.isfinite() & (moved > 0 if hyper.scale == "log" else True)  # e to a large number is neither
    return torch.where(fine, moved, values)


def _projected(values: Tensor, by: Tensor, hyper: Hyper) -> Tensor:
    moved = values * by.exp() if hyper.scale == "log" else values + by
    return moved.clamp(-math.inf if hyper.low is None else hyper.low, math.inf if hyper.high is None else hyper.high)


def halfway(good: Values, bad: Values, hypers: Mapping[str, Hyper]) -> Values:
    """Between values whose run went well and those of one that did not, in each one's own scale.

    >>> halfway({"lr": torch.tensor([0.1])}, {"lr": torch.tensor([0.4])}, {"lr": Hyper(0.1, scale="log")})
    {'lr': tensor([0.2000])}
    """
    return {
        key: (good[key] * at).sqrt() if hypers[key].scale == "log" else (good[key] + at) / 2 for key, at in bad.items()
    }


def between(values: Values, one: Values, other: Values) -> Values:
    """Values put back between two others.

    >>> between({"lr": torch.tensor([-0.1, 0.2])}, {"lr": torch.tensor([0.3, 0.1])}, {"lr": torch.tensor([0.0, 0.4])})
    {'lr': tensor([0.0000, 0.2000])}
    """
    return {key: v.clamp(one[key].minimum(other[key]), one[key].maximum(other[key])) for key, v in values.items()}


def search_range(
    hypers: Mapping[str, Hyper], outer_steps: int, rule: Rule | None = None
) -> dict[str, tuple[float, float]]:
    """How far `SignDescent` can get from the starts in a number of outer steps.

    Args:
        rule: whose arguments may have bounds and outer steps of their own.

    >>> search_range({"lr": Hyper(0.0, step=0.1, low=-0.5)}, 10)
    {'lr': (-0.5, 1.0)}
    """
    ranges = {}
    for key, hyper in _learnt(hypers if rule is None else fitted(rule, hypers)).items():
        reach = torch.full((hyper.windows,), step_size(key, hyper) * outer_steps, dtype=torch.float64)
        low, high = (_projected(hyper.values(), by, hyper) for by in (-reach, reach))
        ranges[key] = (float(low.min()), float(high.max()))
    return ranges


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _in_scale(mean: Tensor, values: Tensor, hyper: Hyper) -> Tensor:
    return mean * values if hyper.scale == "log" else mean  # dL/d ln λ = λ dL/dλ


def _learnt(hypers: Mapping[str, Hyper]) -> dict[str, Hyper]:
    return {key: hyper for key, hyper in hypers.items() if hyper.learn}
