"""longhorizon: tune the hyperparameters of a whole training run with gradients."""

from longhorizon.engines import (
    Adjoint,
    FiniteDifference,
    Forward,
    Greedy,
    Progress,
    ReplayError,
    hypergradient,
)
from longhorizon.hypers import Hyper
from longhorizon.problem import NotDifferentiable
from longhorizon.result import Hypergradient, Status
from longhorizon.rules import Rule, adam, adamw, clipped, sgd
from longhorizon.task import Task

__version__ = "0.1.0"

__all__ = [
    # What is trained, and what is learnt
    "Task",
    "Hyper",
    # Rules: how parameters move
    "Rule",
    "sgd",
    "adam",
    "adamw",
    "clipped",
    # Hypergradients: one entry point, several engines
    "hypergradient",
    "Hypergradient",
    "Status",
    "Progress",
    "Forward",
    "Adjoint",
    "Greedy",
    "FiniteDifference",
    # Errors of their own
    "NotDifferentiable",
    "ReplayError",
]
