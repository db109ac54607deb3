"""Several trials of a search at a time, each at its own step. On the CPU this is never chosen; here it is asked for."""

import math
import time
from itertools import count

import pytest
import torch

import longhorizon as lh
from longhorizon import data
from longhorizon.rivals import blackbox, rows, space
from longhorizon.rivals.driver import Watcher
from longhorizon.rivals.ledger import Ledger
from longhorizon.rivals.training import Counter, Training, judge
from rivals_task import CONSTANT, HYPERS, STEPS, compare, counted_task, loss, make_task, trained_on, without_clock
from test_compare import Stops
from test_rows import killed_after, stopped_often

METHODS = ["random", "bo", "hyperband", "bohb"]


@pytest.fixture
def four(monkeypatch):
    """Seats for four."""
    monkeypatch.setattr(rows, "width", lambda arena, *runs: 4)


def settings_for(method, **changes):
    return {"methods": [method], "test": "none", "budget": "10 runs"} | changes


def without_order(evaluations):
    return sorted(without_clock(evaluations), key=lambda e: (e["trial"], e["steps"]))


@pytest.mark.parametrize("method", METHODS)
def test_every_evaluation_is_that_of_training_alone(method, four):
    """To rounding, whatever sat beside it and wherever they were; every step is charged and taken once."""
    streams, task = [], make_task()
    found = compare(task=counted_task(streams), **settings_for(method)).evaluations
    assert len({e.trial for e in found}) >= 10
    for e in found:
        problem = lh.problem.make_problem(task, lh.sgd(), *plan_of(e))
        training = Training(problem, Counter())
        while training.t < e.steps and training.failed is None:
            training.advance()
        if math.isfinite(e.val_loss):
            assert e.val_loss == pytest.approx(judge(training).val_loss, rel=1e-3), e
    assert [e.cost for e in found] == [e.counted for e in found]
    assert sum(e.cost for e in found) <= 10 * STEPS
    assert trained_on(streams) == sum(e.cost for e in found)
    assert all(e.seconds > 0 for e in found)
    if method in ("hyperband", "bohb"):
        assert len({e.steps for e in found}) == 3  # rungs
        assert len({e.trial for e in found if e.steps == STEPS}) < len({e.trial for e in found})


def plan_of(e):
    """A run of its own length, with the whole schedule; from other weights on every rung."""
    rung = {2: 0, 6: 1, STEPS: 2}[e.steps] if e.method in ("hyperband", "bohb") else 0
    return space.hypers_for(e.values, HYPERS, lh.sgd(), e.steps), e.steps, lh.tuning.run_seed(e.seed, e.trial, rung)


def test_seats_do_not_wait_for_each_other(four, monkeypatch):
    """Hyperband's trials get up at different steps, and others sit down at once."""
    seen = []
    step = rows.Lanes.step
    monkeypatch.setattr(rows.Lanes, "step", lambda self, t: seen.append(list(t)) or step(self, t))
    found = compare(**settings_for("hyperband")).evaluations
    assert any(len(set(at)) > 2 for at in seen)
    assert len(seen) < 0.6 * sum(e.cost for e in found)


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_search_goes_on_exactly(tmp_path, method, four):
    calm = compare(**settings_for(method)).evaluations
    assert without_clock(stopped_often(tmp_path / "r", **settings_for(method))) == without_clock(calm)
    left = {int(path.stem[6:11]) for path in (tmp_path / "r").rglob("trial-*.pt")}
    assert not left & {e.trial for e in calm if e.steps == STEPS}  # only of those that the budget cut short
    assert not left or method in ("hyperband", "bohb")


@pytest.mark.parametrize("lines", [1, 4, 7])
@pytest.mark.parametrize("method", ["random", "bohb"])
def test_a_killed_search_repeats_nothing_that_was_written_down(tmp_path, method, lines, four):
    settings = settings_for(method)
    killed_after(lines, tmp_path / "r", **settings)
    before = Ledger(tmp_path / "r/journal.jsonl").all()
    assert len(before) == lines
    found = compare(tmp_path / "r", **settings).evaluations
    assert without_clock(found[:lines]) == without_clock(before)
    assert len({e.key for e in found}) == len(found)
    assert sum(e.cost for e in found) <= 10 * STEPS


@pytest.mark.parametrize("now", [1, 2, 8])
def test_trials_go_on_where_there_is_room_for_fewer_or_more(tmp_path, monkeypatch, four, now):
    calm = without_order(compare(**settings_for("random")).evaluations)
    with pytest.raises(lh.Interrupted):
        compare(tmp_path / "r", watcher=Watcher(progress=Stops(5)), **settings_for("random"))
    assert len(list((tmp_path / "r").rglob("trial-*.pt"))) == 4
    monkeypatch.setattr(rows, "width", lambda arena, *runs: now)
    found = without_order(compare(tmp_path / "r", **settings_for("random")).evaluations)
    assert [(e["trial"], e["steps"], e["cost"], e["values"]) for e in found] == [
        (e["trial"], e["steps"], e["cost"], e["values"]) for e in calm
    ]
    assert [e["val_loss"] for e in found] == pytest.approx([e["val_loss"] for e in calm], rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_in_steps_is_not_overdrawn_and_can_grow(tmp_path, method, four):
    few = compare(tmp_path / "r", **settings_for(method, budget="6 runs")).evaluations
    assert sum(e.cost for e in few) <= 6 * STEPS
    more = compare(tmp_path / "r", **settings_for(method, budget="9 runs")).evaluations
    assert without_clock(more[: len(few)]) == without_clock(few)
    assert len(more) > len(few)
    assert sum(e.cost for e in more) <= 9 * STEPS


def test_a_budget_in_seconds_ends_a_search_on_its_way(tmp_path, four, monkeypatch):
    """Seconds that are spent and not written down yet count; what is at work then stays open."""
    ticks = count()
    monkeypatch.setattr("longhorizon.rivals.crew.time.perf_counter", lambda: next(ticks) * 1.0)
    found = compare(tmp_path / "r", **settings_for("random", budget="100s")).evaluations
    spent = sum(e.seconds for e in found)
    again = compare(tmp_path / "r", **settings_for("random", budget="400s")).evaluations
    assert len(again) > len(found)
    assert sum(e.seconds for e in again) > spent


def test_one_that_diverges_gets_up_at_once(four):
    hypers = {"lr": lh.Hyper(0.1, step=1e38, low=-1e39, high=1e39)}
    settings = {"steps": STEPS, "outer_steps": 1, "budget": "8 runs", "epoch": 2, "test": "none", "methods": ["random"]}
    found = lh.compare(make_task(), lh.sgd(), hypers, **settings).evaluations
    bad = [e for e in found if e.status.startswith("diverged: non-finite loss at step")]
    assert bad
    assert all(e.val_loss == math.inf and e.cost == e.counted < STEPS for e in bad)
    assert len(found) > 8  # the steps that they left over were used


def test_one_that_goes_bad_on_its_way_leaves_the_others_alone(four):
    def bounded(model, batch):
        size = sum(p.abs().sum() for p in model.parameters())
        return loss(model, batch) + torch.where(size > 20, torch.inf, 0.0)

    found = compare(task=make_task(loss=bounded), **settings_for("random")).evaluations
    bad = [e for e in found if e.status.startswith("diverged")]
    assert 0 < len(bad) < len(found)
    assert all(e.cost == e.counted for e in found)


def test_a_crash_is_written_down_and_the_others_go_on(four):
    made = 0

    def model():
        nonlocal made
        made += 1
        if made in (4, 5):  # a trial that crashes is tried once more, alone
            raise OSError("the disk went away")
        return make_task().model()

    found = compare(task=make_task(model=model), **settings_for("random", budget="4 runs")).evaluations
    assert [e.status for e in found if e.status != "ok"] == ["crashed: OSError: the disk went away"]
    assert len([e for e in found if e.status == "ok"]) == 4


class Broken(list):
    """Batches of which one cannot be had."""

    def __getitem__(self, step):
        if step == 5:
            raise OSError("the disk went away")
        return super().__getitem__(step)


@pytest.mark.parametrize("method", ["random", "bohb"])
def test_a_step_that_fails_is_the_fault_of_one(tmp_path, method, four):
    """The others are judged as if nothing had been; the same when it is called again."""
    task = make_task()
    settings = settings_for(method, budget="4 runs", hypers=CONSTANT)
    sound = compare(**settings).evaluations
    guilty = lh.tuning.run_seed(0, 1, 0)
    broken = make_task(train=lambda seed: Broken(task.train(seed)) if seed == guilty else task.train(seed))
    found = compare(tmp_path / "r", task=broken, **settings).evaluations
    crashed = [e for e in found if e.status != "ok"]
    assert [(e.trial, e.status) for e in crashed] == [(1, "crashed: OSError: the disk went away")]
    same = {e.key: e.val_loss for e in sound if e.trial in (0, 2, 3) and e.steps == sound[0].steps}
    assert same == pytest.approx({e.key: e.val_loss for e in found if e.key in same}, rel=1e-3)
    more = compare(tmp_path / "r", task=broken, **settings | {"budget": "6 runs"}).evaluations
    assert len([e for e in more if e.status != "ok"]) == 1
    assert len(more) > len(found)


@pytest.mark.parametrize("method", ["random", "hyperband"])
def test_no_second_is_charged_twice_and_results_come_when_they_came(method, four, monkeypatch):
    """Proposing included, which is made slow here."""
    ask = blackbox.BlackBox._asked

    def slowly(self, *given):
        time.sleep(0.05)
        return ask(self, *given)

    monkeypatch.setattr(blackbox.BlackBox, "_asked", slowly)
    began, came = time.perf_counter(), []
    watcher = Watcher(on_evaluation=lambda e: came.append((e.total_seconds, time.perf_counter() - began)))
    found = compare(watcher=watcher, **settings_for(method)).evaluations
    asked = len({e.trial for e in found})
    assert 0.05 * asked <= sum(e.seconds for e in found) <= time.perf_counter() - began
    assert all(said <= since for said, since in came)
    assert came[0][0] >= 4 * 0.05  # four were asked for before the first could be judged


def test_empty_seats_do_not_make_data_anew(four, monkeypatch):
    pixels = torch.randint(256, (40, 1, 2, 3), dtype=torch.uint8)
    images = data.to_device(pixels, torch.arange(40) % 3, (0.5,), (0.2,))
    draws, draw = [], data.Stream._draw
    monkeypatch.setattr(data.Stream, "_draw", lambda self, epoch: draws.append(epoch) or draw(self, epoch))
    task = make_task(
        model=lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6, 3)),
        train=lambda seed: data.Stream(images, 20, seed),  # epochs of two steps
        val=lambda seed: [images.batch(torch.arange(10))],
        full=None,
        test=None,
    )
    found = compare(task=task, **settings_for("random", budget="3 runs")).evaluations
    assert len(found) == 3
    assert len(draws) <= 3 * (STEPS // 2 + 3)  # an epoch is drawn once, and the first a few times


def test_on_the_cpu_trials_run_one_by_one(monkeypatch):
    monkeypatch.setattr(blackbox, "Crew", None)
    assert compare(**settings_for("bohb", budget="2 runs")).evaluations
