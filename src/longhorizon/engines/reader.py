"""Taking a meter's readings while a run is in progress."""

from typing import Any, Literal

import torch
from torch import Tensor

from longhorizon.meter import Meter
from longhorizon.problem import Problem

READINGS = 256


class Reader:
    """The readings of a run in progress; they stay on the device until it ends.

    Args:
        columns: how many there are in the end; a reading of fewer leaves the others at zero.
        clips: whether the share of clipped entries is read too.
    """

    def __init__(
        self,
        of: Literal["tangents", "adjoint"],
        problem: Problem,
        columns: int,
        clips: bool = False,
        saved: dict[str, Any] | None = None,
    ):
        self.of: Literal["tangents", "adjoint"] = of
        self.every = max(1, problem.steps // READINGS)
        self._last = problem.steps
        shape = problem.steps // self.every + 2, columns
        self._steps: list[int] = list(saved["steps"]) if saved else []
        self._size = torch.zeros(shape, dtype=torch.float64, device=problem.device)  # it may grow very large
        self._clipped = torch.zeros_like(self._size) if clips else None
        if saved:
            self._size.copy_(saved["size"])
        if saved and self._clipped is not None:
            self._clipped.copy_(saved["clipped"])

    def due(self, step: int) -> bool:
        """Whether to read after so many steps."""
        return step % self.every == 0 or step == self._last

    def take(self, step: int, size: Tensor, clipped: Tensor | None = None) -> None:
        row = len(self._steps)
        self._steps.append(step)
        self._size[row, : len(size)] = size
        if self._clipped is not None and clipped is not None:
            self._clipped[row, : len(clipped)] = clipped

    def save(self) -> dict[str, Any]:
        saved = {"steps": list(self._steps), "size": self._size.clone()}
        return saved if self._clipped is None else saved | {"clipped": self._clipped.clone()}

    def meter(self, order: list[int], bounded: bool = False) -> Meter | None:
        """The readings so far, columns in the given order."""
        if not self._steps:
            return None
        steps, rows = torch.tensor(self._steps).sort()
        size, clipped = (
            None if readings is None else readings.detach().to("cpu", torch.float64)[rows][:, order]
            for readings in (self._size, self._clipped)
        )
        assert size is not None
        return Meter(self.of, steps, size, clipped, bounded)


def largest(tensors: list[Tensor]) -> Tensor:
    """The largest absolute entry of some tensors; NaN if there is one."""
    return torch.stack(torch._foreach_norm([t for t in tensors if t.numel()], torch.inf)).amax()
