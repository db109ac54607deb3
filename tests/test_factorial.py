"""Smoothed differences by a factorial design: right to second order, honest about their error, and never lost."""

import math
import sys
import types

import pytest
import torch
from torch import nn

import longhorizon as lh
from longhorizon.engines import factorial
from longhorizon.engines.base import CHECK_EVERY
from longhorizon.engines.choose import trusted
from longhorizon.engines.design import folded, hadamard
from longhorizon.engines.factorial import effects
from longhorizon.problem import environment, make_problem
from problems import RULES, compute, problem, relative

HYPERS = {"lr": lh.Hyper([0.3, 0.5, 0.2], windows=3), "momentum": lh.Hyper(0.5)}


def slopes(engine, hypers=HYPERS, **options):
    return lh.hypergradient(problem("mlp").task, lh.sgd(), hypers, steps=9, engine=engine, **options)


def compute_quadratic(hypers, engine):
    return lh.hypergradient(problem("quadratic").task, lh.sgd(), hypers, steps=9, engine=engine)


class Straight(nn.Module):
    """A loss that is the parameter itself: x falls by the sum of all learning rates."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros((), dtype=torch.float64))


def straight(scale=lambda seed: 1.0):
    """With a slope that depends on the seed."""
    return lh.Task(
        Straight, lambda model, batch: batch * model.x, lambda seed: [scale(seed)] * 8, lambda seed: [torch.ones(())]
    )


class Cliff(nn.Module):
    """x falls with the first learning rates and y with the last one."""

    def __init__(self):
        super().__init__()
        self.x, self.y = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))


def cliff(far=None):
    """The loss falls gently with x, and explodes where y has fallen far, by as much as chance has it."""

    def loss(model, batch):
        if batch is not None:
            return 2.4 + batch * model.x + (1 - batch) * model.y
        more = (14 + 6 * (999 * model.x).sin()).exp() if far is None else far
        return 0.5 + 0.1 * model.x + torch.where(model.y < -1, more, 0.0)

    def train(seed):
        return [torch.tensor(float(t < 9), dtype=torch.float64) for t in range(12)]

    return lh.Task(Cliff, loss, train, lambda seed: [None])


# --- designs ---


@pytest.mark.parametrize(
    ("precision", "device", "together", "engine"),
    [
        ("bf16", "cuda", 25, lh.Factorial),
        ("bf16", "cuda", 1, lh.Hybrid),  # no runs side by side
        ("float32", "cuda", 25, lh.Hybrid),
        ("bf16", "cpu", 25, lh.Hybrid),
    ],
)
def test_tuning_smooths_all_values_where_that_costs_least(monkeypatch, precision, device, together, engine):
    one = make_problem(problem("mlp").task, lh.sgd(), HYPERS, 9, 0)
    one.device, one.runs = torch.device(device), 12
    asked = []
    choosing = sys.modules["longhorizon.engines.choose"]  # its name in the package is the function's
    monkeypatch.setattr(choosing, "free_memory", lambda device: 2**30)
    monkeypatch.setattr("longhorizon.cuda.current_precision", lambda: precision)
    monkeypatch.setattr(choosing, "at_once", lambda *g: asked.append(g[1:]) or together)
    chosen, why = trusted(one)
    assert isinstance(chosen, engine)
    assert asked == ([(17, 12)] if (precision, device) == ("bf16", "cuda") else [])
    assert ("17 plain training runs, 25 side by side in bf16" in why) == (engine is lh.Factorial)


@pytest.mark.parametrize("least", [1, 2, 3, 4, 5, 9, 12, 13, 20, 21, 25, 33, 41])
def test_columns_of_a_design_are_orthogonal(least):
    matrix = hadamard(least)
    assert len(matrix) >= least
    assert torch.equal(matrix.abs(), torch.ones_like(matrix))
    assert torch.equal(matrix.T @ matrix, len(matrix) * torch.eye(len(matrix), dtype=torch.float64))


def test_a_design_has_room_and_depends_on_the_seed():
    one, two = folded(7, 10, 0), folded(7, 10, 1)
    assert one.shape == (12, 7)
    assert torch.equal(one.T @ one, 12 * torch.eye(7, dtype=torch.float64))
    assert not torch.equal(one, two)
    assert torch.equal(one, folded(7, 10, 0))
    assert folded(7, 1, 0).shape == (8, 7)


# --- slopes ---


@pytest.mark.parametrize(
    ("name", "rule"), [("quadratic", "sgd"), ("mlp", "sgd"), ("mlp", "adam"), ("batchnorm-train", "sgd")]
)
def test_they_are_the_derivative_to_second_order(name, rule):
    case, setting = problem(name), RULES[rule]
    exact = compute(case, setting, lh.Adjoint()).grad
    far, near = (
        compute(case, setting, lh.Factorial(dict.fromkeys(exact, by), pairs=1, seeds="one")).grad for by in (2e-4, 1e-4)
    )
    assert relative(far, exact) / relative(near, exact) == pytest.approx(4, rel=0.1)
    extrapolated = {key: (4 * near[key] - far[key]) / 3 for key in exact}
    assert relative(extrapolated, exact) < 1e-5


def test_a_loss_that_is_straight_gives_the_exact_slope():
    hypers = {"lr": lh.Hyper([0.1, 0.2], windows=2, step=0.05), "momentum": lh.Hyper(0.0, learn=False)}
    found = lh.hypergradient(straight(), lh.sgd(), hypers, steps=8, engine=lh.Factorial())
    assert found.grad["lr"].tolist() == pytest.approx([-4, -4], rel=1e-12)
    assert found.error["lr"].tolist() == pytest.approx([0, 0], abs=1e-12)
    assert found.val_loss == pytest.approx(-1.2)


def test_pairs_have_seeds_of_their_own_and_the_error_covers_their_mean():
    """The slope is that of the seed: −8 times a number from 0 to 2. One seed knows only its own."""

    def scale(seed):
        return 2 * torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).item()

    hypers = {"lr": lh.Hyper(0.1, step=0.01)}
    engine = lh.Factorial(pairs=8)
    inside, found = 0, []
    for seed in range(16):
        h = lh.hypergradient(straight(scale), lh.sgd(), hypers, steps=8, engine=engine, seed=seed)
        slope, error = h.grad["lr"].item(), h.error["lr"].item()
        found.append(slope)
        assert error == pytest.approx(8 * 2 / 12**0.5 / 8**0.5, rel=0.7)
        inside += abs(slope + 8) < 2 * error
    assert inside >= 13  # of 16
    assert torch.tensor(found).mean().item() == pytest.approx(-8, abs=1.2)
    alone = lh.hypergradient(
        straight(scale), lh.sgd(), hypers, steps=8, engine=lh.Factorial(pairs=2, seeds="one"), seed=3
    )
    assert alone.grad["lr"].item() == pytest.approx(-8 * scale(3), rel=1e-9)


@pytest.mark.parametrize("common", [True, False])
def test_standard_errors_cover(common):
    """Roughness of known size: two errors cover nine times in ten with five spare pairs."""
    generator = torch.Generator().manual_seed(0)
    effect = torch.tensor([0.3, -0.2, 0.1, 0.0, 0.05, 0.2, -0.1], dtype=torch.float64)
    covered = []
    for seed in range(300):
        signs = folded(7, 12, seed)
        each = torch.randn(12, 1, generator=generator, dtype=torch.float64) * (0 if common else 5)  # of the seed
        rough = torch.randn(12, 2, generator=generator, dtype=torch.float64)
        losses = -10 + each + torch.stack([signs @ effect, -(signs @ effect)], 1) + rough
        found, error = effects(signs, losses, common)
        covered += ((found - effect).abs() < 2 * error).tolist()
    assert 0.86 < sum(covered) / len(covered) < (0.97 if common else 0.94)


def test_slopes_of_a_positive_loss_are_of_its_logarithm():
    signs = folded(1, 2, 0)
    up, down = (4.0, 1.0) if signs[0, 0] > 0 else (1.0, 4.0)
    losses = torch.tensor([[up, down], [down, up]] if signs[1, 0] != signs[0, 0] else [[up, down]] * 2)
    found, error = effects(signs, losses.double())
    assert found.tolist() == pytest.approx([math.log(4.0) / 2 * 2.0])  # half of ln 4, times the geometric mean
    assert error == pytest.approx(0, abs=1e-12)


def test_a_run_that_diverged_counts_as_the_worst():
    signs = folded(1, 2, 0)
    good = torch.where(signs[:, :1] > 0, torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0, 3.0]])).double()
    bad = good.clone()
    bad[0, int(good[0, 1] == 3)] = math.nan
    assert effects(signs, bad)[0] == pytest.approx(effects(signs, good)[0])


def test_values_on_a_log_scale_and_bounds():
    exact = slopes(lh.Adjoint(), {"lr": lh.Hyper(0.3, scale="log", step=1e-3)}).grad["lr"]
    found = slopes(lh.Factorial(seeds="one"), {"lr": lh.Hyper(0.3, scale="log", step=1e-3)}).grad["lr"]
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)
    bound = {"lr": lh.Hyper(0.3, step=1e-3, high=0.3), "momentum": lh.Hyper(0.0, step=1e-3, low=0.0)}
    with environment():
        made = make_problem(problem("mlp").task, lh.sgd(), bound, 9, 0)
        levels = lh.Factorial().levels(made)
    assert [float(v) for v in levels["lr"]] == pytest.approx([0.299, 0.3])
    assert [float(v) for v in levels["momentum"]] == pytest.approx([0.0, 0.001])
    one_sided = slopes(lh.Factorial(seeds="one"), bound).grad["lr"]  # off by half a step times the curvature
    exact = slopes(lh.Adjoint(), bound).grad["lr"]
    torch.testing.assert_close(one_sided, exact, rtol=2e-2, atol=0)


def test_chosen_values_leave_the_others_where_they_are():
    only = slopes(lh.Factorial(1e-3, seeds="one", only={"lr": [1]}))
    whole = slopes(lh.Adjoint()).grad
    assert only.grad["lr"].isfinite().tolist() == [False, True, False]
    assert only.grad["momentum"].isnan().all()
    assert only.grad["lr"][1].item() == pytest.approx(whole["lr"][1].item(), rel=1e-4)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_windows_that_share_a_shift_share_the_mean_of_their_slopes(scale):
    hypers = {"lr": lh.Hyper([0.3, 0.5, 0.2, 0.4, 0.1], windows=5, step=1e-3, scale=scale), "momentum": lh.Hyper(0.5)}
    engine = lh.Factorial({"lr": 1e-3, "momentum": 1e-3}, seeds="one", most=4)
    exact, found = (slopes(e, hypers).grad for e in (lh.Adjoint(), engine))
    unit = hypers["lr"].values() if scale == "log" else torch.ones(5, dtype=torch.float64)
    own = exact["lr"] * unit  # dL/dλ, or dL / d ln λ
    expected = torch.cat([own[:1], own[1:3].mean().expand(2), own[3:].mean().expand(2)]) / unit  # 1, 2 and 2 windows
    torch.testing.assert_close(found["lr"], expected, rtol=1e-3, atol=1e-8)
    torch.testing.assert_close(found["momentum"], exact["momentum"], rtol=1e-4, atol=0)


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize(("at", "bounds"), [(0.3, {"high": 0.2}), (0.2005, {"high": 0.2}), (0.05, {"low": 0.1})])
def test_a_value_outside_its_bounds_has_a_slope(at, bounds, scale):
    task, values = problem("mlp").task, {"lr": [at]}
    settings = {"steps": 9, "values": values}
    bound = {"lr": lh.Hyper(0.15, step=1e-3, scale=scale, **bounds)}
    found = lh.hypergradient(task, lh.sgd(), bound, engine=lh.Factorial(seeds="one"), **settings)
    assert found.status.ok
    exact = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.15)}, **settings)
    torch.testing.assert_close(found.grad["lr"], exact.grad["lr"], rtol=0.02, atol=0)


def test_sharing_bounds_how_many_runs_there_are():
    hypers = {"lr": lh.Hyper(0.3, windows=9, step=1e-3), "momentum": lh.Hyper(0.5)}
    with environment():
        made = make_problem(problem("mlp").task, lh.sgd(), hypers, 9, 0)
    for most, groups in ((None, 10), (10, 10), (9, 6), (6, 6), (5, 4), (2, 2), (1, 2)):  # one for each key at least
        together = lh.Factorial(most=most).together(made)
        assert len(together) == groups
        assert [value for group in together for value in group] == lh.Factorial().shifted(made)
    assert lh.Factorial(most=21).trainings(57) == 1 + 2 * 24 == lh.Factorial().trainings(21)


def test_the_distance_follows_the_outer_step():
    seen = []

    class Spy(lh.Factorial):
        def begin(self, problem, saved=None):
            seen.append({key: self.distances(problem, key).clone() for key in problem.learnt})
            return super().begin(problem, saved)

    hypers = {"lr": lh.Hyper(0.3, step=0.2), "momentum": lh.Hyper(0.5, step=0.1)}
    run = lh.tune(problem("mlp").task, lh.sgd(), hypers, steps=9, outer_steps=6, engine=Spy(0.5))
    for index, distances in enumerate(seen):
        gamma = 0.2 if index == 0 else run.history[index - 1].outer["gamma"]["lr"].item()
        assert distances["lr"].item() == pytest.approx(gamma / 2)


# --- when things go wrong ---


def test_a_run_that_diverges_everywhere_is_a_status():
    def at(lr, distance):
        hypers = {"lr": lh.Hyper(lr, learn=False), "momentum": lh.Hyper(0.5)}
        return compute_quadratic(hypers, lh.Factorial({"momentum": distance}))

    found = at(1e200, 1.0)
    assert found.status.what == "loss"
    assert found.grad["momentum"].isnan().all()
    far = at(0.1, 1e200)
    assert far.status.what == "difference"
    assert math.isfinite(far.val_loss)
    assert far.grad["momentum"].isnan().all()


BAD = {
    "distance zero": (lambda: lh.Factorial(0.0), r"Factorial\(distance=0.0\): expected positive"),
    "distance of a key": (lambda: lh.Factorial({"lr": [0.1, -1.0]}), r"expected positive numbers"),
    "pairs": (lambda: lh.Factorial(pairs=0), r"Factorial\(pairs=0\): expected a whole number of pairs"),
    "most": (lambda: lh.Factorial(most=0), r"Factorial\(most=0\): expected a whole number of shifts"),
    "seeds": (lambda: lh.Factorial(seeds="two"), r"Factorial\(seeds='two'\): expected 'each' or 'one'"),
    "no distance": (lambda: slopes(lh.Factorial({"lr": 0.1})), r"no distance for hyperparameter 'momentum'"),
    "too many": (lambda: slopes(lh.Factorial({"lr": [0.1] * 2, "momentum": 0.1})), r"2 numbers for 'lr', which has 3"),
    "only unknown": (lambda: slopes(lh.Factorial(only={"lrr": [0]})), r"'lrr', which is not learnt. Did you mean 'lr'"),
    "only window": (lambda: slopes(lh.Factorial(only={"lr": [3]})), r"lr has the windows 0 to 2"),
    "only nothing": (lambda: slopes(lh.Factorial(only={})), r"name at least one value"),
    "per step": (lambda: slopes(lh.Factorial(), per_step=True), r"per_step=True with Factorial"),
    "hybrid": (lambda: lh.Hybrid(exact="greedy"), r"Hybrid\(exact='greedy'\): expected 'adjoint' or 'forward'"),
    "hybrid distance": (lambda: lh.Hybrid(distance=-1.0), r"expected positive numbers"),
    "hybrid no distance": (lambda: slopes(lh.Hybrid(distance={"lr": 0.1})), r"no distance for hyperparameter"),
    "clip": (lambda: lh.Forward(clip="sometimes"), r"Forward\(clip='sometimes'\): expected a positive bound, 'auto'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    make, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        make()


def test_every_pair_expects_as_many_runs_as_the_middle_one():
    """By it a GPU decides whether compiling pays: for all runs of a design alike."""
    case = problem("mlp")
    with environment():
        made = make_problem(case.task, lh.sgd(), {"lr": lh.Hyper(0.1, step=0.05)}, case.steps, 0)
        made.runs = 12
        run = lh.Factorial().begin(made)
        assert {run._problem(i).runs for i in range(-1, run.total - 1)} == {12}


def test_a_learning_rate_is_not_shifted_below_zero():
    hypers = {"lr": lh.Hyper([0.0, 0.05, -0.05], windows=3, step=0.1), "momentum": lh.Hyper(0.0, step=0.1)}
    with environment():
        made = make_problem(problem("mlp").task, lh.sgd(), hypers, 9, 0)
    low, high = lh.Factorial().levels(made)["lr"]
    assert low.tolist() == pytest.approx([0.0, 0.0, -0.15])  # one that is there already may go either way
    assert high.tolist() == pytest.approx([0.1, 0.15, 0.05])
    assert lh.Factorial().levels(made)["momentum"][0].tolist() == [-0.1]
    found = compute_quadratic({"lr": lh.Hyper([0.0, 0.0], windows=2, step=1e-5)}, lh.Factorial())
    exact = compute_quadratic({"lr": lh.Hyper([0.0, 0.0], windows=2)}, lh.Adjoint())
    torch.testing.assert_close(found.grad["lr"], exact.grad["lr"], rtol=1e-2, atol=0)  # the chord of one side


def test_runs_that_explode_do_not_bury_what_the_others_say(monkeypatch):
    """Here whenever the last learning rate is shifted up."""
    hypers = {"lr": lh.Hyper([0.3] * 4, windows=4)}
    engine = lh.Factorial({"lr": 0.1})
    found = lh.hypergradient(cliff(), lh.sgd(), hypers, steps=12, engine=engine)
    assert (found.grad["lr"] * torch.tensor([-1, -1, -1, 1]) > 3 * found.error["lr"]).all()
    for far in (1e3, 1e30, math.inf, math.nan):  # how far does not matter
        other = lh.hypergradient(cliff(far), lh.sgd(), hypers, steps=12, engine=engine)
        assert other.grad["lr"].tolist() == pytest.approx(found.grad["lr"].tolist(), rel=1e-9), far
    monkeypatch.setattr("longhorizon.engines.factorial.most_of_fine", lambda good, began: math.inf)
    buried = lh.hypergradient(cliff(), lh.sgd(), hypers, steps=12, engine=engine)
    assert (buried.grad["lr"][:3].abs() < 3 * buried.error["lr"][:3]).all()


def test_the_middle_run_goes_along_with_the_others():
    """Its loss, its model and what it trained with are those of a run alone."""
    together, alone = slopes(lh.Factorial()), slopes(lh.Adjoint())
    assert together.val_loss == pytest.approx(alone.val_loss, rel=1e-12)
    torch.testing.assert_close(together.train_loss, alone.train_loss, rtol=1e-12, atol=0)
    for name, p in alone.params.items():
        torch.testing.assert_close(together.params[name], p, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("together", [True, False])
def test_runs_that_all_diverge_are_not_trained_to_their_end(monkeypatch, together):
    if not together:
        monkeypatch.setattr(factorial, "at_once", lambda *_: 1)
    steps, batch = 3 * CHECK_EVERY, torch.ones(4, 2, dtype=torch.float64)
    task = lh.Task(
        lambda: nn.Linear(2, 1).double(),
        lambda model, batch: (model(batch) - 1).square().mean(),
        lambda seed: [batch] * steps,
        lambda seed: [batch],
    )
    with environment():
        made = make_problem(task, lh.sgd(), {"momentum": lh.Hyper(0.5)}, steps, 0)
        middle = types.SimpleNamespace(val_loss=1.0)
        run, taken = factorial.FactorialRun(lh.Factorial({"momentum": 1e200}, pairs=2), made, None, middle), 0
        rows = 1 if together else 4
        assert run.side_by_side == 4 / rows
        while not run.done:
            run.advance()
            taken += 1
    assert taken == rows * CHECK_EVERY
    assert len(run.losses) == 5
    assert run.result().status.what == "difference"


@pytest.mark.parametrize("when", ["training", "validation"])
def test_a_middle_run_that_diverges_ends_all_of_them(when):
    def loss(model, batch):
        found = (model(batch.abs()) - 1).square().mean()
        trained = (batch[0, 0] < 0) & (found < 1e-3)
        return found * torch.where(trained, math.nan, 1.0)

    sign = -1.0 if when == "validation" else 1.0
    task = lh.Task(
        lambda: nn.Linear(2, 1).double(),
        loss,
        lambda seed: [torch.ones(4, 2, dtype=torch.float64) for _ in range(9)],
        lambda seed: [sign * torch.ones(4, 2, dtype=torch.float64)],
    )
    with environment():
        made = make_problem(task, lh.sgd(), {"lr": lh.Hyper(0.1 if sign < 0 else 1e200, step=0.01)}, 9, 0)
        run, steps = lh.Factorial(pairs=20).begin(made), 0
        assert run.side_by_side > 20
        while not run.done:
            run.advance()
            steps += 1
    assert run.result().status.what == ("validation loss" if sign < 0 else "loss")
    assert steps <= 9  # and no other group of runs
    assert not torch.equal(run.result().params["weight"], made.start.params["weight"])
