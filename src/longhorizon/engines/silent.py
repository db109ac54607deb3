"""Where autograd would leave out a part of the derivative and say nothing: looked for once, before the run."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from longhorizon import tree
from longhorizon.engines.missing import check_derivative
from longhorizon.first_look import NotDifferentiable, Recorder, check_own, nodes
from longhorizon.functional import Buffers, Part
from longhorizon.hypers import argument
from longhorizon.inner import Hypers, State
from longhorizon.problem import Problem
from longhorizon.rules import Params


def check_losses(problem: Problem, tangents: bool = False) -> None:
    """Find learnt values that a loss turns into plain numbers, and a validation loss cut off from the parameters.

    A value may reach only one of the two losses; a derivative that happens to be zero is fine.

    Args:
        tangents: whether the training step is differentiated forwards, which sees through `no_grad`.
    """
    reached: set[str] = set()
    parts: tuple[Part, Part] = ("train", "val")
    for part in parts:
        if part == "train" and not problem.task.has_learnt_loss:
            continue  # that it can be trained is known already
        batch = problem.batch(0) if part == "train" else problem.val[0]
        loss, inputs, levers, read = _connected(problem, part, batch)
        if part == "val":
            check_own(problem.inner.functional.module, loss, "loss" if problem.task.val_loss is None else "val_loss")
        leaves = {id(getattr(node, "variable", None)) for node in nodes([loss])}
        if part == "val" and not any(id(x) in leaves for x in inputs):
            raise NotDifferentiable(
                "the validation loss does not depend on the parameters; remove `detach` or `no_grad` from it."
            )
        for key in problem.learnt:
            forwards = tangents and part == "train" and key in read
            if id(levers[key]) in leaves or (forwards and _has_tangent(problem, batch, key)):
                reached.add(key)
            elif key in read and _moves(problem, part, batch, key):
                raise _cut_off(problem, key, part)
    for key in problem.learnt:
        if key not in reached and argument(key) not in problem.rule.defaults:
            raise _cut_off(problem, key, "train")
    if tangents:  # the adjoint looks when it has tried a step back
        check_derivative(problem, tangents)


def check_twice(grads: Params) -> None:
    """Find operations marked as differentiable once only: autograd cuts the graph there and says nothing."""
    for node in nodes(grads.values()):
        if node.name().endswith("autograd::Error"):
            raise NotDifferentiable(
                "Adjoint cannot differentiate this model's gradient: a custom autograd.Function is marked "
                "@once_differentiable. Write its backward in plain torch operations, without the mark."
            )


def check_buffers(problem: Problem, state: State, step: int, after: Buffers) -> None:
    """Find buffers that carry an influence of the parameters to a loss, written where autograd cannot see it.

    Forward mode does see it: `no_grad` does not stop tangents.
    """

    def changed(name: str, b: Tensor) -> bool:
        return tree.is_real(b) and not tree.equal(b.detach(), state.buffers[name])

    def hidden(b: Tensor) -> bool:  # `Functional.loss` hands out clones: still one, though it was written to
        return not b.requires_grad or (
            b._version > 0 and b.grad_fn is not None and b.grad_fn.name() == "CloneBackward0"
        )

    def influence(params: Params, buffers: Buffers) -> tuple[Buffers, list[Tensor]]:
        functional, batch, hypers = problem.inner.functional, problem.batch(step), problem.hypers_at(step)
        with torch.no_grad():
            problem.seed_step(step)
            loss, new = functional.loss(params, buffers, batch, hypers)
            problem.seed_step(step)
            judged, _ = functional.loss(params, buffers, problem.val[0], hypers, "val")
        return new, [loss, judged]

    suspects = [name for name, b in after.items() if changed(name, b) and hidden(b)]
    if not suspects:
        return
    here, losses = influence(state.params, state.buffers)
    moved, _ = influence({name: _nudge(p) for name, p in state.params.items()}, state.buffers)
    for name in suspects:
        others, judged = influence(state.params, state.buffers | {name: _nudge(state.buffers[name])})
        rest = [others[other] for other in others if other != name]
        read = not tree.equal([judged, rest], [losses, [here[other] for other in others if other != name]])
        if read and not tree.equal(moved[name], here[name]):
            raise NotDifferentiable(
                f"Adjoint cannot differentiate through buffer {name!r}: it depends on the parameters and a loss reads "
                "it, but the model writes it under no_grad or through .data. Write it in plain sight of autograd, or "
                "use engine=lh.Forward()."
            )


def _nudge(x: Tensor) -> Tensor:
    """Slightly other numbers, every element by another amount (a softmax would not see a common shift)."""
    return x + torch.linspace(0.01, 0.03, x.numel(), dtype=x.dtype, device=x.device).view_as(x)


def _connected(problem: Problem, part: Part, batch: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor], set[str]]:
    """A loss with its graph, the floats of the state and the learnt values that the graph begins at, and what was read.

    Torch refuses to take a tensor with a derivative for some arguments; it is found out which value was given to one.
    """

    def attempt(keys: list[str]) -> tuple[Tensor, list[Tensor], dict[str, Tensor], set[str]]:
        hypers = problem.hypers_at(0)
        levers = {key: hypers[key].detach().requires_grad_() for key in keys}
        recorder = Recorder(hypers | levers)
        loss, inputs = _loss(problem, part, batch, recorder)
        return loss, inputs, levers, recorder.read

    try:
        return attempt(problem.learnt)
    except Exception:
        attempt([])  # an error of the user's own comes out here, as it is
        for key in problem.learnt:
            try:
                attempt([key])
            except Exception as error:
                raise _cut_off(problem, key, part) from error
        raise


def _loss(problem: Problem, part: Part, batch: Any, hypers: Hypers) -> tuple[Tensor, list[Tensor]]:
    """A loss at the start of training, and the floats of the state that it is a function of."""
    real, rebuild = tree.split((problem.start.params, problem.start.buffers))
    real = [leaf.detach().requires_grad_() for leaf in real]
    params, buffers = rebuild(real)
    problem.seed_step(0)
    with torch.enable_grad():
        return problem.inner.functional.loss(params, buffers, batch, hypers, part)[0], real


def _has_tangent(problem: Problem, batch: Any, key: str) -> bool:
    """Whether the training loss carries a tangent of a value, though autograd sees none: `no_grad` does not stop it."""
    hypers = problem.hypers_at(0)
    try:
        with forward_ad.dual_level():
            hypers[key] = forward_ad.make_dual(hypers[key], torch.ones_like(hypers[key]))  # type: ignore[no-untyped-call]
            loss = _loss(problem, "train", batch, hypers)[0]
            return forward_ad.unpack_dual(loss).tangent is not None  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError):
        return True  # an operation without a tangent: the first step names it


def _moves(problem: Problem, part: Part, batch: Any, key: str) -> bool:
    """Whether a loss changes with a value, up or down; one of the two may be out of range."""
    hypers = problem.hypers_at(0)
    here = _loss(problem, part, batch, hypers)[0]
    shift = 0.1 * hypers[key].abs().clamp_min(0.1)
    for other in (hypers[key] + shift, hypers[key] - shift):
        try:
            there = _loss(problem, part, batch, hypers | {key: other})[0]
        except Exception:  # whatever the user's loss says about a value that it never gets
            continue
        if not torch.isclose(here, there, equal_nan=True):  # a kernel on a GPU may round differently each time
            return True
    return False


def _cut_off(problem: Problem, key: str, part: Part) -> NotDifferentiable:
    name = "val_loss" if part == "val" and problem.task.val_loss is not None else "loss"
    return NotDifferentiable(
        f"hyperparameter {key!r} has no derivative in Task.{name}, which uses it as a plain number (by item, float, "
        "detach or no_grad, in a comparison, or as an argument such as label_smoothing= or p=): its hypergradient "
        "would be 0. Write it with tensor operations, for label smoothing (1 - s) * cross_entropy + s * "
        "(-log_softmax).mean(); or use engine=lh.Factorial(), which needs no derivative, or Hyper(learn=False)."
    )
