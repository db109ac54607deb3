"""Whether a hypergradient can be believed, window by window, in words.

Five things speak against a value's hypergradient: it is not finite; training amplifies changes from the beginning of
its window to the end of the run, so that the derivative describes chaos; the clip cut off a part of it, which hides
chaos; the seeds of an outer step do not agree on its sign; or its standard error, where it has one, leaves the sign
open. Each has its remedy.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longhorizon.hypers import window_start
from longhorizon.result import Hypergradient

# Growth from the beginning of a window to the end of the run. Of exact learning rates' signs in the small tasks of
# experiments/trust_bound.py 93 % are right where it is below 2, 79 % between 2 and 5, and half above 10. At the edge
# the hybrid does best with a bound of 2 or 3, better than with 10.
AMPLIFIED = 3.0
AMPLIFIED_UNCUT = 30.0  # the same without the clip of an adjoint, which keeps chaos from showing
# Share of the Hessian product that is cut off, mean over the run from when the window began: there 91 % of clipped
# learning rates' signs are right where it is smaller, and 47 % where it is larger. Clipped tangents look calm. It tells
# hot runs from others, not the bad values within a hot one.
CLIPPED = 0.001
AGREEING = 0.75  # share of the seeds that have the sign of their mean
SURE = 0.84  # of a sign, by its standard error: one standard error away from zero
EXPLODED = 5.0  # times the loss of a run that went well

REMEDIES = {
    "not finite": "clip H·Z, a smaller learning rate, or a shorter run",
    "amplified": "a smaller learning rate, a shorter run first, or fewer windows",
    "clipped": "a smaller learning rate or a shorter run; or a larger clip, if nothing is amplified",
    "seeds disagree": "more seeds, a larger batch, or fewer windows",
    "unsure": "more pairs of runs, more seeds, a larger distance, or fewer windows",
}

Doubts = dict[str, list[str]]  # per key and window, a reason, or "" where there is none


def doubts(found: Hypergradient, steps: int) -> Doubts:
    """What speaks against each value of one hypergradient."""
    doubted: Doubts = {}
    column = 0  # of the meter
    for key, grad in found.grad.items():
        doubted[key] = []
        for w in range(len(grad)):
            if not grad[w].isfinite():
                reason = "not finite"
            elif found.error is not None and not bool(found.error[key][w].isnan()):
                reason = ""  # no derivative: chaos does not matter, and its error says how sure it is
            else:
                reason = _doubt(found, column, window_start(w, steps, len(grad)), steps)
            doubted[key].append(reason)
            column += 1
    return doubted


def amplification(found: Hypergradient, begin: int, steps: int) -> float:
    """By how much training amplifies a small change of the weights between a step and the end of the run.

    The adjoint shows it. A tangent does while it only travels, after its own window; the value with the shortest first
    window shows most of the run, and what came before the end of that one is not seen.
    """
    meter = found.meter
    if meter is None:
        return 1.0
    if meter.of == "adjoint":
        return meter.growth(begin, steps)
    windows = [len(grad) for grad in found.grad.values()]
    most = max(windows)
    if most == 1:
        return 1.0
    return meter.growth(max(begin, window_start(1, steps, most)), steps, sum(windows[: windows.index(most)]))


def among_seeds(
    grads: Sequence[Mapping[str, Tensor]],
    each: Sequence[Doubts],
    error: Mapping[str, Tensor] | None = None,
) -> Doubts:
    """The doubts of an outer step: those that half of its seeds have, and where the sign of the mean is not supported.

    Args:
        grads: hypergradients, one per seed.
        each: the doubts of each.
        error: the standard error of their mean, not finite (or nothing) where it is not known; there the seeds' signs
            decide.
    """
    doubted: Doubts = {}
    for key in each[0]:
        found = torch.stack([grad[key] for grad in grads])
        signs, mean = found.sign(), found.nanmean(0)
        agreeing = (signs == mean.sign()).double().mean(0)  # with the sign that is followed
        doubted[key] = []
        for w in range(signs.shape[1]):
            said = sorted(reasons[key][w] for reasons in each)
            middle = said[len(said) // 2]  # no doubt sorts before any
            off = float(error[key][w]) if error else math.nan
            if not middle and math.isfinite(off):
                sure = sureness(float(mean[w]), off)
                middle = "" if sure >= SURE else f"unsure: {sure:.0%} sure of its sign"
            elif not middle and len(grads) > 1 and agreeing[w] < AGREEING:
                middle = f"seeds disagree: {int((1 - agreeing[w]) * len(grads) + 0.5)} of {len(grads)}"
            doubted[key].append(middle)
    return doubted


def most_of_fine(good: float, began: float) -> float:
    """The largest validation loss of a run that has not exploded, from that of one that went well.

    One that has is worse than training began, too; where that is not known (NaN), only the other counts, as it does
    where the validation loss has larger units than the training loss.

    >>> most_of_fine(0.1, 2.3), most_of_fine(0.5, 2.3), most_of_fine(0.5, math.nan)
    (2.3, 2.5, 2.5)
    """
    return max(EXPLODED * abs(good), abs(began) if math.isfinite(began) else 0.0)


def sureness(slope: float, error: float) -> float:
    """How probable the sign of a slope is, from its standard error.

    >>> round(sureness(1.0, 1.0), 2), sureness(0.0, 1.0), sureness(-1.0, 0.0)
    (0.84, 0.5, 1.0)
    """
    if error == 0:
        return 1.0 if slope else 0.5
    return 0.5 * (1 + math.erf(abs(slope) / error / math.sqrt(2)))


def gathered(doubted: Doubts) -> list[tuple[str, str]]:
    """(values, reason), the windows of one key and reason together and counted from 1.

    >>> gathered({"lr": ["not finite", "not finite", ""], "momentum": [""]})
    [('lr 1, 2', 'not finite')]
    """
    found = []
    for key, reasons in doubted.items():
        for reason in dict.fromkeys(filter(None, reasons)):
            places = ", ".join(str(w + 1) for w, other in enumerate(reasons) if other == reason)
            found.append((key if len(reasons) == 1 else f"{key} {places}", reason))
    return found


def remedy(doubt: str) -> str:
    """What to do about a reason."""
    return next(text for start, text in REMEDIES.items() if doubt.startswith(start))


def _doubt(found: Hypergradient, column: int, begin: int, steps: int) -> str:
    growth, meter, but = amplification(found, begin, steps), found.meter, ""
    if growth <= AMPLIFIED and meter is not None and meter.of == "adjoint" and meter.uncut is not None:
        growth, but = meter.growth(begin, steps, uncut=True), " but for its clip"
    if not growth <= (AMPLIFIED_UNCUT if but else AMPLIFIED):
        return f"amplified {growth:.0f} times{but}" if growth < 1000 else f"amplified {growth:.0e} times{but}"
    if meter is not None and meter.clipped is not None:
        share = float(meter.clipped[meter.steps > begin, column].mean())
        if share > CLIPPED:
            return f"clipped: {share:.0%} of H·Z" if share >= 0.01 else f"clipped: {share:.1%} of H·Z"
    return ""
