"""Trials side by side. On the CPU this is never chosen; here it is asked for."""

import math

import pytest
import torch

import longhorizon as lh
from longhorizon.rivals import rows
from longhorizon.rivals.arena import Arena, Setup
from longhorizon.rivals.budget import Budget, Purse
from longhorizon.rivals.driver import Watcher
from longhorizon.rivals.ledger import Ledger
from longhorizon.rundir import load_tensors, save_tensors
from rivals_task import STEPS, compare, counted_task, loss, make_task, trained_on, without_clock
from test_compare import Stops

METHODS = ["grid", "grid-halving", "hd"]
alone = rows.alone


@pytest.fixture
def four(monkeypatch):
    """Rows of four."""
    monkeypatch.setattr(rows, "width", lambda arena, *runs: 4)


def settings_for(method, **changes):
    return {"methods": [method], "test": "none", "budget": "10 runs"} | changes


@pytest.mark.parametrize("method", METHODS)
def test_a_row_is_the_same_trials(method, monkeypatch):
    """To rounding; and every step is charged and taken once."""
    single = compare(**settings_for(method)).evaluations
    monkeypatch.setattr(rows, "width", lambda arena, *runs: 4)
    streams = []
    row = compare(task=counted_task(streams), **settings_for(method)).evaluations
    assert [e.key for e in row] == [e.key for e in single]
    for e, same in zip(row, single, strict=True):
        assert e.values == {key: pytest.approx(v, rel=1e-4, abs=1e-7) for key, v in same.values.items()}
    assert [e.val_loss for e in row] == pytest.approx([e.val_loss for e in single], rel=1e-4)
    assert [e.cost for e in row] == [e.counted for e in row] == [e.cost for e in single]
    read = trained_on(streams)
    assert read == sum(e.cost for e in row)
    assert all(e.seconds > 0 for e in row)


def stopped_often(directory, **settings):
    """The evaluations of a comparison that is stopped and called again, until it is done."""
    stops = 0
    while True:
        try:
            found = compare(directory, watcher=Watcher(progress=Stops(7)), **settings)
        except lh.Interrupted:
            stops += 1
        else:
            assert stops >= 3
            return found.evaluations


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_row_goes_on_exactly(tmp_path, method, four):
    calm = compare(**settings_for(method)).evaluations
    assert without_clock(stopped_often(tmp_path / "r", **settings_for(method))) == without_clock(calm)
    assert not list((tmp_path / "r").rglob(rows.FILES))


def killed_after(lines, directory, **settings):
    """A comparison that dies when so many evaluations have been written down."""
    append, left = Ledger.append, [lines]

    def dies(self, new, *more):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return append(self, new, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "append", dies)
        with pytest.raises(KeyboardInterrupt):
            compare(directory, checkpoint_seconds=0.0, **settings)


def test_a_row_that_died_while_it_was_written_down_goes_on_with_the_rest(tmp_path, four):
    calm = compare(**settings_for("grid")).evaluations
    killed_after(2, tmp_path / "r", **settings_for("grid"))
    assert len(Ledger(tmp_path / "r/journal.jsonl").all()) == 2
    assert list((tmp_path / "r").rglob(rows.FILES))
    found = compare(tmp_path / "r", **settings_for("grid")).evaluations
    assert without_clock(found) == without_clock(calm)


def test_the_row_of_another_process_is_left_alone(tmp_path, four):
    """Workers share a folder; each knows its own row by the trials in it."""
    calm = compare(**settings_for("grid")).evaluations
    with pytest.raises(lh.Interrupted):
        compare(tmp_path / "r", watcher=Watcher(progress=Stops(7)), **settings_for("grid"))
    (own,) = (tmp_path / "r").rglob(rows.FILES)
    content = load_tensors(own)["content"]
    other = own.with_name("row-90000.pt")
    save_tensors(other, {"content": content | {"numbers": [90000, 90001, 90002, 90003], "t": 0}})
    found = compare(tmp_path / "r", **settings_for("grid")).evaluations
    assert without_clock(found) == without_clock(calm)
    assert list((tmp_path / "r").rglob(rows.FILES)) == [other]


@pytest.mark.parametrize("now", [1, 2, 8])
def test_a_row_goes_on_where_there_is_room_for_fewer_or_more(tmp_path, monkeypatch, four, now):
    calm = {e.key: e.cost for e in compare(**settings_for("grid")).evaluations}
    with pytest.raises(lh.Interrupted):
        compare(tmp_path / "r", watcher=Watcher(progress=Stops(1)), **settings_for("grid"))
    monkeypatch.setattr(rows, "width", lambda arena, *runs: now)
    monkeypatch.setattr(rows, "alone", alone if now == 1 else None)  # rows that fail would be trained one by one
    found = compare(tmp_path / "r", **settings_for("grid")).evaluations
    assert {e.key: e.cost for e in found} == calm


def test_a_share_of_a_row_is_charged_its_share_of_the_time(tmp_path, four):
    """Three of four were written down; what is left is charged a quarter of the time before, not all of it."""
    killed_after(3, tmp_path / "r", **settings_for("grid", budget="4 runs"))
    (file,) = (tmp_path / "r").rglob(rows.FILES)
    content = load_tensors(file)["content"]
    save_tensors(file, {"content": content | {"seconds": 400.0}})
    found = compare(tmp_path / "r", **settings_for("grid", budget="4 runs")).evaluations
    assert 100 < found[-1].seconds < 150


def test_two_processes_finish_one_row(tmp_path, four):
    """Each its own trials, from where the row was, whatever the other has saved by then."""
    calm = compare(**settings_for("grid", budget="4 runs")).evaluations
    with pytest.raises(lh.Interrupted):
        compare(tmp_path / "r", watcher=Watcher(progress=Stops(7)), **settings_for("grid", budget="4 runs"))
    (old,) = (tmp_path / "r").rglob(rows.FILES)
    save_tensors(old, {"content": load_tensors(old)["content"] | {"seconds": 400.0}})
    hypers = {key: lh.Hyper(0.1) for key in ("lr", "momentum", "weight_decay")}
    setup = Setup(make_task(), lh.sgd(), hypers, [STEPS], 3, None, "auto", 1, 2, 1)
    ledger = Ledger(tmp_path / "r/journal.jsonl")
    arenas = [Arena(setup, "grid", 0, Purse(Budget(99, "steps"), 0, 0.0), ledger, old.parent) for _ in range(2)]
    jobs = [rows.Job(e.trial, e.values) for e in calm]
    one = rows._Row(arenas[0], jobs[0::2], STEPS)
    one._save()
    other = rows._Row(arenas[1], jobs[1::2], STEPS)
    other._save()
    assert (one.t, other.t) == (7, 7)
    assert len({one.file, other.file, old.name}) == 3
    assert one.seconds() + other.seconds() == pytest.approx(400.0, abs=20.0)
    one.train()
    one._save()
    assert rows._Row(arenas[0], jobs[0::2], STEPS).t == STEPS  # its own, which is further than the old one
    for arena, half in zip(arenas, (jobs[0::2], jobs[1::2]), strict=True):
        rows.evaluate(arena, half, STEPS)
    losses = {e.trial: e.val_loss for e in ledger.all()}
    assert losses == pytest.approx({e.trial: e.val_loss for e in calm}, rel=1e-4)
    assert not list(old.parent.glob(rows.FILES))


@pytest.mark.parametrize(("first", "then"), [(1, 10), (10, 1)])
def test_a_lone_run_and_a_row_are_each_taken_up_as_they_were(tmp_path, four, first, then):
    """Hypergradient descent trains alone where the budget is for one; with another budget it goes on all the same."""
    with pytest.raises(lh.Interrupted):
        compare(tmp_path / "r", watcher=Watcher(progress=Stops(7)), **settings_for("hd", budget=f"{first} runs"))
    (file,) = (tmp_path / "r").rglob("*-0*.pt")
    assert file.name.startswith("trial" if first == 1 else "row")
    streams = []
    settings = settings_for("hd", budget=f"{then} runs")
    found = compare(tmp_path / "r", task=counted_task(streams), **settings).evaluations
    again = 3  # on nobody's clock: a batch that is looked at, two steps of a row that is compiled again
    assert trained_on(streams) == sum(e.cost for e in found) - 7 + again
    assert [path.name[:3] for path in (tmp_path / "r").rglob("*-0*.pt")] == ([] if first == 1 else ["row"])  # of others


@pytest.mark.parametrize("method", ["grid"])
def test_a_budget_that_ends_inside_a_row_is_not_overdrawn(tmp_path, method, four):
    few = compare(tmp_path / "r", **settings_for(method, budget="6 runs")).evaluations
    assert [e.total_steps for e in few] == [STEPS * (i + 1) for i in range(6)]
    more = compare(tmp_path / "r", **settings_for(method, budget="9 runs")).evaluations
    assert without_clock(more) == without_clock(compare(**settings_for(method, budget="9 runs")).evaluations)


def test_one_trial_that_diverges_leaves_its_row_alone(four):
    def bounded(model, batch):
        size = sum(p.abs().sum() for p in model.parameters())
        return loss(model, batch) + torch.where(size > 36, torch.inf, 0.0)

    found = compare(task=make_task(loss=bounded), **settings_for("grid")).evaluations
    bad = [e for e in found if e.status.startswith("diverged: non-finite loss at step")]
    assert 0 < len(bad) < len(found)
    assert all(e.val_loss == math.inf and e.cost == e.counted < STEPS for e in bad)


def test_a_crash_is_found_by_training_each_alone(four):
    made = 0

    def model():
        nonlocal made
        made += 1
        if made in (3, 5):
            raise OSError("the disk went away")
        return make_task().model()

    found = compare(task=make_task(model=model), **settings_for("grid", budget="4 runs")).evaluations
    assert [e.status for e in found if e.status != "ok"] == ["crashed: OSError: the disk went away"]
    assert len(found) == 5


def test_the_whole_grid_stands_in_wider_rows_than_a_search(monkeypatch):
    asked = []
    monkeypatch.setattr(rows.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(lh.problem.Problem, "worth_compiling", lambda self, steps: True)
    monkeypatch.setattr(lh.problem.Problem, "stepper", lambda self, steps: self.train_step)
    monkeypatch.setattr(rows, "at_once", lambda problem, runs: asked.append(runs) or 1)
    for method, budget in (("grid", "0.2s"), ("grid", "20 runs"), ("grid-halving", "1 runs")):
        compare(**settings_for(method, budget=budget))
    assert asked == [135, 20, rows.WIDTH]


def test_on_the_cpu_trials_run_one_by_one(monkeypatch):
    seen = []
    monkeypatch.setattr(rows, "at_once", lambda *given: seen.append(given) or 4)
    compare(**settings_for("random", budget="2 runs"))
    assert not seen
