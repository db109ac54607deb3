"""The rounding error that a run writes down is the real one."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jvp

import longhorizon as lh
from longhorizon import models, tree
from longhorizon.accuracy import rounding_error
from longhorizon.problem import environment, make_problem

HYPERS = {"lr": lh.Hyper(0.1, windows=2)}


class Rough(nn.Module):
    """Rounds its weight to a few bits on the way, in float32 only."""

    def __init__(self, bits):
        super().__init__()
        self.weight, self.bits = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)), bits

    def forward(self, x):
        weight = self.weight
        if self.bits and weight.dtype == torch.float32:
            weight = weight * (1 + 2.0**-self.bits)
        return (x @ weight.T).tanh()


def make_task(bits=0, dtype=torch.float32, model=None):
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).to(dtype), torch.arange(8) % 3
    return lh.Task(
        model or (lambda: Rough(bits).to(dtype)),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda seed: [(x, y)] * 10,
        lambda seed: [(x, y)],
    )


def error(task):
    with environment():
        return rounding_error(make_problem(task, lh.sgd(), HYPERS, 4, 0))


def test_the_error_is_that_of_the_arithmetic():
    assert 0 < error(make_task()) < 1e-6
    assert 2.0**-10 < error(make_task(bits=8)) < 2.0**-6
    assert error(make_task(dtype=torch.float64)) == 0.0  # it is what others are measured against


def test_a_model_that_insists_on_float32_has_no_measured_error():
    class Stubborn(Rough):
        def forward(self, x):
            return torch.mm(x, torch.eye(4)) @ self.weight.T

    class Asserting(Rough):
        def forward(self, x):
            assert x.dtype == torch.float32
            return super().forward(x)

    assert error(make_task(model=lambda: Stubborn(0))) is None
    assert error(make_task(model=lambda: Asserting(0))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_writes_it_down_once(tmp_path, dtype):
    def tune(outer_steps):
        lh.tune(make_task(dtype=dtype), lh.sgd(), HYPERS, steps=4, outer_steps=outer_steps, dir=tmp_path / "run")
        return json.loads((tmp_path / "run" / "run.json").read_text())

    first = tune(1)
    measured = first["environment"]["hessian_product_error"]
    assert first["environment"]["dtype"] == ("float64" if dtype == torch.float64 else "float32")
    assert (measured == 0.0) if dtype == torch.float64 else (0 < measured < 1e-6)
    assert tune(2) == first


def test_a_run_of_an_older_version_has_no_dtype_and_goes_on(tmp_path):
    def tune(outer_steps):
        lh.tune(
            make_task(dtype=torch.float64), lh.sgd(), HYPERS, steps=4, outer_steps=outer_steps, dir=tmp_path / "run"
        )
        return json.loads((tmp_path / "run" / "run.json").read_text())

    content = tune(1)
    del content["environment"]["dtype"]
    content["environment"]["hessian_product_error"] = None
    (tmp_path / "run" / "run.json").write_text(json.dumps(content))
    assert tune(2) == content


@pytest.mark.parametrize(
    ("precision", "dtype", "says"),
    [
        ("tf32", torch.float64, "precision='tf32' with a model in float64: TF32 is a rougher float32"),
        ("float64", torch.float32, "precision='float64' with a model in float32: make it and its batches float64"),
        ("float16", torch.float32, "precision='float16': expected 'float32', 'tf32', 'bf16', or 'float64'"),
    ],
)
def test_a_precision_that_the_model_does_not_have_is_refused(tmp_path, precision, dtype, says):
    task = make_task(dtype=dtype)
    with pytest.raises(ValueError, match=says):
        lh.hypergradient(task, lh.sgd(), HYPERS, steps=4, precision=precision)
    with pytest.raises(ValueError, match=says):
        lh.tune(task, lh.sgd(), HYPERS, steps=4, outer_steps=1, precision=precision, dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_float64_may_be_asked_for(tmp_path):
    task = make_task(dtype=torch.float64)
    lh.tune(task, lh.sgd(), HYPERS, steps=4, outer_steps=1, precision="float64", dir=tmp_path / "run")
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["settings"]["precision"] == content["environment"]["dtype"] == "float64"


def test_most_of_it_is_relus_that_fall_on_the_other_side_of_zero(monkeypatch):
    """Weights that move by little more than float32 rounds them, all else in float64: the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(64, 3, 32, 32, generator=generator).double(), torch.arange(64) % 10
    torch.manual_seed(0)
    model = models.make("wrn-16-1").double()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    params = {name: p.detach() for name, p in model.named_parameters()}
    along, nudge = tree.random(params), tree.map(torch.randn_like, params)

    def hessian_product(weights):
        def loss(weights):
            return F.cross_entropy(torch.func.functional_call(model, weights, images), labels)

        return torch.cat([x.flatten() for x in jvp(grad(loss), (weights,), (along,))[1].values()])

    def change(by):
        moved = {name: p * (1 + by * nudge[name]) for name, p in params.items()}
        before, after = hessian_product(params), hessian_product(moved)
        return float((after - before).norm() / before.norm())

    with_kinks = change(1e-6)
    monkeypatch.setattr(torch, "relu", lambda x: F.softplus(x, beta=4))
    without = change(1e-6)
    assert with_kinks > 20 * without, (with_kinks, without)
