"""What training runs that failed tell: whether one exploded, which values did it, and whether it may be the data.

A run that ends finite may have exploded all the same. Its derivative says nothing then; smoothed differences do, and
know their error.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from longhorizon import tree
from longhorizon.hypers import Hyper
from longhorizon.outer import Values
from longhorizon.problem import Problem
from longhorizon.result import Hypergradient
from longhorizon.trust import most_of_fine, sureness

GUILTY = 0.977  # how sure a slope must be to be blamed for an explosion: two standard errors


def exploded(finished: Sequence[Mapping[str, Any]], good: float | None, val_loss: float) -> str:
    """What is wrong with a run that ends worse than it began; "" if it is fine.

    Far worse than the last good run, too, because the validation loss may have other units than the training loss;
    where there is none yet, than fresh weights.

    Args:
        finished: what each seed's run came to.
        good: the validation loss of the last run that went well.
        val_loss: their mean.
    """
    key = "fresh" if good is None else "began"
    if not all(key in f and "began" in f for f in finished):  # older ones do not know
        return ""
    began, fresh = (max((abs(f[k]) for f in finished if math.isfinite(f[k])), default=math.nan) for k in ("began", key))
    if not val_loss > most_of_fine(fresh if good is None else good, began):
        return ""
    if good is None:
        return f"exploded: validation loss {val_loss:.3g}, and {fresh:.3g} before training"
    return f"exploded: validation loss {val_loss:.3g}, and training began with {began:.3g}"


def guilty(grad: Values, error: Values, at: Values, good: Values) -> dict[str, list[int]]:
    """Which values made a run explode, by slopes that know their error: those that surely raised the loss the most.

    Args:
        grad, error: of the run that exploded.
        at: its values.
        good: those of the last run that went well.
    """
    rises = {key: slopes * (at[key] - good[key]) for key, slopes in grad.items()} if error else {}
    sure = {
        (key, w): float(rise)
        for key, rises_of in rises.items()
        for w, rise in enumerate(rises_of)
        if rise > 0 and sureness(float(grad[key][w]), float(error[key][w])) >= GUILTY
    }
    found: dict[str, list[int]] = {}
    for (key, w), rise in sure.items():
        if rise >= max(sure.values()) / 2:
            found.setdefault(key, []).append(w)
    return found


def named(chosen: Mapping[str, list[int]], hypers: Mapping[str, Hyper]) -> str:
    """Values in words, windows counted from 1."""
    return " and ".join(
        key if hypers[key].windows == 1 else f"{key} {', '.join(str(w + 1) for w in windows)}"
        for key, windows in chosen.items()
    )


def data_at_fault(failed: Sequence[tuple[int, bool] | None], problem: Problem | None) -> str:
    """What speaks for the data where no training run went well; "" if nothing does.

    Args:
        failed: for each run, the step whose loss was not finite, and whether that came suddenly.
        problem: the last of them.
    """
    last = failed[-1] if failed else None
    if last is None or problem is None:
        return ""
    step, _ = last
    if not all(bool(x.isfinite().all()) for x in tree.leaves(problem.batch(step))):
        return f" But the training batch of step {step} (from 0) holds NaN or infinity: look at the data first."
    if len(failed) > 1 and set(failed) == {(step, True)}:
        return f" But all failed at one and the same step, {step} (from 0): look at its training batch, too."
    return ""


def failed_at(result: Hypergradient) -> tuple[int, bool] | None:
    """The step whose training loss was no number, and whether the one before it was still as at the beginning."""
    step = result.status.step
    if result.status.what != "loss" or step is None:
        return None
    began, before = float(result.train_loss[0]), float(result.train_loss[max(0, step - 1)])
    return step, step > 1 and before <= most_of_fine(began, began)
