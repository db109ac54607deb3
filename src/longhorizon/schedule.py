"""A learnt schedule: save it, load it, stretch it to any number of steps, make the parameter groups it wants."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from longhorizon.attaching import BETAS, FUNCTION, ScheduleScheduler, patterns, shown_type
from longhorizon.files import write_aside
from longhorizon.hypers import Hyper, Selector, argument, nearest, select, window_of
from longhorizon.rules import Rule

FORMAT = "longhorizon-schedule"
VERSION = 2  # 2: "params"


@dataclass(frozen=True)
class Schedule:
    """Values per window for every hyperparameter, learnt or fixed.

    A schedule has no length of its own: step t of T takes the value of window ⌊t · windows / T⌋, for any T.

    Attributes:
        values: key -> one value per window; a bare number will do for one.
        rule: the optimizer it was made for: its name and the arguments that were not scheduled.
        learnt: the keys that were learnt.
        in_loss: the keys that the loss reads; the others are arguments of the optimizer.
        params: key -> the pattern, or patterns, of the parameters that it is for; a key not in here is for all.
    """

    values: dict[str, tuple[float, ...]]
    rule: dict[str, Any] = field(default_factory=dict)
    learnt: tuple[str, ...] = ()
    in_loss: tuple[str, ...] = ()
    params: dict[str, str | tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_parts(self)
        object.__setattr__(self, "values", {key: _checked(key, values) for key, values in self.values.items()})

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

    def attach(self, optimizer: torch.optim.Optimizer, steps: int, last_epoch: int = -1) -> ScheduleScheduler:
        """A torch scheduler that sets lr, momentum, weight decay, betas … of `optimizer` at every `.step()`.

        Call its `.step()` after every optimizer step, not after every epoch. A key with a label ("lr/head") goes to the
        parameter groups whose "name" is the label (or, for a tuple of several names, among them), a plain key to every
        group without one of its own. A plain key that was learnt for some parameters only goes to the groups that hold
        these and no others (or whose "name" is the key); an optimizer made of `groups(model)` has such groups.

        Args:
            optimizer: a `torch.optim` optimizer of the kind the schedule was learnt for.
            steps: T of the run; the schedule is stretched to it.
            last_epoch: as in torch's schedulers, the number of steps already taken minus one.
        """
        return ScheduleScheduler(optimizer, self, steps, last_epoch)

    def groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        """The parameter groups of a model that the schedule wants, for a torch optimizer to be made of.

        They have the labels for names. An argument that the schedule sets for other parameters only has the value that
        the rule was made with.

        >>> schedule = Schedule({"lr": (0.1,), "weight_decay": (0.01,)}, params={"weight_decay": "ndim>=2"})
        >>> optimizer = torch.optim.SGD(schedule.groups(torch.nn.Linear(2, 1)))
        >>> [group["param_names"] for group in optimizer.param_groups]
        [['weight'], ['bias']]
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"groups(model={shown_type(model)}): expected the model itself, whose parameters' names say which "
                "group they belong to: schedule.groups(model)."
            )
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        keys = [key for key in self.values if key not in self.in_loss]
        _check_known(self, keys)
        claims = {key: select(key, self.params[key], params) if key in self.params else list(params) for key in keys}
        made: dict[tuple[str, ...], list[tuple[str, torch.Tensor]]] = {}
        for name, p in params.items():
            own: dict[str, str] = {}
            for key in sorted(keys, key=lambda k: k in self.params):  # those for some parameters last: they win
                if name in claims[key]:
                    own[argument(key)] = key
            made.setdefault(tuple(key for key in keys if key in own.values()), []).append((name, p))
        return [_group(self, keys, own, named) for own, named in made.items()]

    def without(self, *keys: str) -> "Schedule":
        """The same without some keys, learnt or fixed, for what no torch optimizer does (`grad_clip`) and you do.

        >>> Schedule({"lr": (0.1,), "grad_clip": (1.0,)}).without("grad_clip").keys()
        ['lr']
        """
        fixed = self.rule.get("fixed", {})
        for key in keys:
            if key not in fixed:
                self[key]  # a misspelt one is an error
        rest = {key: values for key, values in self.values.items() if key not in keys}
        params = {key: chosen for key, chosen in self.params.items() if key in rest}
        rule = dict(self.rule)
        if fixed:
            rule["fixed"] = {arg: value for arg, value in fixed.items() if arg not in keys}
        return replace(self, values=rest, rule=rule, learnt=tuple(k for k in self.learnt if k in rest), params=params)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, aside and then renamed, so that no reader sees half a file."""
        write_aside(Path(path), json.dumps(self.to_dict(), indent=2) + "\n")

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
                | ({"params": _listed(self.params[key])} if key in self.params else {})
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
            chosen = {key: entry["params"] for key, entry in hypers.items() if entry.get("params") is not None}
            params = {key: p if isinstance(p, str) else tuple(str(one) for one in p) for key, p in chosen.items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{origin} is damaged: {type(error).__name__} at {error}.") from None
        if not values or not all(values.values()):
            raise ValueError(f"{origin} is damaged: a hyperparameter has no values.")
        return cls(values, dict(content.get("rule", {})), learnt, in_loss, params)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Schedule":
        """Read a schedule file, or that of a run's folder."""
        path = Path(path) / "schedule.json" if Path(path).is_dir() else path
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
        given = {
            key: tuple(float(v) for v in torch.as_tensor(values[key], dtype=torch.float64).reshape(-1))
            for key in hypers
        }
        fixed = {arg: v for arg, v in rule.defaults.items() if arg not in {argument(key) for key in hypers}}
        record = {"name": rule.name, "defaults": dict(rule.defaults), "fixed": fixed, "options": dict(rule.options)}
        learnt = tuple(key for key, hyper in hypers.items() if hyper.learn)
        params = {key: _recorded(hyper.params) for key, hyper in hypers.items() if hyper.params is not None}
        return cls(given, record, learnt, tuple(k for k in hypers if argument(k) not in rule.defaults), params)


def _check_parts(schedule: Schedule) -> None:
    """Refuse what is no dictionary, or no list, of names."""
    for part, form in (("values", '{"lr": (0.1, 0.2)}'), ("rule", '{"name": "sgd"}'), ("params", '{"lr": "head.*"}')):
        given = getattr(schedule, part)
        if not isinstance(given, Mapping):
            raise TypeError(f"Schedule({part}={given!r}): expected a dictionary such as {form}.")
    for key in schedule.values:
        if not isinstance(key, str) or not argument(key):
            raise TypeError(f"Schedule(values=…) has the key {key!r}: expected a name such as 'lr' or 'lr/head'.")
    for part in ("learnt", "in_loss"):
        given = getattr(schedule, part)
        if isinstance(given, str):
            raise TypeError(f"Schedule({part}={given!r}): expected a tuple of keys, ({given!r},).")


def _checked(key: str, values: Any) -> tuple[float, ...]:
    """The values of a key as floats; refuses what are none."""
    given = values.tolist() if hasattr(values, "tolist") else values  # a tensor, an array
    listed = [given] if isinstance(given, Real) else given
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise TypeError(f"the schedule's {key!r} is {values!r}: expected a number, or one per window: (0.1, 0.2).")
    if not listed:
        raise ValueError(f"the schedule's {key!r} is {values!r}, which has no value: give one, or leave {key!r} out.")
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"the schedule's {key!r} has the value {value!r}: expected numbers, one per window.")
    return tuple(float(value) for value in listed)


def _check_known(schedule: Schedule, keys: Sequence[str]) -> None:
    """Refuse to make groups where the schedule does not say which parameters a key is for."""
    for key in keys:
        lost = FUNCTION in patterns(schedule, key)
        if lost or ("/" in key and not schedule.params):  # a file of version 1, or made by hand
            why = "a function chose them" if lost else "it has no `params`"
            raise ValueError(
                f"the schedule does not know which parameters {key!r} is for ({why}): make the groups yourself, those "
                f'it is for with the name, {{"params": …, "name": {key.split("/", 1)[-1]!r}}}.'
            )


def _group(
    schedule: Schedule, keys: Sequence[str], own: Sequence[str], named: list[tuple[str, torch.Tensor]]
) -> dict[str, Any]:
    """A parameter group: those of `keys` that are for it are `own`."""
    group: dict[str, Any] = {"params": named}
    labels = tuple(dict.fromkeys(key.split("/", 1)[1] for key in own if "/" in key))
    for key in keys:
        if "/" in key and key.split("/", 1)[1] in labels and key not in own:
            raise ValueError(
                f"the schedule's {key!r} is not for {named[0][0]!r}, but another key with this label is: "
                "give one of them another label."
            )
    if labels:
        group["name"] = labels[0] if len(labels) == 1 else labels
    defaults, args = schedule.rule.get("defaults", {}), {argument(key) for key in keys}
    if args & set(BETAS) and set(BETAS) <= set(defaults):
        group["betas"] = tuple(defaults[beta] for beta in BETAS)
        args -= set(BETAS)
    return group | {arg: defaults[arg] for arg in args - {argument(key) for key in own} if arg in defaults}


def _recorded(selector: Selector) -> str | tuple[str, ...]:
    if callable(selector):
        return FUNCTION
    return selector if isinstance(selector, str) else tuple(selector)


def _listed(chosen: str | tuple[str, ...]) -> str | list[str]:
    return chosen if isinstance(chosen, str) else list(chosen)
