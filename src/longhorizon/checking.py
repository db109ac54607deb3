"""Engines against each other and against finite differences, on a recipe of one's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longhorizon import recipe as recipes
from longhorizon import tree
from longhorizon.engines import Adjoint, FiniteDifference, Forward, hypergradient
from longhorizon.hypers import Hyper
from longhorizon.recipe import Recipe
from longhorizon.result import Hypergradient
from longhorizon.task import Task

BETWEEN_ENGINES = 1e-8  # relative, float64
AGAINST_DIFFERENCES = 1e-5
SHIFTS = 1e-4, 1e-5, 1e-6, 1e-3, 3e-3  # smaller ones step over fewer kinks of a ReLU, larger ones drown less
NEARLY = 1.001, 0.999  # of a shift
SHARP, ROUGH = 1e-2, 0.3
ROUNDING = 30 * torch.finfo(torch.float64).eps  # of a loss after training, relative: what no difference can tell


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
    ):
        error = _largest(_differences(run(engine), reference))
        fine = error <= tolerance
        passed &= fine
        name = f"{engine}{' traced' if getattr(engine, 'compile', None) is True else ''}"
        rows.append({"engine": name, "error": f"{error:.1e}", "verdict": "ok" if fine else f"over {tolerance:.0e}"})
    error, over, lost = _against_differences(run, hypers, reference)
    verdict = f"over {AGAINST_DIFFERENCES:.0e} beyond rounding: {', '.join(over)}" if over else "ok"
    if lost:
        verdict += f"; too small to tell from rounding: {', '.join(lost)}"
    rows.append({"engine": str(FiniteDifference()), "error": f"{error:.1e}", "verdict": verdict})
    return rows, passed and not over


def _against_differences(
    run: Any, hypers: dict[str, Hyper], reference: Hypergradient
) -> tuple[float, list[str], list[str]]:
    """The largest error against central differences, each value at the shift that suits it; keys of which it is too
    large; and those that drown in rounding, of which nothing can be told.

    A large shift may step over a kink, a small one drowns in the rounding of the loss. Training may round far worse
    than its loss: Adam divides a gradient that is nothing but rounding (of a bias before BatchNorm) by its eps. So
    where a difference is off, it is taken again over nearly the same shift, which changes what is rounding and nothing
    else. A value is right only by a difference that is sharp to a hundredth, and wrong only if none that is sharp to a
    third agrees with it; of the others nothing can be told.
    """

    def none() -> dict[str, Tensor]:
        return {key: torch.zeros_like(g, dtype=torch.bool) for key, g in reference.grad.items()}

    right, maybe, told = none(), none(), none()  # told: there was a shift at which something could be told
    shown = {key: torch.full_like(g, torch.inf) for key, g in reference.grad.items()}
    for shift in SHIFTS:
        found = run(FiniteDifference(shift))
        again: list[Hypergradient] = []
        for key, exact in reference.grad.items():
            size = torch.maximum(_size(exact), _size(found.grad[key].nan_to_num(0.0)))
            off = (found.grad[key] - exact).abs().nan_to_num(torch.inf) / size
            distance = shift * hypers[key].values().abs()  # none is zero: they were moved
            blur = ROUNDING * abs(reference.val_loss) / distance / size + 10 * shift**2  # and how the loss bends
            if bool((~right[key] & (off > blur + AGAINST_DIFFERENCES)).any()):
                again = again or [run(FiniteDifference(nearly * shift)) for nearly in NEARLY]
                noise = torch.stack([(found.grad[key] - other.grad[key]).abs() for other in again]).max() / size
                blur = torch.maximum(blur, 10 * noise.nan_to_num(torch.inf))
            agrees = off <= blur + AGAINST_DIFFERENCES
            shown[key] = torch.where(~right[key], torch.minimum(off, shown[key]), shown[key])
            right[key], maybe[key] = right[key] | (agrees & (blur <= SHARP)), maybe[key] | (agrees & (blur <= ROUGH))
            told[key] = told[key] | (blur <= ROUGH)
        if all(bool(each.all()) for each in right.values()):
            break
    over = [key for key in shown if bool((told[key] & ~maybe[key]).any())]
    lost = [key for key in shown if key not in over and not bool(right[key].all())]
    return _largest({key: off for key, off in shown.items() if key not in lost}), over, lost


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


def _differences(found: Hypergradient, reference: Hypergradient) -> dict[str, Tensor]:
    """How far off each value is, relative to the largest of its kind."""
    return {
        key: (found.grad[key] - g).abs() / _size(g) if found.status.ok else torch.full_like(g, torch.inf)
        for key, g in reference.grad.items()
    }


def _size(grad: Tensor) -> Tensor:
    return grad.abs().max().clamp_min(1e-12)


def _largest(off: dict[str, Tensor]) -> float:
    return max((float(each.max()) for each in off.values()), default=0.0)
