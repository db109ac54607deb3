"""What an engine returns."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from longhorizon.functional import Buffers
from longhorizon.meter import Meter
from longhorizon.rules import Params

REMEDIES = {
    "loss": "lower `lr` or shorten the run",
    "tangent": "clip H·Z (clip=10.0), use fewer steps or lower `lr`; values that are finite are exact",
    "adjoint": "clip H·q (clip=10.0), use fewer steps or lower `lr`; values that are finite are exact",
    "validation loss": "lower `lr` or shorten the run",
    "difference": "lower `lr` or shorten the run",
}


@dataclass(frozen=True)
class Status:
    """How a run ended. True in a condition when all went well."""

    what: Literal["", "loss", "tangent", "adjoint", "validation loss", "difference"] = ""
    step: int | None = None  # the step (from 0) where it first went wrong

    @property
    def ok(self) -> bool:
        return not self.what

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return "ok"
        return f"non-finite {self.what} at step {self.step}: {REMEDIES[self.what]}."


@dataclass(frozen=True)
class Hypergradient:
    """The derivative of the final validation loss with respect to every learnt value.

    Attributes:
        grad: per key, one number per window: dL_val / d(value), the sum over the window's steps. NaN only where
            `status` says why.
        mean: the same divided by the window's length, comparable between windows and horizons.
        val_loss: the validation loss at the end of the run (NaN if the run did not get there).
        params, buffers: the trained model; `model.load_state_dict(h.params | h.buffers, strict=False)` restores it.
        status: "ok", or what went non-finite, at which step, and the remedy.
        engine: which engine computed it, and why if it was chosen automatically.
        train_loss: the training loss before every step.
        per_step: per key, the hypergradient of every single step (with `per_step=True`).
        meter: how the tangents or the adjoint grew along the run (Forward and Adjoint).
        error: per key, the standard error of `grad` (Factorial); infinite where too few runs tell it, and
            NaN where `grad` is exact.
        exact: per key, what derivatives alone said, where `grad` has smoothed differences for some values (Hybrid).
    """

    grad: dict[str, Tensor]
    mean: dict[str, Tensor]
    val_loss: float
    params: Params = field(repr=False)
    buffers: Buffers = field(repr=False)
    status: Status
    engine: str
    train_loss: Tensor = field(repr=False)
    per_step: dict[str, Tensor] | None = field(default=None, repr=False)
    meter: Meter | None = field(default=None, repr=False)
    error: dict[str, Tensor] | None = None
    exact: dict[str, Tensor] | None = None
