"""How exact the arithmetic of a run is."""

import torch
from torch import Tensor

from longhorizon import tree
from longhorizon.problem import Problem
from longhorizon.rules import Params


def rounding_error(problem: Problem) -> float | None:
    """The relative error of a Hessian product at the run's first step, against float64.

    It is what every engine adds up step by step. In a deep network of ReLUs most of it comes from those whose input
    rounding moves across zero: WRN-16-1 in float32 is near 1e-3 (benchmarks/results/step_cost_wrn16_cuda_float32.json).
    With softplus in their place it is more than twenty times smaller (tests/test_accuracy.py).

    Returns:
        0 for a run in float64, None for a model that cannot be run in it.
    """
    if problem.dtype == torch.float64:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    params = problem.start.params
    direction = {name: torch.randn(p.shape, generator=generator).to(p) for name, p in params.items()}
    try:
        exact = _product(problem, tree.doubled(direction), double=True)
    except Exception:  # something in the model insists on its type, and may say so in any way
        return None
    found = _product(problem, direction, double=False)
    error = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    size = sum(float(b.square().sum()) for b in exact)
    return (error / size) ** 0.5 if size else None


def _product(problem: Problem, direction: Params, double: bool) -> list[Tensor]:
    """H·direction, as float64."""
    params, buffers = problem.start.params, problem.start.buffers
    batch, hypers = problem.batch(0), problem.hypers_at(0)
    if double:
        params, buffers, batch = tree.doubled(params), tree.doubled(buffers), tree.doubled(batch)
        hypers = tree.doubled(hypers)
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    problem.seed_step(0)
    grads, _, _ = problem.inner.gradient(params, buffers, batch, hypers, create_graph=True)
    with torch.enable_grad():
        slope = torch.stack([(grads[name] * direction[name]).sum() for name in params]).sum()
    if not slope.requires_grad:
        return [torch.zeros_like(p, dtype=torch.float64) for p in params.values()]
    with problem.inner.functional.again(params, buffers):
        got = torch.autograd.grad(slope, list(params.values()), allow_unused=True)
    return [
        torch.zeros_like(p).double() if g is None else g.double() for g, p in zip(got, params.values(), strict=True)
    ]
