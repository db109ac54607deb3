"""Hyperband and BOHB: how trials climb from rung to rung, what is tried next, and what a study is made from."""

import math
from dataclasses import replace

import numpy as np
import pytest

import longhorizon as lh
from longhorizon.rivals import bohb
from longhorizon.rivals.blackbox import BlackBox
from longhorizon.rivals.driver import Watcher
from longhorizon.rivals.ledger import Evaluation
from longhorizon.rivals.space import Axis
from longhorizon.rivals.studies import quiet
from rivals_task import CONSTANT, HYPERS, compare, without_clock
from test_compare import Stops


@pytest.mark.parametrize("method", ["hyperband", "bohb"])
@pytest.mark.parametrize(
    ("hypers", "costs"), [(HYPERS, [2, 6, 18]), (CONSTANT, [2, 4, 12])], ids=["schedule", "constant"]
)
def test_trials_climb_rung_by_rung_and_most_end_early(tmp_path, method, hypers, costs):
    """From scratch with the whole schedule, or on from the last rung where nothing changes along a run."""
    found = compare(tmp_path / "r", hypers=hypers, methods=[method], budget="12 runs", test="none").evaluations
    by_trial = {}
    for e in found:
        by_trial.setdefault(e.trial, []).append(e)
    for climbed in by_trial.values():
        assert [e.steps for e in climbed] == [2, 6, 18][: len(climbed)]
        assert [e.cost for e in climbed] == costs[: len(climbed)]
    tops = sum(len(climbed) == 3 for climbed in by_trial.values())
    assert 0 < tops < len(by_trial)
    assert not list(tmp_path.rglob("trial-*.pt")) or costs == [2, 4, 12]  # none is left of those that are through


def test_a_comparison_goes_on_with_the_rungs_that_it_began_with(tmp_path, monkeypatch):
    """From before schedules were squeezed, when every trial went on from its last rung."""
    settings = {"methods": ["hyperband"], "test": "none"}
    with monkeypatch.context() as patch:
        patch.setattr(BlackBox, "_squeezes", lambda self, arena: False)
        before = compare(tmp_path / "r", budget="4 runs", **settings).evaluations
    assert {e.cost for e in before} == {2, 4, 12}
    assert {e.cost for e in compare(tmp_path / "r", budget="8 runs", **settings).evaluations} == {2, 4, 12}


@pytest.mark.parametrize("method", ["random", "bo", "hyperband", "bohb"])
def test_a_study_that_is_lost_is_made_anew_from_the_journal(tmp_path, method):
    settings = {"methods": [method], "test": "none", "budget": "16 runs"}
    calm = compare(**settings).evaluations
    with pytest.raises(lh.Interrupted):
        compare(tmp_path / "r", watcher=Watcher(progress=Stops(200)), **settings)
    (tmp_path / f"r/{method}-0/study.log").unlink()
    found = compare(tmp_path / "r", **settings).evaluations
    assert without_clock(found) == without_clock(calm)


def test_bohb_asks_the_longest_runs_with_enough_results():
    space = [Axis(name, "lr", -1.0, 1.0, False) for name in ("lr[0]", "lr[1]")]
    chance = np.random.default_rng(0)

    def results(steps, best, count):
        points = chance.uniform(-1, 1, (count, 2)).tolist()
        losses = [sum((x - best) ** 2 for x in point) for point in points]
        pairs = zip(points, losses, strict=True)
        return [Evaluation("bohb", 0, i, steps, 1, 1, 1.0, loss, {}, {"lr": p}) for i, (p, loss) in enumerate(pairs)]

    short, long, few = results(2, -0.6, 200), results(6, 0.6, 100), results(18, -0.6, 4)
    assert bohb.model_of(space, short + long + few) == long
    assert bohb.model_of(space, [e for e in long if e.trial < 4]) == []
    assert bohb.model_of(space, [replace(e, status="crashed: no") for e in long]) == []
    with quiet():
        proposed = [bohb.propose(space, short + long + few, seed) for seed in range(150)]
        free = [bohb.propose(space, [], seed)["lr[0]"] for seed in range(150)]
    near = sum(all(abs(v - 0.6) < 0.35 for v in p.values()) for p in proposed)
    assert 0.5 < near / 150 < 0.85  # a third at random, of which few come near
    assert min(free) < -0.8
    assert max(free) > 0.8
    away = [p["lr[0]"] for p in proposed if abs(p["lr[1]"] - 0.6) > 0.5]
    assert max(away) > 0.3  # those at random are so on every axis


def test_one_that_diverges_is_the_worst_for_bohb():
    space = [Axis("lr", "lr", 0.0, 1.0, False)]
    points = np.linspace(0, 1, 60).tolist()
    past = [
        Evaluation("bohb", 0, i, 9, 9, 9, 1.0, math.inf if x > 0.5 else 1 - x, {}, {"lr": [x]})
        for i, x in enumerate(points)
    ]
    with quiet():
        proposed = [bohb.propose(space, past, seed)["lr"] for seed in range(60)]
    assert sum(0.35 < x <= 0.55 for x in proposed) > 30
