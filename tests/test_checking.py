"""`longhorizon check` neither cries wolf nor sleeps."""

import pytest
import torch

import longhorizon as lh
from longhorizon import checking
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
