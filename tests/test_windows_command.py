"""`longhorizon windows`: the recommendation is theory's, on the recipe's own runs."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

import longhorizon as lh
from longhorizon import cli_windows
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


def test_an_error_that_is_lost_in_noise_is_not_printed_as_a_negative_number(tmp_path, monkeypatch):
    """The estimate subtracts noise, so few runs may leave less than nothing; the curve stays on its axis."""
    rng = np.random.default_rng(1)
    seen = analyse(rng.standard_normal((2, 24)))
    assert min(seen.corrected) < 0
    table = cli_windows._table(seen)
    assert "-" not in table
    assert next(line for line in table.splitlines() if line.endswith("←")).split()[2:4] == ["≤", "0"]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    cli_windows._draw(seen, "lr", "w.png")
    measured, _, _, point = drawn[0].axes[1].lines
    assert list(point.get_xdata()) == [seen.best]
    bottom, top = drawn[0].axes[1].get_ylim()
    for y in (*measured.get_ydata(), *point.get_ydata()):
        assert 0 < bottom <= y <= top


def test_sizes_lost_in_noise_are_as_good_as_each_other():
    seen = analyse(np.random.default_rng(1).standard_normal((2, 24)))
    lost = [size for size, mse in zip(seen.sizes, seen.corrected, strict=True) if mse <= 0]
    assert seen.close == (min(lost), max(lost))


def test_one_window_is_singular(cli, monkeypatch):
    flat = [[1.0] * 12, [2.0] * 12]
    monkeypatch.setattr(cli_windows, "analyse", lambda rows: analyse(flat, [12]))
    assert "recommended: lr with 1 window of 12 steps" in cli("windows", "--runs", "2", *SMALL).stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--key", "lrr"), 2, "--key 'lrr' is not learnt. Did you mean 'lr'?"),
        (("--key", "momentum", "--hypers.momentum.learn", "false"), 2, "--key 'momentum' is not learnt."),
        (("--runs", "1"), 2, "--runs 1: expected at least 2"),
        (("--at", "nowhere.json"), 2, "nowhere.json does not exist; --at takes a schedule.json or a run's folder"),
    ],
)
def test_mistakes_are_named(cli, words, code, said):
    done = cli("windows", *SMALL, *words, code=code)
    assert said in done.stderr
