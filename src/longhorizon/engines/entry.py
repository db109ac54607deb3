"""One entry point to all engines."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from longhorizon.batches import note_step
from longhorizon.cuda import Precision
from longhorizon.engines.adjoint import Adjoint
from longhorizon.engines.base import Engine, Progress, Run
from longhorizon.engines.choose import ADJOINT_ONLY, choose, instead
from longhorizon.engines.greedy import Greedy
from longhorizon.first_look import NotDifferentiable
from longhorizon.hypers import Hyper
from longhorizon.problem import Problem, environment, make_problem, refuse_unfit
from longhorizon.result import Hypergradient
from longhorizon.rules import Rule
from longhorizon.task import Task
from longhorizon.traces import Traces


def hypergradient(
    task: Task,
    rule: Rule,
    hypers: Mapping[str, Hyper],
    *,
    steps: int,
    engine: Engine | Literal["auto"] = "auto",
    seed: int = 0,
    values: Mapping[str, Any] | None = None,
    per_step: bool = False,
    precision: Precision = "float32",
    traces: Traces | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Hypergradient:
    """The derivative of the final validation loss with respect to every learnt hyperparameter of a training run.

    Args:
        task: what is trained and judged.
        rule: the optimizer, such as `sgd()`; an argument that `hypers` does not list keeps the rule's value.
        hypers: what is learnt, by name.
        steps: T, the number of optimizer steps.
        engine: how to differentiate; "auto" picks forward or adjoint by cost and memory and says which and why in the
            result's `engine`.
        seed: of the initialisation, the batches and the model's randomness.
        values: where to evaluate, per key, instead of at the starts.
        per_step: also return the hypergradient of every single step (adjoint and greedy engines).
        precision: of products: "float32", or "tf32", on a GPU faster and rougher; "bf16" for float32 derivatives and
            plain training runs side by side (of `Factorial`, and where `Hybrid` doubts) in mixed precision, where
            there are kernels for it on a GPU; "float64" wants a model in float64.
        traces: a `Traces` that several calls share, so that the step is traced and compiled for the first only.
        progress: called after every inner step.

    Returns:
        The hypergradient with its status; a run that diverged is a result, not an exception.

    Raises:
        TypeError, ValueError: for bad input, before any work, naming the argument and the remedy.

    Example:
        A parabola L = θ²/2 from θ = 1, one step of lr 0.1: θ₁ = 0.9, dL/dlr = θ₁ · (−1) = −0.9.

        >>> import torch, longhorizon as lh
        >>> class Point(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.x = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        >>> task = lh.Task(Point, lambda model, batch: model.x**2 / 2, lambda seed: [0], lambda seed: [0])
        >>> h = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=1)
        >>> round(h.grad["lr"].item(), 12)
        -0.9
    """
    if progress is not None and not callable(progress):
        raise TypeError(f"progress={progress!r}: expected a function or None.")
    with environment(precision):
        problem = make_problem(task, rule, hypers, steps, seed, values, traces)
        if values is None:
            refuse_unfit(problem)
        return compute(problem, engine, per_step, progress)


def compute(
    problem: Problem,
    engine: Engine | Literal["auto"] = "auto",
    per_step: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Hypergradient:
    """The hypergradient of a problem that is already checked."""
    chosen, why = resolve(problem, engine, per_step)
    try:
        try:
            run = _begun(chosen, problem, progress)
        except NotDifferentiable:
            other = instead(chosen) if engine == "auto" else None
            if other is None:
                raise
            run, why = _begun(other, problem, progress), ADJOINT_ONLY
        while not run.done:
            run.advance()
            if progress is not None:
                progress(run.progress)
    except NotDifferentiable:
        raise
    except Exception as error:
        note_step(error)
        raise
    result = run.result()
    return replace(result, engine=f"{result.engine}: {why}") if why else result


def _begun(engine: Engine, problem: Problem, progress: Callable[[Progress], None] | None) -> Run:
    """A run that has taken a step, which is where an engine finds what it cannot differentiate."""
    run = engine.begin(problem)
    if not run.done:
        run.advance()
        if progress is not None:
            progress(run.progress)
    return run


def check_engine(engine: object) -> None:
    """Refuse what is no engine."""
    if engine != "auto" and (isinstance(engine, str | type) or not hasattr(engine, "begin")):
        raise ValueError(
            f"engine={engine!r}: expected 'auto' or an engine such as lh.Forward(), lh.Adjoint(), lh.Greedy()."
        )


def resolve(problem: Problem, engine: Engine | Literal["auto"], per_step: bool = False) -> tuple[Engine, str]:
    """The engine to use, and why if it was chosen here."""
    check_engine(engine)
    if isinstance(engine, str):
        return choose(problem, per_step)
    if not per_step:
        return engine, ""
    if not isinstance(engine, Adjoint | Greedy):
        raise ValueError(
            f"per_step=True with {type(engine).__name__}: use lh.Adjoint(), or windows=steps for one value per step."
        )
    return replace(engine, per_step=True), ""
