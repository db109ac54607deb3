"""How a derivative grew along a run.

Training may amplify a small change of the weights until the derivative of the end says nothing about the trend. The
meter shows it: the largest entry of dθ/dλ, one column per value (Forward), or of dL/dθ, one column (Adjoint), at up to
256 steps of the run.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Meter:
    """Readings of one run.

    Attributes:
        of: "tangents" (Forward; they grow with time) or "adjoint" (it grows towards the beginning).
        steps: when it was read, rising; a reading belongs to the state after that many steps.
        size: readings × columns, the largest entry; for tangents the columns are the values, key by key and window by
            window, and zero before a window begins.
        clipped: readings × columns, the share of the Hessian product's entries that `clip` cut; None without a clip.
        bounded: whether the derivative was kept from growing by `clip="auto"` of Adjoint; `size` is as without.
    """

    of: Literal["tangents", "adjoint"]
    steps: Tensor
    size: Tensor
    clipped: Tensor | None = None
    bounded: bool = False

    def growth(self, begin: int, end: int, column: int = 0) -> float:
        """The factor by which the size grows between two steps: with time for tangents, against it for the adjoint."""
        before, after = self._read(begin, column), self._read(end, column)
        if self.of == "adjoint":
            before, after = after, before
        return after / before if before else math.inf if after else 1.0  # what is zero stays zero

    def exponent(self, begin: int, end: int, column: int = 0) -> float:
        """The rate of that growth per step: above zero, training amplifies changes."""
        factor = torch.tensor(self.growth(begin, end, column), dtype=torch.float64)
        return float(factor.log() / max(1, end - begin))

    def _read(self, step: int, column: int) -> float:
        place = int(torch.searchsorted(self.steps, step).clamp(max=len(self.steps) - 1))
        return float(self.size[place, column])
