"""Records in TensorBoard and in Optuna, read back with their own readers."""

import importlib
import math

import pytest

import longhorizon as lh
from longhorizon.recorders import OptunaRecorder, TensorBoardRecorder, scalars
from records import make_records

optuna = pytest.importorskip("optuna")


def written(path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def record_into(recorder, records):
    for record in records:
        recorder.step(record)
    recorder.close()


def test_tensorboard_has_every_number(tmp_path):
    records = make_records(count=3)
    record_into(TensorBoardRecorder(tmp_path), records)
    found = written(tmp_path)
    assert found.keys() == scalars(records[0]).keys()
    assert {
        "value/lr/4",
        "hypergradient/lr/0",
        "gamma/momentum",
        "validation/loss",
        "validation/accuracy",
    } <= found.keys()
    for index, record in enumerate(records):
        assert found["value/lr/4"][index] == (index, pytest.approx(float(record.values["lr"][4])))
        assert found["hypergradient/lr/0"][index] == (index, pytest.approx(float(record.mean["lr"][0])))
        assert found["gamma/momentum"][index] == (index, pytest.approx(float(record.outer["gamma"]["momentum"])))
        assert found["validation/loss"][index] == (index, pytest.approx(record.val_loss))


def test_tensorboard_shows_a_repeated_step_once(tmp_path):
    records = make_records(count=5)
    record_into(TensorBoardRecorder(tmp_path), records[:3])
    record_into(TensorBoardRecorder(tmp_path), records[2:])
    assert [step for step, _ in written(tmp_path)["validation/loss"]] == [0, 1, 2, 3, 4]


def test_tensorboard_leaves_out_what_is_not_finite(tmp_path):
    record_into(TensorBoardRecorder(tmp_path), make_records(count=3, diverged=(1,)))
    found = written(tmp_path)
    assert [step for step, _ in found["validation/loss"]] == [0, 2]
    assert [step for step, _ in found["value/momentum"]] == [0, 1, 2]


@pytest.fixture(params=["database", "journal"])
def storage(request, tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}" if request.param == "database" else str(tmp_path / "new" / "study.log")


def test_optuna_has_every_step_as_a_trial(storage):
    records = make_records(count=4, diverged=(2,))
    recorder = OptunaRecorder(storage, "first", ranges={"lr": (-1.0, 1.0)})
    record_into(recorder, records)
    trials = OptunaRecorder(storage, "first").study.trials
    assert [t.state.name for t in trials] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    assert [t.value for t in trials] == [None if math.isnan(r.val_loss) else r.val_loss for r in records]
    assert list(trials[1].params) == [*(f"lr[{w}]" for w in range(5)), "momentum"]
    assert trials[1].params["lr[3]"] == float(records[1].values["lr"][3])
    assert trials[1].distributions["lr[3]"] == optuna.distributions.FloatDistribution(-1.0, 1.0)
    assert trials[1].user_attrs["hypergradient"]["lr"] == records[1].mean["lr"].tolist()
    assert trials[1].user_attrs["metrics"] == records[1].metrics
    assert trials[2].user_attrs["status"].startswith("non-finite loss")
    assert trials[2].user_attrs["hypergradient"]["momentum"] == [None]
    assert trials[1].duration.total_seconds() == pytest.approx(records[1].seconds, abs=0.1)


def test_optuna_records_a_step_once(storage):
    records = make_records(count=5)
    record_into(OptunaRecorder(storage, "first"), records[:3])
    record_into(OptunaRecorder(storage, "first"), records)  # resumed: told again from the start
    recorder = OptunaRecorder(storage, "first")
    assert [t.user_attrs["outer_step"] for t in recorder.study.trials] == [0, 1, 2, 3, 4]
    recorder.close()


def test_optuna_refuses_to_mix_runs(storage):
    record_into(OptunaRecorder(storage, "first"), make_records(count=2))
    other = make_records({"lr": lh.Hyper(0.3, windows=5), "momentum": lh.Hyper(0.0)}, count=1)
    recorder = OptunaRecorder(storage, "first")
    with pytest.raises(ValueError, match="study 'first' holds another run"):
        record_into(recorder, other)
    record_into(OptunaRecorder(storage, "second"), other)


def test_optuna_says_what_is_wrong_with_a_storage(tmp_path):
    with pytest.raises(ValueError, match="cannot open the Optuna storage"):
        OptunaRecorder(f"sqlite:///{tmp_path}/no/such/folder/x.db", "first")
    storage = f"sqlite:///{tmp_path}/x.db"
    optuna.create_study(storage=storage, study_name="up", direction="maximize")
    with pytest.raises(ValueError, match="'up' does not minimize"):
        OptunaRecorder(storage, "up")


def test_values_outside_the_range_widen_it(storage):
    record_into(OptunaRecorder(storage, "wide"), make_records({"lr": lh.Hyper(31.0)}, count=1))
    (trial,) = OptunaRecorder(storage, "wide").study.trials
    assert trial.params == {"lr": 31.0}


def test_records_of_a_real_run_fit(tmp_path):
    """What `tune` hands to on_step is what the recorders take, and what a journal gives back is the same."""
    import torch

    task = lh.Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        train=lambda seed: [torch.ones(4, 2)] * 6,
        val=lambda seed: [torch.ones(4, 2)],
    )
    recorder = OptunaRecorder(str(tmp_path / "study.log"), "run")
    board = TensorBoardRecorder(tmp_path / "board")

    def both(record):
        recorder.step(record)
        board.step(record)

    hypers = {"lr": lh.Hyper(0.0, windows=2, step=0.1)}
    lh.tune(task, lh.sgd(), hypers, steps=6, outer_steps=2, dir=tmp_path / "run", on_step=both)
    board.close()
    for record in lh.RunDirectory(tmp_path / "run").journal():
        recorder.step(record)
    assert len(recorder.study.trials) == 2
    assert len(written(tmp_path / "board")["value/lr/1"]) == 2


@pytest.mark.parametrize(
    ("package", "make"),
    [("tensorboard", lambda p: TensorBoardRecorder(p)), ("optuna", lambda p: OptunaRecorder(str(p / "x"), "x"))],
)
def test_missing_package_names_the_extra(tmp_path, monkeypatch, package, make):
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: real("no_such" if name == package else name))
    with pytest.raises(ImportError, match=rf'{package} is missing: pip install "longhorizon\[{package}\]"'):
        make(tmp_path)
