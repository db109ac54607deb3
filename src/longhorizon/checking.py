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
SHIFTS = 1e-4, 1e-5, 1e-6  # the later ones for values whose first shift steps over the kink of a ReLU
NEARLY = 1.001  # of a shift
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
    large; and those that are lost in rounding.

    A large shift may step over a kink, a small one drowns in the rounding of the loss. What rounding alone explains is
    no error: all of it, for a value as small as Adam's eps. Training may round far worse than its loss: Adam divides a
    gradient that is nothing but rounding (of a bias before BatchNorm) by its eps. So where a difference is off, it is
    taken again over nearly the same shift, which changes what is rounding and nothing else.
    """
    beyond: dict[str, Tensor] = {}  # rounding
    shown: dict[str, Tensor] = {}
    lost: list[str] = []
    for shift in SHIFTS:
        found, again = run(FiniteDifference(shift)), None
        for key, off in _differences(found, reference).items():
            distance = shift * hypers[key].values().abs()  # none is zero: they were moved
            blur = ROUNDING * abs(reference.val_loss) / distance / _size(reference.grad[key])
            if bool((off > blur + AGAINST_DIFFERENCES).any()):
                again = again or run(FiniteDifference(NEARLY * shift))
                measured = (found.grad[key] - again.grad[key]).abs().max() / _size(reference.grad[key])
                blur = torch.maximum(blur, 10 * measured.nan_to_num(0.0))
            if shift == SHIFTS[0] and bool((blur > 1e-2).any()):
                lost.append(key)
            excess = (off - blur).clamp_min(0)
            better = excess < beyond.get(key, torch.full_like(off, torch.inf))
            beyond[key] = torch.where(better, excess, beyond.get(key, excess))
            shown[key] = torch.where(better, off, shown.get(key, off))
        over = [key for key, excess in beyond.items() if float(excess.max()) > AGAINST_DIFFERENCES]
        if not over:
            break
    told = shown if over else {key: off for key, off in shown.items() if key not in lost}
    return _largest(told), over, [key for key in lost if key not in over]


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
