"""The automatic choice between forward and adjoint, and its reason in words; and what tuning makes of it."""

from dataclasses import replace
from typing import Any

import torch

from longhorizon import cuda, tree
from longhorizon.batches import free_memory
from longhorizon.engines.adjoint import MEMORY_SHARE, Adjoint, trajectory_bytes
from longhorizon.engines.forward import Forward
from longhorizon.engines.hybrid import MOST, Hybrid
from longhorizon.lanes import at_once
from longhorizon.problem import Problem

# Cost of a step in plain gradients, measured: "summary" in benchmarks/results/step_cost.json, LeNet on two cores.
FORWARD_BASE, FORWARD_COLUMN = 2.1, 0.67  # traced; a run too short to be traced costs little either way
ADJOINT, REPLAY = 4.2, 1.2

ADJOINT_ONLY = "forward mode cannot differentiate this model's gradient"


def choose(problem: Problem, per_step: bool = False) -> tuple[Any, str]:
    """The cheaper engine that fits into memory, and why it was chosen."""
    free = free_memory(problem.device)
    begun = sum((problem.hypers[key].windows + 1) / 2 for key in problem.learnt)  # columns, on average over the run
    forward = FORWARD_BASE + FORWARD_COLUMN * begun
    tangents = problem.n_values * tree.nbytes(problem.start)
    size = f"N={problem.n_values} values, T={problem.steps} steps, D={problem.n_params} parameters"
    for store, adjoint in (("all", ADJOINT), ("sqrt", ADJOINT + REPLAY)):
        need = trajectory_bytes(problem, store)  # type: ignore[arg-type]
        if need > MEMORY_SHARE * free or not _batches_fit(problem):
            continue
        if adjoint <= forward or per_step or tangents > MEMORY_SHARE * free:
            why = (
                f"{size}: about {adjoint:.0f} gradients a step against {forward:.0f} for forward; "
                f"its states take {_gib(need)} of {_gib(free)} free"
            )
            return Adjoint(store=store, per_step=per_step), why  # type: ignore[arg-type]
        return Forward(), f"{size}: about {forward:.0f} gradients a step against {adjoint:.0f} for the adjoint"
    why = f"{size}: the adjoint's states or batches do not fit into half of {_gib(free)} free"
    if per_step:
        raise ValueError(f"per_step=True needs the adjoint, but {why}; lower `steps`.")
    return Forward(), why


def trusted(problem: Problem) -> tuple[Any, str]:
    """The same for tuning: derivatives, and smoothed differences for values that these cannot be trusted for.

    docs/trust.md says why. The derivatives come from the bounded adjoint wherever it fits, because its meter sees the
    whole run; that of forward begins after the first window. In bfloat16, where training runs side by side are
    cheapest, all values are smoothed, unless there are so many that they would have to share slopes: on CIFAR-10 that
    took less time, and found no worse schedules. More hyperparameters than can be smoothed take the bounded adjoint
    alone; and where it is not known how far a value will move, it is `choose`.
    """
    engine, why = choose(problem)
    fits = isinstance(engine, Adjoint) or (
        trajectory_bytes(problem, "all") <= MEMORY_SHARE * free_memory(problem.device) and _batches_fit(problem)
    )
    hybrid = Hybrid("adjoint" if fits else "forward")
    try:
        hybrid.smoothed().levels(problem)
    except ValueError:  # a hyperparameter without a step
        return engine, why
    if len(problem.learnt) > MOST:  # hyperparameters cannot share a slope, as windows can
        return (replace(engine, clip="auto") if isinstance(engine, Adjoint) else engine), why
    smoothed = hybrid.smoothed()
    runs = smoothed.trainings(problem.n_values)
    few = problem.n_values <= MOST
    if few and cuda.current_precision() == "bf16" and problem.device.type == "cuda":
        together = at_once(problem, runs, problem.runs)
        if together > 1:
            return smoothed, f"N={problem.n_values} values: {runs} plain training runs, {together} side by side in bf16"
    return hybrid, why if fits == isinstance(engine, Adjoint) else f"{why}, whose meter sees the whole run"


def instead(engine: Any) -> Any:
    """What takes the place of an engine of forward mode that was chosen by itself; None for any other engine."""
    if isinstance(engine, Hybrid) and engine.exact == "forward":
        return replace(engine, exact="adjoint")
    return Adjoint() if isinstance(engine, Forward) else None


def _batches_fit(problem: Problem) -> bool:
    if problem.batches.is_sequence:
        return True
    return problem.steps * tree.nbytes(problem.batch(0)) < MEMORY_SHARE * free_memory(torch.device("cpu"))


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"
