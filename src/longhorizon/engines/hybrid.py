"""Exact where training is calm, smoothed where it is not.

The exact hypergradient comes first, with its meter. Values that the meter speaks against (`trust.py`) are then
estimated once more by `Factorial`; the others stay exact and stay where they are while those are shifted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from longhorizon.engines.adjoint import Adjoint
from longhorizon.engines.base import Progress, Run
from longhorizon.engines.factorial import Factorial, FactorialRun
from longhorizon.engines.forward import Forward
from longhorizon.problem import Problem
from longhorizon.result import Hypergradient, Status
from longhorizon.trust import doubts


@dataclass(frozen=True)
class Hybrid:
    """Exact hypergradients, and smoothed differences for the values that the exact ones cannot be trusted for.

    Choose it when a run may be calm at first and chaotic later: it costs what the exact engine costs as long as nothing
    is doubted, and what `Factorial` costs on top where something is.

    Args:
        exact: "adjoint" or "forward".
        distance: how far a doubted value is shifted, as in `Factorial`.
        pairs: at least how many pairs of runs, as in `Factorial`.
    """

    exact: Literal["adjoint", "forward"] = "adjoint"
    distance: float | Mapping[str, float | Sequence[float]] = 1.0
    pairs: int | None = None

    def __post_init__(self) -> None:
        if self.exact not in ("adjoint", "forward"):
            raise ValueError(f"Hybrid(exact={self.exact!r}): expected 'adjoint' or 'forward'.")
        self.smoothed()

    def smoothed(self, only: Mapping[str, Sequence[int]] | None = None) -> Factorial:
        """The engine for doubted values."""
        return Factorial(self.distance, self.pairs, only=only)

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> "HybridRun":
        self.smoothed().levels(problem)  # refuses a bad distance before any work
        return HybridRun(self, problem, saved)

    def __str__(self) -> str:
        return f"{self.exact}, smoothed where doubted"


class HybridRun:
    """A hypergradient in progress: exact first, then perhaps smoothed."""

    def __init__(self, engine: Hybrid, problem: Problem, saved: dict[str, Any] | None):
        self.engine, self.problem = engine, problem
        self.exact: Hypergradient | None = None
        self.doubted: dict[str, list[int]] = {}
        if saved is not None and saved["exact"] is not None:
            status = Status(*saved["exact"]["status"])
            self.exact = Hypergradient(**(saved["exact"] | {"status": status}))
            self.doubted = saved["doubted"]
        self.run: Run = self._smooth(saved["run"]) if saved and self.exact is not None else self._exact(saved)

    @property
    def done(self) -> bool:
        return self.run.done and (self.exact is not None or not self._look())

    @property
    def progress(self) -> Progress:
        return self.run.progress

    def advance(self) -> None:
        self.run.advance()
        if self.exact is None and self.run.done and self._look():
            self.exact = self.run.result()
            self.run = self._smooth()

    def save(self) -> dict[str, Any]:
        exact = None
        if self.exact is not None:
            found = self.exact
            exact = {name: getattr(found, name) for name in ("grad", "mean", "val_loss", "params", "buffers", "engine")}
            exact |= {"train_loss": found.train_loss, "status": (found.status.what, found.status.step)}
        return {"exact": exact, "doubted": self.doubted, "run": self.run.save()}

    def result(self) -> Hypergradient:
        if self.exact is None:
            return replace(self.run.result(), engine=self.engine.exact)
        exact, smooth = self.exact, self.run.result()
        grad, mean = ({key: g.clone() for key, g in part.items()} for part in (exact.grad, exact.mean))
        error = {key: torch.full_like(g, torch.nan) for key, g in grad.items()}
        assert smooth.error is not None
        for key, g in grad.items():
            chosen = self.doubted.get(key, [])
            g[chosen], mean[key][chosen] = smooth.grad[key][chosen], smooth.mean[key][chosen]
            error[key][chosen] = smooth.error[key][chosen]
        count, total = sum(map(len, self.doubted.values())), sum(len(g) for g in grad.values())
        return replace(
            exact,
            grad=grad,
            mean=mean,
            error=error,
            status=smooth.status,
            engine=f"{self.engine.exact}, smoothed for {count} of {total} values",
        )

    def _look(self) -> bool:
        """Whether the finished exact run leaves something to be smoothed: not if training itself failed."""
        found = self.run.result()
        if found.status.what in ("loss", "validation loss"):
            return False
        said = doubts(found, self.problem.steps)
        self.doubted = {
            key: [w for w, reason in enumerate(reasons) if reason] for key, reasons in said.items() if any(reasons)
        }
        return bool(self.doubted)

    def _exact(self, saved: dict[str, Any] | None) -> Run:
        engine = Adjoint() if self.engine.exact == "adjoint" else Forward()
        return engine.begin(self.problem, saved and saved["run"])

    def _smooth(self, saved: dict[str, Any] | None = None) -> Run:
        assert self.exact is not None
        engine = self.engine.smoothed(self.doubted)
        return FactorialRun(engine, self.problem, saved, middle=self.exact)
