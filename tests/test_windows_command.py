"""`longhorizon windows`: the recommendation is theory's, on the recipe's own runs."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import longhorizon as lh
from longhorizon import recipe as recipes
from longhorizon.cli import main
from longhorizon.theory import analyse

SMALL = ("--steps", "12", "--batch_size", "16", "--model", "mlp-8", "--hypers.lr.start", "0.2")


@pytest.fixture
def cli(capsys, monkeypatch):
    def call(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["longhorizon", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert end.value.code == code, out + err
        return SimpleNamespace(stdout=out, stderr=err)

    return call


def test_it_is_the_analysis_of_per_step_hypergradients(cli, tmp_path):
    done = cli("windows", "--runs", "3", "--json", "--png", str(tmp_path / "w.png"), *SMALL)
    found = json.loads(done.stdout)
    chosen = recipes.load_recipe(None, {"steps": 12, "batch_size": 16, "model": "mlp-8", "hypers.lr.start": 0.2})
    task, _ = recipes.task_of(chosen)
    rows = [
        lh.hypergradient(
            task,
            recipes.rule_of(chosen),
            recipes.hypers_of(chosen),
            steps=12,
            engine=lh.Adjoint(),
            seed=s,
            per_step=True,
        ).per_step["lr"]
        for s in range(3)
    ]
    expected = analyse(np.stack([row.numpy() for row in rows]))
    assert found["best"] == expected.best
    assert found["windows"] == expected.windows
    assert found["error"] == pytest.approx(expected.corrected, rel=1e-3)
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")


def test_it_trains_with_a_learnt_schedule(cli, tmp_path):
    lh.Schedule({"lr": (0.1, 0.3), "momentum": (0.2,), "weight_decay": (0.0,)}, {"name": "sgd"}).save(
        tmp_path / "schedule.json"
    )
    done = cli("windows", "--runs", "2", "--at", str(tmp_path), *SMALL)
    assert "recommended: lr with" in done.stdout
    assert "run 2 of 2: validation loss" in done.stderr


def test_a_run_that_diverges_is_named(cli, tmp_path):
    hot = lh.Schedule({"lr": (1e30,), "momentum": (0.0,), "weight_decay": (0.0,)}, {"name": "sgd"})
    hot.save(tmp_path / "schedule.json")
    done = cli("windows", "--at", str(tmp_path), *SMALL, code=1)
    assert "the run with seed 0 cannot be used: non-finite" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--key", "lrr"), 2, "--key 'lrr' is not learnt. Did you mean 'lr'?"),
        (("--runs", "1"), 2, "--runs 1: expected at least 2"),
        (("--at", "nowhere.json"), 2, "nowhere.json does not exist; --at takes a schedule.json or a run's folder"),
    ],
)
def test_mistakes_are_named(cli, words, code, said):
    done = cli("windows", *SMALL, *words, code=code)
    assert said in done.stderr
