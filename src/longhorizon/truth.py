"""What a hypergradient should have been, and how well an estimate of it did.

Over a long run the exact derivative of one seed's loss is often useless: the loss is a rough function of the
hyperparameters, and its slope at a point says nothing about the slope that a user would feel. What a user would feel is
the central difference of the loss averaged over seeds, at a step of finite size. It costs two training runs per value
and seed, so it is for judging estimators, not for tuning.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longhorizon.cuda import Precision
from longhorizon.engines import FiniteDifference
from longhorizon.engines.entry import compute
from longhorizon.files import write_aside
from longhorizon.hypers import Hyper
from longhorizon.lanes import Lanes, at_once
from longhorizon.problem import Problem, environment, make_problem
from longhorizon.rules import Rule
from longhorizon.task import Task
from longhorizon.traces import Traces


@dataclass(frozen=True)
class Truth:
    """Central differences of the final validation loss, by seed.

    Attributes:
        differences: per key, seeds × windows; NaN where a value was not shifted or a run ended in a non-finite loss.
        val_loss: of the unshifted runs, one per seed.
    """

    differences: dict[str, Tensor]
    val_loss: Tensor

    @property
    def mean(self) -> dict[str, Tensor]:
        return {key: d.nanmean(0) for key, d in self.differences.items()}

    @property
    def error(self) -> dict[str, Tensor]:
        """The standard error of the mean."""
        return {key: _deviation(d) / d.isfinite().sum(0).sqrt() for key, d in self.differences.items()}

    def significant(self, z: float = 2.0) -> dict[str, Tensor]:
        """Which values have a slope whose sign is known: further from zero than `z` standard errors.

        A value that lost more than a tenth of its seeds is left out: where runs diverge there is no slope.
        """
        kept = {key: d.isfinite().double().mean(0) >= 0.9 for key, d in self.differences.items()}
        return {key: kept[key] & (self.mean[key].abs() > z * self.error[key]) for key in self.differences}


def truth(
    task: Task,
    rule: Rule,
    hypers: Mapping[str, Hyper],
    *,
    steps: int,
    distance: float | Mapping[str, float],
    seeds: int | Sequence[int] = 48,
    values: Mapping[str, Any] | None = None,
    only: Mapping[str, Sequence[int]] | None = None,
    precision: Precision = "float32",
    path: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Truth:
    """Measure the slope of the seed-averaged final validation loss.

    Both runs of a difference share their seed: initial weights, split, order and augmentation.

    Args:
        task, rule, hypers, steps, values, precision: as for `hypergradient`.
        distance: how far to shift, as a fraction of the value (of 0.1 where it is zero); a mapping sets it per key.
            0.3 is a step that a user would feel for a learning rate.
        seeds: how many, or which.
        only: the values to measure, as windows per key.
        path: a JSON file that keeps every finished seed; an interrupted measurement goes on from it.
        progress: called with (seeds done, seeds in all).
    """
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if len(chosen) < 2:
        raise ValueError(f"truth(seeds={seeds!r}): expected at least two, so that there is an error to state.")
    setting: dict[str, Any] = {
        "steps": steps,
        "distance": dict(distance) if isinstance(distance, Mapping) else distance,
    }
    setting["only"] = None if only is None else {key: list(windows) for key, windows in only.items()}
    setting["values"] = {
        key: (hyper.values() if values is None or key not in values else torch.as_tensor(values[key])).tolist()
        for key, hyper in hypers.items()
    }
    own = {"name": rule.name, "defaults": dict(rule.defaults), "options": dict(rule.options)}
    setting |= {"precision": precision, "rule": own}
    for key in [key for key, hyper in hypers.items() if hyper.learn and (only is None or key in only)]:
        if isinstance(distance, Mapping) and key not in distance:
            raise ValueError(f"truth(distance={dict(distance)}): no distance for hyperparameter {key!r}.")
    file = _File(path, setting)
    traces = Traces()
    with environment(precision):
        for number, seed in enumerate(chosen):
            if str(seed) not in file.seeds:
                problem = make_problem(task, rule, hypers, steps, seed, values, traces)
                file.add(seed, *_differences(problem, FiniteDifference(distance, only), len(chosen)))
            if progress is not None:
                progress(number + 1, len(chosen))
    rows = [file.seeds[str(seed)] for seed in chosen]
    grads = {key: _numbers([row["grad"][key] for row in rows]) for key in rows[0]["grad"]}
    return Truth(grads, _numbers([row["val_loss"] for row in rows]))


def _differences(problem: Problem, engine: FiniteDifference, seeds: int) -> tuple[float, dict[str, Tensor]]:
    """The loss of a run and its slopes; all runs at once where that pays, over so many seeds."""
    runs = [*(engine.shifted(problem, *run) for run in engine.runs(problem)), problem]
    count = at_once(problem, len(runs), seeds)
    if count == 1:
        found = compute(problem, engine)
        return found.val_loss, found.grad
    losses: list[Tensor] = []
    for first in range(0, len(runs), count):
        lanes = Lanes(runs[first : first + count], count=count, steps=problem.steps * len(runs) * seeds)
        for t in range(problem.steps):
            lanes.step(t)
        losses += lanes.validation_losses(problem.steps)
    return float(losses[-1]), engine.slopes(problem, losses)


@dataclass(frozen=True)
class Score:
    """How well single estimates of a hypergradient agree with the truth.

    Attributes:
        values: how many values have a significant truth.
        sign: the share of estimates with the right sign on those; zero and non-finite ones count as wrong.
        sign_error: its standard error, over seeds.
        rank: Spearman's correlation of an estimate with the truth over the windows of a key, mean over seeds and keys.
        bias: the median over values of |mean estimate − truth| / |truth|.
        spread: the median over values of the estimates' deviation / |truth|.
    """

    values: int
    sign: float
    sign_error: float
    rank: float
    bias: float
    spread: float


def score(estimates: Mapping[str, Tensor], truth: Truth, z: float = 2.0) -> Score:
    """Judge estimates (per key, estimates × windows) by the truth. Keys that are not estimated are left out."""
    known = truth.significant(z)
    mean = {key: m for key, m in truth.mean.items() if key in estimates}
    if not mean:
        raise ValueError(f"score: the estimates have the keys {list(estimates)}, the truth {list(truth.differences)}.")
    right = [(estimates[key].sign() == mean[key].sign())[:, known[key]] for key in mean]
    each = torch.cat(right, 1).double()
    ranks = [r for key in mean if (r := _rank(estimates[key], mean[key])) is not None]
    bias, spread = [], []
    for key in mean:
        size = mean[key][known[key]].abs()
        given = estimates[key][:, known[key]]
        bias.append((given.nanmean(0) - mean[key][known[key]]).abs() / size)
        spread.append(_deviation(given) / size)
    by_seed = each.mean(1) if each.numel() else torch.full((len(each),), torch.nan)
    error = float(by_seed.std() / len(by_seed) ** 0.5) if len(by_seed) > 1 else math.nan
    return Score(
        int(each.shape[1]),
        float(by_seed.mean()),
        error,
        sum(ranks) / len(ranks) if ranks else math.nan,
        float(torch.cat(bias).nanmedian()) if each.numel() else math.nan,
        float(torch.cat(spread).nanmedian()) if each.numel() else math.nan,
    )


def _rank(estimates: Tensor, mean: Tensor) -> float | None:
    """Spearman's correlation with the truth, mean over the estimates; None for too few windows."""
    fine = mean.isfinite()
    if fine.sum() < 3:
        return None
    target = _ranks(mean[fine])
    found = []
    for row in estimates[:, fine]:
        ranks = _ranks(row)
        if row.isfinite().all() and (ranks != ranks[0]).any():  # equal ones have no order
            found.append(float(torch.corrcoef(torch.stack([ranks, target]))[0, 1]))
        else:
            found.append(0.0)
    return sum(found) / len(found)


def _ranks(row: Tensor) -> Tensor:
    """Ranks, those of equal values averaged."""
    return ((row[:, None] > row).double().sum(1) + (row[:, None] >= row).double().sum(1) - 1) / 2


def _deviation(rows: Tensor) -> Tensor:
    """The standard deviation over the finite entries of each column."""
    count = rows.isfinite().sum(0)
    squares = (rows - rows.nanmean(0)).square().nansum(0)
    return torch.where(count > 1, squares / (count - 1), torch.nan).sqrt()


def _numbers(values: Sequence[Any]) -> Tensor:
    """What a file has, NaN for None."""
    return torch.from_numpy(np.array(values, dtype=np.float64))


class _File:
    """Finished seeds, on disk if a path was given."""

    def __init__(self, path: str | os.PathLike[str] | None, setting: dict[str, Any]):
        self.path, self.setting = None if path is None else Path(path), json.loads(json.dumps(setting, default=str))
        self.seeds: dict[str, Any] = {}
        if self.path is None or not self.path.exists():
            return
        content = json.loads(self.path.read_text())
        # Files of before there was a precision are in float32, and those without a rule do not say which it was.
        found = {"precision": "float32", "rule": self.setting["rule"]} | content["setting"]
        for name in self.setting | found:
            there, value = found.get(name), self.setting.get(name)
            if there != value:
                raise ValueError(
                    f"{self.path} holds another measurement: its {name} is {there}, not {value}. Choose another path."
                )
        self.seeds = content["seeds"]

    def add(self, seed: int, val_loss: float, grad: Mapping[str, Tensor]) -> None:
        as_list = {key: [x if math.isfinite(x) else None for x in g.tolist()] for key, g in grad.items()}
        self.seeds[str(seed)] = {"val_loss": val_loss if math.isfinite(val_loss) else None, "grad": as_list}
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_aside(self.path, json.dumps({"setting": self.setting, "seeds": self.seeds}) + "\n")
