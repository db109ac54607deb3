"""By derivatives where training is calm, smoothed where it is not.

The hypergradient by derivatives comes first, with its meter; on its way back the adjoint is bounded step by step, which
takes away what a few steep batches do to one seed. Values that the meter speaks against (`trust.py`) are then estimated
once more by `Factorial`; the others stay as they are and where they are while those are shifted. Where very many are
doubted, neighbouring windows share a slope. The meter tells how the adjoint would have grown without its bound: bounded
it looks calm, and is no truer for it where training is chaotic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from longhorizon.engines.adjoint import Adjoint
from longhorizon.engines.base import Progress, Run, side_by_side
from longhorizon.engines.clipping import Clip, check_clip, in_words
from longhorizon.engines.factorial import Factorial, FactorialRun
from longhorizon.engines.forward import Forward
from longhorizon.meter import Meter
from longhorizon.problem import Problem
from longhorizon.result import Hypergradient, Status
from longhorizon.trust import doubts

MOST = 21  # shifts that tuning pays for: 24 pairs of runs


@dataclass(frozen=True)
class Hybrid:
    """Hypergradients by derivatives, and smoothed differences for the values that these cannot be trusted for.

    Choose it when a run may be calm at first and chaotic later: it costs about what the exact engine costs as long as
    nothing is doubted, and what `Factorial` costs on top where something is.

    Args:
        exact: the engine of the derivatives, "adjoint" or "forward".
        distance: how far a doubted value is shifted, as in `Factorial`.
        pairs: at least how many pairs of runs, as in `Factorial`.
        most: shifts of doubted values, at most, as in `Factorial`: beyond, neighbouring windows share a slope.
        clip: its bound, as in `Adjoint` and `Forward`. "auto" is that of `Adjoint`, and none for `Forward`; None for
            exact hypergradients.
    """

    exact: Literal["adjoint", "forward"] = "adjoint"
    distance: float | Mapping[str, float | Sequence[float]] = 1.0
    pairs: int | None = None
    clip: Clip = "auto"
    most: int | None = MOST

    def __post_init__(self) -> None:
        if self.exact not in ("adjoint", "forward"):
            raise ValueError(f"Hybrid(exact={self.exact!r}): expected 'adjoint' or 'forward'.")
        check_clip("Hybrid", self.clip)
        self.smoothed()

    def smoothed(self, only: Mapping[str, Sequence[int]] | None = None) -> Factorial:
        """The engine for doubted values."""
        return Factorial(self.distance, self.pairs, only=only, most=self.most)

    def trainings(self, values: int) -> int:
        """At most how many training runs; one where nothing is doubted."""
        return self.smoothed().trainings(values)

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> "HybridRun":
        self.smoothed().levels(problem)  # refuses a bad distance before any work
        return HybridRun(self, problem, saved)

    def __str__(self) -> str:
        return f"{self.exact}{self.bounded}, smoothed where doubted"

    @property
    def bounded(self) -> str:
        """Its clip, in words."""
        product = "H·q" if self.exact == "adjoint" else "H·Z"
        return in_words(product, None if self.exact == "forward" and self.clip == "auto" else self.clip)


class HybridRun:
    """A hypergradient in progress: by derivatives first, then perhaps smoothed."""

    def __init__(self, engine: Hybrid, problem: Problem, saved: dict[str, Any] | None):
        self.engine, self.problem = engine, problem
        self.exact: Hypergradient | None = None  # once it is there
        self.doubted: dict[str, list[int]] = {}
        if saved is not None and saved["exact"] is not None:
            self.exact = _loaded(saved["exact"], problem.device)
            self._look()
            self.run: Run = self._smooth(saved["run"])
        else:
            self.run = self._exact(saved and saved["run"])
            self._turn()

    @property
    def done(self) -> bool:
        return self.run.done and self.exact is not None

    @property
    def progress(self) -> Progress:
        return self.run.progress

    @property
    def side_by_side(self) -> int:
        return side_by_side(self.run)

    def advance(self) -> None:
        self.run.advance()
        self._turn()

    def save(self) -> dict[str, Any]:
        smoothing = isinstance(self.run, FactorialRun)
        return {"exact": _kept(self.exact) if smoothing and self.exact is not None else None, "run": self.run.save()}

    def result(self) -> Hypergradient:
        exact = self.exact
        assert exact is not None
        if not self.doubted:
            return exact
        smooth = self.run.result()
        grad, mean = ({key: g.clone() for key, g in part.items()} for part in (exact.grad, exact.mean))
        error = {key: torch.full_like(g, torch.nan) for key, g in grad.items()}
        assert smooth.error is not None
        for key, chosen in self.doubted.items():
            grad[key][chosen], mean[key][chosen] = smooth.grad[key][chosen], smooth.mean[key][chosen]
            error[key][chosen] = smooth.error[key][chosen]
        count, total = sum(map(len, self.doubted.values())), sum(map(len, grad.values()))
        said = f"{self.engine.exact}{self.engine.bounded}, smoothed for {count} of {total} values"
        return replace(exact, grad=grad, mean=mean, error=error, exact=exact.grad, status=smooth.status, engine=said)

    def _turn(self) -> None:
        """From derivatives to smoothing, when the first are done and leave something to the second."""
        if self.exact is not None or not self.run.done:
            return
        self.exact = self.run.result()
        self._look()
        if self.doubted:
            self.run = self._smooth()

    def _look(self) -> None:
        """Which values are doubted; none if training itself failed."""
        found = self.exact
        assert found is not None
        if found.status.what in ("loss", "validation loss"):
            return
        said = doubts(found, self.problem.steps).items()
        windows = {key: [w for w, reason in enumerate(reasons) if reason] for key, reasons in said}
        self.doubted = {key: some for key, some in windows.items() if some}

    def _exact(self, saved: dict[str, Any] | None) -> Run:
        clip = self.engine.clip
        if self.engine.exact == "adjoint":
            return Adjoint(clip=clip).begin(self.problem, saved)
        return Forward(clip=None if clip == "auto" else clip).begin(self.problem, saved)

    def _smooth(self, saved: dict[str, Any] | None = None) -> Run:
        return FactorialRun(self.engine.smoothed(self.doubted), self.problem, saved, middle=self.exact)


def _kept(found: Hypergradient) -> dict[str, Any]:
    """A finished hypergradient as plain data."""
    meter = found.meter
    return {
        **{f.name: getattr(found, f.name) for f in fields(found) if f.name not in ("status", "meter")},
        "status": (found.status.what, found.status.step),
        "meter": None if meter is None else (meter.of, meter.steps, meter.size, meter.clipped, meter.uncut),
    }


def _loaded(kept: dict[str, Any], device: torch.device) -> Hypergradient:
    """From a file, where everything is on the CPU: the trained model goes back to where it was trained."""
    meter = None if kept["meter"] is None else Meter(*kept["meter"])
    model = {part: {key: x.to(device) for key, x in kept[part].items()} for part in ("params", "buffers")}
    return Hypergradient(**(kept | model | {"status": Status(*kept["status"]), "meter": meter}))
