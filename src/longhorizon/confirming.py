"""Which of several schedules to keep: all are trained from scratch with the same few seeds.

An outer step ends at values that nothing was trained with yet, and the values whose one run ended best may have been
lucky. A few plain training runs of each, on splits that neither has seen, tell them apart where it matters: where one
of them is no good. They cost a small part of what tuning did (docs/trust.md has the measurements).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from statistics import fmean
from typing import Any

import torch

from longhorizon.cuda import Precision
from longhorizon.hypers import Hyper
from longhorizon.problem import check_parts, environment, make_problem
from longhorizon.retraining import trained
from longhorizon.rules import Rule
from longhorizon.schedule import Schedule
from longhorizon.task import Task
from longhorizon.traces import Traces


@dataclass(frozen=True)
class Confirmed:
    """How schedules did on validation data.

    Attributes:
        seeds: one training run of each schedule with each.
        losses: per schedule and seed; infinite for a run that diverged.
        seconds: that the runs of `tune` took, those of an earlier process included.
    """

    seeds: list[int]
    losses: dict[str, list[float]]
    seconds: float = field(default=0.0, compare=False)

    @property
    def chosen(self) -> str:
        """The one that diverged least often and has the lowest mean loss; of equal ones the first.

        >>> Confirmed([0, 1], {"last": [0.1, inf], "best": [0.4, 0.5]}).chosen
        'best'
        """
        return min(self.losses, key=lambda name: _rank(self.losses[name]))

    def __str__(self) -> str:
        """In a line.

        >>> print(Confirmed([0, 1], {"last": [0.1, inf], "best": [0.4, 0.5]}))
        validation loss, mean of 2: last diverged in 1, best 0.45
        """
        said = []
        for name, losses in self.losses.items():
            bad, mean = _rank(losses)
            said.append(f"{name} diverged in {bad}" if bad else f"{name} {mean:.4g}")
        return f"validation loss, mean of {len(self.seeds)}: {', '.join(said)}"


def kept_in(content: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """The losses in confirmed.json, by name and seed; none if there are none to be read.

    >>> kept_in({"losses": {"last": {"7": 0.1, "8": None}}})
    {'last': {7: 0.1, 8: inf}}
    """
    try:
        return {
            name: {int(seed): inf if loss is None else float(loss) for seed, loss in own.items()}
            for name, own in content["losses"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def seconds_in(content: Mapping[str, Any]) -> float:
    """What these took."""
    seconds = content.get("seconds")
    return float(seconds) if isinstance(seconds, float | int) and isfinite(seconds) else 0.0


def _rank(losses: Sequence[float]) -> tuple[int, float]:
    fine = [loss for loss in losses if isfinite(loss)]
    return len(losses) - len(fine), fmean(fine) if fine else inf


def confirm(
    task: Task,
    rule: Rule,
    hypers: Mapping[str, Hyper],
    schedules: Mapping[str, Schedule | Mapping[str, Any]],
    *,
    steps: int,
    seeds: int | Sequence[int] = 3,
    precision: Precision = "float32",
    traces: Traces | None = None,
    known: Mapping[str, Mapping[int, float]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_run: Callable[[str, int, float], None] | None = None,
) -> Confirmed:
    """Train from scratch with each schedule and compare their validation losses.

    Runs are trained side by side where they gain by it (`lanes.py`). Schedules share their seeds: initial weights,
    split, order and augmentation.

    Args:
        task, rule, hypers, steps, precision, traces: as for `tune`.
        schedules: by name, the first of which is kept if they are equal.
        seeds: how many runs of each, or which; give others than a tuning run had.
        known: losses that are known already, by name and seed; these are not trained again.
        progress: called with (steps done, steps in all) after every step, of all runs together.
        on_run: called with a name, a seed and its loss when a run is done.
    """
    check_parts(task, rule)
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not isinstance(schedules, Mapping):
        raise TypeError(f"confirm(schedules={schedules!r}): expected a dictionary from a name to a schedule.")
    if not schedules or not chosen:
        raise ValueError(f"confirm(schedules={list(schedules)}, seeds={seeds!r}): expected at least one of each.")
    for name, schedule in schedules.items():
        if lacks := [key for key in hypers if key not in schedule.keys()]:  # noqa: SIM118 - a Schedule is no mapping
            raise ValueError(f"confirm: the schedule {name!r} has no {lacks[0]!r}, which is in `hypers`.")
    values = {
        name: {key: torch.as_tensor(schedule[key], dtype=torch.float64).reshape(-1) for key in hypers}
        for name, schedule in schedules.items()
    }
    found = {name: dict((known or {}).get(name, {})) for name in schedules}
    runs = [(name, seed) for seed in chosen for name in schedules]
    left = [(name, seed) for name, seed in runs if seed not in found[name]]
    traces = Traces() if traces is None else traces
    with environment(precision):
        makes = [
            partial(make_problem, task, rule, hypers, steps, seed, values[name], traces)
            if (name, seed) in left
            else None
            for name, seed in runs
        ]
        ends = trained(makes, steps * len(runs), progress) if left else ()
        for (name, seed), (problem, state) in zip(left, ends, strict=True):
            loss = float(problem.validation_loss(state, steps))
            found[name][seed] = loss if isfinite(loss) else inf
            if on_run is not None:
                on_run(name, seed, found[name][seed])
    return Confirmed(chosen, {name: [by_seed[seed] for seed in chosen] for name, by_seed in found.items()})
