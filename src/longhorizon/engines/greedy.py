"""Greedy differentiation: many short horizons instead of one long one (the paper's section 3.2).

The run is cut into stretches of H steps. Each stretch is differentiated alone: from its first state, held constant,
to the validation loss right after it. The hypergradient of a step then sees at most H steps ahead. With H = T
this is the exact hypergradient; with H = 1 it is what online methods follow.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from longhorizon.engines.adjoint import Adjoint, AdjointRun
from longhorizon.engines.base import Progress, Watch, finish
from longhorizon.engines.clipping import Clip, check_clip
from longhorizon.inner import State
from longhorizon.problem import Problem
from longhorizon.result import Hypergradient, Status


@dataclass(frozen=True)
class Greedy:
    """The hypergradient of the validation loss H steps later, for every stretch of H steps.

    A biased but calm estimate: it prefers small learning rates, because noise hurts at once and progress pays
    later. Cost: an adjoint sweep and one pass over the validation set per stretch.

    Args:
        horizon: H, from 1 to the number of steps (a longer one is cut to it); the last stretch may be shorter.
        clip: elementwise bound on H·q, as in `Adjoint`.
        per_step: also return the hypergradient of every single step.
        compile: as in `Adjoint`; the validation of every stretch is compiled too.
    """

    horizon: int = 1
    clip: Clip = None
    per_step: bool = False
    compile: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.horizon, bool) or not isinstance(self.horizon, int) or self.horizon < 1:
            raise ValueError(f"Greedy(horizon={self.horizon!r}): expected a whole number of steps, at least 1.")
        check_clip("Greedy", self.clip)
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"Greedy(compile={self.compile!r}): expected True, False or 'auto'.")

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> "GreedyRun":
        return GreedyRun(self, problem, saved)

    def __str__(self) -> str:
        return f"greedy, horizon {self.horizon}"


class GreedyRun:
    """A row of short adjoint sweeps in progress."""

    def __init__(self, engine: Greedy, problem: Problem, saved: dict[str, Any] | None):
        self.engine, self.problem = engine, problem
        self.watch = Watch(problem, saved and saved["watch"])
        self.status = Status()
        keeps = Adjoint().keeps_all(problem)  # asked once: it looks at the free memory
        self._engine = Adjoint("all" if keeps else "sqrt", engine.clip, compile=engine.compile)
        if saved is None:
            self.per_step = {
                key: torch.full((problem.steps,), torch.nan, dtype=problem.dtype, device=problem.device)
                for key in problem.learnt
            }
            self.t = 0
            self.sweep = self._sweep(problem.start)
        else:
            self.per_step = {key: g.to(problem.device, copy=True) for key, g in saved["per_step"].items()}
            self.t = saved["t"]
            self.sweep = self._sweep(None, saved["sweep"])
            self.status = Status(*saved["status"]) if "status" in saved else self.sweep.status

    @property
    def done(self) -> bool:
        # A walk back that overflows costs its own stretch; a loss that does ends the run.
        return self.t >= self.problem.steps or self.status.what in ("loss", "validation loss")

    @property
    def progress(self) -> Progress:
        inside = self.sweep.progress
        return Progress(inside.phase, 2 * self.sweep.first + inside.done, 2 * self.problem.steps)

    def advance(self) -> None:
        self.sweep.advance()
        if not self.sweep.done:
            return
        sweep = self.sweep
        for key, g in sweep.per_step.items():
            self.per_step[key][sweep.first : sweep.last] = g[sweep.first : sweep.last]
        if self.status.ok:
            self.status = sweep.status
        self.t = sweep.last
        if not self.done:
            self.sweep = self._sweep(sweep.state)

    def save(self) -> dict[str, Any]:
        return {
            "per_step": {key: g.clone() for key, g in self.per_step.items()},
            "t": self.t,
            "sweep": self.sweep.save(),
            "watch": self.watch.save(),
            "status": [self.status.what, self.status.step],
        }

    def result(self) -> Hypergradient:
        per_step = {k: g.detach().to("cpu", torch.float64) for k, g in self.per_step.items()}
        return finish(
            self.problem,
            str(self.engine),
            self.problem.share(per_step),
            self.sweep.val_loss,
            self.sweep.state,
            self.status,
            self.watch.losses,
            per_step if self.engine.per_step else None,
        )

    def _sweep(self, start: State | None, saved: dict[str, Any] | None = None) -> AdjointRun:
        last = min(self.t + self.engine.horizon, self.problem.steps)
        return AdjointRun(self._engine, self.problem, saved, first=self.t, last=last, start=start, watch=self.watch)
