"""Meters read what is there: on a quadratic the growth is known in closed form."""

import pytest
import torch
from torch import nn

import longhorizon as lh
from longhorizon.meter import Meter


class Saddle(nn.Module):
    """L = (a x² − b y²) / 2: x shrinks by 1 − lr a a step, y grows by 1 + lr b."""

    def __init__(self):
        super().__init__()
        self.x, self.y = (nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))

    def forward(self, a, b):
        return (a * self.x**2 - b * self.y**2) / 2


def measured(engine, a=1.0, b=0.5, steps=40, lr=0.1, windows=2):
    task = lh.Task(Saddle, lambda model, batch: model(a, b), lambda seed: [0] * steps, lambda seed: [0])
    return lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(lr, windows=windows)}, steps=steps, engine=engine)


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint(), lh.Adjoint(store="sqrt")], ids=str)
def test_exponents_are_those_of_the_fastest_direction(engine):
    meter = measured(engine).meter
    assert meter.of == ("adjoint" if isinstance(engine, lh.Adjoint) else "tangents")
    rate = torch.log1p(torch.tensor(0.05)).item()
    # A tangent of a window that has ended only travels: Z' = (1 + lr b) Z. The adjoint does all the way.
    assert meter.exponent(20, 40) == pytest.approx(rate, rel=1e-6)
    assert meter.growth(20, 40) == pytest.approx(1.05**20, rel=1e-6)
    if meter.of == "adjoint":
        assert meter.exponent(0, 40) == pytest.approx(rate, rel=1e-6)


def test_a_column_per_value_and_zero_before_it_begins():
    meter = measured(lh.Forward(chunk=1)).meter
    assert meter.size.shape == (40, 2)
    assert (meter.size[:20, 1] == 0).all()
    assert (meter.size[20:, 1] > 0).all()
    assert meter.steps.tolist() == list(range(1, 41))
    assert meter.clipped is None


def test_a_long_run_is_read_now_and_then_and_at_its_end():
    for engine in (lh.Forward(), lh.Adjoint(store="all")):
        meter = measured(engine, steps=1000, lr=0.001).meter
        assert 256 <= len(meter.steps) <= 400
        assert meter.steps[-1] == 1000


def test_the_share_that_was_clipped():
    # dg = H·Z: for x a·Zx, for y −b·Zy; the second one grows past the bound, the first never does
    meter = measured(lh.Forward(clip=1.0), a=0.1, steps=60).meter
    assert meter.clipped[0, 0] == 0
    assert meter.clipped[-1, 0] == 0.5
    assert meter.clipped.shape == meter.size.shape


@pytest.mark.parametrize("engine", [lh.Forward(clip=0.5), lh.Adjoint(store="sqrt")], ids=str)
def test_a_resumed_run_has_the_same_meter(engine):
    from longhorizon.engines.entry import compute
    from longhorizon.problem import environment, make_problem

    def make():
        task = lh.Task(Saddle, lambda model, batch: model(1.0, 0.5), lambda seed: [0] * 30, lambda seed: [0])
        return make_problem(task, lh.sgd(), {"lr": lh.Hyper(0.1, windows=3)}, 30, 0)

    with environment():
        whole = compute(make(), engine).meter
        run = engine.begin(make())
        for _ in range(35 if isinstance(engine, lh.Adjoint) else 17):
            run.advance()
        run = engine.begin(make(), run.save())
        while not run.done:
            run.advance()
    found = run.result().meter
    assert torch.equal(found.steps, whole.steps)
    assert torch.equal(found.size, whole.size)
    assert (found.clipped is None) == (whole.clipped is None)


def test_what_has_no_influence_does_not_grow():
    flat = Meter("adjoint", torch.tensor([0, 4]), torch.tensor([[0.0], [0.0]]))
    assert flat.growth(0, 4) == 1.0
    assert flat.exponent(0, 4) == 0.0


def test_reading_between_two_readings_takes_the_next():
    meter = Meter("tangents", torch.tensor([2, 4]), torch.tensor([[1.0], [8.0]]))
    assert meter.growth(1, 3) == 8.0
    assert meter.growth(0, 99) == 8.0
