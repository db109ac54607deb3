"""Engines against each other and against finite differences, on a recipe of one's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from longhorizon import recipe as recipes
from longhorizon import tree
from longhorizon.engines import Adjoint, FiniteDifference, Forward, hypergradient
from longhorizon.hypers import Hyper
from longhorizon.recipe import Recipe
from longhorizon.result import Hypergradient
from longhorizon.task import Task

BETWEEN_ENGINES = 1e-8  # relative, float64
AGAINST_DIFFERENCES = 1e-5
SHIFTS = 1e-4, 1e-6  # the second where the first steps over the kink of a ReLU


def check_engines(recipe: Recipe, inner_steps: int, progress: Any = None) -> tuple[list[dict[str, Any]], bool]:
    """Differentiate a few steps of a recipe in every way there is; one row per engine, and whether all agree.

    A value that starts at zero is moved to half its outer step, because at lr = 0 nothing else has an influence.
    """
    recipe = replace(recipe, dtype="float64", device="cpu" if recipe.device == "auto" else recipe.device)
    with _double():
        return _check(recipe, inner_steps, progress)


def _check(recipe: Recipe, inner_steps: int, progress: Any) -> tuple[list[dict[str, Any]], bool]:
    task, _ = recipes.task_of(recipe, progress)
    task = _in_double(task) if recipe.task else task
    rule = recipes.rule_of(recipe)
    hypers = {key: _moved(hyper, inner_steps) for key, hyper in recipes.hypers_of(recipe).items()}

    def run(engine: Any) -> Hypergradient:
        return hypergradient(task, rule, hypers, steps=inner_steps, engine=engine, seed=recipe.seed)

    try:
        reference = run(Adjoint(store="all"))
    except RuntimeError as cause:
        if "dtype" not in str(cause) or not recipe.task:
            raise
        raise ValueError(f"the check is done in float64, in which your task does not run: {cause}") from cause
    if not reference.status.ok:
        raise ValueError(f"the run to check on failed: {reference.status}")
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
        fine = error <= tolerance
        passed &= fine
        name = f"{engine}{' traced' if getattr(engine, 'compile', None) is True else ''}"
        rows.append({"engine": name, "error": f"{error:.1e}", "verdict": "ok" if fine else f"over {tolerance:.0e}"})
    return rows, passed


@contextmanager
def _double() -> Iterator[None]:
    """New tensors in float64: those that a user's model makes on its way."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _in_double(task: Task) -> Task:
    """A user's task with model and batches in float64: in float32 rounding drowns a difference."""
    return replace(
        task,
        model=lambda: task.model().double(),
        train=lambda seed: _stream_in_double(task.train(seed)),
        val=lambda seed: [tree.doubled(batch) for batch in task.val(seed)],
    )


def _stream_in_double(batches: Any) -> Any:
    return _Doubled(batches) if hasattr(batches, "__getitem__") else map(tree.doubled, batches)


class _Doubled:
    """A sequence of batches in float64."""

    def __init__(self, batches: Any):
        self.batches = batches

    def __getitem__(self, step: int) -> Any:
        return tree.doubled(self.batches[step])


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
