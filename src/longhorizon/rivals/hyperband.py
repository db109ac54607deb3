"""Hyperband's arithmetic (Li et al., JMLR 2018): brackets, and the rungs in them.

Bracket s begins with n = ⌈(s_max + 1) η^s / (s + 1)⌉ trials of R η^(−s) each and keeps the best 1/η of them from rung
to rung; the brackets come one after the other, and then the first one again. Here it is decided trial by trial instead
of rung by rung, so that nobody waits: a trial goes on if it is among the best 1/η of those that have come so far. Both
the bracket of a trial and what becomes of it follow from the journal alone, so that they are the same after a kill.
"""

from collections.abc import Sequence
from functools import cache

ETA = 3  # reduction factor
UNKNOWN_EPOCH = 27  # the part of a run that is an epoch, where the task does not say


def s_max(most: int) -> int:
    """The number of brackets less one, ⌊log_η R⌋, in whole numbers."""
    s = 0
    while ETA ** (s + 1) <= most:
        s += 1
    return s


def brackets(most: int) -> list[list[tuple[int, int]]]:
    """Per bracket, from the one that stops earliest, its rungs as (trials, epochs each).

    >>> brackets(9)
    [[(9, 1), (3, 3), (1, 9)], [(5, 3), (1, 9)], [(3, 9)]]
    """
    top = s_max(most)
    found = []
    for s in range(top, -1, -1):
        trials = -(-(top + 1) * ETA**s // (s + 1))
        found.append([(trials // ETA**i, most // ETA ** (s - i)) for i in range(s + 1)])
    return found


def rungs(steps: int, epoch: int) -> list[int]:
    """Training steps at which a trial is judged: R η^(−i), from the shortest that is an epoch at least.

    >>> rungs(200, 19)
    [22, 66, 200]
    """
    top = s_max(steps // epoch)
    return [steps // ETA ** (top - i) for i in range(top + 1)]


def epoch_of(steps: int, epoch: int) -> int:
    """The least that a trial gets: an epoch, or a share of the run where its length is unknown."""
    return min(epoch, steps) if epoch else max(1, steps // UNKNOWN_EPOCH)


@cache  # asked for every line of the journal
def begins_on(number: int, count: int) -> int:
    """The rung, of so many, that a trial begins on, by its number: that of the bracket whose turn it is.

    >>> [begins_on(number, 3) for number in range(18)]
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 0]
    """
    shares = [bracket[0][0] for bracket in brackets(ETA ** (count - 1))]
    left = number % sum(shares)
    return next(rung for rung in range(count) if left < sum(shares[: rung + 1]))


def survives(loss: float, losses: Sequence[float]) -> bool:
    """Whether a loss is among the best 1/η of all that have come to its rung so far, itself included.

    Of the first few the best goes on.

    >>> survives(2.0, [1.0, 2.0, 3.0]), survives(2.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (False, True)
    """
    return loss <= sorted(losses)[max(1, len(losses) // ETA) - 1]
