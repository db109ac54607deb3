"""Rivals on equal terms: what they are charged, where they search, how they stop and go on, and what they say."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from functools import partial

import pytest
import torch

import longhorizon as lh
from longhorizon import compile, cuda, offtheshelf, recipe_text, retraining, rundir
from longhorizon import recipe as recipes
from longhorizon.problem import Problem, environment, make_problem
from longhorizon.rivals import hyperband, methods, registry, regret, space, testing, workers
from longhorizon.rivals.arena import Stop, Trial
from longhorizon.rivals.blackbox import BlackBox
from longhorizon.rivals.budget import Budget, Purse, parse_budget
from longhorizon.rivals.driver import Watcher
from longhorizon.rivals.fixed import appendix_f, halvings
from longhorizon.rivals.ledger import Ledger
from longhorizon.rivals.studies import quiet
from longhorizon.rivals.training import Counter, Training, judge
from rivals_task import (
    CONSTANT,
    EPOCH,
    HYPERS,
    STEPS,
    X,
    Y,
    compare,
    counted_task,
    loss,
    make_task,
    trained_on,
    without_clock,
)

ALL = list(registry.METHODS)


@pytest.mark.parametrize("method", ALL)
def test_charged_steps_are_the_steps_taken(method):
    """Three counts of the same thing: the method's own plan, the training loop, and the data's door."""
    streams = []
    found = compare(task=counted_task(streams), methods=[method], test="none").evaluations
    read = trained_on(streams)
    assert sum(e.cost for e in found) == sum(e.counted for e in found) == read > 0
    assert found[-1].total_steps == read <= 4 * STEPS
    assert all(e.status == "ok" and math.isfinite(e.val_loss) for e in found)


def test_a_diverged_run_is_charged_what_it_took():
    streams = []
    hypers = {"lr": lh.Hyper(1e38, step=1e37)}
    settings = {"steps": STEPS, "outer_steps": 1, "budget": "4 runs", "epoch": EPOCH, "test": "none"}
    methods = ["random", "hyperband", "hd"]
    found = lh.compare(counted_task(streams), lh.sgd(), hypers, methods=methods, **settings)
    assert sum(e.cost for e in found.evaluations) == trained_on(streams)
    bad = [e for e in found.evaluations if e.status.startswith("diverged: non-finite loss at step")]
    assert bad
    assert all(e.val_loss == math.inf and not e.best and e.cost < STEPS for e in bad)
    assert {row.method: row.score for row in found.table()}["hd"] is None
    assert {e.method for e in bad} == set(methods)


def test_the_compiled_step_trains_the_same():
    """What a GPU takes for long runs; here it is traced, and the seconds are not the point."""
    with environment():
        problem = make_problem(make_task(), lh.sgd(), HYPERS, STEPS, 0)
        plain, fast = Training(problem, Counter()), Training(problem, Counter())
        fast._step = problem.compiled_step
        for _ in range(STEPS):
            plain.advance()
            fast.advance()
    assert problem.inner.cache
    assert judge(fast).val_loss == pytest.approx(judge(plain).val_loss, rel=1e-4)
    assert fast.counter.steps == plain.counter.steps == STEPS


@pytest.mark.parametrize("method", ["random", "grid", "grid-halving"])
def test_compiling_again_after_a_stop_is_on_nobodys_clock(tmp_path, monkeypatch, method):
    monkeypatch.setattr(Problem, "stepper", lambda self, steps: self.compiled_step)
    settings = {"methods": [method], "test": "none", "budget": "2 runs"}
    calm = compare(**settings)
    traced, trace = [], compile._trace
    with pytest.raises(lh.Interrupted):
        compare(tmp_path / "r", watcher=Watcher(progress=Stops(20)), **settings)
    assert Ledger(tmp_path / "r/journal.jsonl").all()
    at_work = []
    monkeypatch.setattr(compile, "_trace", lambda *given: traced.append(bool(at_work)) or trace(*given))
    monkeypatch.setattr(Trial, "to", lambda self, step, to=Trial.to: at_work.append(step) or to(self, step))
    again = compare(tmp_path / "r", **settings)
    assert traced == [False]  # once, and before any trial went on
    assert without_clock(again.evaluations) == without_clock(calm.evaluations)


# Hyperband


def test_hyperbands_table_is_that_of_li_et_al():
    """Their Table 1: R = 81, η = 3; the number of trials and what each gets, for s = 4 … 0."""
    assert hyperband.brackets(81) == [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ]
    assert hyperband.brackets(9) == [[(9, 1), (3, 3), (1, 9)], [(5, 3), (1, 9)], [(3, 9)]]
    assert hyperband.rungs(81, 1) == [1, 3, 9, 27, 81]
    assert hyperband.rungs(STEPS, EPOCH) == [2, 6, 18]
    assert hyperband.rungs(5, 5) == [5]
    assert [hyperband.s_max(n) for n in (1, 2, 3, 8, 9, 242, 243)] == [0, 0, 1, 1, 2, 4, 5]


def test_a_search_is_not_told_how_ruined_a_network_is(tmp_path):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    hypers = {"lr": lh.Hyper(0.0, step=1e37)}
    settings = {"steps": STEPS, "outer_steps": 2, "budget": "3 runs", "epoch": EPOCH, "test": "none"}
    for method in ("random", "hyperband"):
        found = lh.compare(make_task(), lh.sgd(), hypers, methods=[method], dir=tmp_path / method, **settings)
        assert max(e.val_loss for e in found.evaluations) > 1e30
        storage = JournalStorage(JournalFileBackend(str(tmp_path / method / f"{method}-0" / "study.log")))
        with quiet():
            study = optuna.load_study(study_name=f"{method}-0", storage=storage)
        told = [v for t in study.trials for v in [t.value, *t.intermediate_values.values()] if v is not None]
        assert told
        assert max(told) == study.user_attrs["ceiling"] < 10.0


# The range of the search, and the budget


def test_a_search_is_told_losses_below_zero_as_they_are(tmp_path):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    hypers = {"lr": lh.Hyper(0.1, step=0.1)}
    settings = {"steps": STEPS, "outer_steps": 2, "budget": "4 runs", "test": "none", "dir": tmp_path}
    below = make_task(loss=lambda model, batch: loss(model, batch) - 9)
    found = lh.compare(below, lh.sgd(), hypers, methods=["bo"], **settings).evaluations
    with quiet():
        study = optuna.load_study(
            study_name="bo-0", storage=JournalStorage(JournalFileBackend(str(tmp_path / "bo-0" / "study.log")))
        )
    assert [t.value for t in study.trials] == [e.val_loss for e in found]
    assert max(e.val_loss for e in found) < 0


def test_the_range_is_what_fds_can_reach():
    hypers = HYPERS | {"weight_decay": lh.Hyper(1e-3, step=0.5, scale="log", high=2e-3)}
    found = {axis.name: (axis.low, axis.high, axis.log) for axis in space.axes(hypers, 3)}
    assert found["lr[0]"] == found["lr[2]"] == pytest.approx((-0.2, 0.4, False))
    assert found["weight_decay"] == pytest.approx((1e-3 * math.exp(-1.5), 2e-3, True))
    drawn = [space.draw(hypers, space.axes(hypers, 3), seed) for seed in range(200)]
    assert {len(d["lr"]) for d in drawn} == {3}
    for key, (low, high) in lh.search_range(hypers, 3).items():
        numbers = [v for d in drawn for v in d[key]]
        assert low <= min(numbers) < max(numbers) <= high
        assert max(numbers) - min(numbers) > 0.9 * (high - low) * (key != "weight_decay")


@pytest.mark.parametrize("method", ["random", "bo", "hyperband", "bohb", "hd"])
def test_every_trial_starts_within_the_range(method):
    found = compare(methods=[method], test="none").evaluations
    ranges = lh.search_range(HYPERS, 3)
    for e in found:
        for key, (low, high) in ranges.items():
            first = e.values[key][:1] if method == "hd" else e.values[key]
            assert all(low <= v <= high for v in first)
    assert len({json.dumps(e.values) for e in found}) == len({e.trial for e in found})


def test_a_setting_that_is_not_learnt_stays():
    hypers = HYPERS | {"momentum": lh.Hyper(0.5, learn=False)}
    settings = {"steps": STEPS, "outer_steps": 3, "budget": "2 runs", "epoch": EPOCH, "test": "none"}
    found = lh.compare(make_task(), lh.sgd(), hypers, methods=["random", "hd"], **settings).evaluations
    assert all(e.values["momentum"] == [0.5] for e in found)


BUDGETS = {"300s": (300, "seconds"), "5m": (300, "seconds"), "1.5 h": (5400, "seconds"), "20 runs": (360, "steps")}


@pytest.mark.parametrize("text", BUDGETS)
def test_budgets_as_people_write_them(text):
    assert parse_budget(text, STEPS) == Budget(*BUDGETS[text])


def test_a_purse_of_steps_is_never_overdrawn_and_one_of_seconds_once():
    purse = Purse(Budget(10, "steps"), 3, 99.0)
    assert purse.allows(7)
    assert not purse.allows(8)
    purse = Purse(Budget(10, "seconds"), 99, 9.5)
    assert purse.allows(10**6)
    purse.pay(1, 5.0)
    assert not purse.allows(1)


def test_fds_learns_on_short_runs_and_ends_with_a_whole_one(tmp_path):
    """The paper's Figure 1: outer steps on short runs, everyone else and every test on long ones."""
    settings = {"methods": ["fds", "random"], "steps": [6, 9], "train_steps": STEPS, "budget": "3 runs"}
    calm = compare(**settings)
    found = [e for e in calm.evaluations if e.method == "fds"]
    assert [(e.steps, e.cost, e.counted) for e in found] == [(6, 6, 6), (9, 9, 9), (9, 9, 9), (18, 18, 18)]
    assert found[-1].best
    assert found[-1].values not in [e.values for e in found[:-1]]  # what the last outer step led to
    assert {e.steps for e in calm.evaluations if e.method == "random"} == {STEPS}
    stops = 0
    while True:
        try:
            again = compare(tmp_path / "r", watcher=Watcher(progress=Stops(11)), **settings)
            break
        except lh.Interrupted:
            stops += 1
    assert stops > 3
    assert without_clock(again.evaluations) == without_clock(calm.evaluations)
    broke = compare(**settings | {"methods": ["fds"], "budget": "30 steps"}).evaluations
    assert [e.steps for e in broke] == [6, 9, 9]  # no budget for the whole one


def test_fds_without_its_checkpoint_goes_on_from_its_journal(tmp_path):
    """What its outer steps have trained is not trained again, and nothing comes out differently."""
    streams = []
    settings = {"methods": ["fds"], "budget": "9 runs", "test": "none"}
    calm = compare(**settings).evaluations
    done = len(calm) // 2

    def stop(e):
        if e.trial == done:
            (tmp_path / "r" / "fds-0" / "tuning.pt").unlink()
            raise KeyboardInterrupt  # as a kill, between the outer step's evaluation and its line in the journal

    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "r", watcher=Watcher(on_evaluation=stop), **settings)
    again = compare(tmp_path / "r", task=counted_task(streams), **settings)
    assert without_clock(again.evaluations) == without_clock(calm)
    assert trained_on(streams) == STEPS * (len(calm) - done)


@pytest.mark.parametrize("wrong", [17, True, 20.5])
def test_a_whole_run_is_no_shorter_than_the_others(wrong):
    with pytest.raises(ValueError, match=f"train_steps={wrong}"):
        compare(train_steps=wrong)


def test_regret_against_one_methods_choice():
    found = compare(methods=["random", "cosine"], budget="6 runs")
    own = {row.method: row for row in regret.table(found.evaluations, found.tests)}
    other = {row.method: row for row in regret.table(found.evaluations, found.tests, against="cosine")}
    assert other["cosine"].regret == 0
    assert other["random"].regret == pytest.approx(other["cosine"].score - other["random"].score)
    assert own["random"].regret >= 0
    with pytest.raises(ValueError, match="against='grid'"):
        regret.table(found.evaluations, found.tests, against="grid")


# Settings known beforehand


def test_the_grid_is_that_of_appendix_f():
    settings = appendix_f()
    assert len(settings) == len({json.dumps(s) for s in settings}) == 135
    common = {"lr": [0.2] * 3 + [0.04] * 3 + [0.008] * 2 + [0.0016] * 2, "momentum": [0.9], "weight_decay": [5e-4]}
    assert any(all(s[key] == pytest.approx(common[key]) for key in common) for s in settings)
    assert halvings(200) == [7, 22, 66, 200]


def test_halving_keeps_the_best_third():
    found = compare(methods=["grid-halving"], budget="400 runs", test="none").evaluations
    by_rung = {}
    for e in found:
        by_rung.setdefault(e.steps, []).append(e)
    assert [len(by_rung[steps]) for steps in halvings(STEPS)] == [135, 45, 15, 5]
    first, second = by_rung[halvings(STEPS)[0]], by_rung[halvings(STEPS)[1]]
    kept = {e.trial for e in second}
    assert max(e.val_loss for e in first if e.trial in kept) <= min(e.val_loss for e in first if e.trial not in kept)


def test_a_rung_does_not_begin_from_the_checkpoint_of_a_shorter_one(tmp_path):
    """Killed between the line in the journal and the removal of its checkpoint."""
    settings = {"methods": ["grid-halving"], "budget": "80 runs", "test": "none", "checkpoint_seconds": 0.0}
    calm = compare(**settings).evaluations
    shorter, longer = halvings(STEPS)[1:3]
    victim = [e.trial for e in calm if e.steps == longer][-1]

    def die(e):
        if (e.trial, e.steps) == (victim, shorter):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compare(tmp_path / "r", watcher=Watcher(on_evaluation=die), **settings)
    assert list(tmp_path.rglob("trial-*.pt"))
    assert without_clock(compare(tmp_path / "r", **settings).evaluations) == without_clock(calm)
    assert not list(tmp_path.rglob("trial-*.pt"))


def test_onecycle_is_torchs():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=50)
    rates, momenta = offtheshelf.onecycle(0.2, 50)
    for t in range(50):
        group = optimizer.param_groups[0]
        assert (rates[t], momenta[t]) == pytest.approx((group["lr"], group["momentum"]), abs=1e-12)
        optimizer.step()
        if t < 49:
            scheduler.step()


@pytest.mark.parametrize("rule", [lh.sgd(), lh.adam(), lh.adamw()], ids=lambda rule: rule.name)
def test_the_shelf_serves_every_rule(rule):
    settings = {"steps": STEPS, "outer_steps": 2, "budget": "1 runs", "test_seeds": 1}
    found = lh.compare(make_task(), rule, {"lr": lh.Hyper(0.01)}, methods=list(offtheshelf.SHELF), **settings)
    assert len(found.evaluations) == 4
    assert all(row.score is not None for row in found.table())


# Stopped, killed and resumed


class Stops:
    """Sends this process a signal after so many training steps."""

    def __init__(self, after, kind=signal.SIGINT):
        self.left, self.kind = after, kind

    def __call__(self, arena, done):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.kind)


def settings_for(method):
    return {"methods": [method], "test": "none", "budget": "3 runs"}


@pytest.mark.parametrize("method", ALL)
def test_a_stopped_comparison_goes_on_exactly(tmp_path, method):
    """Stopped again and again, in the middle of trials and between them, it writes the journal of an unbroken one."""
    calm = compare(**settings_for(method)).evaluations
    stops = 0
    while True:
        try:
            watcher = Watcher(progress=Stops(11))
            found = compare(tmp_path / "r", watcher=watcher, **settings_for(method))
            break
        except lh.Interrupted as stop:
            said, stops = str(stop), stops + 1
    assert stops >= 1
    assert said == f"stopped; all is saved in {tmp_path / 'r'}"
    assert without_clock(found.evaluations) == without_clock(calm)
    again = compare(tmp_path / "r", **settings_for(method))
    assert [e.to_dict() for e in again.evaluations] == [e.to_dict() for e in found.evaluations]  # the clock too


@pytest.mark.parametrize("kind", ["step", "half a line", "line", "checkpoint"])
def test_a_killed_comparison_goes_on_exactly(tmp_path, kind):
    """Kill -9 at a training step, half way through a line, after one, or before a checkpoint is renamed."""
    methods = {"methods": ["hyperband", "hd", "bo", "fds"], "test": "none", "checkpoint_seconds": 0.0}
    methods["budget"] = "3 runs"
    calm = compare(**methods)
    deaths = 0
    for life in range(200):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _die_at(kind, (25 if kind == "checkpoint" else 2) + life % 3)
                watcher = Watcher(progress=Stops(19 + life % 5, signal.SIGKILL) if kind == "step" else None)
                compare(tmp_path / "r", watcher=watcher, **methods)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        deaths += 1
    assert deaths > 3
    assert without_clock(Ledger(tmp_path / "r/journal.jsonl").all()) == without_clock(calm.evaluations)


@pytest.mark.parametrize("method", ["random", "bo", "bohb"])
@pytest.mark.parametrize("trial", [0, 11])
def test_a_trial_that_died_between_two_axes_is_the_same_trial(tmp_path, monkeypatch, method, trial):
    """Among those that are drawn axis by axis, and those that are drawn at once."""
    import optuna

    settings = {"methods": [method], "test": "none", "budget": f"{trial + 1} runs"}
    calm = compare(**settings).evaluations
    suggest = optuna.Trial.suggest_float

    def dies(self, name, *given, **more):
        if self.number == trial and name == "lr[2]":
            raise KeyboardInterrupt
        return suggest(self, name, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Trial, "suggest_float", dies)
        with pytest.raises(KeyboardInterrupt):
            compare(tmp_path / "r", **settings)
    found = compare(tmp_path / "r", **settings).evaluations
    assert without_clock(found) == without_clock(calm)
    assert max(e.trial for e in found) >= trial


def _die_at(kind, count):
    """Let this process die at the count-th event."""
    left = count

    def due():
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if kind == "line":
        append = Ledger.append

        def dies(self, new, *more):
            written = append(self, new, *more)
            due()
            return written

        Ledger.append = dies
    elif kind == "half a line":
        drop = rundir._drop_torn_line

        def torn(journal):
            drop(journal)
            journal.write(b'{"method": "hd", "se')
            journal.flush()
            due()
            drop(journal)

        rundir._drop_torn_line = torn
    elif kind == "checkpoint":
        rename = os.replace

        def replace(a, b):
            if str(b).endswith(".pt"):
                due()
            rename(a, b)

        os.replace = replace


def test_a_stopped_test_goes_on_with_its_next_training(tmp_path, monkeypatch):
    """Nothing but the training in hand is done twice."""
    monkeypatch.setattr(retraining, "at_once", lambda problem, runs: 1)
    settings = {"methods": ["cosine"], "test_seeds": 4}
    calm = compare(**settings)
    seeds, retrain = [], testing.retrain

    def counts(*given, on_seed, **more):
        def told(seed, scores):
            on_seed(seed, scores)
            seeds.append(seed)
            if seeds == [0, 1]:
                raise Stop

        return retrain(*given, on_seed=told, **more)

    monkeypatch.setattr(testing, "retrain", counts)
    with pytest.raises(lh.Interrupted):
        compare(tmp_path / "r", **settings)
    assert not (tmp_path / "r/tests.jsonl").exists()
    again = compare(tmp_path / "r", **settings)
    assert seeds == [0, 1, 2, 3]
    assert [vars(t) for t in again.tests] == [vars(t) for t in calm.tests]
    assert not (tmp_path / "r/testing.json").exists()


def test_a_method_that_was_killed_is_tested_when_it_is_done(tmp_path):
    """Not after the first method that the next call looks at: its last setting is not known then."""
    settings = {"methods": ["cosine", "random"], "test": "last", "test_seeds": 1, "budget": "6 runs"}
    calm = compare(**settings)

    def die(e):
        if (e.method, e.trial) == ("random", 0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compare(tmp_path / "r", watcher=Watcher(on_evaluation=die), **settings)
    again = compare(tmp_path / "r", **settings)
    assert [vars(t) for t in again.tests] == [vars(t) for t in calm.tests]
    assert [t.trial for t in calm.tests] != [0, 0]


def test_a_comparison_may_be_given_more(tmp_path):
    """More budget, methods and repeats; what is there stays, and is what an unbroken one would have."""
    compare(tmp_path / "r", methods=["random"], budget="2 runs")
    compare(tmp_path / "r", methods=["bo", "hd"], budget="3 runs")
    more = compare(tmp_path / "r", methods=["random", "bo", "hd"], budget="4 runs", repeats=2)
    calm = compare(methods=["random", "bo", "hd"], budget="4 runs", repeats=2)

    def by_key(comparison):
        return {(e["method"], e["seed"], e["trial"], e["steps"]): e for e in without_clock(comparison.evaluations)}

    assert by_key(more) == by_key(calm)
    assert {t.key for t in more.tests} == {t.key for t in calm.tests}
    with pytest.raises(lh.RunError, match="holds another run: its steps.* is .*18.*, here it is .*9"):
        compare(tmp_path / "r", steps=9)


def test_a_trial_that_the_budget_left_on_a_rung_goes_on_with_a_larger_one(tmp_path):
    def open_trials():
        arena = [e for e in Ledger(tmp_path / "r/journal.jsonl").all() if e.trial == 0]
        return [(e.steps, e.cost) for e in arena]

    settings = {"methods": ["hyperband"], "test": "none", "hypers": CONSTANT}
    compare(tmp_path / "r", budget="7 steps", **settings)  # the first two rungs are 6, the third 18
    before = open_trials()
    found = compare(tmp_path / "r", budget="20 steps", **settings).evaluations
    assert before == [(2, 2), (6, 4)]
    assert open_trials() == [(2, 2), (6, 4), (18, 12)]
    assert sum(e.cost for e in found) == 20


def test_a_torn_line_does_not_count_and_a_damaged_one_is_named(tmp_path):
    calm = compare(tmp_path / "r", methods=["hd"]).evaluations
    journal = tmp_path / "r/journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    assert without_clock(compare(tmp_path / "r", methods=["hd"]).evaluations) == without_clock(calm)
    journal.write_bytes(b"{broken}\n" + b"".join(lines))
    with pytest.raises(lh.RunError, match="journal.jsonl is damaged at line 1"):
        compare(tmp_path / "r")


def test_a_line_that_lacks_only_its_end_counts_once(tmp_path):
    settings = {"methods": ["random"], "test": "none"}
    calm = compare(budget="3 runs", **settings).evaluations
    compare(tmp_path / "r", budget="2 runs", **settings)
    journal = tmp_path / "r/journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-1])
    open_one = Ledger(journal)
    assert len(open_one.all()) == 2
    assert without_clock(compare(tmp_path / "r", budget="3 runs", **settings).evaluations) == without_clock(calm)
    assert journal.read_bytes().count(b"\n") == 3
    assert without_clock(open_one.all()) == without_clock(calm)
    with open(journal, "ab") as file:
        file.write(b"{broken}\n")
    with pytest.raises(lh.RunError, match="journal.jsonl is damaged at line 4 "):
        open_one.all()


# Several processes

RECIPE = """
task = "rivals_task:make_task"
steps = 18
outer_steps = 3
threads = 1
checkpoint_seconds = 0.0
[hypers.lr]
start = 0.1
windows = 3
step = 0.1
[hypers.momentum]
start = 0.0
"""


def test_two_workers_over_one_storage_take_up_what_was_left_running(tmp_path, monkeypatch):
    monkeypatch.chdir(os.path.dirname(__file__))
    chosen = recipes.make_recipe(tomllib.loads(RECIPE))
    settings = {"methods": ["hyperband"], "budget": "16 runs", "test": "none", "outer_steps": chosen.outer_steps}
    settings |= {"recipe": recipe_text.to_toml(chosen), "engine": recipes.engine_of(chosen), "steps": chosen.steps}

    def run(**more):
        hypers, task = recipes.hypers_of(chosen), recipes.task_of(chosen)[0]
        return lh.compare(task, lh.sgd(), hypers, dir=tmp_path / "r", **settings, **more)

    child = os.fork()
    if child == 0:
        run(watcher=Watcher(progress=Stops(30, signal.SIGKILL)))
        os._exit(0)
    os.waitpid(child, 0)
    told = []
    found = run(workers=2, watcher=Watcher(on_evaluation=told.append)).evaluations
    check_workers(found, 16)
    assert {e.key for e in told} < {e.key for e in found}
    assert not list((tmp_path / "r" / "hyperband-0").glob("trial-*.part"))
    assert len(run(workers=2).evaluations) == len(found)


def test_workers_search_the_ranges_of_the_rule(tmp_path, monkeypatch):
    """As the process that starts them does: Adam's own outer step for its lr, and its bounds."""
    monkeypatch.chdir(os.path.dirname(__file__))
    text = RECIPE.replace("start = 0.1\nwindows = 3\nstep = 0.1", "start = 0.1").replace("momentum", "beta2")
    chosen = recipes.make_recipe(tomllib.loads(text.replace("[hypers.lr]", 'rule = {name = "adam"}\n[hypers.lr]', 1)))
    hypers, rule = recipes.hypers_of(chosen), recipes.rule_of(chosen)
    how = {"methods": ["random"], "budget": "2 runs", "test": "none", "outer_steps": 3, "steps": chosen.steps}
    how |= {"recipe": recipe_text.to_toml(chosen), "dir": tmp_path / "r"}
    lh.compare(recipes.task_of(chosen)[0], rule, hypers, **how)
    found = {axis.key: (axis.low, axis.high) for axis in workers.setup_of(tmp_path / "r")[0].axes}
    assert found == lh.search_range(hypers, 3, rule)
    assert found["lr"] == pytest.approx((0.1 - 3e-3, 0.1 + 3e-3))


def test_a_comparison_that_was_killed_early_is_not_written_over(tmp_path):
    """A search has nothing but its study before its first checkpoint, and that is of its own ranges."""
    run = partial(compare, tmp_path / "r", methods=["random"], test="none", budget="4 runs")
    child = os.fork()
    if child == 0:
        run(watcher=Watcher(progress=Stops(3, signal.SIGKILL)))
        os._exit(0)
    os.waitpid(child, 0)
    assert not list((tmp_path / "r").rglob("journal.jsonl"))
    with pytest.raises(lh.RunError, match="hypers.lr.step"):
        run(hypers=HYPERS | {"lr": lh.Hyper(0.1, windows=3, step=1e-3, low=-1.0, high=2.0)})
    assert len(run().evaluations) >= 4


@pytest.mark.parametrize("value", [0.9999, 1 / 3, -0.7])
def test_means_of_windows_lie_within_them(value):
    """A bound that every step sits on is not left by rounding."""
    assert set(space.thinned([value] * 7000)) == {value}


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE)
    words = ["compare", "r.toml", "--dir", "r", "--methods", "random", "--budget", "200 runs", "--workers", "2"]
    command = [sys.executable, "-c", "from longhorizon.cli import main; main()", *words, "--test", "none"]
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": path}, "text": True}
    first = subprocess.Popen(command, **how, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    journal = tmp_path / "r/journal.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 6) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    first.communicate()
    second = subprocess.run(command, **how, capture_output=True)  # waits until they are gone
    assert second.returncode == 0, second.stdout + second.stderr
    check_workers(Ledger(journal).all(), 200)


def check_workers(found, runs):
    """Every trial climbs once, costs what it should, and has values of its own."""
    rungs = hyperband.rungs(STEPS, hyperband.epoch_of(STEPS, 0))
    assert len({e.key for e in found}) == len(found)
    for trial in {e.trial for e in found}:
        climbed = [e for e in found if e.trial == trial]
        first = hyperband.begins_on(trial, len(rungs)) if found[0].method == "hyperband" else -1
        assert [e.cost for e in climbed] == rungs[first:][: len(climbed)]
    spent = sum(e.cost for e in found)
    assert spent == sum(e.counted for e in found) == found[-1].total_steps
    assert (runs - 2) * STEPS < spent <= runs * STEPS
    assert len({json.dumps(e.values) for e in found}) == len({e.trial for e in found})


def test_a_folder_in_use_by_workers_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "WAIT", 0.2)
    with workers.alone(tmp_path, shared=True), workers.alone(tmp_path, shared=True):  # noqa: SIM117
        with pytest.raises(lh.RunError, match="still in use by workers of an earlier run"), workers.alone(tmp_path):
            pass
    with workers.alone(tmp_path):
        pass


# Failures


def test_a_crashed_trial_is_recorded_and_does_not_end_the_comparison():
    made = 0

    def model():
        nonlocal made
        made += 1
        if made == 3:
            raise OSError("the disk went away\nfor a while")
        return make_task().model()

    found = compare(task=make_task(model=model), methods=["random", "cosine"], test="none")
    bad = [e for e in found.evaluations if e.status != "ok"]
    assert [e.status for e in bad] == ["crashed: OSError: the disk went away"]
    assert bad[0].cost == bad[0].counted == 0
    assert bad[0].val_loss == math.inf
    assert len(found.evaluations) == 6  # a crash costs no steps, so random search has one trial more
    assert {row.method: row.failed for row in found.table()} == {"random": 1, "cosine": 0}


def test_a_trial_that_cannot_go_on_from_its_rung_costs_nothing_more(tmp_path):
    settings = {"methods": ["hyperband"], "test": "none", "hypers": CONSTANT}
    compare(tmp_path / "r", budget="7 steps", **settings)
    made = 0

    def model():
        nonlocal made
        made += 1
        if made == 3:  # after those of a first look, and of the trial
            raise OSError("the disk went away")
        return make_task().model()

    found = compare(tmp_path / "r", make_task(model=model), budget="20 steps", **settings).evaluations
    crashed = next(e for e in found if e.status.startswith("crashed"))
    assert (crashed.trial, crashed.steps, crashed.cost, crashed.counted) == (0, 18, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"test": lambda: (X[:10], Y[:10])}, r"Task.test\(\) returned bare tensors, 2 of them"),
        ({"test": lambda: [(X, Y)][5:][0]}, r"This was the call of Task.test\(\)"),
        ({"test": lambda: []}, r"Task.test\(\) returned no batches"),
        ({"test": lambda: [(X.double(), Y)]}, "This was the first batch of Task.test, given to Task.loss"),
        ({"test": lambda: [(X * math.nan, Y)]}, "Task.loss is nan on the first batch of Task.test"),
        ({"test": lambda: [(X, Y, 0)], "metrics": lambda m, b: {"n": 1.0 / (3 - len(b))}}, "given to Task.metrics"),
        ({"full": lambda seed: [(X, Y)] * 3}, r"Task.full\(0\) ended after 3 batches.*lower `steps`"),
    ],
)
def test_a_test_that_would_fail_is_refused_before_any_work(tmp_path, wrong, words):
    task = make_task(**wrong)
    with pytest.raises((TypeError, ValueError, RuntimeError, IndexError, ZeroDivisionError)) as caught:
        compare(tmp_path / "r", task, methods=["cosine"])
    said = " ".join([str(caught.value), *caught.value.__notes__])
    assert re.search(words, said)
    assert said.endswith("The test at the end would fail so; its first batches were tried before any other work.")
    assert not (tmp_path / "r").exists()
    assert compare(tmp_path / "r", task, methods=["cosine"], test="none").evaluations


def test_a_test_that_would_be_too_long_names_train_steps():
    with pytest.raises(ValueError, match="lower `train_steps`"):
        compare(methods=["cosine"], steps=6, train_steps=2 * STEPS)


@pytest.mark.parametrize("method", ["cosine", "schedulefree"])
@pytest.mark.parametrize("kind", [KeyError, OSError, AssertionError])
def test_a_test_that_fails_in_any_way_does_not_end_the_comparison(method, kind):
    calls = []

    def test():
        calls.append(1)
        if len(calls) > 1:  # after a first look
            raise kind("no test data here")
        return make_task().test()

    found = compare(task=make_task(test=test), methods=[method])
    assert [t.status[: len(kind.__name__) + 9] for t in found.tests] == [f"crashed: {kind.__name__}"]


@pytest.mark.parametrize("method", ["cosine", "schedulefree"])
def test_tests_are_trained_in_the_precision_of_the_comparison(method):
    asked = set()

    def test():
        asked.add(cuda._asked)
        return make_task().test()

    compare(task=make_task(test=test), methods=[method], precision="tf32")
    assert asked == {"tf32"}


def test_a_method_whose_first_trials_all_crash_gives_up_and_the_next_has_its_turn():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if 8 < calls < 40:
            raise RuntimeError("out of memory")
        return make_task().loss(model, batch)

    said = []
    task = make_task(loss=loss)
    found = compare(task=task, methods=["random", "cosine"], test="none", watcher=Watcher(note=said.append))
    assert found.gave_up["random-0"] == "its first 3 trials crashed: RuntimeError: out of memory"
    assert said == ["random, seed 0, gave up: its first 3 trials crashed: RuntimeError: out of memory"]
    assert [e.method for e in found.evaluations] == ["random"] * 3 + ["cosine"]


def test_fds_that_diverges_from_the_start_gives_up():
    hypers = {"lr": lh.Hyper(1e38, step=1.0)}
    found = lh.compare(make_task(), lh.sgd(), hypers, steps=STEPS, budget="9 runs", methods=["fds", "cosine"])
    assert "3 training runs in a row diverged" in found.gave_up["fds-0"]
    assert found.evaluations[-1].method == "cosine"
    assert found.evaluations[-2].status.startswith("crashed: RuntimeError: 3 training runs in a row diverged")


def test_a_model_that_fds_cannot_differentiate_ends_fds_alone():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    task = make_task(loss=lambda model, batch: Square.apply(model(batch[0])).mean())
    found = compare(task=task, methods=["fds", "random"], test="none")
    assert "cannot differentiate this model's gradient" in found.gave_up["fds-0"]
    assert [e.status[:26] for e in found.evaluations if e.method == "fds"] == ["crashed: NotDifferentiable"]
    assert all(e.status == "ok" for e in found.evaluations if e.method == "random")


BAD = {
    "method": ({"methods": ["randon"]}, ValueError, "unknown method 'randon'. Did you mean 'random'?"),
    "no method": ({"methods": []}, ValueError, "methods is empty"),
    "budget": ({"budget": "much"}, ValueError, "budget 'much': expected '300s'"),
    "unit": ({"budget": "20"}, ValueError, "budget '20': expected a unit too"),
    "nothing": ({"budget": "0 runs"}, ValueError, "expected more than nothing"),
    "small": ({"budget": "17 steps"}, ValueError, "too small for one trial of random, which takes 18; give at least"),
    "short": ({"budget": "0.0001s"}, ValueError, "too small for one trial of random: its 18 training steps take about"),
    "repeats": ({"repeats": 0}, ValueError, "repeats=0: expected a whole number, at least 1"),
    "workers": ({"workers": 2}, ValueError, "give `recipe` and `dir` too"),
    "test": ({"test": "some"}, ValueError, "test='some': expected 'all', 'whole', 'last' or 'none'"),
    "steps": ({"steps": 2}, ValueError, "windows=3 but the run only steps=2"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_refused_before_any_work(tmp_path, kind):
    changes, error, words = BAD[kind]
    with pytest.raises(error) as caught:
        compare(tmp_path / "r", **changes)
    assert words in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_the_grid_wants_sgd():
    with pytest.raises(ValueError, match="grid: the paper's grid is one of SGD's .*, and adam has no 'momentum'"):
        lh.compare(make_task(), lh.adam(), {"lr": lh.Hyper(0.1)}, steps=9, budget="2 runs", methods=["grid"])


@pytest.mark.parametrize(
    ("method", "package"),
    [("bo", "optuna"), ("bo", "scipy"), ("schedulefree", "schedulefree"), ("prodigy", "prodigyopt")],
)
def test_a_missing_package_names_the_extra(monkeypatch, method, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as caught:
        compare(methods=[method])
    assert str(caught.value) == f'{package} is missing: pip install "longhorizon[compare]".'
    assert compare(methods=["hd"]).evaluations  # which needs none of them


def test_all_names_every_method():
    assert [m.name for m in registry.chosen(["all"])] == ALL
    assert set(registry.USUAL) <= set(ALL)
    assert isinstance(registry.METHODS["bohb"], BlackBox)


def test_the_gate_is_that_of_tune(monkeypatch):
    with pytest.raises(ValueError, match="gate='maybe'"):
        compare(methods=["fds"], gate="maybe")
    given = []
    monkeypatch.setattr(methods, "Tuning", lambda *a, **k: given.append(k["gate"]) or lh.Tuning(*a, **k))
    compare(methods=["fds"], gate="wait")
    assert given == ["wait"]


def test_a_search_that_tries_a_value_without_a_loss_counts_it_as_diverged(tmp_path):
    """Whatever was tried first in this process: stopped and called again it is the same."""

    def rooted(model, batch, hypers):
        return loss(model, batch) + 0.01 * hypers["a"].sqrt() * sum(p.square().sum() for p in model.parameters())

    task = make_task(loss=rooted, val_loss=loss)
    settings = {"hypers": {"lr": lh.Hyper(0.1), "a": lh.Hyper(0.1, step=0.3)}, "budget": "6 runs", "test": "none"}
    calm = compare(task=task, **settings).evaluations
    bad = [e for e in calm if e.status != "ok"]
    assert 0 < len(bad) < len(calm)
    assert {e.status for e in bad} == {"diverged: non-finite loss at step 0"}
    for count in range(1, 6):
        compare(tmp_path / "r", task=task, **settings | {"budget": f"{count} runs"})
    assert without_clock(compare(tmp_path / "r", task=task, **settings).evaluations) == without_clock(calm)
