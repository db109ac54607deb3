"""Traced and compiled steps that several runs share."""

import random
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from longhorizon import tree
from longhorizon.inner import Inner
from longhorizon.task import Task

KEPT = 8  # models of one task that differ in their constants: more would fill a GPU with steps nobody takes again


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

    def __len__(self) -> int:
        """How many steps have been traced."""
        return sum(len(inner.cache) for _, inner in self._known)

    def shared(self, task: Task, fresh: Inner) -> Inner:
        """The inner step of an earlier run that does the same, with the weights of the fresh one; or the fresh one."""
        for other, inner in self._known:
            if (
                _same(task, other)
                and inner.rule == fresh.rule
                and inner.groups == fresh.groups
                and _same_constants(inner.functional.module, fresh.functional.module)
            ):
                _take_over(inner.functional.module, fresh.functional.module)
                return inner
        alike = [known for known in self._known if _same(task, known[0])]  # other constants, the same code
        if alike:
            fresh.probed = alike[0][1].probed
        if len(alike) == KEPT:
            self._known.remove(alike[0])
        self._known.append((task, fresh))
        return fresh


def _same_constants(one: nn.Module, other: nn.Module) -> bool:
    """Whether all is equal that is neither trained nor a buffer: drawn anew, it is a constant of a trace."""
    own = {"_parameters", "_buffers", "_modules", "training"}  # these are taken over, or set for every use
    try:
        pairs = list(zip(one.modules(), other.modules(), strict=True))
        seen: dict[tuple[int, int], Any] = {(id(a), id(b)): (a, b) for a, b in pairs}  # each is compared once
        return all(_equal(_kept(a, own), _kept(b, own), seen) for a, b in pairs)
    except Exception:  # whatever a user's objects do when they are compared: it costs another trace
        return False


def _kept(module: nn.Module, own: set[str]) -> dict[str, Any]:
    frozen = {name: p for name, p in module._parameters.items() if p is not None and not p.requires_grad}
    own = own | {"_flat_weights", "_flat_weight_refs"} if isinstance(module, nn.RNNBase) else own  # the weights again
    return {"": frozen} | {name: x for name, x in vars(module).items() if name not in own}


def _equal(a: Any, b: Any, seen: dict[tuple[int, int], Any]) -> bool:
    """Whether two values are alike, down to the tensors, arrays and numbers in them."""
    if a is b or (id(a), id(b)) in seen:  # what holds itself is compared where it was met first
        return True
    if type(a) is not type(b):
        return False
    seen[id(a), id(b)] = a, b  # held: the next object must not be found in the place of one that is gone
    if isinstance(a, Tensor):
        return a.device == b.device and tree.equal(a, b)
    if isinstance(a, np.ndarray):
        return tree.equal(a, b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_equal(v, b[k], seen) for k, v in a.items())
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(_equal(v, w, seen) for v, w in zip(a, b, strict=True))
    if isinstance(a, FunctionType):  # one that is made anew with every model
        return a.__code__ is b.__code__ and _equal(_bound(a), _bound(b), seen)
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and _equal(a.__self__, b.__self__, seen)
    if isinstance(a, partial):
        return _equal([a.func, a.args, a.keywords], [b.func, b.args, b.keywords], seen)
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, random.Random):
        return bool(a.getstate() == b.getstate())
    if isinstance(a, np.random.Generator):
        return _equal(a.bit_generator.state, b.bit_generator.state, seen)
    if isinstance(a, ref):
        return _equal(a(), b(), seen)
    parts, equal_by = _attributes(a), vars(object)["__eq__"]
    if parts is None or type(a).__eq__ is not equal_by:  # also what is derived from a number or a word
        same = bool(a == b) or bool(a != a and b != b)  # NaN is not itself
        return same and (parts is None or _equal(parts, _attributes(b), seen))
    return _equal(parts, _attributes(b), seen)


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
