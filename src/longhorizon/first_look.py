"""A first look at a run, before its first step: one batch of each kind, both losses, the metrics.

What would fail, or train something else than what is meant, is refused here, by its name and with the remedy.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longhorizon import seeds, tree
from longhorizon.hypers import argument, nearest
from longhorizon.inner import Hypers

if TYPE_CHECKING:  # it looks at itself
    from longhorizon.problem import Problem


class NotDifferentiable(TypeError):  # noqa: N818 - says what is wrong
    """The model uses an operation that torch cannot differentiate in the way an engine needs."""


class Recorder(dict[str, Tensor]):
    """Hyperparameter values that remember which were read, one by one or all.

    It is a dict, as what the loss is given in training; what would copy it without a word goes through `__getitem__`.

    Attributes:
        read: all of them.
        named: those that were asked for by name.
    """

    def __init__(self, values: Hypers):
        super().__init__(values)
        self.read: set[str] = set()
        self.named: set[str] = set()

    def __getitem__(self, key: str) -> Tensor:
        if key not in self:
            raise ValueError(f"the loss reads hyperparameter {key!r}, which `hypers` lacks.{nearest(key, list(self))}")
        self.read.add(key)
        self.named.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        if key in self:
            return self[key]
        return default

    def __iter__(self) -> Iterator[str]:  # with its own, dict(hypers) and f(**hypers) ask for every value
        return super().__iter__()

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        self.read.update(self)
        return super().values()

    def copy(self) -> Hypers:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()


def check_batch(problem: "Problem") -> None:
    """A batch is the same whenever it is asked for."""
    if problem.batches.is_sequence and not tree.equal(problem.batch(0), problem.batch(0)):
        raise ValueError(
            f"Task.{problem.called.train}({problem.seed})[0] gave two different batches: draw randomness from the seed "
            "or from torch, numpy or random, which are seeded for every step."
        )


def check_losses(problem: "Problem") -> None:
    """Call both losses once: scalar, floating point, trainable, and every hyperparameter of the loss is read."""
    functional, state, called = problem.inner.functional, problem.start, problem.called
    params = {name: p.detach().requires_grad_() for name, p in state.params.items()}
    own = list(params.values())
    read: dict[str, set[str]] = {}
    for part, batch, loss in (
        ("train", problem.batch(0), problem.task.loss),
        ("val", problem.val[0], problem.task.val_loss or problem.task.loss),
    ):
        name = "loss" if loss is problem.task.loss else "val_loss"
        source = f"Task.{called.train if part == 'train' else called.val}"
        problem.seed_step(0)
        generators, versions, recorder = seeds.torch_state(), _versions(batch), Recorder(problem.hypers_at(0))
        try:
            with torch.set_grad_enabled(part == "train"):
                value, _ = functional.loss(params, state.buffers, batch, recorder, part)  # type: ignore[arg-type]
        except Exception as error:
            bare = part == "val" and all(isinstance(item, Tensor) for item in problem.val)
            if bare and not isinstance(problem.batch(0), Tensor):
                raise TypeError(
                    f"{called.judged_on(problem.seed)} returned bare tensors, {len(problem.val)} of them, where "
                    "training batches are none: one batch, it seems. It has to return a list of batches; write "
                    f"[(x, y)] for (x, y). On the first tensor Task.{name} fails: {error}"
                ) from error
            say = f"; {source} has to return a list of batches, not one of them" if part == "val" else ""
            error.add_note(f"This was the first batch of {source}, given to Task.{name}{say}.")
            raise
        _check_unchanged(name, source, batch, versions)
        read[part] = recorder.read
        if part == "val":  # one of the rule's that a loss came across among all is not what it is made of
            problem.read_in_validation = {
                key for key in recorder.read if key in recorder.named or argument(key) not in problem.rule.defaults
            }
        if part == "train":
            problem.draws = not tree.equal(generators, seeds.torch_state())
        if not isinstance(value, Tensor):
            found = type(value).__name__
            raise TypeError(f"Task.{name} returned {found} on a batch of {source}: expected a scalar tensor.")
        if value.ndim != 0 or not value.is_floating_point():
            raise ValueError(
                f"Task.{name} returned shape {tuple(value.shape)}, {value.dtype}, on a batch of {source}: "
                "expected a scalar of floating point; take the mean."
            )
        if bool(value.isnan()) or (part == "train" and bool(value.isinf())):
            problem.unfit = problem.unfit or (
                f"Task.{name} is {value.item():g} on the first batch of {source} with fresh weights, before any step: "
                "look for NaN and infinity in the data, and for what the loss makes of them."
            )
        if part == "train" and not any(getattr(node, "variable", None) is p for node in nodes([value]) for p in own):
            raise NotDifferentiable(
                "the training loss does not depend on the parameters, so nothing could be trained: remove `detach`, "
                "`item` or `no_grad` from Task.loss and the model."
            )
        check_own(functional.module, value, name)
    unread = [
        k for k in problem.hypers if argument(k) not in problem.rule.defaults and k not in read["train"] | read["val"]
    ]
    if unread:
        known = sorted(read["train"] | read["val"]) + list(problem.rule.defaults)
        raise ValueError(
            f"unknown hyperparameter {unread[0]!r}: it is no float argument of {problem.rule.name} and the loss never "
            f"reads it.{nearest(unread[0], known)} Tried were the first batches: read it on each, if only times zero."
        )


def _versions(batch: Any) -> list[int]:
    """A number for every tensor of a batch, which grows whenever something is written into it."""
    return [x._version for x in tree.leaves(batch) if not x.is_inference()]


def _check_unchanged(name: str, source: str, batch: Any, versions: list[int]) -> None:
    if _versions(batch) != versions:
        raise ValueError(
            f"Task.{name} or the model changes a batch of {source} in place, and a batch is used more than once: "
            "write it out of place, x / 2 for x.div_(2), and leave inplace=True out of the first layer."
        )


def check_own(module: nn.Module, loss: Tensor, name: str) -> None:
    """Refuse a loss that uses weights of the model as it was made: those are not the ones that are trained."""
    own = {id(p): weight for weight, p in module.named_parameters()}
    for node in nodes([loss]):
        weight = own.get(id(getattr(node, "variable", None)))
        if weight is not None:
            raise ValueError(
                f"Task.{name} reaches parameter {weight!r} by a reference that was kept when the model was made (a "
                "list of its parameters, say), which training never changes: take it from the model inside the loss, "
                "by its name or from model.parameters()."
            )


def nodes(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The operations that autograd recorded on the way to some tensors."""
    ahead = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        yield node
        for later, _ in node.next_functions:
            if later is not None and later not in seen:
                seen.add(later)
                ahead.append(later)


def check_metrics(problem: "Problem") -> None:
    """Take the metrics once, so that one that cannot be taken is known before the run and not after it."""
    if problem.task.metrics is None:
        return
    state = problem.start
    buffers = {name: b.clone() for name, b in state.buffers.items()}  # a model may write into its own
    versions = _versions(problem.val[0])
    source = f"Task.{problem.called.val}"
    try:
        found: Any = problem.inner.functional.measure(state.params, buffers, problem.val[0])
    except Exception as error:
        error.add_note(f"This was the first batch of {source}, given to Task.metrics.")
        raise
    _check_unchanged("metrics", source, problem.val[0], versions)
    if not isinstance(found, Mapping):
        raise TypeError(f"Task.metrics returned {type(found).__name__}: expected a dictionary, e.g. {{'accuracy': …}}.")
    for name, value in found.items():
        try:
            float(value)
        except (TypeError, ValueError, RuntimeError):
            shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(f"Task.metrics returned {shown} for {name!r}: expected a number; take the mean.") from None
