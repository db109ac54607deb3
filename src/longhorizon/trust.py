"""Whether a hypergradient can be believed, window by window, in words.

Four things speak against a value's hypergradient: it is not finite; training amplifies changes from the beginning of
its window to the end of the run, so that the derivative describes chaos; the clip cut off a large part of it; or the
seeds of an outer step do not agree on its sign. Each has its remedy.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longhorizon.hypers import window_start
from longhorizon.result import Hypergradient

# Growth from the beginning of a window to the end of the run. Learning rates of digits, T = 200 (experiments/truth.py):
# 94 to 100 % of one seed's signs are right in the windows where it is 0.7 to 1.7, 54 to 58 % where it is 26 to 7e5.
AMPLIFIED = 10.0
CLIPPED = 0.05  # share of the Hessian product, mean over the run from when the window began; a guess so far
AGREEING = 0.75  # share of the seeds that have the sign of their mean

REMEDIES = {
    "not finite": "clip H·Z, a smaller learning rate, or a shorter run",
    "amplified": "a smaller learning rate, a shorter run first, or fewer windows",
    "clipped": "a smaller learning rate or a shorter run; or a larger clip, if nothing is amplified",
    "seeds disagree": "more seeds, a larger batch, or fewer windows",
}

Doubts = dict[str, list[str]]  # per key and window, a reason, or "" where there is none


def doubts(found: Hypergradient, steps: int) -> Doubts:
    """What speaks against each value of one hypergradient."""
    doubted: Doubts = {}
    column = 0  # of the meter
    for key, grad in found.grad.items():
        doubted[key] = []
        for w in range(len(grad)):
            doubted[key].append(
                _doubt(found, bool(grad[w].isfinite()), column, window_start(w, steps, len(grad)), steps)
            )
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


def among_seeds(grads: Sequence[Mapping[str, Tensor]], each: Sequence[Doubts]) -> Doubts:
    """The doubts of an outer step: those that half of its seeds have, and where the seeds' signs differ."""
    doubted: Doubts = {}
    for key in each[0]:
        signs = torch.stack([grad[key].sign() for grad in grads])
        agreeing = (signs == signs.nansum(0).sign()).double().mean(0)
        doubted[key] = []
        for w in range(signs.shape[1]):
            said = sorted(reasons[key][w] for reasons in each)
            middle = said[len(said) // 2]  # no doubt sorts before any
            if not middle and len(grads) > 1 and agreeing[w] < AGREEING:
                middle = f"seeds disagree: {int((1 - agreeing[w]) * len(grads) + 0.5)} of {len(grads)}"
            doubted[key].append(middle)
    return doubted


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


def _doubt(found: Hypergradient, finite: bool, column: int, begin: int, steps: int) -> str:
    if not finite:
        return "not finite"
    growth = amplification(found, begin, steps)
    if not growth <= AMPLIFIED:
        return f"amplified {growth:.0e} times"
    meter = found.meter
    if meter is not None and meter.clipped is not None:
        share = float(meter.clipped[meter.steps > begin, column].mean())
        if share > CLIPPED:
            return f"clipped: {share:.0%} of H·Z"
    return ""
