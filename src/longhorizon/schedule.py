"""A learnt schedule: save it, load it, stretch it to any number of steps, hand it to a torch optimizer."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from longhorizon.hypers import Hyper, argument, nearest, window_of
from longhorizon.rules import Rule

FORMAT = "longhorizon-schedule"
VERSION = 1


@dataclass(frozen=True)
class Schedule:
    """Values per window for every hyperparameter, learnt or fixed.

    A schedule has no length of its own: step t of T takes the value of window ⌊t · windows / T⌋, for any T.

    Attributes:
        values: key -> one value per window.
        rule: the optimizer it was made for: its name and the arguments that were not scheduled.
        learnt: the keys that were learnt.
        in_loss: the keys that the loss reads; the others are arguments of the optimizer.
    """

    values: dict[str, tuple[float, ...]]
    rule: dict[str, Any] = field(default_factory=dict)
    learnt: tuple[str, ...] = ()
    in_loss: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self.values:
            raise KeyError(f"the schedule has no {key!r}.{nearest(key, list(self.values))}")
        return torch.tensor(self.values[key], dtype=torch.float64)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def keys(self) -> list[str]:
        return list(self.values)

    def value(self, key: str, step: int, steps: int) -> float:
        """The value of a hyperparameter at a step (from 0) of a run of `steps`; the last one from there on.

        >>> Schedule({"lr": (0.1, 0.3)}).value("lr", 7, 10)
        0.3
        """
        if key not in self.values:
            raise KeyError(f"the schedule has no {key!r}.{nearest(key, list(self.values))}")
        if steps < 1 or step < 0:
            raise ValueError(f"value(step={step}, steps={steps}): expected step >= 0 and steps >= 1.")
        values = self.values[key]
        return values[window_of(min(step, steps - 1), steps, len(values))]

    def attach(self, optimizer: torch.optim.Optimizer, steps: int, last_epoch: int = -1) -> "ScheduleScheduler":
        """A torch scheduler that sets lr, momentum, weight decay, betas … of `optimizer` at every `.step()`.

        Call its `.step()` after every optimizer step, not after every epoch. A key with a label ("lr/head") goes to the
        parameter groups whose "name" is the label (or, for a tuple of several names, among them), a plain key to every
        group without one of its own.

        Args:
            optimizer: a `torch.optim` optimizer of the kind the schedule was learnt for.
            steps: T of the run; the schedule is stretched to it.
            last_epoch: as in torch's schedulers, the number of steps already taken minus one.
        """
        return ScheduleScheduler(optimizer, self, steps, last_epoch)

    def without(self, *keys: str) -> "Schedule":
        """The same without some keys, for values that no torch optimizer takes (`grad_clip`).

        >>> Schedule({"lr": (0.1,), "grad_clip": (1.0,)}).without("grad_clip").keys()
        ['lr']
        """
        for key in keys:
            self[key]  # a misspelt one is an error
        rest = {key: values for key, values in self.values.items() if key not in keys}
        return replace(self, values=rest, learnt=tuple(k for k in self.learnt if k in rest))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, aside and then renamed, so that no reader sees half a file."""
        target = Path(path)
        partial = target.with_name(target.name + ".part")
        partial.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        os.replace(partial, target)

    def to_dict(self) -> dict[str, Any]:
        """The content of a schedule file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "rule": self.rule,
            "hypers": {
                key: {
                    "values": list(values),
                    "argument": argument(key),
                    "learnt": key in self.learnt,
                    "of": "loss" if key in self.in_loss else "optimizer",
                }
                for key, values in self.values.items()
            },
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], origin: str = "schedule") -> "Schedule":
        """The schedule in the content of a file."""
        if content.get("format") != FORMAT:
            raise ValueError(f'{origin} is no longhorizon schedule: its "format" is {content.get("format")!r}.')
        if not isinstance(content.get("version"), int) or content["version"] > VERSION:
            raise ValueError(
                f"{origin} has version {content.get('version')!r}; this longhorizon reads up to {VERSION}: update it."
            )
        try:
            hypers = content["hypers"]
            values = {key: tuple(float(v) for v in entry["values"]) for key, entry in hypers.items()}
            learnt = tuple(key for key, entry in hypers.items() if entry.get("learnt"))
            in_loss = tuple(key for key, entry in hypers.items() if entry.get("of") == "loss")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{origin} is damaged: {type(error).__name__} at {error}.") from None
        if not values or not all(values.values()):
            raise ValueError(f"{origin} is damaged: a hyperparameter has no values.")
        return cls(values, dict(content.get("rule", {})), learnt, in_loss)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Schedule":
        """Read a schedule file."""
        try:
            content = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no JSON (line {error.lineno}: {error.msg}).") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} is no longhorizon schedule: expected a JSON object.")
        return cls.from_dict(content, str(path))

    @classmethod
    def of(cls, hypers: Mapping[str, Hyper], values: Mapping[str, Any], rule: Rule) -> "Schedule":
        """The schedule that a run's values make."""
        given = {key: tuple(float(v) for v in torch.as_tensor(values[key]).reshape(-1)) for key in hypers}
        fixed = {arg: v for arg, v in rule.defaults.items() if arg not in {argument(key) for key in hypers}}
        record = {"name": rule.name, "defaults": dict(rule.defaults), "fixed": fixed, "options": dict(rule.options)}
        learnt = tuple(key for key, hyper in hypers.items() if hyper.learn)
        return cls(given, record, learnt, tuple(k for k in hypers if argument(k) not in rule.defaults))


class ScheduleScheduler(LRScheduler):
    """A torch scheduler that follows a `Schedule`; made by `Schedule.attach`."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule, steps: int, last_epoch: int = -1):
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"attach(steps={steps!r}): expected the number of optimizer steps of the run, at least 1.")
        self.schedule, self.steps = schedule, steps
        self.plan = _plan(optimizer, schedule)
        super().__init__(optimizer, last_epoch)
        self._set_others()

    def get_lr(self) -> list[Any]:
        """The learning rate of every group at the current step."""
        return [
            self._at(keys["lr"]) if "lr" in keys else group["lr"]
            for keys, group in zip(self.plan, self.optimizer.param_groups, strict=True)
        ]

    def step(self, epoch: int | None = None) -> None:
        """Go to the next step of the schedule."""
        super().step(epoch)
        self._set_others()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers only, so that `torch.load(weights_only=True)` reads a checkpoint that holds it."""
        return {
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "_last_lr": [float(lr) for lr in self._last_lr],
            "steps": self.steps,
            "schedule": self.schedule.to_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.schedule = Schedule.from_dict(state_dict["schedule"], "the scheduler's state")
        self.steps, self.last_epoch = state_dict["steps"], state_dict["last_epoch"]
        self._step_count, self._last_lr = state_dict["_step_count"], list(state_dict["_last_lr"])
        self.plan = _plan(self.optimizer, self.schedule)
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = lr
        self._set_others()

    def _at(self, key: str) -> float:
        return self.schedule.value(key, max(self.last_epoch, 0), self.steps)

    def _set_others(self) -> None:
        for keys, group in zip(self.plan, self.optimizer.param_groups, strict=True):
            for arg, key in keys.items():
                value = self._at(key)
                if arg == "lr":
                    continue
                if arg == "momentum" and value == 0 and any(self.schedule.values[key]):
                    value = sys.float_info.min  # torch forgets its buffer at exactly 0; see `sgd`
                if arg in ("beta1", "beta2"):
                    first, second = group["betas"]
                    group["betas"] = (value, second) if arg == "beta1" else (first, value)
                else:
                    group[arg] = value


def _plan(optimizer: torch.optim.Optimizer, schedule: Schedule) -> list[dict[str, str]]:
    """Per parameter group, which key of the schedule sets which argument."""
    names = [_names(group) for group in optimizer.param_groups]
    keys = [key for key in schedule.values if key not in schedule.in_loss]
    labels = {key: key.split("/", 1)[1] for key in keys if "/" in key}
    for key, label in labels.items():
        if not any(label in own for own in names):
            raise ValueError(
                f"the schedule has {key!r}, but no parameter group of the optimizer has the name {label!r}: "
                f'give it one, {{"params": …, "name": {label!r}}}.'
            )
    plan = []
    for group, own in zip(optimizer.param_groups, names, strict=True):
        chosen: dict[str, str] = {}
        for key in sorted(keys, key=lambda k: "/" in k):  # labelled ones last: they win
            if key in labels and labels[key] not in own:
                continue
            arg = argument(key)
            if arg not in group and not (arg in ("beta1", "beta2") and "betas" in group):
                raise ValueError(
                    f"the schedule sets {arg!r}, which {type(optimizer).__name__} does not have; it was learnt for "
                    f"{schedule.rule.get('name', 'another optimizer')}. To set it yourself, attach "
                    f"schedule.without({key!r})."
                )
            if chosen.get(arg) in labels:
                raise ValueError(f"the schedule has {chosen[arg]!r} and {key!r}, and a parameter group has both names.")
            chosen[arg] = key
        plan.append(chosen)
    return plan


def _names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels that a parameter group answers to."""
    name = group.get("name", ())
    return (name,) if isinstance(name, str) else tuple(name or ())
