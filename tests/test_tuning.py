"""The outer loop on a task small enough to run hundreds of times."""

import dataclasses
import functools
import json
import math
import re
import threading
import time
import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
from longhorizon.figures import diverged
from longhorizon.problem import environment

HYPERS = {
    "lr": lh.Hyper(0.0, windows=2, step=0.1),
    "momentum": lh.Hyper(0.0),
    "weight_decay": lh.Hyper(0.0, low=-1e-3, high=1e-3),
}
FOREVER = lh.SignDescent(tolerance=0.0)  # does not converge


def make_model():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batches(seed, count=30):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, 4, generator=generator).double()
    return [(x[i], (x[i].sum(-1) > 0).long()) for i in range(count)]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}


def make_task(**settings):
    given = {"train": batches, "val": lambda seed: batches(seed + 10**6, 4), "metrics": accuracy}
    given |= {"full": batches, "test": lambda: batches(7, 20)}
    given |= {"model": make_model, "loss": loss}
    return lh.Task(**given | settings)


def tune(**settings):
    given = {"task": make_task(), "rule": lh.sgd(), "hypers": HYPERS, "steps": 20, "outer_steps": 4}
    given |= {"engine": lh.Adjoint()}
    return lh.tune(**given | settings)


def test_a_line_of_an_older_journal_knows_that_it_exploded():
    step = next(iter(lh.steps(make_task(), lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=3, outer_steps=1)))
    line = step.to_dict()
    assert line["exploded"] is False
    del line["exploded"]
    assert not lh.OuterStep.from_dict(line).exploded
    assert lh.OuterStep.from_dict(line | {"status": "exploded: validation loss 1e+05"}).exploded


def test_tuning_from_zero_lowers_the_validation_loss_and_reports_everything():
    run = tune(outer_steps=6)
    assert run.history[-1].val_loss < 0.8 * run.history[0].val_loss
    assert run.history[-1].metrics["accuracy"] > run.history[0].metrics["accuracy"]
    assert [record.index for record in run.history] == list(range(6))
    assert all(record.status == "ok" for record in run.history)
    assert run.schedule["lr"].shape == (2,)
    assert run.schedule["weight_decay"].abs().item() <= 1e-3


def test_the_generator_is_the_same_run():
    records = list(lh.steps(make_task(), lh.sgd(), HYPERS, steps=20, outer_steps=3, engine=lh.Adjoint()))
    again = tune(outer_steps=3).history
    for one, other in zip(records, again, strict=True):
        assert one.to_dict() | {"seconds": 0} == other.to_dict() | {"seconds": 0}


def test_every_outer_step_has_its_own_seed_and_split():
    seen = []
    task = make_task(train=lambda seed: seen.append(seed) or batches(seed))
    records = list(lh.steps(task, lh.sgd(), HYPERS, steps=5, outer_steps=3, seeds=2, engine=lh.Adjoint()))
    used = [seed for record in records for seed in record.seeds]
    assert len(set(used)) == 6
    assert set(seen) == set(used)


def test_the_hypergradient_is_the_mean_over_seeds():
    (record,) = lh.steps(make_task(), lh.sgd(), HYPERS, steps=10, outer_steps=1, seeds=3, engine=lh.Adjoint())
    single = [lh.hypergradient(make_task(), lh.sgd(), HYPERS, steps=10, seed=s).grad["lr"] for s in record.seeds]
    torch.testing.assert_close(record.grad["lr"], torch.stack(single).mean(0), rtol=1e-12, atol=0)


def test_budgets_per_outer_step():
    run = tune(steps=[5, 20], outer_steps=3)
    assert [record.steps for record in run.history] == [5, 20, 20]
    best = min(run.history[1:], key=lambda record: record.val_loss)  # a short run's loss does not count
    assert run.best["lr"].tolist() == best.values["lr"].tolist()


def test_best_and_last_are_both_kept(tmp_path):
    run = tune(dir=tmp_path / "r")
    best = min(run.history, key=lambda record: record.val_loss)
    assert run.best["lr"].tolist() == best.values["lr"].tolist()
    assert run.schedule["lr"].tolist() == run.history[-1].next["lr"].tolist()
    assert lh.Schedule.load(tmp_path / "r/schedule.json") == run.schedule
    assert lh.Schedule.load(tmp_path / "r/best.json") == run.best


def test_convergence_ends_the_run_early():
    run = tune(outer=lh.SignDescent(tolerance=0.6), outer_steps=40, hypers={"lr": lh.Hyper(0.0, step=2.0)})
    assert run.converged
    assert len(run.history) < 40


@pytest.mark.parametrize("outer", [lh.GradientDescent(0.5), functools.partial(torch.optim.Adam, lr=0.05)], ids=str)
def test_other_outer_optimizers(outer):
    run = tune(outer=outer, outer_steps=5)
    assert run.history[-1].val_loss < run.history[0].val_loss


def exploding(model, batch):
    """A loss that is not finite once the weights have moved far."""
    size = sum(p.abs().sum() for p in model.parameters())
    return loss(model, batch) + torch.where(size > 40, torch.inf, 0.0)


def test_a_diverged_outer_step_is_survived():
    task = make_task()
    task = lh.Task(make_model, exploding, task.train, task.val)
    run = tune(task=task, hypers={"lr": lh.Hyper(0.0, step=3.0)}, outer_steps=8, outer=FOREVER)
    bad = [record for record in run.history if record.status != "ok"]
    assert bad
    first = bad[0]
    assert "non-finite loss at step" in first.status
    good = run.history[first.index - 1]
    middle = (good.values["lr"] + first.values["lr"]) / 2
    assert first.next["lr"].tolist() == middle.tolist()  # half a step back to where it last went well
    assert first.outer["gamma"]["lr"].item() < good.outer["gamma"]["lr"].item()
    assert run.history[-1].index == 7
    assert all(math.isfinite(v) for v in run.schedule["lr"].tolist())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x, y: (x * math.nan, y), r"But the training batch of step 7 \(from 0\) holds NaN or infinity"),
        (lambda x, y: (x * 1e200, y), r"But all failed at one and the same step, 7 \(from 0\): look at its training"),
        (None, r"non-finite loss at step .*Start lower\.$"),
    ],
)
def test_data_that_spoil_every_run_are_mentioned(spoil, words):
    def train(seed):
        return [spoil(*batch) if spoil and i == 7 else batch for i, batch in enumerate(batches(seed))]

    def squared(model, batch):
        return (model[0](batch[0]).square() * batch[1][:, None]).mean()

    task = make_task(train=train, loss=squared, val_loss=loss)
    with pytest.raises(RuntimeError, match=words):
        tune(task=task, hypers={"lr": lh.Hyper(0.01 if spoil else 1e200)}, outer_steps=5)


def huge(model, batch):
    """A loss that is finite, and beyond all bounds once the weights have moved far."""
    size = sum(p.abs().sum() for p in model.parameters())
    return loss(model, batch) * torch.where(size > 40, 1e6, 1.0)


def test_a_run_that_ends_far_worse_than_it_began_is_gone_back_from():
    run = tune(task=make_task(loss=huge), hypers={"lr": lh.Hyper(0.0, step=3.0)}, outer_steps=8, outer=FOREVER)
    first = next(record for record in run.history if record.status != "ok")
    assert first.val_loss > 1e4
    assert re.match(r"exploded: validation loss .*, and training began with .*; half a step back", first.status)
    good = run.history[first.index - 1]
    assert first.next["lr"].tolist() == ((good.values["lr"] + first.values["lr"]) / 2).tolist()
    assert first.outer["gamma"]["lr"].item() == good.outer["gamma"]["lr"].item() / 2
    assert diverged(first)
    assert not diverged(good)
    assert run.history[-1].index == 7


@pytest.mark.parametrize("outer_steps", [1, 2, 5])
def test_runs_that_explode_from_the_first_on_are_not_taken_for_a_result(outer_steps):
    """Nothing was ever learnt: training ends far worse than fresh weights, each time."""
    runs = "the training run" if outer_steps == 1 else f"{min(3, outer_steps)} training runs in a row"
    with pytest.raises(RuntimeError, match=f"^{runs} diverged .*exploded: .* before training.*Start lower"):
        tune(task=make_task(loss=huge), hypers={"lr": lh.Hyper(60.0, step=1.0)}, outer_steps=outer_steps)


def test_a_first_run_may_end_worse_than_a_good_start():
    """A model that is nearly right from the beginning, and trained on noisy targets: training began far worse."""
    true = torch.tensor([[1.0, -1.0, 0.5]])

    def model():
        made = torch.nn.Linear(3, 1, bias=False)
        made.weight.data = true + 0.01
        return made

    def noisy(seed):
        generator = torch.Generator().manual_seed(seed)
        xs = torch.randn(20, 32, 3, generator=generator)
        return [(x, x @ true.T + 0.5 * torch.randn(32, 1, generator=generator)) for x in xs]

    task = lh.Task(
        model,
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        noisy,
        lambda seed: [(x, x @ true.T) for x, _ in noisy(seed + 1)[:4]],
    )
    run = lh.tune(task, lh.sgd(), {"lr": lh.Hyper(0.2)}, steps=20, outer_steps=3)
    assert run.history[0].val_loss > 5 * 3e-4  # that of fresh weights
    assert [record.status for record in run.history] == ["ok"] * 3


def test_a_first_run_that_only_gets_worse_is_followed():
    """Here the validation loss is a fifth larger after training than before."""
    engine = Told((0.85, FALLS, SURE))
    (record,) = tune(engine=engine, outer_steps=1).history
    assert record.status == "ok"
    assert record.next["lr"].tolist() == [0.1, 0.1]


class Told:
    """An engine that finds what it is told: per outer step a validation loss, slopes, and how sure they are."""

    def __init__(self, *found):
        self.found = list(found)

    def begin(self, problem, saved=None):
        run = lh.Adjoint().begin(problem, saved)
        val_loss, grad, error = self.found.pop(0)
        plain = run.result

        def result():
            grads, errors = (
                {key: torch.tensor(v, dtype=torch.float64) for key, v in part.items()} for part in (grad, error)
            )
            mean = {key: g * len(g) / problem.steps for key, g in grads.items()}
            return dataclasses.replace(plain(), val_loss=val_loss, grad=grads, mean=mean, error=errors)

        run.result = result
        return run


FALLS = {"lr": [-1.0, -1.0], "momentum": [-1.0], "weight_decay": [-1.0]}
SURE = {"lr": [0.1, 0.1], "momentum": [0.1], "weight_decay": [0.1]}


def test_only_what_made_a_run_explode_goes_back():
    """Here the second learning rate, by its slope; weight decay would help, too, but it has not done it."""
    slopes = {"lr": [0.1, 1.0], "momentum": [0.5], "weight_decay": [-1.0]}
    error = {"lr": [0.1, 0.1], "momentum": [0.4], "weight_decay": [0.1]}
    engine = Told((1.0, FALLS, SURE), (1e6, slopes, error))
    first, second = tune(engine=engine, outer_steps=2, outer=lh.SignDescent(growth=1.5)).history
    assert second.status.endswith("; lr 2 goes back")
    assert second.exploded
    assert first.next["lr"].tolist() == [0.1, 0.1]
    assert second.next["lr"].tolist() == [0.1, 0.05]
    assert second.next["momentum"].tolist() == first.next["momentum"].tolist()
    assert second.next["weight_decay"].tolist() == first.next["weight_decay"].tolist()
    assert second.outer["gamma"]["lr"].tolist() == [0.1, 0.05]
    assert second.outer["sign"]["lr"].tolist() == [-1.0, 1.0]  # to go there again is to turn round again


@pytest.mark.parametrize(
    ("good", "val_loss", "exploded"), [(0.46, 12.3, True), (0.9, 4.0, False), (0.3, 2.0, False), (0.3, 2.6, True)]
)
def test_a_run_explodes_that_ends_worse_than_it_began_and_five_times_worse_than_the_last(good, val_loss, exploded):
    """As on CIFAR-10, with a learning rate of -0.002: from 0.46 to 12.3, where training had begun with 2.4."""
    task = make_task(loss=lambda model, batch: 2.4 + loss(model, batch) * 1e-3)
    engine = Told((good, FALLS, SURE), (val_loss, FALLS, SURE))
    assert tune(task=task, engine=engine, outer_steps=2).history[1].exploded == exploded


@pytest.mark.parametrize(("engine", "low"), [(lh.Factorial(), 0.0), (lh.Hybrid(), -0.3), ("auto", -0.3)])
def test_the_range_that_is_told_is_the_one_that_can_be_reached(engine, low):
    hypers = {"lr": lh.Hyper(0.0, step=0.1), "momentum": lh.Hyper(0.0, step=0.1)}
    told = lh.Tuning(make_task(), lh.sgd(), hypers, steps=9, outer_steps=3, engine=engine).range()
    assert told["lr"] == pytest.approx((low, 0.3))
    assert told["momentum"] == pytest.approx((-0.3, 0.3))


@pytest.mark.parametrize("error", [0.1, math.inf])
@pytest.mark.parametrize("outer", [None, lh.SignDescent(growth=1.5), lh.GradientDescent(1.0)])
def test_a_learning_rate_that_was_not_shifted_below_zero_does_not_move_there(outer, error):
    rises = {"lr": [1.0, 1.0], "momentum": [1.0], "weight_decay": [0.0]}
    known = {"lr": [error, math.nan], "momentum": [0.1], "weight_decay": [0.1]}  # the second one's slope is exact
    engine = Told((1.0, FALLS, SURE), *[(1.0, rises, known)] * 4)
    run = tune(engine=engine, outer_steps=5, outer=outer)
    first, second = run.last["lr"].tolist()
    assert first == 0
    assert second < 0
    assert run.last["momentum"].item() < 0


@pytest.mark.parametrize("seeds", [1, 2])
def test_without_a_spare_pair_a_learning_rate_does_not_move_below_zero_either(seeds):
    hypers = {"lr": lh.Hyper([0.05] * 4, windows=4, step=1.0)}  # as many values as pairs: no error is known
    task = make_task(val_loss=lambda model, batch: -loss(model, batch))  # less training is better
    engine = lh.Factorial(0.05, pairs=4)
    record = tune(task=task, hypers=hypers, engine=engine, outer_steps=1, seeds=seeds).history[0]
    assert (record.grad["lr"] > 0).any()
    assert (record.next["lr"] >= 0).all()
    assert record.error["lr"].isnan().all()
    assert record.doubts["lr"] == [""] * 4 or seeds > 1


def test_explosions_in_a_row_lead_back_to_where_it_went_well_and_no_further():
    """γ grows while a sign stays: twice back by it would be beyond the last good value."""
    there, back = {"lr": [-1.0, -1.0], "momentum": [0.0], "weight_decay": [0.0]}, {"lr": [0.0, 1.0]}
    back |= {"momentum": [0.0], "weight_decay": [0.0]}
    engine = Told((1.0, there, SURE), *[(1e6, back, SURE)] * 3)
    history = tune(engine=engine, outer_steps=4, outer=lh.SignDescent(growth=1.5)).history
    # There it has nothing to be blamed for any more, and all go half a step back.
    assert [r.next["lr"].tolist() for r in history] == [[0.1, 0.1], [0.1, 0.05], [0.1, 0.0], [0.05, 0.0]]


@pytest.mark.parametrize(
    ("slopes", "error", "outer"),
    [
        ({"lr": [0.1, 0.1], "momentum": [0.1], "weight_decay": [0.0]}, SURE, None),  # nobody surely
        ({"lr": [0.1, 1.0], "momentum": [0.1], "weight_decay": [0.0]}, SURE, lh.GradientDescent()),
        ({"lr": [0.1, 1.0], "momentum": [0.1], "weight_decay": [0.0]}, {}, None),  # not known how sure
    ],
)
def test_where_nobody_is_to_blame_all_go_back(slopes, error, outer):
    engine = Told((1.0, FALLS, SURE), (1e6, slopes, error or {key: [math.nan] * len(v) for key, v in SURE.items()}))
    first, second = tune(engine=engine, outer_steps=2, outer=outer).history
    assert second.status.endswith("; half a step back")
    for key, v in second.next.items():
        assert v.tolist() == pytest.approx(((first.values[key] + second.values[key]) / 2).tolist())


def test_a_validation_loss_in_other_units_is_no_explosion():
    task = make_task(val_loss=lambda model, batch: 1e6 * loss(model, batch))
    assert all(record.status == "ok" for record in tune(task=task).history)


def test_a_checkpoint_without_the_loss_of_the_last_good_run_is_read(tmp_path):
    given = {"task": make_task(), "rule": lh.sgd(), "hypers": HYPERS, "steps": 20, "engine": lh.Adjoint()}
    first = lh.Tuning(**given)
    with environment():
        while first.advance() is None:
            pass
        again = lh.Tuning(**given, saved=first.save() | {"good": first.good[1]})
        assert again.good == (math.inf, first.good[1])
        while (record := again.advance()) is None:
            pass
    assert record.status == "ok"


def test_a_start_that_always_diverges_is_an_error():
    task = make_task()
    task = lh.Task(make_model, exploding, task.train, task.val)
    with pytest.raises(RuntimeError, match="diverged at the starting values"):
        tune(task=task, hypers={"lr": lh.Hyper(1000.0)}, outer_steps=8)


def test_a_start_too_large_to_be_shifted_is_an_error():
    with pytest.raises(RuntimeError, match="diverged at the starting values"):
        tune(hypers={"lr": lh.Hyper(1e200)}, outer_steps=8, engine="auto")


def test_a_loss_of_survivors_is_not_the_best():
    calls = []

    def sometimes(seed):
        calls.append(seed)
        bad = len(calls) == 5  # one of the second outer step's three runs
        return [(x * math.inf if bad else x, y) for x, y in batches(seed)]

    run = tune(task=make_task(train=sometimes), seeds=3, outer_steps=2, hypers={"lr": lh.Hyper(0.01, step=0.1)})
    assert run.history[1].val_loss < run.history[0].val_loss
    assert run.history[1].status.startswith("1 of 3 runs")
    assert run.best["lr"].tolist() == run.history[0].values["lr"].tolist()


def test_a_metric_that_is_nan_is_so_in_a_journal(tmp_path):
    task = make_task(metrics=lambda model, batch: {"accuracy": torch.tensor(math.nan), "one": 1.0})
    for _ in range(2):  # the second time it is read
        (record,) = tune(task=task, outer_steps=1, dir=tmp_path / "r").history
        assert math.isnan(record.metrics["accuracy"])
        assert record.metrics["one"] == 1.0


def test_records_survive_json():
    (record,) = lh.steps(make_task(), lh.sgd(), HYPERS, steps=5, outer_steps=1)
    again = type(record).from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False)))
    assert again.to_dict() == record.to_dict()


def test_retrain_uses_all_data_and_tests_in_eval_mode():
    asked = []
    task = make_task(full=lambda seed: asked.append(seed) or batches(seed, 60))
    values = {"lr": [0.3, 0.3], "momentum": [0.5], "weight_decay": [0.0]}
    found = lh.retrain(task, lh.sgd(), HYPERS, values, steps=40, seeds=3)
    assert sorted(set(asked)) == [0, 1, 2]
    mean, deviation = found.summary()["accuracy"]
    assert mean > 0.8
    assert deviation == pytest.approx(torch.tensor(found.metrics["accuracy"]).std().item())
    (alone, unknown) = dataclasses.replace(found, test_loss=[0.3]).summary()["loss"]
    assert alone == 0.3
    assert math.isnan(unknown)
    model = make_model()
    model.load_state_dict(found.params | found.buffers)
    with torch.no_grad():
        direct = torch.stack([loss(model.eval(), b) for b in batches(7, 20)]).mean()
    assert found.test_loss[-1] == pytest.approx(direct.item(), abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"outer_steps": 0}, "outer_steps=0"),
        ({"seeds": 0}, "seeds=0"),
        ({"steps": []}, r"steps=\[\]"),
        ({"steps": [10, 0]}, "0 is no number of training steps"),
        ({"steps": 1}, "windows=2 but the run only steps=1"),
        ({"outer": "sign"}, "outer='sign'"),
        ({"engine": "fast"}, "engine='fast'"),
        ({"hypers": {"smoothing": lh.Hyper(0.1)}}, "unknown hyperparameter 'smoothing'"),
        ({"hypers": {"eps": lh.Hyper(1e-8)}, "rule": lh.adam()}, "'eps' has no `step`"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(tmp_path, settings, words):
    with pytest.raises((ValueError, TypeError), match=words):
        tune(dir=tmp_path / "r", **settings)
    assert not (tmp_path / "r" / "journal.jsonl").exists()


def test_retrain_may_be_shorter_than_the_schedule_has_windows():
    task = make_task(test=lambda: batches(5, 2))
    values = {"lr": [0.1, 0.2, 0.3, 0.4, 0.5]}
    short = lh.retrain(task, lh.sgd(), {"lr": lh.Hyper(0.0, windows=5)}, values, steps=2, seeds=1)
    same = lh.retrain(task, lh.sgd(), {"lr": lh.Hyper(0.0, windows=2)}, {"lr": [0.1, 0.3]}, steps=2, seeds=1)
    assert short.test_loss == same.test_loss


NO_LIST = r"Task.test\(\) returned bare tensors, 2 of them"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"test": lambda: batches(7)[0]}, NO_LIST),
        ({"test": lambda: batches("seven")}, r"This was the call of Task.test\(\)"),
        ({"test": lambda: []}, r"Task.test\(\) returned no batches: the test loss needs at least one"),
        ({"test": lambda: 3}, r"Task.test\(\) returned int: expected a list of batches"),
        ({"test": lambda: [*batches(7, 2), (torch.zeros(3, 99),) * 2]}, r"Task.test\(\) has a batch 2 \(from 0\)"),
        ({"full": lambda seed: batches(seed, 3)}, r"Task.full\(0\) ended after 3 .*steps=5.* or train for fewer steps"),
        ({"full": lambda seed: iter(batches(seed, 3))}, r"Task.full\(0\) ended after 3 batches"),
        ({"full": lambda seed: batches("seven")}, r"This was the call of Task.full\(0\)"),
        ({"full": lambda seed: 3}, r"Task.full returned int: expected batches"),
        ({"full": lambda seed: [torch.zeros(3, 99)] * 5}, "This was the first batch of Task.full, given to Task.loss"),
        ({"full": None, "train": lambda seed: batches(seed, 3)}, r"Task.train\(0\) ended after 3 batches"),
    ],
)
def test_a_part_of_a_test_that_is_wrong_is_named(wrong, words):
    with pytest.raises((TypeError, ValueError, RuntimeError, IndexError)) as caught:
        lh.retrain(make_task(**wrong), lh.sgd(), HYPERS, {k: h.values() for k, h in HYPERS.items()}, steps=5, seeds=1)
    assert re.search(words, "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))


def test_retrain_without_test_data_is_refused():
    with pytest.raises(ValueError, match="give Task\\(test="):
        lh.retrain(make_task(test=None), lh.sgd(), HYPERS, {k: h.values() for k, h in HYPERS.items()}, steps=5)


def test_compiling_is_paid_for_by_all_outer_steps(monkeypatch):
    tuning = lh.Tuning(make_task(), lh.sgd(), HYPERS, steps=20, outer_steps=6, seeds=5)
    with environment():
        tuning.advance()
    problem = tuning.problem
    assert problem.runs == 30
    assert not problem.worth_compiling(20)  # on a CPU, never
    monkeypatch.setattr(problem, "device", torch.device("cuda"))
    assert problem.worth_compiling(20)
    monkeypatch.setattr(problem, "runs", 1)
    assert not problem.worth_compiling(20)


def test_runs_in_two_threads_do_not_disturb_each_other():
    """Random generators are the process's: the second run waits."""
    alone = {seed: tune(seed=seed) for seed in (1, 2)}
    both, inside = {}, []

    def progress(tuning):
        inside.append(tuning)
        time.sleep(0.001)  # let the other one in

    threads = [
        threading.Thread(target=lambda seed=seed: both.update({seed: tune(seed=seed, progress=progress)}))
        for seed in (1, 2)
    ]
    state = torch.get_rng_state()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), state)
    assert len([a for a, b in pairwise(inside) if a is not b]) == 1
    for seed in (1, 2):
        assert [r.val_loss for r in both[seed].history] == [r.val_loss for r in alone[seed].history]
        assert both[seed].schedule == alone[seed].schedule


@pytest.mark.parametrize(("val_loss", "warned"), [(None, True), (loss, False)])
def test_a_validation_loss_that_could_be_tuned_by_itself_is_warned_of(val_loss, warned):
    """A weight below zero would be the best, and every network the same."""
    called = tune.__code__.co_firstlineno + 3
    task = make_task(loss=lambda model, batch, hypers: hypers["weight"] * loss(model, batch), val_loss=val_loss)
    hypers = {"lr": lh.Hyper(0.1), "weight": lh.Hyper(1.0, step=0.1)}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tune(task=task, hypers=hypers, outer_steps=1)
    words = "the validation loss reads 'weight', which is learnt"
    assert [str(w.message)[: len(words)] for w in said] == [words] * warned
    assert all(w.filename == __file__ and w.lineno == called for w in said)  # where `lh.tune` is called
    fixed = hypers | {"weight": lh.Hyper(1.0, learn=False)}
    tune(task=task, hypers=fixed, outer_steps=1)  # warnings are errors here


@pytest.mark.parametrize(
    ("rule", "warned"), [(lh.adamw(), True), (lh.adamw(weight_decay=0.0), False), (lh.sgd(), False)]
)
def test_weight_decay_that_is_left_on_others_is_warned_of(rule, warned):
    """AdamW has one of its own, which "not on biases" would leave on biases."""
    hypers = {"lr": lh.Hyper(0.01), "weight_decay": lh.Hyper(0.0, params="ndim>=2")}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tune(rule=rule, hypers=hypers, outer_steps=1)
        tune(rule=lh.adamw(), hypers=hypers | {"weight_decay": lh.Hyper(0.0)}, outer_steps=1)
    words = "hyperparameter 'weight_decay' is not for all parameters: 2 others, such as '0.bias', keep adamw's weight"
    assert [str(w.message)[: len(words)] for w in said] == [words] * warned


def test_a_batch_instead_of_a_list_of_batches_is_refused_outright():
    with pytest.raises(TypeError, match=r"Task.val\(\d+\) returned bare tensors, 2 of them.*write \[\(x, y\)\] for"):
        tune(task=make_task(val=lambda seed: make_task().val(seed)[0]))


@pytest.mark.parametrize(("part", "hint"), [("val", "Task.val has to return a list of batches"), ("train", "")])
def test_a_batch_that_fails_is_named(part, hint):
    wrong = {part: lambda seed: [(torch.zeros(3, 99),) * 2] * 20 for part in ("val", "train")}
    with pytest.raises((ValueError, IndexError, RuntimeError)) as caught:
        tune(task=make_task(**{part: wrong[part]}))
    (note,) = caught.value.__notes__
    assert note.startswith(f"This was the first batch of Task.{part}, given to Task.loss")
    assert hint in note


@pytest.mark.parametrize(("start", "nothing"), [(0.1, False), (-0.1, True)])
def test_a_run_says_whether_it_found_anything(tmp_path, start, nothing):
    """Uphill no run ends better than fresh weights."""
    task, hypers = make_task(), {"lr": lh.Hyper(start, step=1e-3)}
    run = tune(task=task, hypers=hypers, outer_steps=2, dir=tmp_path / "r")
    assert run.found_nothing is nothing
    again = tune(task=task, hypers=hypers, outer_steps=2, dir=tmp_path / "r")  # reads it
    assert (again.found_nothing, again.untrained) == (nothing, run.untrained)
    assert "tensor" not in repr(run)
    assert len(repr(run)) < 1000


def test_values_that_only_confirming_trained_with_are_found_too(tmp_path):
    """From a learning rate of zero the only outer step trains nothing; its move does."""
    words = {"hypers": {"lr": lh.Hyper(0.0, step=0.1)}, "outer_steps": 1}
    assert tune(**words, confirm=0).found_nothing
    run = tune(**words, confirm=1, dir=tmp_path / "r")
    assert run.history[0].val_loss == pytest.approx(run.untrained)
    assert run.confirmed.losses["last"][0] < run.untrained
    assert not run.found_nothing
    assert not tune(**words, confirm=1, dir=tmp_path / "r").found_nothing


def test_a_stream_too_short_for_a_later_outer_step_is_refused_before_the_first():
    seen = []
    with pytest.raises(ValueError, match=r"ended after 30 batches, but the run has steps=40"):
        tune(steps=[10, 40], on_step=seen.append)
    assert not seen
    assert len(tune(steps=[10, 40], outer_steps=1).history) == 1  # the longer one is never reached
