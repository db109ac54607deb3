"""One step back: the VJP of the inner step, in two forms that give the same numbers.

`step_back` goes through torch's autograd, backwards twice, and works for whatever torch can differentiate twice.
`pure_step_back` is one pure function that can be traced and compiled as a whole; on a GPU that is several times faster.
"""

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp

from longhorizon import tree
from longhorizon.engines.clipping import Clip, clipped_back
from longhorizon.functional import PlainLosses
from longhorizon.inner import Hypers, Inner, State
from longhorizon.problem import Problem


def step_back(
    problem: Problem, state: State, step: int, cotangent: State, clip: Clip = None
) -> tuple[State, dict[str, Tensor], Tensor, list[Tensor]]:
    """The VJP of one inner step.

    Args:
        state: before the step.
        cotangent: dL/d(state after the step).
        clip: bound on the Hessian product.

    Returns:
        dL/d(state before the step), dL/d(value) for every learnt hyperparameter of this step, the training loss, and
        with a clip how much larger the first would be without (`clipping.clipped_back`).
    """
    inner, learnt = problem.inner, problem.learnt
    batch, hypers = problem.batch(step), problem.hypers_at(step)
    problem.seed_step(step)
    hypers |= {key: hypers[key].detach().requires_grad_() for key in learnt}
    levers = [hypers[key] for key in learnt]
    params = {name: p.detach().requires_grad_() for name, p in state.params.items()}
    buffers, with_buffers = tree.split(state.buffers)
    memory, with_memory = tree.split(state.memory)
    buffers = [b.detach().requires_grad_() for b in buffers]
    memory = [m.detach().requires_grad_() for m in memory]
    d_params, d_buffers = list(cotangent.params.values()), tree.split(cotangent.buffers)[0]
    d_memory, rebuild_memory = tree.split(cotangent.memory)

    grads, new_buffers, loss = inner.gradient(params, with_buffers(buffers), batch, hypers, create_graph=True)
    leaves = {name: g.detach().requires_grad_() for name, g in grads.items()}
    with torch.enable_grad():
        new_params, new_memory = inner.update(params, leaves, with_memory(memory), hypers)
    d_rule = pulled_back(
        [*new_params.values(), *tree.split(new_memory)[0]],
        [*params.values(), *leaves.values(), *memory, *levers],
        [*d_params, *d_memory],
    )
    n, m = len(params), len(memory)
    to_params, to_grads, to_memory, to_levers = (
        d_rule[:n],
        d_rule[n : 2 * n],
        d_rule[2 * n : 2 * n + m],
        d_rule[2 * n + m :],
    )
    outputs, inputs = [*grads.values(), *tree.split(new_buffers)[0]], [*params.values(), *buffers, *levers]
    with inner.functional.again(params, with_buffers(buffers)):
        d_loss = pulled_back(outputs, inputs, [*to_grads, *d_buffers])
    bounded, grown = clipped_back(d_loss[:n], d_params, to_params, clip)
    before = State(
        {name: a + b for name, a, b in zip(params, to_params, bounded, strict=True)},
        with_buffers(d_loss[n : n + len(buffers)]),
        rebuild_memory(to_memory),
    )
    direct = d_loss[n + len(buffers) :]
    return before, {key: a + b for key, a, b in zip(learnt, to_levers, direct, strict=True)}, loss.detach(), grown


def pure_step_back(
    inner: Inner, state: State, batch: Any, hypers: Hypers, learnt: Hypers, cotangent: State, clip: Clip = None
) -> tuple[State, Hypers, Tensor, list[Tensor]]:
    """The same as a pure function, to be traced.

    The Hessian is symmetric, so its product with q is the tangent of the gradient along q: forward over reverse, whose
    convolutions are faster than those of a second backward pass. What the buffers' cotangent adds travels in the same
    pass, as the tangent of a term with weight zero:

        d/dε ∇[L(θ + εq) + ε·⟨dL/db', b'(θ)⟩]  =  H·q + (db'/dθ)ᵀ·dL/db'

    The gradient itself appears twice, once for the rule and once below the tangent; a trace computes it once. A model
    that draws random numbers would draw twice: it needs `step_back`.

    Args:
        learnt: the part of `hypers` that is differentiated.
    """
    params = state.params
    (buffers, with_buffers), (memory, with_memory) = tree.split(state.buffers), tree.split(state.memory)
    d_buffers, (d_memory, as_memory) = tree.split(cotangent.buffers)[0], tree.split(cotangent.memory)
    one = next(iter(params.values())).new_ones(())
    zero = torch.zeros_like(one)

    def weighted(params: Any, buffers: Any, learnt: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
        with PlainLosses():
            value, after = inner.functional.loss(params, with_buffers(buffers), batch, hypers | learnt)
        later = [(b * d).sum() for b, d in zip(tree.split(after)[0], d_buffers, strict=True)]
        return value + weight * torch.stack(later).sum() if later else value, value

    def update(params: Any, grads: Any, memory: Any, learnt: Any) -> Any:
        new_params, new_memory = inner.pure_update(params, grads, with_memory(memory), hypers | learnt)
        return new_params, tree.split(new_memory)[0]

    def gradients(params: Any, weight: Tensor) -> Any:
        return grad(weighted, argnums=(0, 1, 2), has_aux=True)(params, buffers, learnt, weight)

    grads, value = grad(weighted, has_aux=True)(params, buffers, learnt, zero)
    through_rule: Any = vjp(update, params, grads, memory, learnt)[1]
    to_params, to_grads, to_memory, to_learnt = through_rule((cotangent.params, d_memory))
    tangents: Any = jvp(gradients, (params, zero), (to_grads, one), has_aux=True)[1]
    hessian_product, to_buffers, direct = tangents
    product, kept = list(hessian_product.values()), [to_params[name] for name in hessian_product]
    bounded, grown = clipped_back(product, [cotangent.params[name] for name in hessian_product], kept, clip)
    moved = dict(zip(hessian_product, bounded, strict=True))
    before = State(
        {name: to_params[name] + moved[name] for name in params},
        with_buffers(to_buffers),
        as_memory(to_memory),
    )
    return before, {key: to_learnt[key] + direct[key] for key in learnt}, value, grown


def pulled_back(
    outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor], keep: bool = False
) -> list[Tensor]:
    """autograd.grad that takes outputs without a graph and inputs without an influence; `keep` its graph for more."""
    live = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not live:
        return [torch.zeros_like(x) for x in inputs]
    ends, starts = [o for o, _ in live], [c for _, c in live]
    got = torch.autograd.grad(ends, inputs, starts, retain_graph=keep, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(got, inputs, strict=True)]
