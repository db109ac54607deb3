"""`longhorizon check` neither cries wolf nor sleeps."""

import pytest
import torch

import longhorizon as lh
from longhorizon import checking, rules
from longhorizon.recipe import Recipe

OWN_TASK = """
import torch, longhorizon as lh

def batches(seed, count=8):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 8, 3, generator=generator, dtype=torch.float32) for _ in range(count)]

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0] + torch.zeros(3)), batch[1])

def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))

def sequence():
    return lh.Task(model, loss, batches, lambda seed: batches(seed + 1, 2))

def stream():
    return lh.Task(model, loss, lambda seed: iter(batches(seed)), lambda seed: batches(seed + 1, 2))

def stubborn():
    return lh.Task(model, lambda m, b: m(b[0].float()).square().mean(), batches, lambda seed: batches(seed + 1, 2))
"""


def test_the_kink_of_a_relu_is_no_disagreement():
    """With this seed a shift of 1e-4 steps over one, and central differences are off by 8 %."""
    rows, passed = checking.check_engines(Recipe(seed=2), 12)
    assert passed, rows


SMALL = {
    "lr": {"start": 1e-3, "windows": 2, "scale": "log"},
    "beta1": {"start": 0.9},
    "eps": {"start": 1e-8, "scale": "log"},
}


def test_what_is_lost_in_rounding_is_no_disagreement():
    """Adam's eps moves the loss by 1e-13: no shift of it can be told from rounding, and others have kinks in theirs."""
    for seed in (0, 2):
        rows, passed = checking.check_engines(Recipe(rule={"name": "adamw"}, hypers=SMALL, seed=seed), 10)
        assert passed, rows
    tiny = SMALL | {"eps": {"start": 1e-14, "scale": "log"}}
    rows, passed = checking.check_engines(Recipe(rule={"name": "adamw"}, hypers=tiny), 10)
    assert passed, rows
    assert rows[-1]["verdict"] == "ok; too small to tell from rounding: eps"


@pytest.mark.filterwarnings("ignore::longhorizon.MissingDerivative")
def test_rounding_that_training_amplifies_is_no_disagreement(tmp_path, monkeypatch):
    """The gradient of a bias before BatchNorm is rounding and nothing else, and Adam divides it by its eps."""
    (tmp_path / "own_norm.py").write_text(
        OWN_TASK.replace("torch.nn.Linear(3, 4), ", "torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), ")
    )
    monkeypatch.syspath_prepend(tmp_path)
    hypers = {"lr": {"start": 1e-3, "windows": 2}, "weight_decay": {"start": 0.01}}
    recipe = Recipe(task="own_norm:sequence", rule={"name": "adamw"}, hypers=hypers, steps=8)
    rows, passed = checking.check_engines(recipe, 8)
    assert passed, rows
    assert rows[-1]["verdict"] == "ok"
    whole = rules._adam_update(decoupled=True)
    for key, hidden, verdict in (("lr", 0.01, "rounding: lr"), ("lr", 0.5, "over"), ("weight_decay", 1.0, "over")):

        def update(params, grads, state, h, key=key, hidden=hidden):
            fixed = h[key].detach() if isinstance(h[key], torch.Tensor) else h[key]
            return whole(params, grads, state, {**h, key: hidden * fixed + (1 - hidden) * h[key]})

        monkeypatch.setattr(rules, "_adam_update", lambda decoupled, update=update: update)
        rows, passed = checking.check_engines(recipe, 8)
        assert verdict in rows[-1]["verdict"], (key, hidden, rows)  # a small part of it drowns, and that is said
        assert passed is (verdict != "over")


@pytest.mark.filterwarnings("ignore::longhorizon.MissingDerivative")  # which says so, too
def test_an_error_is_found_by_central_differences_alone(monkeypatch):
    """All engines share the rule, so that a derivative that it hides is one for central differences to find."""
    from longhorizon import rules

    whole = rules._adam_update(decoupled=True)

    def update(params, grads, state, h):
        fixed = h["beta1"].detach() if isinstance(h["beta1"], torch.Tensor) else h["beta1"]
        return whole(params, grads, state, {**h, "beta1": 0.999 * fixed + 0.001 * h["beta1"]})

    monkeypatch.setattr(rules, "_adam_update", lambda decoupled: update)
    rows, passed = checking.check_engines(Recipe(rule={"name": "adamw"}, hypers=SMALL), 10)
    assert not passed
    assert rows[-1]["verdict"].startswith("over")


def test_a_task_in_float32_is_checked_in_float64(tmp_path, monkeypatch):
    """In float32 rounding drowns central differences, and the engines would be said to disagree."""
    (tmp_path / "float32_task.py").write_text(OWN_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("stream", "sequence"):
        rows, passed = checking.check_engines(Recipe(task=f"float32_task:{name}"), 6)
        assert passed, rows
    with pytest.raises(ValueError, match="in float64, in which your task does not run"):
        checking.check_engines(Recipe(task="float32_task:stubborn"), 6)
    assert torch.get_default_dtype() == torch.float32


def test_a_wrong_engine_is_found(monkeypatch):
    whole = lh.Adjoint.begin

    def begin(engine, problem, saved=None):
        run = whole(engine, problem, saved)
        if engine.store == "sqrt":
            run.engine = lh.Adjoint(store="sqrt", clip=1e-3)
        return run

    monkeypatch.setattr(lh.Adjoint, "begin", begin)
    rows, passed = checking.check_engines(Recipe(), 4)
    assert not passed
    assert [row["verdict"].startswith("over") for row in rows] == [False, True, False, False, False]
