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
        cuts: whether the size without a clip is.
    """

    def __init__(
        self,
        of: Literal["tangents", "adjoint"],
        problem: Problem,
        columns: int,
        clips: bool = False,
        cuts: bool = False,
        saved: dict[str, Any] | None = None,
    ):
        self.of: Literal["tangents", "adjoint"] = of
        self.every = max(1, problem.steps // READINGS)
        self._last = problem.steps
        shape = problem.steps // self.every + 2, columns
        self._steps: list[int] = list(saved["steps"]) if saved else []
        self._size = torch.zeros(shape, dtype=torch.float64, device=problem.device)  # it may grow very large
        self._clipped, self._uncut = (torch.zeros_like(self._size) if asked else None for asked in (clips, cuts))
        for name, readings in (("size", self._size), ("clipped", self._clipped), ("uncut", self._uncut)):
            if saved and readings is not None:
                readings.copy_(saved[name])

    def due(self, step: int) -> bool:
        """Whether to read after so many steps."""
        return step % self.every == 0 or step == self._last

    def take(self, step: int, size: Tensor, clipped: Tensor | None = None, uncut: Tensor | None = None) -> None:
        row = len(self._steps)
        self._steps.append(step)
        self._size[row, : len(size)] = size
        if self._clipped is not None and clipped is not None:
            self._clipped[row, : len(clipped)] = clipped
        if self._uncut is not None:
            self._uncut[row, : len(size)] = size if uncut is None else uncut

    def save(self) -> dict[str, Any]:
        readings = {"size": self._size, "clipped": self._clipped, "uncut": self._uncut}
        return {"steps": list(self._steps)} | {name: x.clone() for name, x in readings.items() if x is not None}

    def meter(self, order: list[int]) -> Meter | None:
        """The readings so far, columns in the given order."""
        if not self._steps:
            return None
        steps, rows = torch.tensor(self._steps).sort()
        size, clipped, uncut = (
            None if readings is None else readings.detach().to("cpu", torch.float64)[rows][:, order]
            for readings in (self._size, self._clipped, self._uncut)
        )
        assert size is not None
        return Meter(self.of, steps, size, clipped, uncut)


def largest(tensors: list[Tensor]) -> Tensor:
    """The largest absolute entry of some tensors; NaN if there is one."""
    return torch.stack(torch._foreach_norm([t for t in tensors if t.numel()], torch.inf)).amax()
