"""Trials side by side. On the CPU this is never chosen; here it is asked for."""

import math

import pytest

import longhorizon as lh
from longhorizon.rivals import rows
from longhorizon.rivals.driver import Watcher
from longhorizon.rivals.ledger import Ledger
from longhorizon.rundir import load_tensors, save_tensors
from rivals_task import STEPS, compare, counted_task, make_task, without_clock
from test_compare import Stops

METHODS = ["random", "grid", "grid-halving"]


@pytest.fixture
def four(monkeypatch):
    """Rows of four."""
    monkeypatch.setattr(rows, "width", lambda arena: 4)


def settings_for(method, **changes):
    return {"methods": [method], "test": "none", "budget": "10 runs"} | changes


@pytest.mark.parametrize("method", METHODS)
def test_a_row_is_the_same_trials(method, monkeypatch):
    """To rounding; and every step is charged and taken once."""
    single = compare(**settings_for(method)).evaluations
    monkeypatch.setattr(rows, "width", lambda arena: 4)
    streams = []
    row = compare(task=counted_task(streams), **settings_for(method)).evaluations
    assert [e.key for e in row] == [e.key for e in single]
    assert [e.values for e in row] == [e.values for e in single]
    assert [e.val_loss for e in row] == pytest.approx([e.val_loss for e in single], rel=1e-4)
    assert [e.cost for e in row] == [e.counted for e in row] == [e.cost for e in single]
    read = sum(len(stream.read) for stream in streams)
    assert read - sum(e.cost for e in row) == (method == "random")  # the loss of an untrained network, once
    assert all(e.seconds > 0 for e in row)


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_row_goes_on_exactly(tmp_path, method, four):
    calm = compare(**settings_for(method)).evaluations
    stops = 0
    while True:
        try:
            found = compare(tmp_path / "r", watcher=Watcher(progress=Stops(7)), **settings_for(method))
            break
        except lh.Interrupted:
            stops += 1
    assert stops >= 3
    assert without_clock(found.evaluations) == without_clock(calm)
    assert not list((tmp_path / "r").rglob(rows.FILES))


def test_a_row_that_died_while_it_was_written_down_goes_on_with_the_rest(tmp_path, four, monkeypatch):
    calm = compare(**settings_for("random")).evaluations
    append, left = Ledger.append, [2]

    def dies(self, new):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return append(self, new)

    monkeypatch.setattr(Ledger, "append", dies)
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "r", checkpoint_seconds=0.0, **settings_for("random"))
    monkeypatch.setattr(Ledger, "append", append)
    assert len(Ledger(tmp_path / "r/journal.jsonl").all()) == 2
    assert list((tmp_path / "r").rglob(rows.FILES))
    found = compare(tmp_path / "r", **settings_for("random")).evaluations
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


@pytest.mark.parametrize("method", ["random", "grid"])
def test_a_budget_that_ends_inside_a_row_is_not_overdrawn(tmp_path, method, four):
    few = compare(tmp_path / "r", **settings_for(method, budget="6 runs")).evaluations
    assert [e.total_steps for e in few] == [STEPS * (i + 1) for i in range(6)]
    more = compare(tmp_path / "r", **settings_for(method, budget="9 runs")).evaluations
    assert without_clock(more) == without_clock(compare(**settings_for(method, budget="9 runs")).evaluations)


def test_one_trial_that_diverges_leaves_its_row_alone(four):
    hypers = {"lr": lh.Hyper(0.1, step=1e38, low=-1e39, high=1e39)}
    settings = {"steps": STEPS, "outer_steps": 1, "budget": "8 runs", "epoch": 2, "test": "none", "methods": ["random"]}
    found = lh.compare(make_task(), lh.sgd(), hypers, **settings).evaluations
    bad = [e for e in found if e.status.startswith("diverged: non-finite loss at step")]
    assert bad
    assert all(e.val_loss == math.inf and e.cost == e.counted < STEPS for e in bad)


def test_a_crash_is_found_by_training_each_alone(four):
    made = 0

    def model():
        nonlocal made
        made += 1
        if made in (3, 5):
            raise OSError("the disk went away")
        return make_task().model()

    found = compare(task=make_task(model=model), **settings_for("random", budget="4 runs")).evaluations
    assert [e.status for e in found if e.status != "ok"] == ["crashed: OSError: the disk went away"]
    assert len(found) == 5


def test_on_the_cpu_trials_run_one_by_one(monkeypatch):
    seen = []
    monkeypatch.setattr(rows, "at_once", lambda *given: seen.append(given) or 4)
    compare(**settings_for("random", budget="2 runs"))
    assert not seen
