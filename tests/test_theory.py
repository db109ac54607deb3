"""The theorem, its terms and the windows it recommends, against Monte Carlo and closed forms."""

import numpy as np
import pytest
import torch

from longhorizon import theory
from longhorizon.hypers import window_of

T = 60
SIZES = [1, 2, 3, 7, 12, 25, 30, 60]  # divisors and others


def spd(rng, steps=T):
    """A covariance with all kinds of correlations."""
    a = rng.standard_normal((steps, steps + 5))
    return a @ a.T / steps


def constant_correlation(variance, c):
    deviation = np.sqrt(variance)
    return (c + (1 - c) * np.eye(len(variance))) * np.outer(deviation, deviation)


@pytest.mark.parametrize("size", SIZES)
def test_mse_equals_monte_carlo(size):
    rng = np.random.default_rng(size)
    mu, sigma = theory.profile("random", T, 0.3, rng), spd(rng)
    g = rng.multivariate_normal(mu, sigma, 20_000)
    slow = np.zeros(T)  # straight from the definition
    windows = round(T / size)
    for t in range(T):  # the windows are those of `Hyper`
        alike = [s for s in range(T) if window_of(s, T, windows) == window_of(t, T, windows)]
        slow[t] = ((g[:, alike].mean(1) - mu[t]) ** 2).mean()
    assert theory.measured_mse(g, size, mean=mu) == pytest.approx(slow.mean(), rel=1e-12)
    assert theory.expected_mse(size, mu, sigma) == pytest.approx(slow.mean(), rel=0.03)


@pytest.mark.parametrize("seeds", [3, 10])
def test_corrected_mse_has_no_bias_and_the_papers_has_the_one_that_is_stated(seeds):
    rng = np.random.default_rng(0)
    mu, variance = theory.profile("random", T, 0.2, rng), rng.uniform(0.5, 2.0, T)
    sigma = constant_correlation(variance, 0.3)
    found = [theory.analyse(theory.sample(mu, variance, 0.3, seeds, rng), SIZES) for _ in range(800)]
    corrected, measured = np.mean([f.corrected for f in found], 0), np.mean([f.measured for f in found], 0)
    truth = [theory.expected_mse(size, mu, sigma) for size in SIZES]
    assert corrected == pytest.approx(truth, rel=0.05)
    assert measured[0] == pytest.approx(truth[0] * (seeds - 1) / seeds, rel=0.05)


def test_measured_is_what_the_paper_measures():
    g = np.random.default_rng(1).standard_normal((9, T)).cumsum(1)
    found = theory.analyse(g)
    assert set(theory.divisors(T)) < set(found.sizes)
    assert {round(T / size) for size in found.sizes} == {round(T / size) for size in range(1, T + 1)}  # every cut
    for size in found.sizes:
        assert found.at(size)["measured"] == pytest.approx(theory.measured_mse(g, size), rel=1e-10)


@pytest.mark.parametrize("c", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["minimum", "maximum", "random"])
def test_the_bound_holds(kind, c):
    rng = np.random.default_rng(5)
    for _ in range(20):
        epsilon = rng.uniform(0, 0.5)
        mu, variance = theory.profile(kind, T, epsilon, rng), rng.uniform(0, 2, T)
        sigma = constant_correlation(variance, c)
        for size in range(1, T + 1):
            assert theory.expected_mse(size, mu, sigma) <= theory.bound(size, sigma, epsilon, c) * (1 + 1e-12)


def test_the_bound_holds_for_any_covariance_at_its_own_correlation():
    rng = np.random.default_rng(6)
    for _ in range(20):
        mu, sigma = theory.profile("random", T, 0.1, rng), spd(rng)
        deviation = np.sqrt(np.diagonal(sigma))
        c = np.abs(sigma / np.outer(deviation, deviation) - np.eye(T)).max()
        epsilon = np.abs(np.diff(mu)).max()
        for size in range(1, T + 1):
            assert theory.expected_mse(size, mu, sigma) <= theory.bound(size, sigma, epsilon, c) * (1 + 1e-12)


@pytest.mark.parametrize("size", theory.divisors(T))
def test_the_bound_is_the_theorem_and_is_reached(size):
    variance, epsilon, c = np.random.default_rng(7).uniform(0.5, 2, T), 0.07, 0.2
    printed = (1 + c * (size - 1)) / size * variance.mean() + epsilon**2 * (size**2 - 1) / 12
    assert theory.bound(size, variance, epsilon, c) == pytest.approx(printed, rel=1e-12)
    equal = np.full(T, 0.8)  # maximal drift, equal variances and equal correlations: an equality
    reached = theory.expected_mse(size, theory.profile("maximum", T, epsilon), constant_correlation(equal, c))
    assert theory.bound(size, equal, epsilon, c) == pytest.approx(reached, rel=1e-12)


def test_terms_are_estimated():
    rng = np.random.default_rng(8)
    mu, variance, c = theory.profile("random", T, 0.4, rng), rng.uniform(0.5, 2, T), 0.6
    g = theory.sample(mu, variance, c, 20_000, rng)
    found = theory.estimate(g)
    assert found.mean == pytest.approx(mu, abs=0.03)
    assert found.variance == pytest.approx(variance, rel=0.05)
    assert found.epsilon == pytest.approx(np.abs(np.diff(mu)).max(), abs=0.02)
    assert found.correlation == pytest.approx(c, abs=0.02)
    assert theory.covariance(g) == pytest.approx(constant_correlation(variance, c), abs=0.08)
    assert found.mse_1 == pytest.approx(variance.mean(), rel=0.02)


def test_correlation_by_blocks_is_that_of_numpy():
    g = np.random.default_rng(9).standard_normal((20, 1100))
    g[:, 3] = 1.0  # a step without noise
    with np.errstate(invalid="ignore", divide="ignore"):
        slow = np.corrcoef(np.delete(g, 3, axis=1).T)
    assert theory.max_correlation(g) == pytest.approx(np.abs(slow - np.eye(1099)).max(), rel=1e-9)


def test_epsilon_floor_is_what_noise_alone_shows():
    rng = np.random.default_rng(10)
    alone = [theory.estimate(theory.sample(np.zeros(T), 1.0, 0.2, 25, rng)) for _ in range(200)]
    assert np.mean([n.epsilon for n in alone]) == pytest.approx(np.mean([n.epsilon_floor for n in alone]), rel=0.05)


def test_recommends_the_best_window():
    rng = np.random.default_rng(11)
    mu, variance = 2 * np.sin(np.linspace(0, 3, 240)), np.full(240, 1.0)
    truth = [theory.expected_mse(size, mu, np.diag(variance)) for size in range(1, 241)]
    found = theory.analyse(theory.sample(mu, variance, 0.0, 100, rng))
    assert truth[found.best - 1] < 1.1 * min(truth)
    low, high = found.close
    assert low <= found.best <= high
    assert found.windows == round(240 / found.best)
    assert 1 < found.best_bound < 240
    assert theory.best_size(1.0, 0.01) == pytest.approx(
        min(range(1, 241), key=lambda w: 1 / w + 1e-4 * (w**2 - 1) / 12), abs=1
    )


def test_nothing_to_average_and_nothing_to_share():
    rng = np.random.default_rng(12)
    flat = theory.analyse(theory.sample(np.zeros(T), 1.0, 0.0, 400, rng))
    assert flat.best > T // 2  # no drift: share everything
    calm = theory.analyse(theory.sample(theory.profile("maximum", T, 1.0), 1e-6, 0.0, 10, rng))
    assert calm.best == 1  # no noise: share nothing


def test_takes_tensors_and_long_runs():
    g = torch.randn(3, 5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = theory.analyse(g)
    assert {1, 2500, 5000} <= set(found.sizes)
    assert len(found.sizes) < 150
    assert found.noise.mean.dtype == np.float64


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: theory.analyse(np.zeros((1, 9))), "at least 2"),
        (lambda: theory.analyse(np.zeros(9)), r"shape \(9,\)"),
        (lambda: theory.analyse([[0.0, 1.0], [np.nan, 1.0]]), r"seeds \[1\] are not finite"),
        (lambda: theory.analyse(np.zeros((2, 9)), [10]), "from 1 to T=9"),
        (lambda: theory.bound(0, [1.0, 1.0], 0.1, 0.0), "W=0"),
        (lambda: theory.bound(1, [1.0, 1.0], 0.1, 1.5), "c from 0 to 1"),
        (lambda: theory.profile("random", 5, 0.1), "rng="),
        (lambda: theory.profile("most", 5, 0.1), "'minimum', 'maximum' or 'random'"),
    ],
)
def test_bad_input(call, match):
    with pytest.raises(ValueError, match=match):
        call()
