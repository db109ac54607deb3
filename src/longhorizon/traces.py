"""Traced and compiled steps that several runs share."""

from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longhorizon.inner import Inner
from longhorizon.task import Task


class Traces:
    """What to hand to several calls that train one model by one rule, so that its step is compiled for the first only.

    A traced step is a fixed list of operations, with every constant of the model and the loss in it. So share one
    object between runs for as long as `task.model` and `task.loss` do the same thing; data, seeds, values and the
    number of steps may differ.

    Example:
        >>> import torch, longhorizon as lh
        >>> task = lh.Task(
        ...     lambda: torch.nn.Linear(2, 1),
        ...     lambda model, batch: model(batch).square().mean(),
        ...     lambda seed: [torch.ones(4, 2)] * 3,
        ...     lambda seed: [torch.ones(4, 2)],
        ... )
        >>> traces, rule, hypers = lh.Traces(), lh.sgd(), {"lr": lh.Hyper(0.1)}
        >>> for seed in range(3):
        ...     h = lh.hypergradient(
        ...         task, rule, hypers, steps=3, seed=seed, engine=lh.Adjoint(compile=True), traces=traces
        ...     )
        >>> len(traces)  # a step and a step back
        2
    """

    def __init__(self) -> None:
        self._known: list[tuple[Task, Inner]] = []
        self._probed: list[tuple[Task, set[bool]]] = []  # as `Inner.probed`, of models that are never shared

    def __len__(self) -> int:
        """How many steps have been traced."""
        return sum(len(inner.cache) for _, inner in self._known)

    def shared(self, task: Task, fresh: Inner) -> Inner:
        """The inner step of an earlier run that does the same, with the weights of the fresh one; or the fresh one."""
        if not all(p.requires_grad for p in fresh.functional.module.parameters()):
            known = [probed for other, probed in self._probed if _same(task, other)]
            if known:
                fresh.probed = known[0]
            else:
                self._probed.append((task, fresh.probed))
            return fresh  # what is not trained is a constant of the trace
        for other, inner in self._known:
            if (
                _same(task, other)
                and inner.rule == fresh.rule
                and inner.groups == fresh.groups
                and _same_constants(inner.functional.module, fresh.functional.module)
            ):
                _take_over(inner.functional.module, fresh.functional.module)
                return inner
        self._known.append((task, fresh))
        return fresh


def _same_constants(one: nn.Module, other: nn.Module) -> bool:
    """Whether all is equal that is neither parameter nor buffer: drawn anew, it is a constant of a trace."""
    own = ("_parameters", "_buffers", "_modules", "training")  # these are taken over, or set for every use
    pairs = zip(one.modules(), other.modules(), strict=True)
    kept = [[{k: v for k, v in vars(m).items() if k not in own} for m in pair] for pair in pairs]
    seen = {id(m) for m in one.modules()}  # each is compared once
    return all(_equal(a, b, seen) for a, b in kept)


def _equal(a: Any, b: Any, seen: set[int]) -> bool:
    """Whether two values are alike, down to the tensors, arrays and numbers in them."""
    if a is b or id(a) in seen:  # what holds itself is compared where it was met first
        return True
    if type(a) is not type(b):
        return False
    seen.add(id(a))
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_equal(v, b[k], seen) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_equal(v, w, seen) for v, w in zip(a, b, strict=True))
    if isinstance(a, FunctionType):  # one that is made anew with every model
        return a.__code__ is b.__code__ and _equal(_bound(a), _bound(b), seen)
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and _equal(a.__self__, b.__self__, seen)
    if isinstance(a, partial):
        return _equal([a.func, a.args, a.keywords], [b.func, b.args, b.keywords], seen)
    parts = _attributes(a)
    return bool(a == b) if parts is None else _equal(parts, _attributes(b), seen)


def _attributes(x: Any) -> dict[str, Any] | None:
    """What an object is made of; None for a number, a word or whatever else torch or Python has built in."""
    slots = [name for kind in type(x).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    if not slots and not hasattr(x, "__dict__"):
        return None
    return {name: getattr(x, name) for name in slots if hasattr(x, name)} | getattr(x, "__dict__", {})


def _names(slots: str | Iterable[str]) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _bound(function: FunctionType) -> list[Any]:
    """What a function brings along besides its code."""
    return [*(c.cell_contents for c in function.__closure__ or ()), function.__defaults__, function.__kwdefaults__]


def _take_over(module: nn.Module, fresh: nn.Module) -> None:
    """The weights and buffers of another; also of buffers that a state dict leaves out."""
    module.load_state_dict(fresh.state_dict())
    with torch.no_grad():
        for name, buffer in fresh.named_buffers():
            module.get_buffer(name).copy_(buffer)


def _same(one: Task, other: Task) -> bool:
    """Whether two tasks differ in their data at most."""
    names = ("model", "loss", "val_loss", "val_mode", "metrics")
    return all(getattr(one, name) is getattr(other, name) for name in names)
