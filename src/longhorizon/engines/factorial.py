"""Smoothed differences by a factorial design: for runs whose derivative says nothing.

Where training amplifies small changes, the final loss is a rough function of the hyperparameters: its derivative is
that of the roughness. Over a finite distance the roughness averages out. So every value is shifted at once, up or down
as a two-level design says (`design.py`), and every row of the design is one plain training run. A row and its negative
share a seed; the next pair has another, because what is wanted is the slope of the loss averaged over seeds. Each
value's slope comes from all runs:

    slope_j = Σ_i x_ij (ln L(λ + x_i δ) − ln L(λ − x_i δ)) / (2 n δ_j) · L̄        n pairs, x_ij = ±1, δ_j the distance

One pair per value would cost as much and have N times the variance. What the slopes leave unexplained tells their
standard error, and with it how sure each sign is. The logarithm keeps one bad run from deciding everything, and one
that explodes (`trust.most_of_fine`) or diverges counts as if it had just exploded; where a loss is not positive, the
loss itself is taken, and one that diverges counts as the worst that did not.

Where there are more values than runs can be paid for, neighbouring windows are shifted together (`most`): they share a
slope, as in the paper steps share a hypergradient.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from longhorizon import seeds, tree
from longhorizon.engines.base import CHECK_EVERY, Progress, Watch, check_repeated, finish, nothing
from longhorizon.engines.design import folded, hadamard
from longhorizon.hypers import argument, nearest, step_size
from longhorizon.inner import State
from longhorizon.lanes import Alone, Lanes, at_once
from longhorizon.problem import Problem, make_problem
from longhorizon.result import Hypergradient, Status
from longhorizon.trust import most_of_fine

SPARE = 3  # pairs beyond the number of values: what is left to tell the error by


@dataclass(frozen=True)
class Factorial:
    """Slopes over a finite distance, from plain training runs in which all values are shifted at once.

    Choose it where `Forward` and `Adjoint` are doubted: high learning rates, long runs. It knows how sure it is:
    `Hypergradient.error`. It asks nothing of the model but a loss. Cost: one plain training run, and two per pair; 17
    for five values, 25 for nine. It is a slope over a distance, not a derivative: for a loss without roughness the
    error falls with the square of the distance, and with the distance where a bound lies within it.

    Args:
        distance: how far each value is shifted. A number is a fraction of γ, the outer step (`Hyper.step`; in `tune`
            the current one). A mapping gives it per key, in the value's own scale (ln for the log scale), one number or
            one per window. Bounds are kept, and a learning rate is not shifted below zero, where training goes uphill.
        pairs: at least how many pairs of runs; there are never fewer than values. By default three more than values,
            rounded up to an order that has a design (4, 8, 12, 16, 20, 24, 32 …).
        seeds: "each" gives every pair a seed of its own; "one" keeps the run's for all of them, for the slope of that
            seed's loss.
        only: the values to shift, as windows per key; the others get NaN. By default all.
        most: shifts, at most, but one for each hyperparameter. If there are more values, neighbouring windows of a key
            are shifted together and share a slope. By default every value is shifted alone.
    """

    distance: float | Mapping[str, float | Sequence[float]] = 1.0
    pairs: int | None = None
    seeds: Literal["each", "one"] = "each"
    only: Mapping[str, Sequence[int]] | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        given = self.distance.values() if isinstance(self.distance, Mapping) else [self.distance]
        for distance in given:
            for d in distance if isinstance(distance, Sequence) else [distance]:
                if isinstance(d, bool) or not isinstance(d, int | float) or not 0 < d < math.inf:
                    raise ValueError(f"Factorial(distance={self.distance!r}): expected positive numbers.")
        pairs = self.pairs
        if pairs is not None and (isinstance(pairs, bool) or not isinstance(pairs, int) or pairs < 1):
            raise ValueError(f"Factorial(pairs={pairs!r}): expected a whole number of pairs, or None to let it choose.")
        most = self.most
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
            raise ValueError(f"Factorial(most={most!r}): expected a whole number of shifts, or None for one per value.")
        if self.seeds not in ("each", "one"):
            raise ValueError(f"Factorial(seeds={self.seeds!r}): expected 'each' or 'one'.")

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> "FactorialRun":
        return FactorialRun(self, problem, saved)

    def __str__(self) -> str:
        return "smoothed differences"

    def at_least(self, values: int) -> int:
        """Pairs for so many shifted values, before they are rounded up to a design."""
        return values + SPARE if self.pairs is None else self.pairs

    def trainings(self, values: int) -> int:
        """Training runs for so many learnt values."""
        values = values if self.only is None else sum(map(len, self.only.values()))
        values = values if self.most is None else min(values, self.most)
        return 1 + 2 * len(hadamard(max(values, self.at_least(values))))

    def shifted(self, problem: Problem) -> list[tuple[str, int]]:
        """The values that are shifted, as (key, window)."""
        if self.only is None:
            return [(key, w) for key in problem.learnt for w in range(problem.hypers[key].windows)]
        chosen = []
        for key, windows in self.only.items():
            if key not in problem.learnt:
                raise ValueError(f"only has the key {key!r}, which is not learnt.{nearest(key, problem.learnt)}")
            for w in windows:
                if w not in range(problem.hypers[key].windows):
                    raise ValueError(
                        f"only={{{key!r}: {w}}}: {key} has the windows 0 to {problem.hypers[key].windows - 1}."
                    )
                chosen.append((key, w))
        if not chosen:
            raise ValueError("Factorial(only={}): name at least one value, or leave it out to shift all.")
        return chosen

    def together(self, problem: Problem) -> list[list[tuple[str, int]]]:
        """The same, those in a list that are shifted together."""
        values = self.shifted(problem)
        windows: dict[str, list[tuple[str, int]]] = {}
        for key, w in values:
            windows.setdefault(key, []).append((key, w))
        if self.most is None or len(values) <= self.most:
            return [[value] for value in values]
        most = max(self.most, len(windows))  # one for each hyperparameter at least
        size = next(n for n in range(1, len(values) + 1) if sum(-(-len(v) // n) for v in windows.values()) <= most)
        return [group for own in windows.values() for group in _alike(own, -(-len(own) // size))]

    def distances(self, problem: Problem, key: str) -> Tensor:
        """δ for the windows of a key, in its own scale."""
        windows = problem.hypers[key].windows
        if isinstance(self.distance, Mapping):
            if key not in self.distance:
                raise ValueError(f"Factorial(distance={dict(self.distance)}): no distance for hyperparameter {key!r}.")
            given = torch.as_tensor(self.distance[key], dtype=torch.float64)
            if given.numel() not in (1, windows):
                raise ValueError(
                    f"Factorial(distance=…): {given.numel()} numbers for {key!r}, which has {windows} windows; "
                    "give one, or one per window."
                )
            return given.expand(windows)
        if problem.reach is not None:
            return self.distance * problem.reach[key]
        return torch.full((windows,), self.distance * step_size(key, problem.hypers[key]), dtype=torch.float64)

    def levels(self, problem: Problem, below_zero: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
        """Per key, each window's lower and upper value, inside the bounds; learning rates below zero only if asked."""
        found = {}
        for key in dict.fromkeys(key for key, _ in self.shifted(problem)):
            hyper, value, by = problem.hypers[key], problem.values[key], self.distances(problem, key)
            low, high = (value * (-by).exp(), value * by.exp()) if hyper.scale == "log" else (value - by, value + by)
            # A value that was given may lie outside the bounds, and is then shifted to the side where they are.
            least = value.clamp(max=-math.inf if hyper.low is None else hyper.low)
            most = value.clamp(min=math.inf if hyper.high is None else hyper.high)
            low = low if below_zero else _not_below_zero(key, low, value)
            found[key] = (low.clamp(least, most), high.clamp(least, most))
        return found


class FactorialRun:
    """A row of training runs in progress: the middle one, then the pairs, several at once where that pays."""

    def __init__(
        self,
        engine: Factorial,
        problem: Problem,
        saved: dict[str, Any] | None,
        middle: Hypergradient | None = None,  # of another engine, which has trained the unshifted run already
    ):
        self.engine, self.problem = engine, problem
        self.columns = engine.together(problem)  # the values that each column of the design shifts
        old = saved is not None and "levels" not in saved  # its runs were shifted below zero, too
        self.levels = saved["levels"] if saved and not old else engine.levels(problem, below_zero=old)
        self.signs = folded(len(self.columns), engine.at_least(len(self.columns)), problem.seed)
        self.total = 1 + 2 * len(self.signs)
        self.watch = Watch(problem, saved and saved["watch"])
        self.losses: list[Tensor] = [loss.to(problem.device) for loss in saved["losses"]] if saved else []
        if saved is None and middle is not None:
            self.losses.append(torch.tensor(middle.val_loss, dtype=torch.float64, device=problem.device))
        left, goes = self.total - len(self.losses), 1 if self.losses else problem.runs
        self.at_once = saved["at_once"] if saved else at_once(problem, left, goes)
        self.t = saved["t"] if saved else 0
        self._apart = saved is not None and saved.get("apart", True)  # an older run: its middle one was alone
        self._failed = False  # the middle run: the others are for nothing then
        self._look()
        self.middle: State = tree.unpack(problem.start, saved["middle"]) if saved else problem.start
        self._first: Tensor | None = saved["first"] if saved else None  # loss of the first step
        if self._first is not None:
            self._first = self._first.to(problem.device)
        self._same = all(argument(key) in problem.rule.defaults for group in self.columns for key, _ in group)
        self._of_pair: dict[int, Problem] = {}
        self._group = self._runs()
        self._begin(tree.unpack(problem.start, saved["state"]) if saved else None)

    @property
    def done(self) -> bool:
        return len(self.losses) == self.total or self._failed

    @property
    def progress(self) -> Progress:
        steps = self.problem.steps
        under_way = 0 if self.done else self.t * len(self._group)
        return Progress("train", len(self.losses) * steps + under_way, self.total * steps)

    @property
    def side_by_side(self) -> int:
        return len(self._group)

    def advance(self) -> None:
        steps = self.problem.steps
        losses, leads = self._row.step(self.t), self._group[0] < 0
        if self.t == 0:
            for run, loss in zip(self._group, losses, strict=True):
                self._compare(run, loss)
        self.t += 1
        if leads:
            failed = self.watch.see(self.t - 1, losses[0]) is not None
        else:  # of several, all: one that goes on needs the others' lanes anyway
            failed = self.t % CHECK_EVERY == 0 and not bool(losses.isfinite().any())
        if not failed and self.t < steps:
            return
        if leads:
            self.middle = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, self._row.lane(0))
        if failed:
            self.losses += [losses.new_full((), torch.nan, dtype=torch.float64)] * (1 if leads else len(losses))
        else:
            self.losses += [loss.double() for loss in self._row.validation_losses(steps)]
        self._next()

    def _compare(self, run: int, loss: Tensor) -> None:
        """Both runs of a pair begin with one loss, unless it is the loss that is shifted."""
        if self._first is None or run % 2 == 0:
            self._first = loss
        if self._same:
            check_repeated(0, self._first, loss)

    def _look(self) -> None:
        """Whether the middle run, if it is through, went well; asked once, because the answer is on the device."""
        self._failed = bool(self.losses) and not bool(self.losses[0].isfinite())

    def _next(self) -> None:
        """Go on with the runs that come next."""
        if self._group[0] < 0:
            self._look()
        self._group = self._runs()
        if not self.done:
            self.t = 0
            self._begin(None)

    def _runs(self) -> list[int]:
        """The runs to take now: −1 is the middle one, 2i and 2i + 1 are a pair."""
        first = len(self.losses) - 1
        if first < 0 and self._apart:
            return [-1]
        return list(range(first, min(first + self.at_once, self.total - 1)))

    def _begin(self, state: State | None) -> None:
        """The problems of the runs in hand, and where they begin or go on."""
        self._of_pair = {pair: made for pair, made in self._of_pair.items() if pair in {r // 2 for r in self._group}}
        problems = [self._problem(run) for run in self._group] or [self.problem]
        steps = self.total * self.problem.steps
        self._row: Lanes | Alone
        if self.at_once > 1 and self._group and self._group != [-1]:  # the last one alone, too: both of a pair alike
            self._row = Lanes(problems, state, self.at_once, steps)
        else:
            self._row = Alone(problems[0], state, steps)

    def save(self) -> dict[str, Any]:
        return {
            "losses": list(self.losses),
            "t": self.t,
            "at_once": self.at_once,
            "state": tree.pack(self._row.state),
            "middle": tree.pack(self.middle),
            "first": self._first,
            "watch": self.watch.save(),
            "apart": self._apart,
            "levels": self.levels,
        }

    def result(self) -> Hypergradient:
        problem, engine, losses = self.problem, str(self.engine), self.watch.losses
        middle = self.losses[0]
        if self.watch.first is not None or not middle.isfinite():
            what = Status("validation loss", problem.steps)
            status = what if self.watch.first is None else Status("loss", self.watch.first)
            return finish(problem, engine, nothing(problem), middle, self.middle, status, losses)
        runs = torch.stack([loss.cpu() for loss in self.losses[1:]]).reshape(-1, 2)
        grads, errors = nothing(problem), nothing(problem)
        if 2 * int(runs.isfinite().sum()) < runs.numel():  # more than half diverged
            status = Status("difference", problem.steps)
            return finish(problem, engine, grads, middle, self.middle, status, losses, error=errors)
        status = Status()
        if middle > 0 and not bool((runs <= 0).any()):
            # One that explodes, or diverges, says that it did, and no more: how far would bury what the others say.
            most = most_of_fine(float(middle), math.nan if self._first is None else float(self._first))
            runs = torch.where(runs.isnan(), most, runs.clamp(max=most))
        slopes, error = effects(self.signs, runs, common=self.engine.seeds == "one")
        for group, slope in zip(self.columns, slopes.tolist(), strict=True):
            key, windows = group[0][0], [w for _, w in group]
            low, high = (level[windows] for level in self.levels[key])
            log = problem.hypers[key].scale == "log"
            width = ((high / low).log() if log else high - low).sum()
            # On the log scale dL/dλ = (dL / d ln λ) / λ.
            unit = problem.values[key][windows] if log else torch.ones(len(windows), dtype=torch.float64)
            grads[key][windows], errors[key][windows] = 2 * slope / width / unit, 2 * error / width / unit
            if width == 0:  # so large a value that the distance is lost in rounding
                status = Status("difference", problem.steps)
        return finish(problem, engine, grads, middle, self.middle, status, losses, error=errors)

    def _problem(self, run: int) -> Problem:
        """A run: no value shifted, or all."""
        if run < 0:
            return self.problem
        signs = self.signs[run // 2] * (1 - 2 * (run % 2))
        values = {key: v.clone() for key, v in self.problem.values.items()}
        for group, sign in zip(self.columns, signs.tolist(), strict=True):
            for key, w in group:
                values[key][w] = self.levels[key][int(sign > 0)][w]
        return replace(self._seeded(run // 2), values=values)

    def _seeded(self, pair: int) -> Problem:
        """The unshifted run with the seed of a pair; the first has the run's own."""
        if pair == 0 or self.engine.seeds == "one":
            return self.problem
        if pair not in self._of_pair:
            p = self.problem
            seed = seeds.mix(p.seed, pair, seeds.PAIR) % 2**31
            self._of_pair[pair] = make_problem(p.task, p.rule, p.hypers, p.steps, seed, p.values, p.traces)
            self._of_pair[pair].runs = p.runs
        return self._of_pair[pair]


def _alike(values: list[tuple[str, int]], groups: int) -> list[list[tuple[str, int]]]:
    """Neighbours together, in so many groups of nearly one size.

    >>> [len(group) for group in _alike([("lr", w) for w in range(7)], 3)]
    [2, 2, 3]
    """
    ends = [len(values) * (i + 1) // groups for i in range(groups)]
    return [values[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def within_shifts(
    values: Mapping[str, Tensor], at: Mapping[str, Tensor], error: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Where values may move to that were shifted, and so have an error, be it infinite: no learning rate below zero.

    >>> lr = torch.tensor([0.0, 0.1])
    >>> within_shifts({"lr": lr - 0.2}, {"lr": lr}, {"lr": torch.tensor([0.01, torch.nan])})  # the second one is exact
    {'lr': tensor([ 0.0000, -0.1000])}
    """
    kept = dict(values)
    for key, off in error.items():
        kept[key] = torch.where(off.isnan(), values[key], _not_below_zero(key, values[key], at[key]))
    return kept


def reach(key: str, start: Tensor, low: float, high: float) -> tuple[float, float]:
    """What is left of a search range that outer steps alone would have, from where the values of a key start."""
    return float(_not_below_zero(key, torch.full_like(start, low), start).min()), high


def _not_below_zero(key: str, to: Tensor, at: Tensor) -> Tensor:
    """Where values may go from where they are: a learning rate is not taken below zero, where training goes uphill."""
    return torch.where(at >= 0, to.clamp(min=0.0), to) if argument(key) == "lr" else to


def effects(signs: Tensor, losses: Tensor, common: bool = False) -> tuple[Tensor, float]:
    """Half the change of the loss from each value's lower to its upper level, and the standard error they share.

    The error comes from what the effects leave of the pairs' differences; infinite if no pair is spare.

    Args:
        signs: of the design, pairs × values.
        losses: pairs × 2; a run that diverged counts as the worst of those that did not.
        common: whether all pairs have one seed. Then how far the pairs' means lie apart is roughness too and counts;
            interactions of two values are in it, so the error is rather too large than too small.

    >>> signs = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    >>> effects(signs, torch.tensor([[-3.0, -1.0], [-1.0, -3.0]], dtype=torch.float64))
    (tensor([-1.], dtype=torch.float64), 0.0)
    """
    losses = torch.where(losses.isfinite(), losses, losses[losses.isfinite()].max())
    size = 1.0
    if bool((losses > 0).all()):
        losses = losses.log()
        size = float(losses.mean().exp())
    pairs, values = signs.shape
    differences, means = (losses[:, 0] - losses[:, 1]) / 2, losses.mean(1)
    found = signs.T @ differences / pairs
    left, spare = (differences - signs @ found).square().sum(), pairs - values
    if common:
        left, spare = left + (means - means.mean()).square().sum(), spare + pairs - 1
    error = float((left / spare / pairs).sqrt()) if spare > 0 else math.inf
    return found * size, error * size
