"""The training loop that every method shares, one step at a time.

A training counts its steps where it takes them. What a method is charged is worked out from its plan; the two are
written down side by side and must agree.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from longhorizon import tree
from longhorizon.engines.base import Watch
from longhorizon.functional import Buffers
from longhorizon.inner import State
from longhorizon.problem import Problem
from longhorizon.rivals.space import Setting
from longhorizon.rules import Params


@dataclass
class Counter:
    """How many training steps were taken."""

    steps: int = 0


@dataclass(frozen=True)
class Judged:
    """How a trained model does on the validation set."""

    val_loss: float = math.inf
    metrics: dict[str, float] = field(default_factory=dict)
    status: str = "ok"


class Trains(Protocol):
    """A training run in progress."""

    problem: Problem
    watch: Watch
    t: int  # steps taken

    @property
    def failed(self) -> int | None:
        """The first step whose loss was not finite, once it is known."""
        ...

    def advance(self) -> None:
        """Take one step, and count it."""
        ...

    def weights(self) -> State:
        """The model as it would be used now."""
        ...

    def learnt(self) -> Setting:
        """The setting that this run turned out to be trained with, if that was not known before."""
        ...

    def save(self) -> dict[str, Any]: ...


def judge(training: Trains) -> Judged:
    """The validation loss and metrics now."""
    failed = training.watch.first  # on an accelerator `failed` is looked at now and then only
    return judged(training.problem, training.weights, training.t, failed)


def judged(problem: Problem, weights: Callable[[], State], steps: int, failed: int | None) -> Judged:
    """How a model does after so many steps, by the functions that the tuner uses.

    Args:
        failed: the first step whose loss was not finite.
    """
    if failed is not None:
        return Judged(status=f"diverged: non-finite loss at step {failed}")
    state = weights()
    loss = float(problem.validation_loss(state, steps))
    if not math.isfinite(loss):
        return Judged(status=f"diverged: non-finite validation loss after step {steps}")
    return Judged(loss, problem.measure(state.params, state.buffers))


class Training:
    """Training at given hyperparameter values, the same step that the engines differentiate.

    On a GPU a run that is long enough takes the step compiled, as the adjoint does.

    Args:
        whole: steps of a whole run, if this one is a short one among others that share its compiled step.
    """

    def __init__(self, problem: Problem, counter: Counter, saved: dict[str, Any] | None = None, whole: int = 0):
        self.problem, self.counter = problem, counter
        self.watch = Watch(problem, saved and saved["watch"])
        self.t: int = saved["t"] if saved else 0
        self.state: State = tree.unpack(problem.start, saved["state"]) if saved else problem.start
        self.failed = self.watch.first
        self._step = problem.stepper(max(whole, problem.steps))

    def advance(self) -> None:
        step = self.t
        self.state, loss = self._step(self.state, step)
        self.counter.steps += 1
        self.failed = self.watch.see(step, loss)
        self.t += 1

    def weights(self) -> State:
        return self.state

    def learnt(self) -> Setting:
        return {}

    def save(self) -> dict[str, Any]:
        return {"t": self.t, "state": tree.pack(self.state), "watch": self.watch.save()}


class TorchTraining:
    """Training with a `torch.optim` optimizer that has no hyperparameters to learn.

    Args:
        make: from a list of parameters to the optimizer. One with `train()` and `eval()` (schedule-free ones) is
            judged in eval mode.
    """

    def __init__(
        self,
        problem: Problem,
        counter: Counter,
        make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        saved: dict[str, Any] | None = None,
    ):
        self.problem, self.counter = problem, counter
        self.watch = Watch(problem, saved and saved["watch"])
        self.failed = self.watch.first
        self.t: int = saved["t"] if saved else 0
        first = (problem.start.params, problem.start.buffers)
        params, buffers = tree.unpack(first, saved["model"]) if saved else first
        self.buffers: Buffers = buffers
        self.params: Params = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        self.optimizer = make(list(self.params.values()))
        self._mode("train")
        if saved:
            self.optimizer.load_state_dict(saved["optimizer"])

    def advance(self) -> None:
        problem, step = self.problem, self.t
        batch = problem.batch(step)
        problem.seed_step(step)
        grads, buffers, loss = problem.inner.gradient(self.params, self.buffers, batch, problem.hypers_at(step))
        self.buffers = {name: b.detach() for name, b in buffers.items()}
        for name, p in self.params.items():
            p.grad = grads[name].detach()
        self.optimizer.step()
        self.counter.steps += 1
        self.failed = self.watch.see(step, loss.detach())
        self.t += 1

    def weights(self) -> State:
        self._mode("eval")
        params = {name: p.detach().clone() for name, p in self.params.items()}
        self._mode("train")
        return State(params, self.buffers, ())

    def learnt(self) -> Setting:
        return {}

    def save(self) -> dict[str, Any]:
        return {
            "t": self.t,
            "model": tree.pack(({name: p.detach() for name, p in self.params.items()}, self.buffers)),
            "optimizer": self.optimizer.state_dict(),
            "watch": self.watch.save(),
        }

    def _mode(self, name: str) -> None:
        if hasattr(self.optimizer, name):
            getattr(self.optimizer, name)()
