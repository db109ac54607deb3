"""Stabilisers that were tried and did not earn a place in the library; `estimators.py` scores them."""

from dataclasses import dataclass
from typing import Any

import torch

import longhorizon as lh
from longhorizon import tree
from longhorizon.engines.adjoint import AdjointRun
from longhorizon.problem import Problem


@dataclass(frozen=True)
class NonExpansive:
    """An adjoint that may not grow: on its way back it is scaled down whenever a step would make it larger."""

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> "NonExpansiveRun":
        return NonExpansiveRun(lh.Adjoint("all", compile=False), problem, saved)


class NonExpansiveRun(AdjointRun):
    """The sweep with its bound."""

    def advance(self) -> None:
        before = None if self.cotangent is None else _norm(self.cotangent)
        super().advance()
        if before is None or self.cotangent is None:
            return
        growth = _norm(self.cotangent) / before
        if growth > 1:
            real, rebuild = tree.split(self.cotangent)
            self.cotangent = rebuild([leaf / growth for leaf in real])


def _norm(state: Any) -> torch.Tensor:
    return torch.stack([leaf.square().sum() for leaf in tree.split(state)[0]]).sum().sqrt()
