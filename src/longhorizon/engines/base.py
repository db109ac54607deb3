"""What all engines have in common.

An engine is a small frozen object that says how to differentiate. `begin` turns it and a problem into a run, which
is advanced one inner step at a time until it is done. A run can be saved between any two advances and begun
again from there, which is what checkpoints are made of; it knows nothing of files.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from longhorizon.first_look import NotDifferentiable
from longhorizon.hypers import window_lengths
from longhorizon.inner import State
from longhorizon.meter import Meter
from longhorizon.problem import Problem
from longhorizon.result import Hypergradient, Status

CHECK_EVERY = 64  # steps between looks at a flag that lives on an accelerator


class ReplayError(RuntimeError):
    """Repeating a stretch of training did not give the same numbers."""


class Progress(NamedTuple):
    """How far a run is."""

    phase: str  # "train", "replay", "back", …
    done: int  # units of work
    total: int


class Run(Protocol):
    """A hypergradient being computed."""

    @property
    def done(self) -> bool: ...

    @property
    def progress(self) -> Progress: ...

    def advance(self) -> None:
        """Do the next inner step."""
        ...

    def result(self) -> Hypergradient: ...

    def save(self) -> dict[str, Any]:
        """Everything needed to go on later, copied: nested dicts and lists of tensors, numbers and strings."""
        ...


class Engine(Protocol):
    """A way to differentiate."""

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> Run: ...


def trainings(engine: object, values: int) -> int:
    """At most how many training runs a hypergradient of so many values takes: one, unless the engine says otherwise."""
    told = getattr(engine, "trainings", None)
    return 1 if told is None else int(told(values))


def side_by_side(run: object) -> int:
    """How many training runs the next `advance` takes a step further: one, unless the run says otherwise."""
    return int(getattr(run, "side_by_side", 1))


class Watch:
    """Training losses, and the first step at which something was not finite.

    On the CPU every step is looked at; on an accelerator the flag stays there and is fetched now and then, so that
    watching costs no synchronisation.
    """

    def __init__(self, problem: Problem, saved: dict[str, Any] | None = None):
        self.every = 1 if problem.device.type == "cpu" else CHECK_EVERY
        self.losses = torch.full((problem.steps,), torch.nan, dtype=problem.dtype, device=problem.device)
        self._first = torch.full((), -1, dtype=torch.int64, device=problem.device)
        if saved is not None:
            self.losses = saved["losses"].to(problem.device, copy=True)
            self._first = saved["first"].to(problem.device, copy=True)

    def see(self, step: int, loss: Tensor) -> int | None:
        """Record a loss; the first bad step once it is known."""
        self.losses[step] = loss
        bad = (self._first < 0) & ~torch.isfinite(loss)
        self._first = torch.where(bad, step, self._first)
        if (step + 1) % self.every and step + 1 < len(self.losses):
            return None
        return self.first

    @property
    def flag(self) -> Tensor:
        """The first bad step where it is, −1 if there is none; to be set by who looks at the losses himself."""
        return self._first

    @flag.setter
    def flag(self, first: Tensor) -> None:
        self._first = first.clone()

    @property
    def first(self) -> int | None:
        first = int(self._first)
        return first if first >= 0 else None

    def save(self) -> dict[str, Any]:
        return {"losses": self.losses.clone(), "first": self._first.clone()}


def check_repeated(step: int, before: Tensor, again: Tensor) -> None:
    """Refuse a step whose loss is another when it is computed again: its derivative would belong to no run."""
    kinds = (before.dtype, again.dtype)  # losses are kept in the dtype of the parameters, which may be another
    tolerance = 1e-6 if kinds == (torch.float64, torch.float64) else 1e-3  # kernels differ in rounding, batches do not
    tolerance = max(tolerance, *(2 * torch.finfo(kind).eps for kind in kinds))
    if not torch.isclose(before, again.to(before.dtype), rtol=tolerance, atol=tolerance, equal_nan=True):
        raise ReplayError(
            f"step {step} had the loss {float(before):g} and, computed again, {float(again):g}: Task.train or the "
            "model is random beyond its seed. Draw randomness from the seed or, in the data, from torch, numpy or "
            "random; in the model, from torch."
        )


def finish(
    problem: Problem,
    engine: str,
    grad: dict[str, Tensor],
    val_loss: Tensor | float,
    state: State,
    status: Status,
    losses: Tensor,
    per_step: dict[str, Tensor] | None = None,
    meter: Meter | None = None,
    error: dict[str, Tensor] | None = None,
) -> Hypergradient:
    """Gather a result on the CPU, in float64 where it is a hypergradient."""
    if status.ok and not torch.isfinite(torch.as_tensor(val_loss)):
        status, grad = Status("validation loss", problem.steps), nothing(problem)
    grad = {key: g.detach().to("cpu", torch.float64) for key, g in grad.items()}
    grad = {key: torch.where(g.isfinite(), g, torch.nan) for key, g in grad.items()}  # no mean over seeds is infinite
    mean = {key: g / window_lengths(problem.steps, len(g)) for key, g in grad.items()}
    return Hypergradient(
        grad,
        mean,
        float(val_loss),
        state.params,
        state.buffers,
        status,
        engine,
        losses.detach().cpu(),
        per_step,
        meter,
        error,
    )


def nothing(problem: Problem) -> dict[str, Tensor]:
    """NaN for every value: the hypergradient of a run that did not get to its end."""
    return {key: torch.full((problem.hypers[key].windows,), torch.nan, dtype=torch.float64) for key in problem.learnt}


def explain(error: Exception, engine: str) -> Exception:
    """Turn torch's complaint about an operation into ours, or return the error as it is."""
    text = str(error).split("\n")[0]
    marks = ["not implemented", "does not support it", "Batching rule", "doesn't have a derivative", "vmap:"]
    marks += ["setup_context", "vmap support", "implement the jvp", "once_differentiable", "differentiate twice"]
    marks += ["saved tensor hooks"]  # torch.utils.checkpoint
    if isinstance(error, RuntimeError | NotImplementedError) and any(mark in str(error) for mark in marks):
        other = "lh.Adjoint()" if engine == "Forward" else "lh.Forward()"
        return NotDifferentiable(
            f"{engine} cannot differentiate this model's gradient: {text} "
            f"Replace the operation by plain torch ones, or try engine={other}, or lh.Factorial(), which needs no "
            "derivative."
        )
    return error
