"""Where autograd would leave out a part of the derivative and say nothing: looked for once, before the run."""

import torch
from torch import Tensor

from longhorizon import tree
from longhorizon.functional import Buffers
from longhorizon.inner import State
from longhorizon.problem import NotDifferentiable, Problem
from longhorizon.rules import Params


def check_twice(grads: Params) -> None:
    """Find operations marked as differentiable once only: autograd cuts the graph there and says nothing."""
    ahead = [g.grad_fn for g in grads.values() if g.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node.name().endswith("autograd::Error"):
            raise NotDifferentiable(
                "Adjoint cannot differentiate this model's gradient: a custom autograd.Function is marked "
                "@once_differentiable. Write its backward in plain torch operations, without the mark."
            )
        for later, _ in node.next_functions:
            if later is not None and later not in seen:
                seen.add(later)
                ahead.append(later)


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
