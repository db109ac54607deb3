"""Hyperband's arithmetic (Li et al., JMLR 2018): brackets, and the rungs in them.

Bracket s begins with n = ⌈(s_max + 1) η^s / (s + 1)⌉ trials of R η^(−s) each and keeps the best 1/η of them from rung
to rung. Optuna's pruner decides trial by trial instead of rung by rung (a trial goes on if it is among the best 1/η of
those that have come so far), with the same brackets, rungs and shares.
"""

ETA = 3  # reduction factor
UNKNOWN_EPOCH = 27  # the part of a run that is an epoch, where the task does not say


def s_max(most: int, eta: int = ETA) -> int:
    """The number of brackets less one, ⌊log_η R⌋, in whole numbers."""
    s = 0
    while eta ** (s + 1) <= most:
        s += 1
    return s


def brackets(most: int, eta: int = ETA) -> list[list[tuple[int, int]]]:
    """Per bracket, from the one that stops earliest, its rungs as (trials, epochs each).

    >>> brackets(9)
    [[(9, 1), (3, 3), (1, 9)], [(5, 3), (1, 9)], [(3, 9)]]
    """
    top = s_max(most, eta)
    found = []
    for s in range(top, -1, -1):
        trials = -(-(top + 1) * eta**s // (s + 1))
        found.append([(trials // eta**i, most // eta ** (s - i)) for i in range(s + 1)])
    return found


def rungs(steps: int, epoch: int, eta: int = ETA) -> list[int]:
    """Training steps at which a trial is judged: R η^(−i), from the shortest that is an epoch at least.

    >>> rungs(200, 19)
    [22, 66, 200]
    """
    top = s_max(steps // epoch, eta)
    return [steps // eta ** (top - i) for i in range(top + 1)]


def epoch_of(steps: int, epoch: int) -> int:
    """The least that a trial gets: an epoch, or a share of the run where its length is unknown."""
    return min(epoch, steps) if epoch else max(1, steps // UNKNOWN_EPOCH)
