"""Noise and windows: how far to share a hyperparameter in time (the paper's section 4.1 and Appendix B).

The hypergradient g_t of a single step depends on the seed. Its mean over seeds, μ_t, is what one would like to know;
one run gives a noisy sample of it. Sharing a value over a window of W steps replaces every g_t of the window by their
mean, which is less noisy, and wrong by as much as μ changes inside the window:

    MSE_W = 1/T Σ_t E[(mean of the window of t − μ_t)²]
          = noise, Var(window mean) averaged over steps  +  bias, the spread of μ inside the windows

Everything here works on an array of hypergradients, one row per seed and one column per step, as the adjoint and
the greedy engine return them with `per_step=True`. A window size W stands for the cut that
`Hyper(windows=round(T / W))` makes: lengths differ by at most one. Where W divides T these are the paper's windows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from longhorizon.hypers import window_start

Array = npt.NDArray[np.float64]

CLOSE = 1.1  # an MSE this many times the lowest is as good


@dataclass(frozen=True)
class Noise:
    """What the theorem asks for, estimated from a few seeds.

    Attributes:
        seeds: k, how many there were.
        mean: μ_t.
        variance: Σ_tt, without bias (divided by k − 1).
        epsilon: ε, the largest |μ_{t+1} − μ_t|. The paper's; with few seeds most of it may be noise.
        epsilon_floor: what ε would be on average from the noise of k seeds alone, if μ did not change at all.
        correlation: c, the largest absolute correlation of two different steps. With few seeds it is near 1 by chance.
    """

    seeds: int
    mean: Array
    variance: Array
    epsilon: float
    epsilon_floor: float
    correlation: float

    @property
    def steps(self) -> int:
        """T."""
        return len(self.mean)

    @property
    def mse_1(self) -> float:
        """MSE_1 = 1/T Σ_t Σ_tt, the error without sharing."""
        return float(self.variance.mean())


@dataclass(frozen=True)
class Windows:
    """MSE and bound for many window sizes, and the size to choose.

    Attributes:
        noise: μ, Σ, ε and c.
        sizes: W.
        measured: MSE_W as the paper measures it, with the mean over these seeds in the place of μ. It favours
            small W a little: that mean contains each seed's own noise.
        corrected: the same without that bias; what a new seed would show. May be negative for few seeds.
        bound: the theorem's.
    """

    noise: Noise
    sizes: list[int]
    measured: list[float]
    corrected: list[float]
    bound: list[float]

    @property
    def best(self) -> int:
        """The W of the lowest corrected MSE."""
        return self.sizes[int(np.argmin(self.corrected))]

    @property
    def best_measured(self) -> int:
        """The W of the lowest MSE, measured as the paper does."""
        return self.sizes[int(np.argmin(self.measured))]

    @property
    def best_bound(self) -> int:
        """The W of the lowest bound; what can be said when only Σ, ε and c are known."""
        return self.sizes[int(np.argmin(self.bound))]

    @property
    def close(self) -> tuple[int, int]:
        """The smallest and the largest W whose corrected MSE is within a tenth of the lowest, or also at most 0."""
        limit = max(min(self.corrected) * CLOSE, 0.0)
        good = [size for size, mse in zip(self.sizes, self.corrected, strict=True) if mse <= limit]
        return min(good), max(good)

    @property
    def windows(self) -> int:
        """The recommended number of windows, as `Hyper` takes it."""
        return count(self.best, self.noise.steps)

    def at(self, size: int) -> dict[str, float]:
        """Everything known about one W."""
        i = self.sizes.index(size)
        return {"measured": self.measured[i], "corrected": self.corrected[i], "bound": self.bound[i]}


def analyse(hypergradients: Any, sizes: Sequence[int] | None = None) -> Windows:
    """Estimate μ, Σ, ε and c from hypergradients of single steps, and how good every window size is.

    Args:
        hypergradients: one row per seed (at least two), one column per step; an array, a tensor or lists.
        sizes: which W to look at; without it, one for each way to cut the run.

    Raises:
        ValueError: if there are fewer than two seeds or steps, or a value is not finite.

    >>> rng = np.random.default_rng(0)
    >>> found = analyse(sample(profile("maximum", 60, 0.01), 1.0, 0.0, 500, rng))
    >>> 20 <= found.best <= 40  # the bound of maximal drift is lowest at (6 σ² / ε²)^⅓ = 39
    True
    """
    g = _checked(hypergradients)
    chosen = all_sizes(g.shape[1]) if sizes is None else [_size(size, g.shape[1]) for size in sizes]
    noise = estimate(g)
    parts = [_parts(g, size) for size in chosen]
    k = len(g)
    return Windows(
        noise,
        chosen,
        [spread * (k - 1) / k + bias for spread, bias in parts],
        [spread * (1 + 1 / k) + bias - noise.mse_1 / k for spread, bias in parts],
        [bound(size, noise.variance, noise.epsilon, noise.correlation) for size in chosen],
    )


def estimate(hypergradients: Any) -> Noise:
    """μ, Σ_tt, ε and c of hypergradients, one row per seed."""
    g = _checked(hypergradients)
    mean, residual = g.mean(0), g - g.mean(0)
    drift = float(np.abs(np.diff(mean)).max())
    return Noise(len(g), mean, g.var(0, ddof=1), drift, _floor(residual), max_correlation(g))


def covariance(hypergradients: Any) -> Array:
    """Σ, without bias."""
    g = _checked(hypergradients)
    residual = g - g.mean(0)
    return np.asarray(residual.T @ residual / (len(g) - 1))


def max_correlation(hypergradients: Any) -> float:
    """c: the largest |Σ_tt'| / √(Σ_tt Σ_t't') of two different steps; a step without noise has none."""
    g = _checked(hypergradients)
    unit = g - g.mean(0)
    length = np.sqrt((unit**2).sum(0))
    unit = np.divide(unit, length, out=np.zeros_like(unit), where=length > 0)
    largest = 0.0
    for first in range(0, unit.shape[1], 512):  # by blocks: T × T numbers may be too many
        block = np.abs(unit[:, first : first + 512].T @ unit)
        np.fill_diagonal(block[:, first:], 0.0)
        largest = max(largest, float(block.max()))
    return min(largest, 1.0)


def measured_mse(hypergradients: Any, size: int, mean: Any = None) -> float:
    """MSE_W: the mean over seeds and steps of (window mean − μ_t)².

    Args:
        hypergradients: one row per seed.
        size: W.
        mean: μ; the mean over these seeds without it.
    """
    g = _checked(hypergradients, least=1)
    centre = g.mean(0) if mean is None else np.asarray(mean, dtype=np.float64)
    return float(((_shared(g, _size(size, g.shape[1])) - centre) ** 2).mean())


def expected_mse(size: int, mean: Any, covariance: Any) -> float:
    """MSE_W of a distribution with the mean μ and the covariance Σ, exactly; it need not be Gaussian.

    >>> expected_mse(2, [0.0, 1.0], [[1.0, 0.5], [0.5, 1.0]])  # (1 + 0.5 + 0.5 + 1) / 4 + 0.5²
    1.0
    """
    mu, sigma = np.asarray(mean, dtype=np.float64), np.asarray(covariance, dtype=np.float64)
    edges, lengths = _edges(len(mu), _size(size, len(mu)))
    blocks = [sigma[a : a + n, a : a + n].sum() / n for a, n in zip(edges, lengths, strict=True)]
    bias = ((_shared(mu[None], size)[0] - mu) ** 2).mean()
    return float(sum(blocks) / len(mu) + bias)


def bound(size: int, variance: Any, epsilon: float, correlation: float) -> float:
    """The theorem's upper bound of MSE_W.

        (1 + c (W − 1)) / W · 1/T Σ_t Σ_tt + ε² (W² − 1) / 12

    if W divides T; if not, each window counts with its own length.

    Args:
        size: W.
        variance: Σ_tt of every step (or Σ itself).
        epsilon: ε, the largest change of μ from step to step.
        correlation: c, the largest absolute correlation of two steps.

    >>> round(bound(10, np.full(100, 0.25), 0.01, 0.0), 9)  # 0.025 + 0.0001 · 99 / 12
    0.025825
    """
    if not 0 <= correlation <= 1 or epsilon < 0:
        raise ValueError(f"bound(epsilon={epsilon}, correlation={correlation}): expected ε >= 0 and c from 0 to 1.")
    given = np.asarray(variance, dtype=np.float64)
    diagonal = np.diagonal(given) if given.ndim == 2 else given
    edges, lengths = _edges(len(diagonal), _size(size, len(diagonal)))
    noise = np.add.reduceat(diagonal, edges) * (1 + correlation * (lengths - 1)) / lengths
    drift = lengths * epsilon**2 * (lengths**2 - 1) / 12
    return float((noise + drift).sum() / len(diagonal))


def best_size(mse_1: float, epsilon: float) -> float:
    """W at which the bound is lowest without correlation, (6 MSE_1 / ε²)^⅓; correlation moves it up or down a little.

    >>> round(best_size(0.25, 0.08), 1)  # the paper's Figure 2
    6.2
    """
    return (6 * mse_1 / epsilon**2) ** (1 / 3) if epsilon > 0 else math.inf


def profile(
    kind: Literal["minimum", "maximum", "random"],
    steps: int,
    epsilon: float,
    rng: np.random.Generator | None = None,
    start: float = 0.0,
) -> Array:
    """A sequence μ_t that changes by at most ε a step (the paper's Appendix B).

    Args:
        kind: "minimum": constant; "maximum": by +ε every step, where the bound's second term is reached; "random": by
            something between −ε and ε.
        steps: T.
        epsilon: ε.
        rng: where randomness comes from.
        start: μ of the first step.
    """
    if kind == "random":
        if rng is None:
            raise ValueError("profile('random') needs a generator: rng=np.random.default_rng(0).")
        changes = rng.uniform(-epsilon, epsilon, steps - 1)
    elif kind in ("minimum", "maximum"):
        changes = np.full(steps - 1, epsilon if kind == "maximum" else 0.0)
    else:
        raise ValueError(f"profile({kind!r}): expected 'minimum', 'maximum' or 'random'.")
    return start + np.concatenate([[0.0], np.cumsum(changes)])


def sample(mean: Any, variance: Any, correlation: float, seeds: int, rng: np.random.Generator) -> Array:
    """Gaussian hypergradients with the mean μ, in which any two steps have the correlation c: the theorem's worst case.

    Args:
        mean: μ.
        variance: Σ_tt, a number or one per step.
        correlation: c, from 0 to 1.
        seeds: rows.
        rng: where randomness comes from.
    """
    mu = np.asarray(mean, dtype=np.float64)
    deviation = np.sqrt(np.broadcast_to(np.asarray(variance, dtype=np.float64), mu.shape))
    own, common = rng.standard_normal((seeds, len(mu))), rng.standard_normal((seeds, 1))
    return np.asarray(mu + deviation * (math.sqrt(1 - correlation) * own + math.sqrt(correlation) * common))


def count(size: int, steps: int) -> int:
    """How many windows a window size stands for.

    >>> count(50, 250), count(80, 250), count(240, 250)
    (5, 3, 1)
    """
    return max(1, round(steps / size))


def all_sizes(steps: int) -> list[int]:
    """One window size for each way to cut a run; about 2 √T of them.

    >>> all_sizes(20)
    [1, 2, 3, 4, 5, 7, 10, 20]
    """
    return sorted({round(steps / number) for number in range(1, steps + 1)})


def divisors(steps: int) -> list[int]:
    """The window sizes that cut a run into equal windows.

    >>> divisors(250)
    [1, 2, 5, 10, 25, 50, 125, 250]
    """
    return [size for size in range(1, steps + 1) if steps % size == 0]


def _parts(g: Array, size: int) -> tuple[float, float]:
    """MSE_W in two: the variance of window means, without bias, and the spread of the seeds' mean inside windows."""
    steps = g.shape[1]
    edges, lengths = _edges(steps, size)
    means = np.add.reduceat(g, edges, axis=1) / lengths
    mu = g.mean(0)
    bias = ((mu - np.repeat(np.add.reduceat(mu, edges) / lengths, lengths)) ** 2).mean()
    return float((means.var(0, ddof=1) * lengths).sum() / steps), float(bias)


def _shared(g: Array, size: int) -> Array:
    """Every step's value replaced by the mean of its window."""
    edges, lengths = _edges(g.shape[1], size)
    return np.repeat(np.add.reduceat(g, edges, axis=1) / lengths, lengths, axis=1)


def _edges(steps: int, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where windows begin, and how long they are."""
    windows = count(size, steps)
    edges = np.array([window_start(w, steps, windows) for w in range(windows + 1)], dtype=np.int64)
    return edges[:-1], np.diff(edges)


def _floor(residual: Array, repeats: int = 200) -> float:
    """The largest change, step to step, of a mean that is zero in truth: each seed's noise under a random sign."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (repeats, len(residual)))
    means = signs @ residual / math.sqrt(len(residual) * (len(residual) - 1))
    return float(np.abs(np.diff(means, axis=1)).max(1).mean())


def _size(size: int, steps: int) -> int:
    if isinstance(size, bool) or int(size) != size or not 1 <= size <= steps:
        raise ValueError(f"window size W={size!r}: expected a whole number from 1 to T={steps}.")
    return int(size)


def _checked(hypergradients: Any, least: int = 2) -> Array:
    g = np.asarray(hypergradients, dtype=np.float64)
    if g.ndim != 2 or g.shape[0] < least or g.shape[1] < 2:
        raise ValueError(
            f"hypergradients of shape {g.shape}: expected one row per seed, at least {least}, and one column per step, "
            "at least 2."
        )
    if not np.isfinite(g).all():
        bad = sorted(set(np.argwhere(~np.isfinite(g))[:, 0].tolist()))
        raise ValueError(
            f"hypergradients of seeds {bad[:8]} are not finite: leave these seeds out and say so, use fewer steps or "
            "a lower learning rate."
        )
    return g
