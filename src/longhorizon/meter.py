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
        uncut: readings × columns, the size that the adjoint would have had without its clip, were it not for what the
            clip did before; None without a clip, and for tangents.
    """

    of: Literal["tangents", "adjoint"]
    steps: Tensor
    size: Tensor
    clipped: Tensor | None = None
    uncut: Tensor | None = None

    def growth(self, begin: int, end: int, column: int = 0, uncut: bool = False) -> float:
        """The factor by which the size grows between two steps: with time for tangents, against it for the adjoint.

        Args:
            uncut: by which it would have, without the clip; the same where that is not known.
        """
        size = self.size if self.uncut is None or not uncut else self.uncut
        before, after = self._read(size, begin, column), self._read(size, end, column)
        if self.of == "adjoint":
            before, after = after, before
        return after / before if before else math.inf if after else 1.0  # what is zero stays zero

    def exponent(self, begin: int, end: int, column: int = 0) -> float:
        """The rate of that growth per step: above zero, training amplifies changes."""
        factor = torch.tensor(self.growth(begin, end, column), dtype=torch.float64)
        return float(factor.log() / max(1, end - begin))

    def _read(self, size: Tensor, step: int, column: int) -> float:
        place = int(torch.searchsorted(self.steps, step).clamp(max=len(self.steps) - 1))
        return float(size[place, column])
