"""The outer step: signs, step sizes, bounds, scales."""

import functools
import math

import pytest
import torch

import longhorizon as lh
from longhorizon.hypers import step_size
from longhorizon.outer import as_outer, search_range


def values(*numbers):
    return {"lr": torch.tensor(numbers, dtype=torch.float64)}


def hypers(**settings):
    return {"lr": lh.Hyper(**{"start": 0.0, "windows": 1, "step": 0.1, **settings})}


def descend(grads, outer=None, start=0.0, **settings):
    """The values after each of a row of hypergradients."""
    outer, entry = outer or lh.SignDescent(), hypers(start=start, **settings)
    state, at, path = outer.init(entry), values(start), []
    for grad in grads:
        at, state = outer.update(at, values(grad), state, entry)
        path.append(at["lr"].item())
    return path, state


def test_sign_descent_moves_by_gamma_and_halves_on_a_flip():
    path, state = descend([-3.0, -0.1, 5.0, 5.0, -1.0])
    assert path == pytest.approx([0.1, 0.2, 0.15, 0.1, 0.125])
    assert state["gamma"]["lr"].item() == pytest.approx(0.025)


@pytest.mark.parametrize("silent", [0.0, math.nan, math.inf, -math.inf])
def test_a_sign_that_says_nothing_moves_nothing_and_halves_nothing(silent):
    path, state = descend([-1.0, silent, -1.0])
    assert path == pytest.approx([0.1, 0.1, 0.2])
    assert state["gamma"]["lr"].item() == 0.1


def test_a_flip_is_seen_across_a_silent_step():
    path, _ = descend([-1.0, 0.0, 1.0])
    assert path == pytest.approx([0.1, 0.1, 0.05])


def test_bounds_hold_by_projection():
    path, _ = descend([-1.0] * 4, high=0.25)
    assert path == pytest.approx([0.1, 0.2, 0.25, 0.25])
    path, _ = descend([1.0] * 3, low=-0.15)
    assert path == pytest.approx([-0.1, -0.15, -0.15])


def test_log_scale_moves_by_factors_and_stays_positive():
    path, _ = descend([1.0] * 200, start=1.0, step=0.5, scale="log")
    assert path[0] == pytest.approx(math.exp(-0.5))
    assert path[-1] > 0


def test_convergence_is_judged_by_gamma_alone():
    outer = lh.SignDescent(tolerance=0.3)
    for start in (-0.5, 0.0, 0.5):  # a negative value has not converged because it is negative
        _, state = descend([-1.0, -1.0], outer, start=start)
        assert not outer.converged(state)
        _, state = descend([-1.0, 1.0, -1.0], outer, start=start)
        assert outer.converged(state)


def test_growth_lets_a_value_go_somewhere_after_it_went_back_and_forth():
    signs = [-1.0, 1.0, -1.0, -1.0, -1.0, math.nan, -1.0]
    path, state = descend(signs, lh.SignDescent(growth=1.5))
    # γ: 0.1, 0.05, 0.025, 0.0375, 0.05625, the same, 0.084375
    assert path == pytest.approx([0.1, 0.05, 0.075, 0.1125, 0.16875, 0.16875, 0.253125])
    _, state = descend([*signs, -1.0, -1.0], lh.SignDescent(growth=1.5))
    assert state["gamma"]["lr"].item() == pytest.approx(0.1)  # and no further than where it started
    assert descend(signs)[0] == descend(signs, lh.SignDescent(growth=1.0))[0]
    assert str(lh.SignDescent()) == "SignDescent(factor=0.5, tolerance=0.05)"  # as in run directories of before
    assert str(lh.SignDescent(growth=1.5)) == "SignDescent(factor=0.5, tolerance=0.05, growth=1.5)"


def test_a_grown_step_ends_at_zero_where_it_would_go_through():
    signs = [-1.0, 1.0, 1.0, 1.0, -1.0]  # γ: 0.1, 0.05, 0.075, 0.1, 0.05
    path, state = descend(signs, lh.SignDescent(growth=1.5))
    assert path == pytest.approx([0.1, 0.05, 0.0, -0.1, -0.05])  # from zero it may go on
    assert state["gamma"]["lr"].item() == pytest.approx(0.05)
    assert descend(signs)[0] == pytest.approx([0.1, 0.05, 0.0, -0.05, -0.025])  # the paper's never does, from zero
    assert descend([1.0], start=0.05)[0] == pytest.approx([-0.05])


def test_shrink_halves_every_step_size():
    outer = lh.SignDescent()
    state = outer.shrink(outer.init(hypers(windows=2)))
    assert state["gamma"]["lr"].tolist() == [0.05, 0.05]


def test_gradient_descent_is_algorithm_1():
    path, _ = descend([-2.0, 1.0, math.nan], lh.GradientDescent())
    assert path == pytest.approx([0.2, 0.1, 0.1])


def test_gradient_descent_with_a_clip_moves_no_further():
    path, _ = descend([-2.0, 0.5, math.inf, -7.0], lh.GradientDescent(0.1, clip=1.0))
    assert path == pytest.approx([0.1, 0.05, 0.05, 0.15])
    assert str(lh.GradientDescent()) == "GradientDescent(rate=0.1)"  # as in run directories of before
    assert str(lh.GradientDescent(clip=3.0)) == "GradientDescent(rate=0.1, clip=3.0)"


def test_gradient_descent_on_the_log_scale_follows_the_chain_rule():
    path, _ = descend([3.0], lh.GradientDescent(0.1), start=2.0, scale="log")
    assert path[0] == pytest.approx(2.0 * math.exp(-0.1 * 3.0 * 2.0))


@pytest.mark.parametrize("outer", [lh.GradientDescent(1.0), as_outer(functools.partial(torch.optim.SGD, lr=1.0))])
@pytest.mark.parametrize("grad", [1e4, -1e4])
def test_a_step_that_would_overflow_on_the_log_scale_moves_nothing(outer, grad):
    path, _ = descend([grad, -0.5], outer=outer, start=1.0, scale="log")
    assert path == pytest.approx([1.0, math.exp(0.5)])
    bound, _ = descend([grad], outer=outer, start=1.0, scale="log", low=0.5, high=2.0)
    assert bound == [0.5 if grad > 0 else 2.0]
    path, _ = descend([1e308], outer=lh.GradientDescent(1e9), start=1.0)
    assert path == [1.0]


def test_torch_optimizer_keeps_its_momentum_between_outer_steps():
    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)
    path, _ = descend([1.0, 1.0], as_outer(make))
    assert path == pytest.approx([-0.1, -0.25])


def test_torch_optimizer_does_not_move_what_has_no_hypergradient():
    path, _ = descend([1.0, math.nan], as_outer(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)))
    assert path == pytest.approx([-0.1, -0.1])


def test_fixed_entries_stay():
    entry = hypers() | {"momentum": lh.Hyper(0.9, learn=False)}
    at = values(0.0) | {"momentum": torch.tensor([0.9])}
    outer = lh.SignDescent()
    new, _ = outer.update(at, values(1.0), outer.init(entry), entry)
    assert new["momentum"].item() == pytest.approx(0.9)


def test_search_range_is_gamma_times_outer_steps_within_bounds():
    entries = {
        "lr": lh.Hyper(0.0, step=0.1),
        "momentum": lh.Hyper(0.5, step=0.15, high=0.99),
        "weight_decay": lh.Hyper(1e-3, scale="log", step=math.log(2)),
    }
    found = search_range(entries, 10)
    assert found["lr"] == pytest.approx((-1.0, 1.0))
    assert found["momentum"] == pytest.approx((-1.0, 0.99))
    assert found["weight_decay"] == pytest.approx((1e-3 / 1024, 1.024))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: as_outer("sign"), "outer='sign': expected lh.SignDescent"),
        (lambda: as_outer(lh.SignDescent), "expected lh.SignDescent"),
        (lambda: lh.SignDescent(factor=1.0), "factor=1.0"),
        (lambda: lh.GradientDescent(rate=-1.0), "rate=-1.0"),
        (lambda: lh.GradientDescent(clip=0.0), "clip=0.0"),
        (lambda: lh.GradientDescent(rate={"lr": float("nan")}), "expected positive numbers"),
        (lambda: lh.SignDescent(tolerance=2.0), "tolerance=2.0"),
        (lambda: lh.SignDescent(growth=0.9), "growth=0.9"),
        (lambda: lh.SignDescent(factor="a"), "factor='a'"),
        (lambda: lh.SignDescent(growth=None), "growth=None"),
        (lambda: lh.GradientDescent("a"), "rate='a'.*: expected positive numbers"),
        (lambda: lh.GradientDescent(clip="a"), "clip='a'"),
        (lambda: as_outer(torch.optim.LBFGS).init(hypers()), "outer=LBFGS: its step evaluates the loss anew"),
        (lambda: lh.GradientDescent({"momentum": 0.1}).init(hypers()), "no rate for hyperparameter 'lr'"),
        (lambda: step_size("smoothing", lh.Hyper(0.1)), "'smoothing' has no `step`"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("key", "hyper", "rule", "expected"),
    [
        ("lr", lh.Hyper(0.0), lh.sgd(), 0.1),
        ("lr", lh.Hyper(0.5), lh.sgd(), 0.1),
        ("lr", lh.Hyper([0.01, -0.02], windows=2), lh.sgd(), 0.02),  # no first step tenfold the start
        ("lr/head", lh.Hyper(0.0), lh.adamw(), 1e-3),
        ("lr", lh.Hyper(3e-4), lh.clipped(lh.adam(), 1.0), 3e-4),
        ("lr", lh.Hyper(3e-4, step=0.1), lh.adam(), 0.1),
        ("lr", lh.Hyper(3e-4, scale="log"), lh.adam(), 0.25),
        ("momentum", lh.Hyper(0.9), lh.sgd(), 0.15),
        ("beta1", lh.Hyper(0.9), lh.adam(), 0.05),
    ],
)
def test_the_usual_outer_step_suits_the_optimizer_and_the_start(key, hyper, rule, expected):
    (low, high), start = search_range({key: hyper}, 1, rule)[key], hyper.values().abs().max()
    own = high / float(start) if hyper.scale == "log" else high - float(hyper.values().max())
    assert own == pytest.approx(math.exp(expected) if hyper.scale == "log" else expected)
    assert low < high


def test_values_stay_where_the_optimizer_has_a_meaning():
    """An outer step of 1 would take β₂ to 1 and beyond, and ε below zero."""
    model = torch.nn.Linear(2, 1)
    task = lh.Task(
        lambda: model,
        lambda m, b: m(b).square().mean(),
        lambda seed: [torch.ones(3, 2)] * 4,
        lambda seed: [torch.ones(3, 2)],
    )
    hypers = {"beta2": lh.Hyper(0.9, step=1.0), "eps": lh.Hyper(1e-3, step=1.0), "lr": lh.Hyper(0.01)}
    run = lh.tune(task, lh.adam(), hypers, steps=4, outer_steps=4, engine=lh.Forward())
    assert [record.status for record in run.history] == ["ok"] * 4
    for record in run.history:
        assert 0 <= record.next["beta2"].item() <= 0.9999999
        assert record.next["eps"].item() >= 1e-30
    assert {record.next["beta2"].item() for record in run.history} & {0.0, 0.9999999}


@pytest.mark.parametrize("by", ["value", "norm"])
def test_a_learnt_clip_of_the_gradient_stays_positive(by):
    rule, grad_clip = lh.clipped(lh.adam(), 1.0, by=by), {"grad_clip": lh.Hyper(0.2, step=0.3)}
    low, high = search_range(grad_clip, 3, rule)["grad_clip"]
    assert low == 1e-30
    assert high == pytest.approx(1.1)
    assert rule.ranges["beta2"] == lh.adam().ranges["beta2"]
    task = lh.Task(
        lambda: torch.nn.Linear(2, 1).double(),
        lambda m, b: m(b).square().mean(),
        lambda seed: [torch.ones(3, 2).double()] * 4,
        lambda seed: [torch.ones(3, 2).double()],
    )
    hypers = {"lr": lh.Hyper(3.0, learn=False), **grad_clip}
    for record in lh.steps(task, lh.clipped(lh.sgd(), 1.0, by=by), hypers, steps=4, outer_steps=3):
        assert record.next["grad_clip"].item() > 0
    with pytest.raises(ValueError, match="takes at least 1e-30"):
        lh.hypergradient(task, rule, {"grad_clip": lh.Hyper(-0.5, step=0.1)}, steps=4)
