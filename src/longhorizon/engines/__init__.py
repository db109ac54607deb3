"""How to differentiate: the engines, the entry point, and the automatic choice."""

from longhorizon.engines.adjoint import Adjoint
from longhorizon.engines.base import Engine, Progress, ReplayError, Run
from longhorizon.engines.choose import choose
from longhorizon.engines.difference import FiniteDifference
from longhorizon.engines.entry import hypergradient
from longhorizon.engines.factorial import Factorial
from longhorizon.engines.forward import Forward
from longhorizon.engines.greedy import Greedy
from longhorizon.engines.hybrid import Hybrid
from longhorizon.engines.missing import MissingDerivative

__all__ = [
    "Adjoint",
    "Engine",
    "Factorial",
    "FiniteDifference",
    "Forward",
    "Greedy",
    "Hybrid",
    "MissingDerivative",
    "Progress",
    "ReplayError",
    "Run",
    "choose",
    "hypergradient",
]
