"""Train from scratch with a schedule, on all data but the test set, and test."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, nan
from statistics import mean, stdev

import torch
from torch import Tensor

from longhorizon import compile, tree
from longhorizon.batches import note_step
from longhorizon.cuda import Precision
from longhorizon.functional import Buffers
from longhorizon.hypers import Hyper, window_of
from longhorizon.inner import State
from longhorizon.lanes import Alone, Lanes, at_once
from longhorizon.problem import Problem, check_parts, environment, make_problem, refuse_unfit
from longhorizon.rules import Params, Rule
from longhorizon.schedule import Schedule
from longhorizon.task import Called, Task
from longhorizon.traces import Traces


@dataclass(frozen=True)
class Retrained:
    """How a schedule does on the test set.

    Attributes:
        seeds: one training run each.
        test_loss, metrics: per seed; the loss of a run that diverged is NaN.
        params, buffers: of the last seed.
    """

    seeds: list[int]
    test_loss: list[float]
    metrics: dict[str, list[float]]
    params: Params = field(repr=False)
    buffers: Buffers = field(repr=False)

    def summary(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation over the seeds, of the loss and of every metric.

        The deviation of a single seed is NaN: it is not known.
        """
        return {name: mean_and_deviation(v) for name, v in {"loss": self.test_loss, **self.metrics}.items()}


def mean_and_deviation(found: Sequence[float]) -> tuple[float, float]:
    """Of one number per seed; NaN is what is not known: a single one's deviation, and both if one is not finite."""
    if not all(map(isfinite, found)):
        return nan, nan
    return mean(found), stdev(found) if len(found) > 1 else nan


def retrain(
    task: Task,
    rule: Rule,
    hypers: Mapping[str, Hyper],
    schedule: Schedule | Mapping[str, object],
    *,
    steps: int,
    seeds: int | Sequence[int] = 3,
    precision: Precision = "float32",
    traces: Traces | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_seed: Callable[[int, dict[str, float]], None] | None = None,
) -> Retrained:
    """Train on training and validation data with a schedule, and test in eval mode.

    Runs that gain by it are trained side by side (`lanes.py`), as one batched step; they are tested together, at the
    end.

    Args:
        task: with `test`, and with `full` for the data of both (without it, `train` is used).
        rule: the optimizer.
        hypers: as they were learnt; the values come from the schedule.
        schedule: what to train with, or a mapping from key to values.
        steps: the budget; any number, the schedule stretches.
        seeds: how many runs, or which.
        precision: of float32 products on a GPU; see `hypergradient`. With "bf16" seeds are trained in mixed
            precision, side by side.
        traces: shared with other calls, so that on a GPU the step is compiled once for all of them; then it is compiled
            however short a run is.
        progress: called with (steps done, steps in all) after every step, of all seeds together.
        on_seed: called with a seed and its loss and metrics when its run has been tested.
    """
    check_parts(task, rule)
    if task.test is None:
        raise ValueError("retrain needs data that nothing has seen: give Task(test=lambda: [batches]).")
    for key in schedule.keys():  # noqa: SIM118 - a Schedule is no mapping
        if key not in hypers:
            raise ValueError(
                f"retrain: the schedule has {key!r}, which `hypers` lacks: "
                "add it there as it was learnt, or leave it out of the schedule."
            )
    given = {key: torch.as_tensor(schedule[key], dtype=torch.float64).reshape(-1) for key in hypers}
    hypers, values = _with_steps_for_all_windows(hypers, given, steps)
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not chosen:
        raise ValueError(f"retrain(seeds={seeds!r}): expected at least one.")
    whole, called = whole_of(task)
    total = steps * len(chosen) if traces is None else compile.WORTH_COMPILING  # who shares traces runs often
    traces = Traces() if traces is None else traces
    losses: list[float] = []
    metrics: dict[str, list[float]] = {}
    with environment(precision):
        makes = [partial(make_problem, whole, rule, hypers, steps, seed, values, traces, called) for seed in chosen]
        for seed, (problem, state) in zip(chosen, trained(makes, total, progress), strict=True):
            losses.append(float(problem.validation_loss(state, steps)))
            measured = problem.measure(state.params, state.buffers)
            for name, value in measured.items():
                metrics.setdefault(name, []).append(value)
            if on_seed is not None:
                on_seed(seed, {"loss": losses[-1], **measured})
    last = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)  # of its own, not of a row of runs
    return Retrained(chosen, losses, metrics, last.params, last.buffers)


def check_test(
    task: Task,
    rule: Rule,
    hypers: Mapping[str, Hyper],
    steps: int,
    *,
    fewer: str = "lower `steps`",
    precision: Precision = "float32",
) -> None:
    """Refuse what a test would fail on, before the hours of work that it comes after.

    Tried are the list of test batches, the loss and the metrics on its first, the loss on the first training batch, and
    the length of a stream that has one. Other batches and streams are seen by the test alone.

    Args:
        task: with `test`.
        rule, hypers: what is to be learnt.
        steps: of a training run of the test.
        fewer: what to do for a test of fewer steps.
        precision: as for `retrain`.
    """
    whole, called = whole_of(task, fewer)
    hypers, values = _with_steps_for_all_windows(hypers, {key: h.values() for key, h in hypers.items()}, steps)
    try:
        with environment(precision):
            refuse_unfit(make_problem(whole, rule, hypers, steps, 0, values, called=called))
    except Exception as error:
        error.add_note("The test at the end would fail so; its first batches were tried before any other work.")
        raise


def _with_steps_for_all_windows(
    hypers: Mapping[str, Hyper], values: Mapping[str, Tensor], steps: int
) -> tuple[Mapping[str, Hyper], dict[str, Tensor]]:
    """Without the windows that no step of a short run lies in."""
    kept = dict(values)
    for key, v in values.items():
        if isinstance(steps, int) and 0 < steps < len(v):
            kept[key] = v[[window_of(step, steps, len(v)) for step in range(steps)]]
            hypers = {**hypers, key: replace(hypers[key], start=kept[key].tolist(), windows=steps)}
    return hypers, kept


def whole_of(task: Task, fewer: str = "train for fewer steps") -> tuple[Task, Called]:
    """The task of a test, trained on `full` and judged on `test`, and what messages call its parts."""
    assert task.test is not None
    test = task.test
    whole = replace(task, train=task.full or task.train, val=lambda seed: test(), val_mode="eval")
    return whole, Called("train" if task.full is None else "full", "test", fewer)


def trained(
    makes: Sequence[Callable[[], Problem] | None], total: int, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[Problem, State]]:
    """Train runs of one length that differ in their seed or their values; each in its turn, when its group is done.

    Args:
        makes: what makes each run, with one `Traces`; None for one that an earlier process has done. The others then
            keep their lanes: in another one of as many, or of another number, sums are rounded otherwise.
        total: steps of all that will ever be made like these, which decides whether tracing pays.
        progress: called with (steps done, steps in all) after every step, of all runs together.
    """
    place, make = next((i, make) for i, make in enumerate(makes) if make is not None)
    first = make()
    together, steps = at_once(first, len(makes)), first.steps
    for begin in range(0, len(makes), together):
        group = makes[begin : begin + together]
        own = [first if begin + i == place else make and make() for i, make in enumerate(group)]
        left = [problem for problem in own if problem is not None]
        if not left:
            continue
        problems = [problem or left[0] for problem in own]
        training = Lanes(problems, None, together, total) if together > 1 else Alone(problems[0], None, total)
        for step in range(steps):
            try:
                loss = training.step(step)
            except Exception as error:
                note_step(error)
                raise
            if progress is not None:
                progress(begin * steps + (step + 1) * len(group), len(makes) * steps)
            if step % 100 == 99 and not torch.isfinite(loss).any():
                break
        for i, problem in enumerate(own):
            if problem is not None:
                yield problem, training.lane(i)
