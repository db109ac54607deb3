"""The greedy scheme step by step: by hand on a quadratic, by differences, and stopped anywhere."""

import pytest
import torch

import longhorizon as lh
from longhorizon.inner import State
from longhorizon.problem import environment, make_problem
from longhorizon.rivals.stepwise import Stepwise
from problems import RULES, problem, through_a_file


def bowl(curvature=2.0):
    def loss(model, batch):
        return 0.5 * curvature * model.weight.square().sum() * batch

    one = [torch.ones((), dtype=torch.float64)]
    return lh.Task(lambda: torch.nn.Linear(1, 1, bias=False).double(), loss, lambda seed: one * 9, lambda seed: one)


def finished(run):
    while run.t < run.problem.steps:
        run.advance()
    return run


def test_each_rate_is_the_best_for_its_step():
    """On a bowl of curvature c that is 1/c, and then there is nothing left to do."""
    with environment():
        p = make_problem(bowl(), lh.sgd(), {"lr": lh.Hyper(0.0)}, 3, 0)
        start = float(p.start.params["weight"])
        rate = 0.4 / (4 * start**2)  # the validation loss as a function of the rate has the curvature 4θ²
        run = Stepwise(p, 40, lh.GradientDescent(rate))
        run.advance()
        assert run.learnt["lr"][0] == pytest.approx(0.5, rel=1e-6)
        assert run.val_losses[0] == pytest.approx(0, abs=1e-10)
        finished(run)
    assert run.learnt["lr"][1:].tolist() == pytest.approx([0, 0], abs=1e-9)  # at the bottom no rate is better
    assert run.failed is None


def test_the_best_of_a_steps_rates_is_taken_where_they_go_back_and_forth():
    """Two clipped steps lead there and back: the last rate is the first one, and no step was taken."""
    with environment():
        p = make_problem(bowl(), lh.sgd(), {"lr": lh.Hyper(0.0)}, 3, 0)
        outer = lh.GradientDescent(1e9, clip=0.7e-9)  # from 0 to 0.7, where 0.5 is best, and back
        last, best = Stepwise(p, 2, outer, keep="last"), Stepwise(p, 2, outer)
        for run in (last, best):
            finished(run)
    assert last.learnt["lr"].tolist() == pytest.approx([0, 0, 0], abs=1e-12)
    assert best.learnt["lr"].tolist() == pytest.approx([0.7, 0.7, 0.7])
    assert best.val_losses.tolist() == pytest.approx([float(last.val_losses[0]) * 0.4 ** (2 * n) for n in (1, 2, 3)])


def test_values_that_come_again_are_not_looked_at_again(monkeypatch):
    """Rates that go back and forth between two values cost two looks, however many outer steps there are."""
    outer, looks = lh.GradientDescent(1e9, clip=0.75e-9), []
    with environment():
        p = make_problem(bowl(), lh.sgd(), {"lr": lh.Hyper(0.0)}, 1, 0)
        short, run = (Stepwise(p, count, outer) for count in (3, 41))
        look, short = p.validate, finished(short)
        monkeypatch.setattr(p, "validate", lambda *args, **how: looks.append(0) or look(*args, **how))
        finished(run)
    assert len(looks) == 3  # and one after the last step
    assert run.learnt["lr"].tolist() == short.learnt["lr"].tolist()
    assert run.val_losses.tolist() == short.val_losses.tolist()


@pytest.mark.parametrize("rule", ["sgd", "adam", "clipped"])
def test_against_central_differences(rule):
    """One outer step moves a value by its hypergradient: of the validation loss right after the step."""
    case, setting = problem("mlp"), RULES[rule]
    hypers = {k: h for k, h in setting.hypers.items() if h.learn}
    with environment():
        p = make_problem(case.task, setting.rule, hypers, 3, 1)
        rate = 0.1  # with 1 a clip would end at its bound, zero
        run = Stepwise(p, 1, lh.GradientDescent(rate), keep="last")
        run.advance()
        before = run.state
        run.advance()
        batch, inner, now = p.batch(1), p.inner, p.hypers_at(1)
        params = {name: x.detach().requires_grad_() for name, x in before.params.items()}
        grads, buffers, _ = inner.gradient(params, before.buffers, batch, now)

        def after(key, by):
            moved, memory = inner.update(before.params, grads, before.memory, now | {key: now[key] + by})
            return float(p.validation_loss(State(moved, buffers, memory), 2))

        for key in run.keys:
            slope = (after(key, 1e-6) - after(key, -1e-6)) / 2e-6
            found = (float(now[key]) - float(run.learnt[key][1])) / rate
            if hypers[key].scale != "log":
                assert found == pytest.approx(slope, rel=1e-5, abs=1e-8), key


def test_stopped_anywhere_it_goes_on():
    case, setting = problem("mlp"), RULES["sgd"]
    with environment():

        def make():
            return make_problem(case.task, setting.rule, setting.hypers, 4, 1)

        whole = Stepwise(make(), 3, lh.GradientDescent(0.1, clip=3.0))
        saves = []
        while whole.t < 4:
            saves.append(through_a_file(whole.save()))
            whole.advance()
        for saved in saves:
            again = finished(Stepwise(make(), 3, lh.GradientDescent(0.1, clip=3.0), saved))
            assert all(torch.equal(again.learnt[key], whole.learnt[key]) for key in whole.keys)
            assert torch.equal(again.val_losses, whole.val_losses)
