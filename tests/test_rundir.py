"""What is on disk: complete or not there, exact to resume, safe to open, and clear when something is wrong."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import longhorizon as lh
from longhorizon import rundir
from longhorizon.rundir import RunDirectory
from records import SPEC, make_records
from test_tuning import HYPERS, loss, make_task, tune


def lines(directory):
    return [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]


def without_clock(record):
    return {k: v for k, v in record.to_dict().items() if k != "seconds"}


class Stop(Exception):  # noqa: N818
    pass


def stopped_after(directory, inner_steps, **settings):
    """A run that is broken off after some inner steps, with a checkpoint at each."""
    left = inner_steps

    def progress(tuning):
        nonlocal left
        left -= 1
        if not left:
            raise Stop

    with pytest.raises(Stop):
        tune(dir=directory, checkpoint_seconds=0.0, progress=progress, **settings)


@pytest.mark.parametrize(
    "engine", [lh.Forward(compile=False), lh.Adjoint(store="sqrt"), lh.Greedy(4), lh.Factorial(pairs=1)], ids=str
)
@pytest.mark.parametrize("when", [1, 27, 55])
def test_a_broken_run_goes_on_exactly(tmp_path, engine, when):
    calm = tune(engine=engine)
    stopped_after(tmp_path / "r", when, engine=engine)
    resumed = tune(dir=tmp_path / "r", engine=engine)
    assert [without_clock(r) for r in resumed.history] == [without_clock(r) for r in calm.history]
    assert resumed.schedule == calm.schedule
    assert resumed.best == calm.best


@pytest.mark.parametrize(
    ("engine", "outer", "lost"),
    [
        (lh.Forward(compile=False), None, False),
        (lh.Forward(compile=False), None, True),
        (lh.Factorial(), None, False),
        (lh.Factorial(), None, True),
        (lh.Adjoint(), partial(torch.optim.Adam, lr=0.05), False),  # its state is in the checkpoint alone
    ],
    ids=["forward", "forward, from the journal", "factorial", "factorial, from the journal", "torch optimizer"],
)
def test_hyperparameters_in_another_order_are_the_same_run(tmp_path, engine, outer, lost):
    settings = {"engine": engine, "outer": outer, "outer_steps": 3, "confirm": 0}
    hypers = {"lr": lh.Hyper(0.1, windows=2, step=0.05), "momentum": lh.Hyper(0.3, step=0.1)}
    calm = tune(hypers=hypers, **settings)
    stopped_after(tmp_path / "r", 50, hypers=hypers, **settings)
    if lost:
        tune(dir=tmp_path / "r", hypers=hypers, **settings | {"outer_steps": 1})
        (tmp_path / "r/checkpoint.pt").unlink()
    resumed = tune(dir=tmp_path / "r", hypers=dict(reversed(hypers.items())), **settings)
    assert [without_clock(r) for r in resumed.history] == [without_clock(r) for r in calm.history]


def test_a_finished_run_is_read_not_repeated(tmp_path):
    run = tune(dir=tmp_path / "r")
    again = tune(dir=tmp_path / "r")
    assert [r.to_dict() for r in again.history] == [r.to_dict() for r in run.history]  # the clock too


def test_a_finished_run_may_take_more_outer_steps(tmp_path):
    tune(dir=tmp_path / "r", outer_steps=2)
    longer = tune(dir=tmp_path / "r", outer_steps=4)
    assert [without_clock(r) for r in longer.history] == [without_clock(r) for r in tune(outer_steps=4).history]


def test_without_its_checkpoint_a_run_goes_on_from_the_journal(tmp_path):
    stopped_after(tmp_path / "r", 100)
    (tmp_path / "r/checkpoint.pt").unlink()
    resumed = tune(dir=tmp_path / "r")
    assert resumed.schedule == tune().schedule


def test_the_journal_knows_where_the_last_good_run_was_and_the_best(tmp_path):
    """As the run itself: some of a step's seeds may fail, and it is followed, but no mean of survivors is the best."""
    failed = {"seeds": [1, 2], "status": "1 of 2 runs: non-finite loss at step 7: lower `lr` or shorten the run."}
    whole, partly, lost = make_records(count=3, diverged=(2,))
    history = [replace(whole, seeds=[1, 2]), replace(partly, **failed), replace(lost, **failed)]
    directory = SimpleNamespace(load=lambda: None, path=tmp_path)
    first = lh.Tuning(make_task(), lh.sgd(), SPEC, steps=200, seeds=2)
    saved = lh.run._where(directory, history, first)
    assert saved["good"][0] == partly.val_loss
    assert saved["good"][1] is partly.values
    assert saved["best"][:2] == (whole.val_loss, 200)
    assert saved["best"][2] is whole.values


def test_a_checkpoint_that_knows_more_than_the_journal_is_refused(tmp_path):
    tune(dir=tmp_path / "r", outer_steps=3)
    journal = tmp_path / "r" / "journal.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:1]))
    with pytest.raises(lh.RunError, match="journal.jsonl knows less than the checkpoint, which is at outer step 4"):
        tune(dir=tmp_path / "r", outer_steps=4)
    (tmp_path / "r" / "checkpoint.pt").unlink()
    assert tune(dir=tmp_path / "r", outer_steps=3).schedule == tune(outer_steps=3).schedule


def test_a_checkpoint_of_a_run_with_equal_settings_is_refused(tmp_path):
    """Another model or other data: settings do not tell them apart."""
    tune(dir=tmp_path / "one")
    tune(dir=tmp_path / "two")
    (tmp_path / "one" / "checkpoint.pt").replace(tmp_path / "two" / "checkpoint.pt")
    with pytest.raises(lh.RunError, match="belongs to another run"):
        tune(dir=tmp_path / "two")


class Careful:
    """An outer optimizer of a user's own, without a name of its own."""

    def init(self, hypers):
        return {}

    def update(self, values, mean, state, hypers):
        return values, state

    def shrink(self, state):
        return state

    def converged(self, state):
        return False


def test_an_own_outer_optimizer_goes_on(tmp_path):
    tune(dir=tmp_path / "r", outer=Careful(), outer_steps=1)
    keep = [Careful() for _ in range(3)]  # elsewhere in memory
    assert len(tune(dir=tmp_path / "r", outer=keep[-1], outer_steps=2).history) == 2


def test_progress_begins_before_the_first_record(tmp_path):
    """A display starts there; an outer step may be a single inner step."""
    seen = []
    hypers = {"lr": lh.Hyper(0.0)}
    told = {"on_step": lambda r: seen.append(r.index), "progress": lambda t: seen.append("inner")}
    lh.tune(make_task(), lh.sgd(), hypers, steps=1, outer_steps=2, engine=lh.Forward(), **told)
    assert seen == ["inner", 0, 1]


def test_a_torn_last_line_does_not_count(tmp_path):
    stopped_after(tmp_path / "r", 100)
    with open(tmp_path / "r/journal.jsonl", "a") as journal:
        journal.write('{"index": 2, "val_l')
    resumed = tune(dir=tmp_path / "r")
    assert resumed.schedule == tune().schedule
    assert [line["index"] for line in lines(tmp_path / "r")] == [0, 1, 2, 3]


def test_a_last_line_that_lacks_only_its_end_counts_and_stays(tmp_path):
    stopped_after(tmp_path / "r", 50)
    journal = tmp_path / "r/journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-1])
    stopped_after(tmp_path / "r", 25)
    assert tune(dir=tmp_path / "r").schedule == tune().schedule
    assert [line["index"] for line in lines(tmp_path / "r")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 31}, "31"),  # more than there are batches
        ({"precision": "fp16"}, "precision='fp16'"),
        ({"hypers": {"lr": lh.Hyper(0.0, params="nothing.*")}}, "nothing"),
    ],
)
def test_what_is_refused_leaves_the_directory_free(tmp_path, settings, words):
    with pytest.raises((ValueError, TypeError), match=words):
        tune(dir=tmp_path / "r", **settings)
    assert tune(dir=tmp_path / "r", outer_steps=1).history[0].status == "ok"


def test_a_whole_number_is_the_same_setting_as_its_float(tmp_path):
    for count, growth, step in ((1, 2, 1), (2, 2.0, 1.0)):
        hypers = {"lr": lh.Hyper(0.0, step=step)}
        run = tune(dir=tmp_path / "r", outer_steps=count, outer=lh.SignDescent(growth=growth), hypers=hypers)
        assert len(run.history) == count  # it went on


def test_how_numpy_writes_a_number_and_the_order_of_a_set_are_no_setting(tmp_path):
    class Reversed(set):
        """Where hash seeds differ, so does the order of a set."""

        def __iter__(self):
            return iter(sorted(set.copy(self), reverse=True))

        def __repr__(self):
            return str(list(self))

    patterns = {"*.weight", "*.bias"}
    number = {"step": np.float32(0.25), "low": np.int64(-1), "high": np.float32(2.0), "windows": np.int64(2)}
    for count, settings in enumerate(
        (
            number | {"params": patterns},
            {name: int(v) if name == "windows" else float(v) for name, v in number.items()} | {"params": patterns},
            number | {"params": Reversed(patterns)},
            number | {"params": ["*.bias", "*.weight"]},
        )
    ):
        run = tune(dir=tmp_path / "r", outer_steps=count + 1, hypers={"lr": lh.Hyper(0.0, **settings)})
        assert len(run.history) == count + 1  # it went on


def test_another_recipe_in_the_directory_is_refused_by_name(tmp_path):
    tune(dir=tmp_path / "r", outer_steps=1)
    with pytest.raises(lh.RunError, match="holds another run: its hypers.lr.step is 0.1, here it is 0.2"):
        tune(dir=tmp_path / "r", hypers=HYPERS | {"lr": lh.Hyper(0.0, windows=2, step=0.2)})
    with pytest.raises(lh.RunError, match="its seed is 0, here it is 1"):
        tune(dir=tmp_path / "r", seed=1)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_damage_is_one_clear_sentence_and_loses_nothing(tmp_path):
    directory = tmp_path / "r"
    tune(dir=directory, outer_steps=1)
    whole = {path.name: path.read_bytes() for path in directory.iterdir()}

    def broken(words, **settings):
        before = (directory / "journal.jsonl").read_bytes()
        with pytest.raises(lh.RunError, match=words) as caught:
            tune(dir=directory, **settings)
        assert "\n" not in str(caught.value)
        assert (directory / "journal.jsonl").read_bytes() == before
        for name, content in whole.items():
            (directory / name).write_bytes(content)

    (directory / "checkpoint.pt").write_bytes(b"not a checkpoint")
    broken(r"checkpoint.pt cannot be read \(\w+\); delete it to go on from the journal\.$")
    (directory / "checkpoint.pt").write_bytes(whole["checkpoint.pt"][:200])
    broken(r"checkpoint.pt cannot be read \(\w+\); delete")
    (directory / "run.json").unlink()
    broken("has a journal or a checkpoint but no run.json: part of it was deleted")
    (directory / "run.json").write_text("{")
    broken("run.json is damaged")
    edit(directory / "run.json", lambda c: c.update(format=99))
    broken("has format 99; this longhorizon reads up to 1: update it")
    saved = torch.load(directory / "checkpoint.pt", weights_only=True)
    torch.save(saved | {"format": 99}, directory / "checkpoint.pt")
    broken("checkpoint.pt has format 99")
    torch.save(saved | {"fingerprint": "other"}, directory / "checkpoint.pt")
    broken("belongs to another run")
    (directory / "journal.jsonl").write_bytes(b"{broken}\n" + whole["journal.jsonl"])
    broken("journal.jsonl is damaged at line 1")


def test_a_directory_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert tune(dir="~/r", outer_steps=1).dir == tmp_path / "home/r"
    assert not (tmp_path / "~").exists()


def test_a_checkpoint_with_code_in_it_is_not_run(tmp_path):
    tune(dir=tmp_path / "r", outer_steps=1)
    mark = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(mark),))

    torch.save({"format": 1, "fingerprint": "x", "content": Trap()}, tmp_path / "r/checkpoint.pt")
    with pytest.raises(lh.RunError, match="cannot be read"):
        tune(dir=tmp_path / "r")
    assert not mark.exists()


def test_a_full_disk_is_one_sentence_and_the_old_checkpoint_stays(tmp_path, monkeypatch):
    stopped_after(tmp_path / "r", 30)
    old = (tmp_path / "r/checkpoint.pt").read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rundir.torch, "save", full)
    with pytest.raises(
        lh.RunError, match="cannot write .*checkpoint.pt; the checkpoint before it is untouched: the disk is full"
    ):
        tune(dir=tmp_path / "r", checkpoint_seconds=0.0)
    monkeypatch.undo()
    assert (tmp_path / "r/checkpoint.pt").read_bytes() == old
    assert not list((tmp_path / "r").glob("*.part"))
    assert tune(dir=tmp_path / "r").schedule == tune().schedule


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "r").write_text("")
    with pytest.raises(lh.RunError, match="cannot create .*a file of that name is in the way"):
        tune(dir=tmp_path / "r")


def test_a_second_process_is_refused_with_the_first_ones_pid(tmp_path):
    script = textwrap.dedent(
        f"""
        import sys
        from longhorizon.rundir import RunDirectory
        with RunDirectory({str(tmp_path / "r")!r}):
            print("held", flush=True)
            sys.stdin.read()
        """
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(lh.RunError, match=f"in use by process {other.pid}"):
            tune(dir=tmp_path / "r")
    finally:
        other.communicate()
    with RunDirectory(tmp_path / "r"):  # free again once the other is gone
        pass


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_inner_step_and_saves(tmp_path, kind):
    count = 0

    def progress(tuning):
        nonlocal count
        count += 1
        if count == 30:
            os.kill(os.getpid(), kind)

    before = signal.getsignal(kind)
    with pytest.raises(lh.Interrupted, match="stopped at outer step 1 of 4; all is saved in"):
        tune(dir=tmp_path / "r", progress=progress)
    assert count in (30, 31)
    assert signal.getsignal(kind) is before
    assert tune(dir=tmp_path / "r").schedule == tune().schedule


def test_checkpoints_are_made_by_the_clock(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(RunDirectory, "checkpoint", lambda self, content: made.append(content["index"]))
    clock = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    tune(dir=tmp_path / "r", outer_steps=1, engine=lh.Forward(compile=False), checkpoint_seconds=10.0)
    assert 2 <= len(made) <= 5  # 20 inner steps of one tick or two each, and the end of the outer step


def test_the_environment_is_recorded_without_names_of_places(tmp_path):
    tune(dir=tmp_path / "r", outer_steps=1)
    record = RunDirectory(tmp_path / "r").describe()["environment"]
    assert record["torch"] == torch.__version__
    assert str(tmp_path) not in json.dumps(record)


def test_tasks_may_stop_and_go_on_with_a_torch_optimizer(tmp_path):
    make = make_adam
    calm = tune(outer=make)
    stopped_after(tmp_path / "r", 100, outer=make)
    assert tune(dir=tmp_path / "r", outer=make).schedule == calm.schedule


def make_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda p: torch.optim.Adam(p, lr=5.0), "its outer.with.lr is 0.05, here it is 5.0"),
        (lambda p: torch.optim.SGD(p, lr=0.05), "its outer.kind is 'Adam', here it is 'SGD'"),
        (
            lambda p: torch.optim.Adam([{"params": p[:1], "lr": 1.0}, {"params": p[1:]}], lr=0.05),
            "its outer.with.groups is None",
        ),
    ],
)
def test_another_outer_optimizer_is_refused(tmp_path, other, words):
    """Also from a function of no name; its saved state would hide it."""
    tune(dir=tmp_path / "r", outer=lambda p: torch.optim.Adam(p, lr=0.05), outer_steps=1)
    with pytest.raises(lh.RunError, match=words):
        tune(dir=tmp_path / "r", outer=other, outer_steps=2)
    assert len(tune(dir=tmp_path / "r", outer=make_adam, outer_steps=2).history) == 2  # another name, the same settings


def test_task_is_not_needed_to_read_a_run(tmp_path):
    tune(dir=tmp_path / "r", outer_steps=2, task=make_task())
    assert [record.index for record in RunDirectory(tmp_path / "r").journal()] == [0, 1]


def test_an_outer_optimizer_made_by_a_function_is_the_same_in_another_process(tmp_path):
    """Its address in memory does not count."""
    runs = [
        tune(dir=tmp_path / "r", outer=lambda p: torch.optim.Adam(p, lr=0.01), outer_steps=outer_steps)
        for outer_steps in (1, 2)
    ]
    assert len(runs[1].history) == 2
    assert " at 0x" not in (tmp_path / "r" / "run.json").read_text()


def rooted(model, batch, hypers):
    return loss(model, batch) + 0.3 * hypers["a"].sqrt() * sum(p.square().sum() for p in model.parameters())


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_a_value_that_makes_the_loss_no_number_is_gone_back_from_after_a_stop_too(tmp_path, stop):
    """The second outer step has a root of what is below zero. A user who starts there is told before any work."""
    task = make_task(loss=rooted, val_loss=loss)
    settings = {"task": task, "hypers": {"lr": lh.Hyper(0.1), "a": lh.Hyper(0.05, step=0.1)}}
    calm = tune(**settings).history
    assert [record.status[:23] for record in calm[:2]] == ["ok", "non-finite loss at step"]
    if stop:
        tune(**settings, dir=tmp_path / "r", outer_steps=stop)
    found = tune(**settings, dir=tmp_path / "r").history
    assert [without_clock(record) for record in found] == [without_clock(record) for record in calm]
    with pytest.raises(ValueError, match=r"Task.loss is nan on the first batch of Task.train with fresh weights"):
        tune(**settings | {"hypers": {"lr": lh.Hyper(0.1), "a": lh.Hyper(-0.05, step=0.1)}}, dir=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_what_a_run_that_failed_at_once_has_left_is_written_over(tmp_path):
    """Its stream ended before the first checkpoint; corrected, the same call begins anew."""
    short = make_task(train=lambda seed: iter(make_task().train(seed)[:3]))
    with pytest.raises(ValueError, match=r"ended after 3 batches"):
        tune(task=short, dir=tmp_path / "r", checkpoint_seconds=1000.0)
    assert (tmp_path / "r/run.json").exists()
    assert not RunDirectory(tmp_path / "r").begun
    with pytest.raises(ValueError, match=r"ended after 3 batches"):  # the same settings, another model
        tune(task=replace(short, model=wider), dir=tmp_path / "r", checkpoint_seconds=1000.0)
    (tmp_path / "r/models").mkdir()
    for name in ("weights.pt", "models/best.pt"):  # the user's own
        torch.save({}, tmp_path / "r" / name)
    assert not RunDirectory(tmp_path / "r").begun
    found = tune(dir=tmp_path / "r", steps=10, outer_steps=1)
    assert found.history[0].steps == 10
    assert RunDirectory(tmp_path / "r").describe()["settings"]["steps"] == [10]
    with pytest.raises(lh.RunError, match="holds another run"):
        tune(dir=tmp_path / "r", steps=12, outer_steps=1)


class Inside(torch.nn.Module):
    """The same model under another name."""

    def __init__(self):
        super().__init__()
        self.inside = make_task().model()

    def forward(self, x):
        return self.inside(x)


def wider():
    return torch.nn.Sequential(make_task().model(), torch.nn.Linear(2, 2).double())


@pytest.mark.parametrize(
    ("model", "words"),
    [(wider, "50 parameters, and that of the run had 44"), (Inside, "as many parameters as that of the run, of other")],
)
def test_a_run_of_another_model_is_refused(tmp_path, model, words):
    tune(dir=tmp_path / "r", outer_steps=1)
    with pytest.raises(lh.RunError, match=f"r holds a run of another model: this one has {words}"):
        tune(task=make_task(model=model), dir=tmp_path / "r", outer_steps=2)
    assert len(tune(dir=tmp_path / "r", outer_steps=2).history) == 2


@pytest.mark.parametrize("name", ["schedule.json", "best.json"])
def test_a_schedule_that_no_run_has_made_is_not_written_over(tmp_path, name):
    kept = tmp_path / name
    lh.Schedule({"lr": (0.7,)}, {"name": "sgd"}).save(kept)
    before = kept.read_bytes()
    with pytest.raises(lh.RunError, match=f"has a {name} but no run.json"):
        tune(dir=tmp_path)
    assert kept.read_bytes() == before
    assert not (tmp_path / "run.json").exists()
    kept.rename(tmp_path / "mine.json")
    assert tune(dir=tmp_path).history
