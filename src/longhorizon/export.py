"""A learnt schedule as a few lines of Python that depend on nothing of ours."""

import sys
from pprint import pformat

from longhorizon.hypers import argument
from longhorizon.schedule import Schedule

_HEADER = '''"""Hyperparameters learnt by longhorizon, for {rule}.

    for step in range(total_steps):
        set_hyperparameters(optimizer, step, total_steps)
        ...  # forward, backward, optimizer.step()
"""

SCHEDULE = {schedule}


def hyperparameters(step, total_steps):
    """The values at a step (from 0) of a run of any length."""
    step = min(step, total_steps - 1)
    return {{name: values[step * len(values) // total_steps] for name, values in SCHEDULE.items()}}
'''

_SETTER = '''

def _names(group):
    name = group.get("name") or ()
    return (name,) if isinstance(name, str) else name


def set_hyperparameters(optimizer, step, total_steps):
    """Put the values of a step into a torch optimizer's parameter groups."""
    for name, value in hyperparameters(step, total_steps).items():
        argument, _, label = name.partition("/")
        if label and not any(label in _names(group) for group in optimizer.param_groups):
            raise ValueError(f"no parameter group has the name {{label!r}}, for which {{name!r}} was learnt")
        for group in optimizer.param_groups:
            own = _names(group)
            if label and label not in own or not label and any(f"{{argument}}/{{n}}" in SCHEDULE for n in own):
                continue
            if argument in ("beta1", "beta2"):
                first, second = group["betas"]
                group["betas"] = (value, second) if argument == "beta1" else (first, value)
            elif argument == "momentum" and value == 0 and any(SCHEDULE[name]):
                group["momentum"] = {tiny!r}  # torch forgets its buffer at exactly 0
            elif argument in group:
                group[argument] = value
'''


def to_python(schedule: Schedule) -> str:
    """A module with the values and a function that puts them into a torch optimizer."""
    of_optimizer = {key: list(v) for key, v in schedule.values.items() if key not in schedule.in_loss}
    everything = {key: list(v) for key, v in schedule.values.items()}
    text = _HEADER.format(rule=_twin(schedule), schedule=pformat(everything, width=100, sort_dicts=False))
    return text + _SETTER.format(tiny=sys.float_info.min) if of_optimizer else text


def to_csv(schedule: Schedule, steps: int) -> str:
    """One row per step: the value of every hyperparameter."""
    rows = [",".join(["step", *schedule.values])]
    for step in range(steps):
        rows.append(",".join([str(step), *(repr(schedule.value(key, step, steps)) for key in schedule.values)]))
    return "\n".join(rows) + "\n"


def _twin(schedule: Schedule) -> str:
    """The torch optimizer to use, with the arguments that the schedule does not set."""
    name = str(schedule.rule.get("name", "")).removeprefix("clipped ")
    twin = {"sgd": "torch.optim.SGD", "adam": "torch.optim.Adam", "adamw": "torch.optim.AdamW"}.get(name, name)
    scheduled = {argument(key) for key in schedule.values}
    fixed = {k: v for k, v in schedule.rule.get("defaults", {}).items() if k not in scheduled and "beta" not in k}
    betas = {k: v for k, v in schedule.rule.get("defaults", {}).items() if "beta" in k}
    parts = [f"{k}={v!r}" for k, v in {**fixed, **schedule.rule.get("options", {})}.items() if k != "grad_clip"]
    if betas and not set(betas) <= scheduled:
        parts.append(f"betas=({betas['beta1']!r}, {betas['beta2']!r})")
    return f"{twin}(…{''.join(', ' + p for p in parts)})" if twin else "the optimizer it was learnt with"
