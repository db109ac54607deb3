"""A learnt schedule drives a torch optimizer: a scheduler, and what it has to find out about the optimizer first."""

import math
import sys
import warnings
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from longhorizon.hypers import BY_DIMENSION, argument, matches

if TYPE_CHECKING:  # it imports this
    from longhorizon.schedule import Schedule

FUNCTION = "a function"  # in the place of a `params` that no file can hold
BETAS = ("beta1", "beta2")  # `betas` in torch
TWINS = {"sgd": "torch.optim.SGD", "adam": "torch.optim.Adam", "adamw": "torch.optim.AdamW"}  # of rules


class ScheduleScheduler(LRScheduler):
    """A torch scheduler that follows a `Schedule`; made by `Schedule.attach`."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: "Schedule", steps: int, last_epoch: int = -1):
        if isinstance(steps, bool) or not isinstance(steps, int | Integral) or steps < 1:
            raise ValueError(f"attach(steps={steps!r}): expected the number of optimizer steps of the run, at least 1.")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"attach(optimizer={shown_type(optimizer)}): expected a torch optimizer, made before, for instance "
                "torch.optim.SGD(schedule.groups(model)); to set values by hand, read schedule.value(key, step, steps)."
            )
        self.schedule, self.steps = schedule, int(steps)
        _warn_of_another_kind(optimizer, schedule)
        self.plan = _plan(optimizer, schedule)
        _warn_of_others(optimizer, schedule)
        _warn_of_a_clip(schedule)
        super().__init__(optimizer, last_epoch)
        self._set_others()

    def get_lr(self) -> list[Any]:
        """The learning rate of every group at the current step."""
        if len(self.plan) < len(self.optimizer.param_groups):  # one was added
            self.plan = _plan(self.optimizer, self.schedule)
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
        self.schedule = type(self.schedule).from_dict(state_dict["schedule"], "the scheduler's state")
        self.steps, self.last_epoch = state_dict["steps"], state_dict["last_epoch"]
        self._step_count, self._last_lr = state_dict["_step_count"], list(state_dict["_last_lr"])
        self.plan = _plan(self.optimizer, self.schedule)
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            _put(group, "lr", lr)
        self._set_others()

    def _at(self, key: str) -> float:
        return self.schedule.value(key, max(self.last_epoch, 0), self.steps)

    def _set_others(self) -> None:
        for keys, group in zip(self.plan, self.optimizer.param_groups, strict=True):
            for arg, key in keys.items():
                value = self._at(key)
                if arg == "lr":
                    continue
                if arg in BETAS and arg not in group:
                    first, second = group["betas"]
                    group["betas"] = (value, second) if arg == "beta1" else (first, value)
                else:
                    _put(group, arg, value)
            moved = "momentum" in keys and any(self.schedule.values[keys["momentum"]])
            if group.get("momentum") == 0 and (moved or group.get("dampening")):
                _put(group, "momentum", sys.float_info.min)  # at 0 torch has neither buffer nor dampening; see `sgd`


def shown_type(given: object) -> str:
    """What kind of thing was given; the thing itself may fill pages."""
    return f"<{given.__name__}>" if isinstance(given, type) else f"<{type(given).__name__}>"


def _put(group: dict[str, Any], arg: str, value: Any) -> None:
    """Set an argument; one that is a tensor stays that tensor, which a captured graph may hold."""
    if isinstance(group[arg], torch.Tensor):
        group[arg].fill_(value)
    else:
        group[arg] = value


def _plan(optimizer: torch.optim.Optimizer, schedule: "Schedule") -> list[dict[str, str]]:
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
    for number, (group, own) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        chosen: dict[str, str] = {}
        for key in sorted(keys, key=lambda k: k not in labels):  # labelled ones first: they win
            arg = argument(key)
            if key in labels:
                if labels[key] not in own:
                    continue
                if arg in chosen:
                    raise ValueError(
                        f"the schedule has {chosen[arg]!r} and {key!r}, and a parameter group has both names."
                    )
            elif arg in chosen:
                continue
            elif key in schedule.params:
                named = any(key in each for each in names)
                if not (key in own if named else _is_for(schedule, key, optimizer, number)):
                    continue
            if arg not in group and not (arg in BETAS and "betas" in group):
                raise ValueError(
                    f"the schedule sets {arg!r}, which {type(optimizer).__name__} does not have; it was learnt for "
                    f"{schedule.rule.get('name', 'another optimizer')}. To set it yourself, attach "
                    f"schedule.without({key!r})."
                )
            chosen[arg] = key
        plan.append(chosen)
    idle = [key for key in keys if key in schedule.params and not any(key in own.values() for own in plan)]
    if idle:
        raise ValueError(
            f"the schedule's {idle[0]!r} is for the parameters {_shown(schedule, idle[0])} only, and the optimizer has "
            f"none of them: give it some, or attach schedule.without({idle[0]!r})."
        )
    return plan


def _warn_of_others(optimizer: torch.optim.Optimizer, schedule: "Schedule") -> None:
    """Say which arguments that the schedule does not set are other ones, in every group, than it was learnt with."""
    kind, rule = type(optimizer).__name__, schedule.rule
    if _kind(optimizer) != rule_name(schedule):
        return
    groups = [group | dict(zip(BETAS, group.get("betas", ()), strict=False)) for group in optimizer.param_groups]
    learnt_with, others = {**rule.get("fixed", {}), **rule.get("options", {})}, []
    for arg, value in learnt_with.items():
        found = [group[arg] for group in groups if arg in group]
        if found and not any(_alike(one, value) for one in found):
            others.append((f"{arg}={value!r}", f"{arg}={found[0]!r}"))
    if others:
        had, has = (", ".join(texts) for texts in zip(*others, strict=True))
        warnings.warn(
            f"the schedule was learnt with {had}, and {kind} has {has}: give it those values to train alike.",
            stacklevel=4,
        )


def _warn_of_a_clip(schedule: "Schedule") -> None:
    """Say that the gradient was clipped, at a level that was not learnt: no torch optimizer does it."""
    call = clip_call(schedule)
    if call:
        warnings.warn(
            f"the schedule was learnt with the gradient clipped, which no torch optimizer does: call {call} before "
            "every step of the optimizer. Where that is done, attach schedule.without('grad_clip').",
            stacklevel=4,
        )


def clip_call(schedule: "Schedule") -> str:
    """The call that a fixed clip of the gradient is in plain PyTorch; empty where there is none."""
    level = schedule.rule.get("fixed", {}).get("grad_clip")
    by = schedule.rule.get("options", {}).get("clip_by", "value")
    return "" if level is None else f"torch.nn.utils.clip_grad_{by}_(model.parameters(), {level!r})"


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    return math.isclose(float(one), float(other), rel_tol=1e-6)


def rule_name(schedule: "Schedule") -> str:
    """The rule that a schedule was learnt with, without its clip."""
    return str(schedule.rule.get("name", "")).removeprefix("clipped ")


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """The rule that is an optimizer's twin, its subclasses' and that of what wraps it; of others its name."""
    inner = getattr(optimizer, "optimizer", optimizer)  # as accelerate's
    inner = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    decoupled = any(group.get("decoupled_weight_decay") for group in inner.param_groups)
    if isinstance(inner, torch.optim.AdamW) or (decoupled and isinstance(inner, torch.optim.Adam)):
        return "adamw"
    twins = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    return next((name for name, twin in twins.items() if isinstance(inner, twin)), type(inner).__name__.lower())


def _warn_of_another_kind(optimizer: torch.optim.Optimizer, schedule: "Schedule") -> None:
    """Say where a schedule of one of torch's optimizers is given to another one: its values rarely suit it."""
    name, kind = rule_name(schedule), _kind(optimizer)
    one_of_torch = kind in TWINS or type(optimizer).__module__.startswith("torch.optim")
    if name in TWINS and (kind != name if one_of_torch else name not in kind):  # AdamW8bit is an AdamW, NAdam no Adam
        warnings.warn(
            f"the schedule was learnt for {TWINS[name]}, and this is {type(optimizer).__name__}: what is best for one "
            "is rarely good for the other. Use that optimizer, or learn a schedule for this one.",
            stacklevel=4,
        )


def _is_for(schedule: "Schedule", key: str, optimizer: torch.optim.Optimizer, number: int) -> bool:
    """Whether a key that is for some parameters only is for those of a group; refuses a group that has both."""
    group, wanted = optimizer.param_groups[number], patterns(schedule, key)
    names = group.get("param_names")  # where it was made of named parameters
    known = FUNCTION not in wanted and (names is not None or set(wanted) <= set(BY_DIMENSION))
    named = zip(names or [""] * len(group["params"]), group["params"], strict=True)
    picked = {any(matches(pattern, name, p) for pattern in wanted) for name, p in named}
    if known and len(picked) < 2:
        return True in picked
    problem = f"but parameter group {number} has others, too" if known else "and the optimizer does not know which"
    raise ValueError(
        f"the schedule's {key!r} is for the parameters {_shown(schedule, key)} only, {problem}: make the optimizer as "
        f"{type(optimizer).__name__}(schedule.groups(model), …), or give these parameters a group of their own, "
        f'{{"params": …, "name": {key!r}}}.'
    )


def _names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels that a parameter group answers to."""
    name = group.get("name", ())
    return (name,) if isinstance(name, str) else tuple(name or ())


def patterns(schedule: "Schedule", key: str) -> tuple[str, ...]:
    """The patterns of the parameters that a key is for; none where it is for all."""
    chosen = schedule.params.get(key, ())
    return (chosen,) if isinstance(chosen, str) else chosen


def _shown(schedule: "Schedule", key: str) -> str:
    return " or ".join(repr(pattern) for pattern in patterns(schedule, key))
