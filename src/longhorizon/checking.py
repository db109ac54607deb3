"""Engines against each other and against finite differences, on a recipe of one's own."""

from dataclasses import replace
from typing import Any

import torch

from longhorizon import recipe as recipes
from longhorizon.engines import Adjoint, FiniteDifference, Forward, hypergradient
from longhorizon.hypers import Hyper
from longhorizon.recipe import Recipe
from longhorizon.result import Hypergradient

BETWEEN_ENGINES = 1e-8  # relative, float64
AGAINST_DIFFERENCES = 1e-5
SHIFTS = 1e-4, 1e-6  # the second where the first steps over the kink of a ReLU


def check_engines(recipe: Recipe, inner_steps: int) -> tuple[list[dict[str, Any]], bool]:
    """Differentiate a few steps of a recipe in every way there is; one row per engine, and whether all agree.

    A value that starts at zero is moved to half its outer step, because at lr = 0 nothing else has an influence.
    """
    recipe = replace(recipe, dtype="float64", device="cpu" if recipe.device == "auto" else recipe.device)
    task, _ = recipes.task_of(recipe)
    rule = recipes.rule_of(recipe)
    hypers = {key: _moved(hyper, inner_steps) for key, hyper in recipes.hypers_of(recipe).items()}

    def run(engine: Any) -> Hypergradient:
        return hypergradient(task, rule, hypers, steps=inner_steps, engine=engine, seed=recipe.seed)

    reference = run(Adjoint(store="all"))
    if not reference.status.ok:
        raise ValueError(f"the run to check on failed: {reference.status}")
    dtype = next(iter(reference.params.values())).dtype
    rows = [
        {"engine": "adjoint (reference)", "error": "-", "verdict": f"{sum(map(len, reference.grad.values()))} values"}
    ]
    passed = True
    for engine, tolerance in (
        (Adjoint(store="sqrt"), BETWEEN_ENGINES),
        (Forward(compile=False), BETWEEN_ENGINES),
        (Forward(compile=True), BETWEEN_ENGINES),
        (FiniteDifference(SHIFTS[0]), AGAINST_DIFFERENCES),
    ):
        error = _difference(run(engine), reference)
        if isinstance(engine, FiniteDifference) and error > tolerance:
            error = min(error, _difference(run(FiniteDifference(SHIFTS[1])), reference))
        tolerance = tolerance if dtype == torch.float64 else 1e-2
        fine = error <= tolerance
        passed &= fine
        name = f"{engine}{' traced' if getattr(engine, 'compile', None) is True else ''}"
        rows.append({"engine": name, "error": f"{error:.1e}", "verdict": "ok" if fine else f"over {tolerance:.0e}"})
    return rows, passed


def _moved(hyper: Hyper, steps: int) -> Hyper:
    values = hyper.values()
    unit = hyper.step or 0.1
    values = torch.where(values == 0, 0.5 * unit, values)
    windows = min(hyper.windows, steps)
    return replace(hyper, start=values[:windows].tolist(), windows=windows, low=None, high=None)


def _difference(found: Hypergradient, reference: Hypergradient) -> float:
    """The largest difference of any value, relative to the largest of its kind."""
    if not found.status.ok:
        return float("inf")
    errors = [
        float((found.grad[key] - g).abs().max() / g.abs().max().clamp_min(1e-12)) for key, g in reference.grad.items()
    ]
    return max(errors)
