"""What is on a method's clock, and what it is charged: nothing twice, nothing left out, and the same for all."""

import math
import time

import pytest

import longhorizon as lh
from longhorizon import trust
from longhorizon.rivals import rows
from longhorizon.rivals.arena import Arena, Trial
from longhorizon.rivals.driver import Watcher
from longhorizon.rivals.training import Training
from rivals_task import CONSTANT, STEPS, compare, make_task, without_clock
from test_compare import Stops


def test_a_stretch_that_is_repeated_after_a_kill_is_not_on_the_clock(tmp_path, monkeypatch):
    """Killed between a rung's evaluation and its checkpoint."""
    settings = {"methods": ["hyperband"], "budget": "1 runs", "test": "none", "hypers": CONSTANT}
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "keep", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compare(tmp_path / "r", **settings)
    advance, first = Training.advance, 2  # steps of the first rung

    def slow(self):
        time.sleep(0.5 if self.t < first else 0.0)
        advance(self)

    monkeypatch.setattr(Training, "advance", slow)
    found = compare(tmp_path / "r", **settings).evaluations
    assert [(e.trial, e.steps) for e in found[:2]] == [(0, 2), (0, 6)]
    assert found[1].seconds < 0.5


@pytest.mark.parametrize("method", ["fds", "random", "row"])
def test_writing_checkpoints_is_on_nobodys_clock(tmp_path, monkeypatch, method):
    if method == "row":
        monkeypatch.setattr(rows, "width", lambda arena, *runs: 2)
    saves, save = 0, Arena.save

    def slow(self, *given):
        nonlocal saves
        saves += 1
        time.sleep(0.2)
        save(self, *given)

    monkeypatch.setattr(Arena, "save", slow)
    name, engine = "random" if method == "row" else method, lh.Adjoint(compile=False)
    settings = {"methods": [name], "budget": "1 runs", "test": "none", "engine": engine}
    found = compare(tmp_path / "r", checkpoint_seconds=0.0, **settings).evaluations
    assert saves >= STEPS - 1
    assert sum(e.seconds for e in found) < 0.2 * (saves - 1)


def test_the_last_of_several_diverged_runs_is_charged_like_the_others():
    def spoilt(seed):
        return [(x * math.nan if i == 1 else x, y) for i, (x, y) in enumerate(make_task().train(seed))]

    task = make_task(train=spoilt)
    found = compare(task=task, methods=["fds"], budget="9 runs", test="none", outer_steps=5).evaluations
    assert [e.trial for e in found] == [0, 1, 2]
    assert [e.cost for e in found] == [e.counted for e in found] == [2, 2, 2]
    assert found[2].seconds > 0
    assert "3 training runs in a row diverged" in found[2].status


ENGINES = {"factorial": lh.Factorial(pairs=1), "hybrid": lh.Hybrid(pairs=1), "difference": lh.FiniteDifference()}


@pytest.mark.parametrize("name", ENGINES)
def test_every_run_of_an_outer_step_is_charged(tmp_path, monkeypatch, name):
    """Five values: 8 pairs and a run between them; side by side or not, stopped or not."""
    monkeypatch.setattr(trust, "AMPLIFIED", -1.0)  # everything is doubted
    runs = 11 if name == "difference" else 17
    settings = {"methods": ["fds"], "engine": ENGINES[name], "test": "none"}
    with pytest.raises(ValueError, match=f"too small for one trial of fds, which takes {runs * STEPS}"):
        compare(budget=f"{runs - 1} runs", **settings)
    settings["budget"] = f"{3 * runs - 1} runs"
    calm = compare(**settings).evaluations
    assert [(e.cost, e.counted, e.total_steps) for e in calm] == [
        (runs * STEPS,) * 2 + (runs * STEPS * (i + 1),) for i in range(2)
    ]
    stops = 0
    while True:
        try:
            again = compare(tmp_path / "r", watcher=Watcher(progress=Stops(9)), **settings)
            break
        except lh.Interrupted:
            stops += 1
    assert stops > 1
    assert without_clock(again.evaluations) == without_clock(calm)


def test_a_calm_hybrid_is_charged_one_run(monkeypatch):
    monkeypatch.setattr(trust, "AMPLIFIED", math.inf)
    monkeypatch.setattr(trust, "AMPLIFIED_UNCUT", math.inf)
    found = compare(methods=["fds"], engine=lh.Hybrid(), budget="20 runs", test="none").evaluations
    assert {(e.cost, e.counted) for e in found} == {(STEPS, STEPS)}
    assert len(found) == 3
