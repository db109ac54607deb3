"""A learnt schedule as a few lines of Python that depend on nothing of ours."""

import csv
import io
import sys
from pprint import pformat

from longhorizon.attaching import BETAS, TWINS, clip_call, patterns, rule_name
from longhorizon.schedule import Schedule

CLIPS = ("grad_clip", "clip_by")  # no arguments of a torch optimizer

_HEADER = '''"""Hyperparameters learnt by longhorizon, for {rule}.

    for step in range(total_steps):
        set_hyperparameters(optimizer, step, total_steps)
        ...  # forward, backward, {clip}optimizer.step()
"""

{imports}SCHEDULE = {schedule}
IN_LOSS = {in_loss}  # what the loss reads: yours to hand to it
{params}

def hyperparameters(step, total_steps):
    """The values at a step (from 0) of a run of any length."""
    step = min(step, total_steps - 1)
    return {{name: values[step * len(values) // total_steps] for name, values in SCHEDULE.items()}}
'''

_SETTER = '''

def _names(group):
    name = group.get("name") or ()
    return (name,) if isinstance(name, str) else name


def _groups_for(name, groups):
    argument, _, label = name.partition("/")
    labels = [[n for n in _names(group) if f"{{argument}}/{{n}}" in SCHEDULE] for group in groups]
    if any(len(own) > 1 for own in labels):
        raise ValueError(f"a parameter group has more than one of the names {{labels}} that set {{argument!r}}")
    found = [group for group, own in zip(groups, labels) if own == ([label] if label else [])]
    if label and not found:
        raise ValueError(f"no parameter group has the name {{label!r}}, for which {{name!r}} was learnt")
    return {found}


def set_hyperparameters(optimizer, step, total_steps):
    """Put the values of a step into a torch optimizer's parameter groups."""
    for name, value in hyperparameters(step, total_steps).items():
        if name in IN_LOSS:
            continue
        argument = name.partition("/")[0]
        if argument == "momentum" and value == 0 and any(SCHEDULE[name]):
            value = {tiny!r}  # torch forgets its buffer at exactly 0
        for group in _groups_for(name, optimizer.param_groups):
            if argument in group and hasattr(group[argument], "fill_"):
                group[argument].fill_(value)  # a tensor stays that tensor
            elif argument in group:
                group[argument] = value
            elif argument in ("beta1", "beta2") and "betas" in group:
                first, second = group["betas"]
                group["betas"] = (value, second) if argument == "beta1" else (first, value)
            else:
                kind = type(optimizer).__name__
                raise ValueError(f"{{kind}} has no {{argument!r}}; to set it yourself, take {{name!r}} out of SCHEDULE")
    for group in optimizer.param_groups:
        if group.get("dampening") and group["momentum"] == 0:
            group["momentum"] = {tiny!r}  # and its dampening
'''

# Only where an entry without a label is for some parameters.
_PICKED = '''

def _fits(pattern, name, p):
    """Whether a pattern picks a parameter, by its name or by what it is without torch.compile and DataParallel."""
    bare = ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))
    by_dimension = "ndim>=2" if p.ndim >= 2 else "ndim<2"
    return pattern == by_dimension or fnmatchcase(name, pattern) or fnmatchcase(bare, pattern)


def _picked(name, groups):
    """Those of the groups that have the parameters an entry is for, and no others."""
    named = [group for group in groups if name in _names(group)]
    if named:
        return named
    found, clear = [], True
    for group in groups:
        names = group.get("param_names")
        picks = {
            any(_fits(pattern, n, p) for pattern in PARAMS[name])
            for n, p in zip(names or [""] * len(group["params"]), group["params"])
        }
        clear = clear and len(picks) < 2 and bool(names or {"ndim>=2", "ndim<2"}.issuperset(PARAMS[name]))
        found += [group] if True in picks else []
    if not (found and clear):
        raise ValueError(
            f"{name!r} was learnt for the parameters {PARAMS[name]} only: give these a parameter group of their own, "
            f'{{"params": …, "name": {name!r}}}, and the others another'
        )
    return found
'''
_FOUND = "_picked(name, found) if name in PARAMS and not label else found"


def to_python(schedule: Schedule) -> str:
    """A module with the values and a function that puts them into a torch optimizer."""
    params = {key: list(patterns(schedule, key)) for key in schedule.values if key in schedule.params}
    some = any("/" not in key for key in params)  # told apart by no label
    text = _HEADER.format(
        rule=_twin(schedule),
        clip=f"{call}, " if (call := clip_call(schedule)) else "",
        imports="from fnmatch import fnmatchcase\n\n" if some else "",
        schedule=_literal({key: list(v) for key, v in schedule.values.items()}),
        in_loss=[key for key in schedule.values if key in schedule.in_loss],
        params=f"PARAMS = {_literal(params)}  # what an entry is for; one not in here: all\n" if params else "",
    )
    if set(schedule.values) <= set(schedule.in_loss):
        return text
    setter = _SETTER.format(tiny=sys.float_info.min, found=_FOUND if some else "found")
    return text + (_PICKED if some else "") + setter


def _literal(value: object) -> str:
    return pformat(value, width=100, sort_dicts=False)


def to_csv(schedule: Schedule, steps: int) -> str:
    """One row per step: the value of every hyperparameter.

    The column of one that is for some parameters only, and has no label to tell, is headed "weight_decay (ndim>=2)".
    """
    heads = [
        f"{key} ({' or '.join(patterns(schedule, key))})" if key in schedule.params and "/" not in key else key
        for key in schedule.values
    ]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["step", *heads])
    for step in range(steps):
        rows.writerow([step, *(repr(schedule.value(key, step, steps)) for key in schedule.values)])
    return text.getvalue()


def _twin(schedule: Schedule) -> str:
    """The torch optimizer to use, with the arguments that the schedule does not set, or not for all parameters."""
    name = rule_name(schedule)
    twin = TWINS.get(name, name)
    scheduled = {key for key in schedule.values if "/" not in key and key not in schedule.params}
    defaults = dict(schedule.rule.get("defaults", {}))
    betas = [defaults.pop(beta) for beta in BETAS] if set(BETAS) <= set(defaults) else []
    fixed = {k: v for k, v in defaults.items() if k not in scheduled}
    parts = [f"{k}={v!r}" for k, v in {**fixed, **schedule.rule.get("options", {})}.items() if k not in CLIPS]
    if betas and not set(BETAS) <= scheduled:
        parts.append(f"betas=({betas[0]!r}, {betas[1]!r})")
    return f"{twin}(…{''.join(', ' + p for p in parts)})" if twin else "the optimizer it was learnt with"
