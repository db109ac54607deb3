"""At the end of tuning, plain training runs decide whether the last values are kept or the best ones."""

import json
import math
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
from longhorizon.confirming import kept_in
from longhorizon.problem import Problem, environment, make_problem
from longhorizon.report import write_report
from test_rundir import wider
from test_tuning import make_task, tune

FAR = {"lr": lh.Hyper(0.1, step=1e4)}  # one outer step leads to where nothing trains
NEAR = {"lr": lh.Hyper(0.1, step=0.01)}
STEPS = 20


def counted(trained, stops=None):
    """The task, which writes down the seed of every training run; and sends a signal with the n-th."""

    def train(seed):
        trained.append(seed)
        if stops is not None and len(trained) == stops[0]:
            os.kill(os.getpid(), stops[1])
        return make_task().train(seed)

    return make_task(train=train)


def plain_loss(lr, seed):
    with environment():
        problem = make_problem(make_task(), lh.sgd(), {"lr": lh.Hyper(lr)}, STEPS, seed)
        state = problem.start
        for t in range(STEPS):
            state, _ = problem.train_step(state, t)
            state = torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, state)
        return float(problem.validation_loss(state, STEPS))


def test_losses_are_those_of_plain_training():
    schedules = {"small": {"lr": 0.01}, "large": lh.Schedule({"lr": (0.3,)}), "wild": {"lr": [1e4]}}
    told = []
    found = lh.confirm(
        make_task(), lh.sgd(), NEAR, schedules, steps=STEPS, seeds=[5, 9], on_run=lambda *run: told.append(run)
    )
    assert found.losses["small"] == pytest.approx([plain_loss(0.01, 5), plain_loss(0.01, 9)])
    assert found.losses["large"] == pytest.approx([plain_loss(0.3, 5), plain_loss(0.3, 9)])
    assert found.chosen == "large"
    assert sum(found.losses["large"]) < sum(found.losses["small"])
    assert sorted(told) == sorted(
        (name, s, v) for name, own in found.losses.items() for s, v in zip((5, 9), own, strict=True)
    )


def test_what_diverges_is_not_chosen():
    assert lh.Confirmed([0, 1], {"last": [0.1, math.inf], "best": [3.0, 4.0]}).chosen == "best"
    assert lh.Confirmed([0, 1], {"last": [math.inf, 0.1], "best": [math.inf, math.inf]}).chosen == "last"
    assert lh.Confirmed([0], {"last": [0.5], "best": [0.5]}).chosen == "last"
    assert "diverged in 1" in str(lh.Confirmed([0], {"last": [math.inf], "best": [0.5]}))


def test_a_last_step_that_went_wrong_is_not_kept(tmp_path):
    run = tune(hypers=FAR, outer_steps=1, dir=tmp_path / "r")
    assert abs(run.last["lr"].item()) > 1e3
    assert run.confirmed.chosen == "best"
    assert run.schedule == run.best != run.last
    assert lh.Schedule.load(tmp_path / "r/schedule.json") == run.best
    page = write_report(tmp_path / "r").read_text()
    assert f"Kept are the best ones ({run.confirmed})." in page
    assert "<b>0.1</b>" in page
    assert "the ring is kept: the start" in page
    again = tune(hypers=FAR, outer_steps=1, dir=tmp_path / "r", confirm=0)
    assert again.schedule == again.last == lh.Schedule.load(tmp_path / "r")
    assert "schedule.json has the last ones." in write_report(tmp_path / "r").read_text()
    trusting = tune(hypers=FAR, outer_steps=1, confirm=0)
    assert trusting.schedule == trusting.last == run.last
    assert trusting.confirmed is None


def test_values_that_are_the_same_are_not_trained():
    task = make_task(val_loss=lambda model, batch: 0.0 * sum(p.sum() for p in model.parameters()))
    flat = tune(task=task, hypers=NEAR, outer_steps=1)
    assert flat.last == flat.best == flat.schedule
    assert flat.confirmed is None


def test_where_neither_trains_the_best_are_kept(monkeypatch):
    """They did so once; with other seeds no run of either ends at a number."""
    said, judged = [], Problem.validation_loss

    def lost(self, *rest):
        return judged(self, *rest) if self.seed not in fresh else torch.tensor(math.nan)

    fresh = tune(hypers=NEAR, outer_steps=2).confirmed.seeds
    monkeypatch.setattr(Problem, "validation_loss", lost)
    run = tune(hypers=NEAR, outer_steps=2, note=said.append)
    assert run.confirmed.losses == {"best": [math.inf] * 3, "last": [math.inf] * 3}
    assert run.schedule == run.best != run.last
    assert said[-1].startswith("kept the best values, though neither trains with other seeds")


def test_no_seed_is_one_of_tuning():
    trained = []
    run = tune(task=counted(trained), hypers=NEAR, outer_steps=3)
    assert len(run.confirmed.seeds) == 3
    assert not {seed for record in run.history for seed in record.seeds} & set(run.confirmed.seeds)
    assert set(run.confirmed.seeds) <= set(trained)


def test_more_outer_steps_go_on_from_the_last_values(tmp_path):
    once = tune(hypers=FAR, outer_steps=1, dir=tmp_path / "r")
    assert once.schedule == once.best
    again = tune(hypers=FAR, outer_steps=2, dir=tmp_path / "r")
    assert again.history[1].values["lr"].item() == once.last["lr"].item()
    assert again.confirmed.chosen == "best"


def test_a_finished_run_trains_nothing_again(tmp_path):
    run, trained = tune(hypers=NEAR, outer_steps=2, dir=tmp_path / "r"), []
    same = tune(task=counted(trained), hypers=NEAR, outer_steps=2, dir=tmp_path / "r")
    assert same.confirmed == run.confirmed
    assert same.schedule == run.schedule
    assert trained == []
    more = tune(task=counted(trained), hypers=NEAR, outer_steps=2, dir=tmp_path / "r", confirm=5)
    assert more.confirmed.seeds[:3] == run.confirmed.seeds
    assert [losses[:3] for losses in more.confirmed.losses.values()] == list(run.confirmed.losses.values())
    assert set(trained) == set(more.confirmed.seeds[3:])


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_stopped_while_confirming_it_goes_on(tmp_path, kind, monkeypatch):
    """What is trained by then is on disk, and not trained again."""
    monkeypatch.setattr("longhorizon.retraining.at_once", lambda *_: 1)  # one after the other
    calm, trained = tune(hypers=NEAR, outer_steps=2), []
    tune(task=counted(trained), hypers=NEAR, outer_steps=2)
    fourth = len(trained) - 1  # of six; with a directory the model is looked at before
    child = os.fork()
    if child == 0:
        try:
            tune(task=counted([], (fourth, kind)), hypers=NEAR, outer_steps=2, dir=tmp_path / "r")
        except lh.Interrupted as stop:
            os._exit(7 if "while confirming" in str(stop) else 8)
        os._exit(9)
    status = os.waitpid(child, 0)[1]
    assert status == (7 << 8 if kind == signal.SIGINT else signal.SIGKILL)
    there = kept_in(json.loads((tmp_path / "r/confirmed.json").read_text()))
    assert sum(map(len, there.values())) == 3
    again = []
    found = tune(task=counted(again), hypers=NEAR, outer_steps=2, dir=tmp_path / "r")
    assert found.confirmed == calm.confirmed
    assert found.schedule == calm.schedule
    assert len(again) == 1 + 3


@pytest.mark.parametrize(("confirm", "words"), [(3, "while confirming"), (0, "when tuning was done")])
def test_stopped_in_the_last_outer_step_it_goes_on(tmp_path, confirm, words):
    def stop(record):
        if record.index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    settings, trained = {"hypers": NEAR, "outer_steps": 2, "confirm": confirm}, []
    with pytest.raises(lh.Interrupted, match=words):
        tune(dir=tmp_path / "r", on_step=stop, **settings)
    assert not (tmp_path / "r/confirmed.json").exists()
    found, calm = tune(task=counted(trained), dir=tmp_path / "r", **settings), tune(**settings)
    assert (found.schedule, found.confirmed) == (calm.schedule, calm.confirmed)
    assert bool(trained) == bool(confirm)


@pytest.mark.parametrize("done", [1, 4, 6])
def test_what_is_left_trains_as_it_would_have_with_the_rest(done):
    """In float32 a step of another number of lanes rounds otherwise, and so does another lane."""
    schedules = {"best": {"lr": [0.5, 0.4, 0.3]}, "last": {"lr": [0.7, 0.2, 0.3]}}
    given = in_float32(), lh.sgd(momentum=0.5), {"lr": lh.Hyper(0.1, windows=3)}, schedules
    runs = []
    calm = lh.confirm(*given, steps=STEPS, seeds=5, on_run=lambda *run: runs.append(run))
    known = {name: {seed: loss for n, seed, loss in runs[:done] if n == name} for name in schedules}
    assert lh.confirm(*given, steps=STEPS, seeds=5, known=known) == calm


def in_float32():
    def batches(seed, count=STEPS):
        generator = torch.Generator().manual_seed(seed)
        return [
            (torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)
        ]

    def model():
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    return lh.Task(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, lambda seed: batches(seed + 10**6, 2))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"losses": {"last": 3}}', '{"losses": {"last": {"x": 1}}, "values": 2}']
)
def test_a_damaged_file_is_made_anew(tmp_path, content):
    run = tune(hypers=NEAR, outer_steps=1, dir=tmp_path / "r")
    (tmp_path / "r/confirmed.json").write_text(content)
    assert "schedule.json has the last ones." in write_report(tmp_path / "r").read_text()
    assert tune(hypers=NEAR, outer_steps=1, dir=tmp_path / "r").confirmed == run.confirmed


def test_another_model_is_refused_while_confirming(tmp_path):
    """Its losses would stand among those of the first one."""
    tune(hypers=NEAR, outer_steps=1, dir=tmp_path / "r")
    there = (tmp_path / "r/confirmed.json").read_bytes()
    with pytest.raises(lh.RunError, match="holds a run of another model"):
        tune(task=make_task(model=wider), hypers=NEAR, outer_steps=1, dir=tmp_path / "r", confirm=5)
    assert (tmp_path / "r/confirmed.json").read_bytes() == there


def test_what_earlier_processes_spent_is_told(tmp_path):
    first = tune(hypers=NEAR, outer_steps=1, dir=tmp_path / "r", confirm=2)
    assert 0 < first.confirmed.seconds < first.seconds
    again = tune(hypers=NEAR, outer_steps=1, dir=tmp_path / "r", confirm=2)
    assert again.confirmed.seconds == pytest.approx(first.confirmed.seconds, rel=0.5)
    more = tune(hypers=NEAR, outer_steps=1, dir=tmp_path / "r", confirm=3)
    assert more.confirmed.seconds > again.confirmed.seconds


@pytest.mark.parametrize("confirm", [-1, True, 2.5, "3"])
def test_a_bad_number_is_refused_before_any_work(tmp_path, confirm):
    with pytest.raises(ValueError, match=f"confirm={confirm!r}: expected a number of training runs, 0 for none"):
        tune(confirm=confirm, dir=tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_schedules_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="the schedule 'b' has no 'momentum', which is in `hypers`"):
        lh.confirm(make_task(), lh.sgd(), NEAR | {"momentum": lh.Hyper(0.5)}, {"b": {"lr": 0.1}}, steps=STEPS)
    with pytest.raises(TypeError, match="expected a dictionary from a name to a schedule"):
        lh.confirm(make_task(), lh.sgd(), NEAR, [{"lr": 0.1}], steps=STEPS)  # type: ignore[arg-type]


def test_a_folder_will_do_for_a_schedule(tmp_path):
    run = tune(hypers=NEAR, outer_steps=1, dir=tmp_path / "r")
    assert lh.Schedule.load(tmp_path / "r") == run.schedule


def test_nothing_to_choose_from_is_refused():
    for schedules, seeds in (({}, 3), ({"a": {"lr": 0.1}}, 0)):
        with pytest.raises(ValueError, match="expected at least one of each"):
            lh.confirm(make_task(), lh.sgd(), NEAR, schedules, steps=STEPS, seeds=seeds)
