"""longhorizon: tune the hyperparameters of a whole training run with gradients."""

from longhorizon.confirming import Confirmed, confirm
from longhorizon.engines import (
    Adjoint,
    Factorial,
    FiniteDifference,
    Forward,
    Greedy,
    Hybrid,
    MissingDerivative,
    Progress,
    ReplayError,
    hypergradient,
)
from longhorizon.first_look import NotDifferentiable
from longhorizon.hypers import Hyper
from longhorizon.outer import GradientDescent, SignDescent, TorchOuter, search_range
from longhorizon.outer_step import OuterStep
from longhorizon.result import Hypergradient, Status
from longhorizon.retraining import Retrained, retrain
from longhorizon.rivals import Comparison, compare
from longhorizon.rules import Rule, adam, adamw, clipped, sgd
from longhorizon.run import Tuned, tune
from longhorizon.rundir import RunDirectory, RunError
from longhorizon.schedule import Schedule
from longhorizon.stopping import Interrupted
from longhorizon.task import Task
from longhorizon.traces import Traces
from longhorizon.tuning import Tuning, steps

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
    "Factorial",
    "Hybrid",
    "FiniteDifference",
    "Traces",
    # Tuning: the outer loop
    "tune",
    "Tuned",
    "steps",
    "OuterStep",
    "Tuning",
    "SignDescent",
    "GradientDescent",
    "TorchOuter",
    "search_range",
    # The result: a schedule to save, attach, and train with
    "Schedule",
    "confirm",
    "Confirmed",
    "retrain",
    "Retrained",
    "RunDirectory",
    # Other ways to find hyperparameters, on equal terms
    "compare",
    "Comparison",
    # Errors of their own, and a warning
    "NotDifferentiable",
    "MissingDerivative",
    "ReplayError",
    "RunError",
    "Interrupted",
]
