"""The journal of a comparison: one line per evaluation, of all methods, only ever appended to.

Several processes may append. Each line carries what it cost and, from the lines before it, what its method has spent by
then and whether it is the best so far, so that a line can be read alone.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from longhorizon.outer_step import plain
from longhorizon.rivals.space import Setting
from longhorizon.rundir import RunError, append_line


@dataclass(frozen=True)
class Evaluation:
    """One trained model, judged on the validation set."""

    method: str
    seed: int
    trial: int  # from 0, per method and seed
    steps: int  # of training behind the judged model
    cost: int  # inner steps charged for it: fewer than `steps` where training went on from an earlier evaluation
    counted: int  # the same, by the counter in the training loop
    seconds: float  # of the method's own work: choosing, training, judging
    val_loss: float  # infinite if there is none
    metrics: dict[str, float]
    values: Setting  # what to train with; empty for an optimizer that has nothing to set
    status: str = "ok"  # or "diverged: …", "crashed: …"
    # Filled in by the ledger
    total_steps: int = 0  # charged to the method with this seed, so far
    total_seconds: float = 0.0  # with those of trials that were at work beside it
    best: bool = False  # of its method and seed, so far
    best_loss: float = field(default=math.inf)  # the validation loss of the best so far

    @property
    def key(self) -> tuple[str, int, int, int]:
        return (self.method, self.seed, self.trial, self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; null for a loss that is not finite."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Evaluation":
        known = {f.name: content[f.name] for f in fields(cls)}
        for name in ("val_loss", "best_loss"):
            known[name] = math.inf if known[name] is None else known[name]
        return cls(**known)


def beats(one: Evaluation, other: Evaluation | None) -> bool:
    """Whether a method would rather have `one`: of longer training, or of equal training and lower loss.

    This is the tuner's own rule for its best run.
    """
    if not math.isfinite(one.val_loss):
        return False
    return other is None or (one.steps, -one.val_loss) > (other.steps, -other.val_loss)


def incumbents(evaluations: Iterable[Evaluation]) -> list[Evaluation]:
    """Those that were the best of their method and seed when they came."""
    return [e for e in evaluations if e.best]


class Ledger:
    """The journal in a directory."""

    def __init__(self, path: Path):
        self.path = path
        self._read, self._known, self._line = 0, list[Evaluation](), 0

    def all(self) -> list[Evaluation]:
        """Every evaluation so far; a torn last line does not count, one that lacks only its end does."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._read)
            lines = file.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            ends = number < len(lines)
            try:
                if line.strip():
                    self._known.append(Evaluation.from_dict(json.loads(line)))
                self._line += ends
                self._read += len(line) + ends  # `append_line` completes one that lacks its end
            except (ValueError, KeyError, TypeError) as error:
                if not ends:  # torn
                    break
                raise RunError(
                    f"{self.path} is damaged at line {self._line + 1} ({type(error).__name__}: {error})."
                ) from None
        return self._known

    def of(self, method: str, seed: int) -> list[Evaluation]:
        return [e for e in self.all() if e.method == method and e.seed == seed]

    def append(self, new: Evaluation, under_way: float = 0.0) -> Evaluation:
        """Add an evaluation, unless it is there already, and return it as it is written.

        Args:
            new: the evaluation.
            under_way: seconds that trials beside it have taken and that were not written down yet.
        """
        with self._alone():
            earlier = self.of(new.method, new.seed)
            for known in earlier:
                if known.key == new.key:
                    return known  # killed after it was written, and repeated
            best = next((e for e in reversed(earlier) if e.best), None)
            wins = beats(new, best)
            filled = replace(
                new,
                total_steps=new.cost + sum(e.cost for e in earlier),
                total_seconds=new.seconds + sum(e.seconds for e in earlier) + under_way,
                best=wins,
                best_loss=new.val_loss if wins else best.val_loss if best else math.inf,
            )
            append_line(self.path, filled.to_dict())
            return filled

    @contextmanager
    def _alone(self) -> Iterator[None]:
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)
