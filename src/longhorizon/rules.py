"""Optimizers as pure functions: `update(params, grads, state, hypers) -> (params, state)`.

Hyperparameters are an argument, not a part of the rule, because they are what we differentiate. Every rule
is written out of place and never branches on a hyperparameter's value, so its JVP and VJP exist everywhere,
at zero too. A hyperparameter arrives as a 0-dim tensor, or as a plain float where it is fixed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Params = dict[str, Tensor]
Values = Mapping[str, Any]  # argument name -> float or 0-dim tensor
Update = Callable[[Params, Params, Any, Values], tuple[Params, Any]]


class Together(NamedTuple):
    """What is done to the gradients of all parameters, before each group's are given to `Rule.update`."""

    arguments: tuple[str, ...]  # that it reads: they are one for all parameters
    change: Callable[[Params, Values], Params]  # (grads, hypers) -> grads, pure


class Range(NamedTuple):
    """What an argument may be, and how far the first outer step moves it, where a `Hyper` does not say."""

    low: float | None = None
    high: float | None = None
    step: float | None = None


@dataclass(frozen=True)
class Rule:
    """How parameters move.

    Args:
        name: what error messages, run records and `torch.optim` twins are found by.
        defaults: every float argument with the value it has unless a `Hyper` sets it; each is learnable.
        init: `params -> state`, a NamedTuple of tensors.
        update: `(params, grads, state, hypers) -> (params, state)`, pure, state of the same structure.
        options: the arguments that are not floats (`nesterov`), for the record.
        together: for what needs all gradients at once, such as their norm: `update` sees one group of parameters.
        elementwise: every entry of a parameter moves by itself, and the state is made of dicts like the parameters and
            of what has no parameter's shape. On a GPU a group then moves as one vector, which compiles faster.
        ranges: per argument, its bounds and its usual outer step, where it has any of its own.
    """

    name: str
    defaults: Mapping[str, float]
    init: Callable[[Params], Any]
    update: Update
    options: Mapping[str, Any] = field(default_factory=dict)
    together: Together | None = None
    elementwise: bool = False
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for argument, value in self.defaults.items():
            if isinstance(value, bool) or not isinstance(value, float | int):
                raise TypeError(
                    f"{self.name}({argument}={value!r}): expected a float; to learn it, list it in `hypers`."
                )
            self.check(argument, [value], f"{self.name}({argument}={value!r})")

    def check(self, argument: str, values: Sequence[float], what: str) -> None:
        """Refuse what is outside an argument's bounds; `what` says who gave it."""
        low, high, _ = self.ranges.get(argument, Range())
        if any((low is not None and v < low) or (high is not None and v > high) for v in values):
            known = [(word, bound) for word, bound in (("least", low), ("most", high)) if bound is not None]
            bounds = [f"at {word} {bound:.10g}" for word, bound in known]
            raise ValueError(f"{what}: {self.name} takes {' and '.join(bounds)} there.")


class SgdState(NamedTuple):
    """What `sgd` remembers."""

    velocity: Params  # as the parameters
    step: Tensor  # int64 scalar, steps taken


def sgd(
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    *,
    nesterov: bool = False,
) -> Rule:
    """Stochastic gradient descent with momentum and coupled weight decay, as `torch.optim.SGD`.

        g ← g + ξ θ        v ← β v + (1 − τ) g   (first step: v ← g)        θ ← θ − α v   (Nesterov: g + β v)

    One difference is deliberate. torch stops updating its buffer while momentum is exactly zero, which makes the
    training run discontinuous there and its derivative with respect to momentum zero. Ours is the limit
    β → 0 of torch's update, so momentum can be learnt from a zero start; `Schedule.attach` reproduces it.

    Args:
        lr: step size α.
        momentum: β.
        dampening: τ.
        weight_decay: ξ.
        nesterov: look ahead along the new velocity.
    """
    if not isinstance(nesterov, bool):
        raise TypeError(f"sgd(nesterov={nesterov!r}): expected True or False.")
    if nesterov and dampening != 0.0:
        raise ValueError(f"sgd(nesterov=True, dampening={dampening}): Nesterov momentum needs dampening 0.")

    defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    return Rule("sgd", defaults, _sgd_init, _sgd_update(nesterov), {"nesterov": nesterov}, elementwise=True)


# Steps are of about the size of the lr, whatever the gradient. At β = 1, and at ε = 0 where a gradient is zero, 0 / 0:
# what is nearest to that in float32 with some room.
_ADAM = {
    "lr": Range(step=1e-3),
    "beta1": Range(-0.9999999, 0.9999999),
    "beta2": Range(0.0, 0.9999999),
    "eps": Range(low=1e-30),
}


class AdamState(NamedTuple):
    """What `adam` and `adamw` remember."""

    first: Params  # running mean of the gradient
    second: Params  # running mean of its square
    step: Tensor  # int64 scalar, steps taken


def adam(
    lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> Rule:
    """Adam with coupled weight decay, as `torch.optim.Adam` (whose `betas` are `beta1` and `beta2` here).

        g ← g + ξ θ    m ← β₁ m + (1 − β₁) g    s ← β₂ s + (1 − β₂) g²    θ ← θ − α m̂ / (√ŝ + ε)

    with m̂ = m / (1 − β₁ᵗ), ŝ = s / (1 − β₂ᵗ). Kingma & Ba, ICLR 2015.

    Args:
        lr: step size α.
        beta1: β₁, of the running mean of the gradient.
        beta2: β₂, of that of its square.
        eps: ε.
        weight_decay: ξ.
    """
    defaults = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    return Rule("adam", defaults, _adam_init, _adam_update(decoupled=False), elementwise=True, ranges=_ADAM)


def adamw(
    lr: float = 1e-3, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 1e-2
) -> Rule:
    """Adam with decoupled weight decay, as `torch.optim.AdamW`: θ ← (1 − α ξ) θ before Adam's step.

    Loshchilov & Hutter, ICLR 2019.

    Args:
        lr: step size α.
        beta1: β₁, of the running mean of the gradient.
        beta2: β₂, of that of its square.
        eps: ε.
        weight_decay: ξ.
    """
    defaults = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    return Rule("adamw", defaults, _adam_init, _adam_update(decoupled=True), elementwise=True, ranges=_ADAM)


def clipped(rule: Rule, grad_clip: float, by: Literal["value", "norm"] = "value") -> Rule:
    """`rule` behind a clip of the gradient at `grad_clip`, itself learnable under that name.

    The clip belongs to the training run, so every engine differentiates through it. It is not the clip of H·Z, which
    `Forward(clip=)` applies to the tangents alone.

    Args:
        rule: what the clipped gradient is given to.
        grad_clip: the level.
        by: "value" clips every entry to ±`grad_clip`, as `torch.nn.utils.clip_grad_value_`. "norm" scales the gradient
            of all parameters together where its norm is larger than `grad_clip`, as `clip_grad_norm_`.
    """
    if not isinstance(rule, Rule):
        raise TypeError(f"clipped(rule={rule!r}): expected a rule such as longhorizon.sgd().")
    if isinstance(grad_clip, bool) or not isinstance(grad_clip, Real) or not grad_clip > 0:
        raise ValueError(f"clipped(grad_clip={grad_clip!r}): the clip level must be a positive number.")

    if by not in ("value", "norm"):
        raise ValueError(f"clipped(by={by!r}): expected 'value' or 'norm'.")
    if "grad_clip" in rule.defaults:
        raise ValueError(f"clipped(rule=…): {rule.name} has a clip already, and the level of both would be one value.")

    name, defaults = f"clipped {rule.name}", {**rule.defaults, "grad_clip": grad_clip}
    ranges = {**rule.ranges, "grad_clip": Range(low=1e-30)}  # below zero every gradient would be one number, or uphill
    if by == "value":
        return replace(rule, name=name, defaults=defaults, update=_behind_a_clip(rule.update), ranges=ranges)
    if rule.together is not None:
        raise ValueError(f"clipped(rule=…, by='norm'): {rule.name} changes all gradients together already.")
    options, together = {**rule.options, "clip_by": by}, Together(("grad_clip",), _scaled_to_norm)
    return replace(rule, name=name, defaults=defaults, options=options, together=together, ranges=ranges)


# Functions are made once for each choice, so that rules of the same arguments are equal and share their traces.


def _sgd_init(params: Params) -> SgdState:
    return SgdState({name: torch.zeros_like(p) for name, p in params.items()}, _counter(params))


@cache
def _sgd_update(nesterov: bool) -> Update:
    def update(params: Params, grads: Params, state: SgdState, h: Values) -> tuple[Params, SgdState]:
        first = state.step == 0
        new_params, new_velocity = {}, {}
        for name, p in params.items():
            g = grads[name] + h["weight_decay"] * p
            damped = (1 - h["dampening"]) * g
            v = h["momentum"] * state.velocity[name] + torch.where(first, g, damped)
            direction = g + h["momentum"] * v if nesterov else v
            new_params[name] = p - h["lr"] * direction
            new_velocity[name] = v
        return new_params, SgdState(new_velocity, state.step + 1)

    return update


@cache
def _behind_a_clip(inner: Update) -> Update:
    def update(params: Params, grads: Params, state: Any, h: Values) -> tuple[Params, Any]:
        level = h["grad_clip"]
        if not isinstance(level, Tensor):
            grads = {name: g.clamp(-level, level) for name, g in grads.items()}
        else:
            grads = {name: torch.minimum(torch.maximum(g, -level), level) for name, g in grads.items()}
        return inner(params, grads, state, h)

    return update


def _scaled_to_norm(grads: Params, h: Values) -> Params:
    squares = torch.stack([g.square().sum() for g in grads.values()]).sum()
    some = squares > 0  # the root has no derivative at zero
    norm = torch.where(some, squares, 1.0).sqrt()
    scale = torch.where(some, h["grad_clip"] / (norm + 1e-6), 1.0).clamp(max=1.0)
    return {name: g * scale for name, g in grads.items()}


def _adam_init(params: Params) -> AdamState:
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    return AdamState(zeros, {name: torch.zeros_like(p) for name, p in params.items()}, _counter(params))


@cache
def _adam_update(decoupled: bool) -> Update:
    def update(params: Params, grads: Params, state: AdamState, h: Values) -> tuple[Params, AdamState]:
        step = state.step + 1
        power = step.double()  # a float raised to an int64 tensor is float32, whatever the parameters are
        correction1 = 1 - h["beta1"] ** power
        correction2 = (1 - h["beta2"] ** power).sqrt()
        new_params, first, second = {}, {}, {}
        for name, p in params.items():
            g = grads[name]
            if decoupled:
                p = p * (1 - h["lr"] * h["weight_decay"])
            else:
                g = g + h["weight_decay"] * p
            m = h["beta1"] * state.first[name] + (1 - h["beta1"]) * g
            s = h["beta2"] * state.second[name] + (1 - h["beta2"]) * g * g
            rate = (h["lr"] / correction1).to(p.dtype)
            new_params[name] = p - rate * m / (_root(s) / correction2.to(p.dtype) + h["eps"])
            first[name], second[name] = m, s
        return new_params, AdamState(first, second, step)

    return update


def _root(s: Tensor) -> Tensor:
    """√s with slope 0 at s = 0, where the true slope is infinite.

    There the first moment is zero too and multiplies it, so the product's derivative is exactly zero; autograd
    would make 0 · ∞ = NaN of it. A negative s still gives NaN, as in torch.
    """
    at_zero = s == 0
    return torch.where(at_zero, 0.0, torch.where(at_zero, 1.0, s).sqrt())


def _counter(params: Params) -> Tensor:
    device = next(iter(params.values())).device
    return torch.zeros((), dtype=torch.int64, device=device)
