"""Hypergradient descent: by hand on a quadratic, by finite differences for every rule, and stopped anywhere."""

import math

import pytest
import torch
from torch import nn

import longhorizon as lh
from longhorizon import tree
from longhorizon.problem import environment, make_problem
from longhorizon.rivals.descent import Descent, one_step_hypergradient
from longhorizon.rivals.descents import Descents
from longhorizon.rivals.training import Counter
from rivals_task import make_task


class Point(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.ones((), dtype=torch.float64))


def quadratic(curvatures):
    """L_t = a_t θ²/2 from θ = 1."""
    return lh.Task(Point, lambda model, a: a * model.x**2 / 2, lambda seed: curvatures, lambda seed: [1.0])


def descend(task, rule, hypers, steps, **settings):
    with environment():
        run = Descent(make_problem(task, rule, hypers, steps, 0), Counter(), **settings)
        while run.t < steps:
            run.advance()
    return run


def test_three_steps_by_hand():
    """Learning rate alone: α ← α + 0.2 · g_t g_{t-1}, before the step that uses it.

    θ₀ = 1        g₀ = 1                     α₀ = 0.1                              θ₁ = 1 − 0.1 · 1 = 0.9
    g₁ = 0.5 · 0.9 = 0.45                    h = −0.45 · 1                         α₁ = 0.1 + 0.09 = 0.19
    θ₂ = 0.9 − 0.19 · 0.45 = 0.8145
    g₂ = 0.25 · 0.8145 = 0.203625            h = −0.203625 · 0.45 = −0.09163125    α₂ = 0.19 + 0.01832625
    θ₃ = 0.8145 − 0.20832625 · 0.203625
    """
    run = descend(quadratic([1.0, 0.5, 0.25]), lh.sgd(), {"lr": lh.Hyper(0.1)}, 3)
    assert run.trace["lr"].tolist() == pytest.approx([0.1, 0.19, 0.20832625], abs=1e-15)
    assert float(run.state.params["x"]) == pytest.approx(0.8145 - 0.20832625 * 0.203625, abs=1e-15)
    assert run.counter.steps == 3


def test_three_steps_by_hand_with_momentum():
    """Both at once, with ∂θ/∂β = −α v of the step before.

    v₀ = 1, θ₁ = 0.9, g₁ = 0.45:   h_α = −0.45 · v₀,  h_β = 0        α₁ = 0.19, β₁ = 0.5
    v₁ = 0.5 + 0.45 = 0.95,  θ₂ = 0.9 − 0.19 · 0.95 = 0.7195,  g₂ = 0.25 · 0.7195 = 0.179875
    h_α = −0.179875 · 0.95,  h_β = −0.179875 · 0.19 · v₀
    """
    hypers = {"lr": lh.Hyper(0.1), "momentum": lh.Hyper(0.5)}
    run = descend(quadratic([1.0, 0.5, 0.25]), lh.sgd(), hypers, 3)
    lr = 0.19 + 0.2 * 0.179875 * 0.95
    momentum = 0.5 + 0.2 * 0.179875 * 0.19
    assert run.trace["lr"].tolist() == pytest.approx([0.1, 0.19, lr], abs=1e-15)
    assert run.trace["momentum"].tolist() == pytest.approx([0.5, 0.5, momentum], abs=1e-15)
    assert float(run.state.params["x"]) == pytest.approx(0.7195 - lr * (momentum * 0.95 + 0.179875), abs=1e-15)


def test_the_papers_clip_and_rate():
    """A hypergradient of −6 moves α by 0.2 · 1, not by 1.2; and by rate · 6 without the clip."""
    run = descend(quadratic([2.0, 4.0]), lh.sgd(), {"lr": lh.Hyper(0.125)}, 2)  # θ₁ = 0.75, g₁ = 3, h = −3 · 2
    assert run.trace["lr"].tolist() == pytest.approx([0.125, 0.325])
    run = descend(quadratic([2.0, 4.0]), lh.sgd(), {"lr": lh.Hyper(0.125)}, 2, rate=0.01, clip=math.inf)
    assert run.trace["lr"].tolist() == pytest.approx([0.125, 0.185])


def test_bounds_and_the_log_scale_hold():
    run = descend(quadratic([2.0, 4.0]), lh.sgd(), {"lr": lh.Hyper(0.125, high=0.2)}, 2)
    assert run.trace["lr"].tolist() == pytest.approx([0.125, 0.2])
    run = descend(quadratic([1.0, 0.5]), lh.sgd(), {"lr": lh.Hyper(0.1, scale="log")}, 2)
    assert run.trace["lr"].tolist() == pytest.approx([0.1, 0.1 * math.exp(0.2 * 0.45 * 0.1)])  # dL/d ln α = α dL/dα


RULES = {
    "sgd": (lh.sgd(), {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.01}),
    "sgd from zero": (lh.sgd(), {"lr": 0.0, "momentum": 0.0, "weight_decay": 0.0}),
    "nesterov": (lh.sgd(nesterov=True), {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.01}),
    "adam": (lh.adam(), {"lr": 0.01, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.01}),
    "adamw": (lh.adamw(), {"lr": 0.01, "beta1": 0.8, "weight_decay": 0.1}),
    "clipped": (lh.clipped(lh.sgd(), 0.05), {"lr": 0.1, "momentum": 0.5, "grad_clip": 0.05}),
    "clipped by norm": (lh.clipped(lh.sgd(), 0.2, by="norm"), {"lr": 0.1, "momentum": 0.5, "grad_clip": 0.2}),
}


@pytest.mark.parametrize("name", RULES)
def test_finite_differences_of_the_one_step_objective(name):
    """dL_next/dλ of the third step, the run before it held constant, against central differences in float64."""
    rule, start = RULES[name]
    base = make_task()
    task = make_task(
        model=lambda: base.model().double(),
        train=lambda seed: [(x.double(), y) for x, y in base.train(seed)],
        val=lambda seed: [(x.double(), y) for x, y in base.val(seed)],
    )
    with environment():
        problem = make_problem(task, rule, {key: lh.Hyper(v) for key, v in start.items()}, 4, 0)
        state = problem.start
        for step in range(2):
            state, _ = problem.train_step(state, step)
        inner, hypers = problem.inner, problem.hypers_at(2)

        def gradient(params, step):
            params = {n: p.detach().requires_grad_() for n, p in params.items()}
            grads, _, loss = inner.gradient(params, state.buffers, problem.batch(step), hypers)
            return grads, float(loss.detach())

        grads, _ = gradient(state.params, 2)
        after, _ = inner.update(state.params, grads, state.memory, hypers)
        found = one_step_hypergradient(inner, state, grads, hypers, list(start), gradient(after, 3)[0])
        eps = 1e-6
        for key, value in start.items():
            losses = []
            for sign in (1, -1):
                moved = {**hypers, key: torch.tensor(value + sign * eps, dtype=torch.float64)}
                losses.append(gradient(inner.update(state.params, grads, state.memory, moved)[0], 3)[1])
            difference = (losses[0] - losses[1]) / (2 * eps)
            assert float(found[key]) == pytest.approx(difference, rel=1e-6, abs=1e-9), key
        assert any(float(g) != 0 for g in found.values())


def test_values_leave_zero():
    """Learning rate first; momentum and weight decay cannot matter before it."""
    zero = {"lr": lh.Hyper(0.0), "momentum": lh.Hyper(0.0), "weight_decay": lh.Hyper(0.0)}
    run = descend(quadratic([0.5] * 4), lh.sgd(), zero, 4)
    assert run.trace["lr"][1] > 0
    assert run.trace["momentum"][1] == 0
    assert run.trace["momentum"][2] > 0
    assert run.trace["weight_decay"][2] > 0


@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_resumed_run_is_the_same_bit_for_bit(at):
    hypers = {"lr": lh.Hyper(0.1, windows=3), "momentum": lh.Hyper(0.2), "weight_decay": lh.Hyper(0.0, learn=False)}
    calm = descend(make_task(), lh.sgd(), hypers, 12)
    with environment():
        problem = make_problem(make_task(), lh.sgd(), hypers, 12, 0)
        first = Descent(problem, Counter())
        while first.t < at:
            first.advance()
        second = Descent(problem, Counter(), saved=first.save())
        while second.t < 12:
            second.advance()
    assert tree.equal(calm.state, second.state)
    assert calm.learnt() == second.learnt()
    assert calm.learnt()["weight_decay"] == [0.0]
    assert len(calm.learnt()["lr"]) == 12


def test_the_compiled_halves_of_a_step_do_the_same():
    """What a GPU takes for long runs; here they are traced."""
    hypers = {"lr": lh.Hyper(0.1), "momentum": lh.Hyper(0.3), "weight_decay": lh.Hyper(1e-3)}
    plain = descend(make_task(), lh.sgd(), hypers, 12)
    with environment():
        run = Descent(make_problem(make_task(), lh.sgd(), hypers, 12, 0), Counter())
        run.compiles = True
        while run.t < 12:
            run.advance()
    traced = run.problem.inner.cache
    assert sorted(key[0] for key in traced) == ["hd gradient", "hd update"]
    assert all(graph is not None for graph in traced.values())
    for key in hypers:
        assert torch.allclose(run.trace[key], plain.trace[key], rtol=1e-5)
        assert run.trace[key][-1] != run.trace[key][0]


def test_runs_side_by_side_are_single_runs():
    """Traced, each from its own values, with a lane to spare; one of them diverges."""
    starts = [(0.1, 0.3), (0.02, 0.8), (1e9, 0.0)]
    single, problems, traces = [], [], lh.Traces()
    with environment():
        for seed, (lr, momentum) in enumerate(starts):
            hypers = {"lr": lh.Hyper(lr), "momentum": lh.Hyper(momentum, high=0.9), "weight_decay": lh.Hyper(1e-3)}
            problems.append(make_problem(make_task(), lh.sgd(), hypers, 12, seed, traces=traces))
            run = Descent(make_problem(make_task(), lh.sgd(), hypers, 12, seed), Counter())
            while run.t < 12:
                run.advance()
            single.append(run)
        row = Descents(problems, None, 4, 10**9)
        losses = [row.step(t) for t in range(12)]
        assert sorted(key[0][0] for key in problems[0].inner.cache) == ["hd gradients", "hd slopes", "hd update"]
        for i, run in enumerate(single[:2]):
            for key, values in row.learnt(i, 12).items():
                assert values == pytest.approx(run.learnt()[key], rel=1e-4), key
                assert values[-1] != values[0]
            for own, alone in zip(tree.leaves(row.lane(i)), tree.leaves(run.weights()), strict=True):
                assert torch.allclose(own, alone, rtol=1e-4, atol=1e-5)
    assert not torch.stack(losses)[:, 2].isfinite().all()
    assert torch.stack(losses)[:, :2].isfinite().all()
