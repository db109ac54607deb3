"""The record of an outer step: a line of a run's journal, and what reports, progress and results are made of."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from longhorizon.outer import Values
from longhorizon.trust import Doubts


@dataclass(frozen=True)
class OuterStep:
    """What one outer step saw and did."""

    index: int  # from 0
    seeds: list[int]  # of its training runs
    steps: int  # inner steps of each
    values: Values  # at which the hypergradient was taken
    grad: Values  # dL_val/d(value), averaged over the seeds
    mean: Values  # the same per inner step
    val_loss: float
    metrics: dict[str, float]
    status: str  # "ok", or what went wrong where
    next: Values  # the values it moved to
    outer: dict[str, Any]  # γ and signs after it, for SignDescent; not the state of a torch optimizer
    engine: str
    seconds: float
    doubts: Doubts = field(default_factory=dict)  # per key and window, what speaks against its hypergradient, or ""
    error: Values = field(default_factory=dict)  # of grad, a standard error; NaN or missing where it is not known
    held: dict[str, list[int]] = field(default_factory=dict)  # per key, the windows that the gate kept from moving
    exploded: bool = False  # training ended finite, but worse than it began, and far worse than before

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; floats keep all their digits."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "OuterStep":
        """The record in one line of a journal."""
        later = ("doubts", "error", "held", "exploded")  # not in every journal
        known = {f.name: content[f.name] for f in fields(cls) if f.name in content or f.name not in later}
        for name in ("values", "grad", "mean", "next", "error"):
            known[name] = {key: _tensors(v) for key, v in content.get(name, {}).items()}
        known["outer"] = _tensors(content["outer"])
        known.setdefault("exploded", "exploded: " in content["status"])
        known["val_loss"] = math.nan if known["val_loss"] is None else known["val_loss"]
        known["metrics"] = {name: math.nan if v is None else v for name, v in known["metrics"].items()}
        return cls(**known)


def went_well(record: OuterStep) -> bool:
    """Whether some run of an outer step got to its end, with some hypergradient: then it was followed."""
    known = any(bool(m.isfinite().any()) for m in record.mean.values())
    return math.isfinite(record.val_loss) and known and not record.exploded


def best_of(records: Sequence[OuterStep]) -> OuterStep | None:
    """The outer step of the lowest validation loss, among those of the longest horizon, as far as records tell.

    As in `Tuning`, the mean of the seeds that survived does not count.
    """
    whole = [r for r in records if went_well(r) and (r.status == "ok" or len(r.seeds) == 1)]
    return min(whole, key=lambda r: (-r.steps, r.val_loss), default=None)


def plain(value: Any) -> Any:
    """A value as JSON takes it: tensors as lists, and null for what is not finite."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def _tensors(value: Any) -> Any:
    """Lists of numbers back to tensors."""
    if isinstance(value, Mapping):
        return {key: _tensors(v) for key, v in value.items()}
    if isinstance(value, list):
        return torch.tensor([math.nan if v is None else v for v in value], dtype=torch.float64)
    return value
