"""Hyperband and BOHB: how trials climb from rung to rung, what is tried next, and what a study is made from."""

import math
from dataclasses import replace

import numpy as np
import pytest

import longhorizon as lh
from longhorizon.lanes import Lanes
from longhorizon.problem import make_problem
from longhorizon.rivals import bohb, hyperband, rows, testing
from longhorizon.rivals.arena import Trial
from longhorizon.rivals.driver import Watcher
from longhorizon.rivals.ledger import Evaluation, Ledger
from longhorizon.rivals.space import Axis
from longhorizon.rivals.studies import quiet
from longhorizon.rivals.training import Counter, Training, judge
from rivals_task import CONSTANT, HYPERS, compare, make_task, without_clock
from test_compare import Stops
from test_crew import plan_of


@pytest.mark.parametrize("method", ["hyperband", "bohb"])
@pytest.mark.parametrize(
    ("hypers", "costs"), [(HYPERS, [2, 6, 18]), (CONSTANT, [2, 4, 12])], ids=["schedule", "constant"]
)
def test_trials_climb_rung_by_rung_and_most_end_early(tmp_path, method, hypers, costs):
    """From scratch with the whole schedule, or on from the last rung where nothing changes along a run."""
    found = compare(tmp_path / "r", hypers=hypers, methods=[method], budget="24 runs", test="none").evaluations
    for trial, climbed in by_trial(found).items():
        first = hyperband.begins_on(trial, 3)
        assert [e.steps for e in climbed] == [2, 6, 18][first:][: len(climbed)]
        assert [e.cost for e in climbed] == [[2, 6, 18][first], *costs[first + 1 :]][: len(climbed)]
    tops = [trial for trial, climbed in by_trial(found).items() if climbed[-1].steps == 18]
    assert {hyperband.begins_on(trial, 3) for trial in tops} == {0, 1, 2}
    assert len([t for t in tops if t < 9]) < 9
    left = {int(path.stem[6:11]) for path in tmp_path.rglob("trial-*.pt")}
    assert left <= {found[-1].trial}  # none of those that are through


def by_trial(found):
    trials = {}
    for e in found:
        trials.setdefault(e.trial, []).append(e)
    return trials


def test_who_goes_on_is_among_the_best_third_of_its_bracket_so_far():
    found = compare(methods=["hyperband"], budget="24 runs", test="none").evaluations
    places, seen = {}, []
    for e in found:
        seen.append(e)
        bracket = hyperband.begins_on(e.trial, 3)
        rivals = sorted(x.val_loss for x in seen if x.steps == e.steps and hyperband.begins_on(x.trial, 3) == bracket)
        places[e.trial, e.steps] = (rivals.index(e.val_loss) + 1, len(rivals))
    short = {(trial, steps): place for (trial, steps), place in places.items() if steps < 18}
    climbed = {key for key in short if (key[0], 3 * key[1]) in places}
    good = {key for key, (place, count) in short.items() if place <= max(1, count // 3)}
    assert climbed <= good
    spent = {(e.trial, e.steps): e.total_steps for e in found}
    assert all(spent[key] + 3 * key[1] > 24 * 18 for key in good - climbed)  # more than the budget had left


def test_the_shares_of_brackets_are_optunas():
    import optuna

    pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3)
    with quiet():
        study = optuna.create_study(pruner=pruner)
        trial = study.ask()
        trial.report(1.0, 1)
        trial.should_prune()
    begun = [hyperband.begins_on(number, 3) for number in range(17)]
    assert pruner._trial_allocation_budgets == [begun.count(rung) for rung in range(3)]


def told(directory, method):
    """What a study knows of every trial."""
    from optuna import load_study
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(directory / f"{method}-0" / "study.log")))
    with quiet():
        study = load_study(study_name=f"{method}-0", storage=storage)
    return [(t.number, t.state.name, t.params, t.intermediate_values, t.values) for t in study.trials]


@pytest.mark.parametrize("seats", [1, 4])
@pytest.mark.parametrize("method", ["random", "bo", "hyperband", "bohb"])
def test_a_study_that_is_lost_is_made_anew_from_the_journal(tmp_path, monkeypatch, method, seats):
    monkeypatch.setattr(rows, "width", lambda arena, *runs: seats)
    settings = {"methods": [method], "test": "none", "budget": "16 runs"}
    stopped = compare_and_stop(tmp_path / "r", 150 // seats, **settings)
    before = told(tmp_path / "r", method)
    (tmp_path / f"r/{method}-0/study.log").unlink()
    (tmp_path / f"r/{method}-0/study.log.7").write_text("of one that was killed while it did this")
    arenas = []
    with pytest.raises(lh.Interrupted):
        compare(
            tmp_path / "r",
            watcher=Watcher(on_method=lambda *given: arenas.append(given), progress=Stops(1)),
            **settings,
        )
    judged = {e.trial for e in stopped}
    after = [one for one in told(tmp_path / "r", method) if one[0] in judged]
    assert after == [one for one in before if one[0] in judged]
    assert [path.name for path in (tmp_path / f"r/{method}-0").glob("study.log*")] == ["study.log"]
    found = compare(tmp_path / "r", **settings).evaluations
    assert without_clock(found[: len(stopped)]) == without_clock(stopped)
    assert all_as_alone(found)  # no checkpoint of another setting was taken up
    if seats == 1:  # several at a time have other neighbours when they go on
        assert without_clock(found) == without_clock(compare(**settings).evaluations)


def all_as_alone(evaluations):
    """Whether every loss is that of a training of its own with the values beside it."""
    for e in evaluations:
        if math.isfinite(e.val_loss):
            training = Training(make_problem(make_task(), lh.sgd(), *plan_of(e)), Counter())
            while training.t < e.steps:
                training.advance()
            assert e.val_loss == pytest.approx(judge(training).val_loss, rel=1e-3), e
    return True


@pytest.mark.parametrize("hypers", [HYPERS, CONSTANT], ids=["schedule", "constant"])
@pytest.mark.parametrize("seats", [1, 3])
@pytest.mark.parametrize("method", ["hyperband", "bohb"])
def test_a_search_that_is_through_is_through(tmp_path, monkeypatch, method, seats, hypers):
    """Called again it adds nothing; and the steps of a budget are never overdrawn, whatever fails on the way."""
    monkeypatch.setattr(rows, "width", lambda arena, *runs: seats)
    step, taken = Lanes.step, [0]

    def sometimes(self, t):
        taken[0] += 1
        if taken[0] % 9 == 0:
            raise RuntimeError("the device was busy")
        return step(self, t)

    for budget in (29, 35, 148):
        settings = {"methods": [method], "test": "none", "budget": f"{budget} steps", "hypers": hypers}
        place = tmp_path / str(budget)
        with monkeypatch.context() as patch:
            patch.setattr(Lanes, "step", sometimes)
            found = compare(place, **settings).evaluations
        assert sum(e.cost for e in found) <= budget
        assert len(compare(place, **settings).evaluations) == len(found)


def test_trials_that_crash_at_no_cost_do_not_go_on_for_ever():
    made = 0

    def model():
        nonlocal made
        made += 1
        if made >= 4:
            raise OSError("the disk went away")
        return make_task().model()

    found = compare(task=make_task(model=model), methods=["random"], test="none")
    assert len(found.evaluations) < 30
    assert found.gave_up == {"random-0": "its last 20 trials crashed: OSError: the disk went away"}


@pytest.mark.parametrize("method", ["random", "bohb"])
def test_a_torn_line_of_a_study_does_not_count(tmp_path, method):
    settings = {"methods": [method], "test": "none", "budget": "9 runs"}
    compare_and_stop(tmp_path / "r", 60, **settings)
    with (tmp_path / f"r/{method}-0/study.log").open("a") as study:
        study.write('{"op_code": 6, "worker')
    assert without_clock(compare(tmp_path / "r", **settings).evaluations) == without_clock(
        compare(**settings).evaluations
    )


@pytest.mark.parametrize("hypers", [HYPERS, CONSTANT], ids=["schedule", "constant"])
def test_killed_before_a_checkpoint_was_removed_it_is_removed_later(tmp_path, monkeypatch, hypers):
    settings = {
        "methods": ["hyperband"],
        "test": "none",
        "budget": "4 runs",
        "hypers": hypers,
        "checkpoint_seconds": 0.0,
    }
    with monkeypatch.context() as patch:
        patch.setattr(Trial, "forget", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compare(tmp_path / "r", **settings)
    compare(tmp_path / "r", **settings)
    left = {int(path.name[6:11]) for path in tmp_path.rglob("trial-*.pt")}
    assert left <= {number for number, state, *_ in told(tmp_path / "r", "hyperband") if state == "RUNNING"}


def compare_and_stop(directory, after, **settings):
    with pytest.raises(lh.Interrupted):
        compare(directory, watcher=Watcher(progress=Stops(after)), **settings)
    return Ledger(directory / "journal.jsonl").all()


@pytest.mark.parametrize("method", ["hyperband", "bohb"])
@pytest.mark.parametrize("writes", [1, 9, 30, 60])
def test_killed_while_it_makes_a_study_anew_it_begins_again(tmp_path, monkeypatch, method, writes):
    from optuna.storages.journal import JournalFileBackend

    settings = {"methods": [method], "test": "none", "budget": "16 runs"}
    compare_and_stop(tmp_path / "r", 150, **settings)
    (tmp_path / f"r/{method}-0/study.log").unlink()
    append, left = JournalFileBackend.append_logs, [writes + 1]

    def dies(self, logs):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        append(self, logs)

    with monkeypatch.context() as patch:
        patch.setattr(JournalFileBackend, "append_logs", dies)
        with pytest.raises(KeyboardInterrupt):
            compare(tmp_path / "r", **settings)
    assert without_clock(compare(tmp_path / "r", **settings).evaluations) == without_clock(
        compare(**settings).evaluations
    )


@pytest.mark.parametrize("method", ["hyperband", "bohb"])
def test_killed_between_a_verdict_and_its_consequence_it_is_the_same_verdict(tmp_path, monkeypatch, method):
    import optuna

    settings = {"methods": [method], "test": "none", "budget": "16 runs"}
    calm = without_clock(compare(**settings).evaluations)
    for count in (1, 3):
        tell, left = optuna.Study.tell, [count]

        def dies(self, trial, values=None, state=None, left=left, tell=tell):
            left[0] -= state == optuna.trial.TrialState.PRUNED
            if left[0] == 0 and state == optuna.trial.TrialState.PRUNED:
                raise KeyboardInterrupt
            return tell(self, trial, values, state=state)

        with monkeypatch.context() as patch:
            patch.setattr(optuna.Study, "tell", dies)
            with pytest.raises(KeyboardInterrupt):
                compare(tmp_path / str(count), **settings)
        assert without_clock(compare(tmp_path / str(count), **settings).evaluations) == calm


def test_a_search_of_an_earlier_version_is_refused_by_name(tmp_path):
    settings = {"methods": ["hyperband"], "test": "none", "budget": "4 runs"}
    compare(tmp_path / "r", **settings)
    study = tmp_path / "r/hyperband-0/study.log"
    lines = study.read_text().splitlines(keepends=True)
    study.write_text("".join(line for line in lines if '"rungs"' not in line))
    with pytest.raises(lh.RunError, match="begun by an earlier version, whose hyperband had other rungs: give another"):
        compare(tmp_path / "r", **settings)
    study.unlink()
    journal = tmp_path / "r/journal.jsonl"
    journal.write_text(journal.read_text().replace('"steps": 6,', '"steps": 7,', 1))
    with pytest.raises(
        lh.RunError, match=r"is lost, and cannot be made anew from the journal: trial \d+ after 7 steps"
    ):
        compare(tmp_path / "r", **settings)


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


@pytest.mark.parametrize("method", ["random", "hyperband", "bohb", "grid"])
def test_a_comparison_goes_on_elsewhere_from_its_journal(tmp_path, method):
    few, more = ({"methods": [method], "test": "last", "budget": f"{runs} runs"} for runs in (6, 9))
    compare(tmp_path / "here", **few)
    (tmp_path / "carried").mkdir()
    for name in ("journal.jsonl", "tests.jsonl"):
        (tmp_path / "carried" / name).write_bytes((tmp_path / "here" / name).read_bytes())
    there = compare(tmp_path / "there", earlier=tmp_path / "carried", **more)
    assert without_clock(there.evaluations) == without_clock(compare(tmp_path / "here", **more).evaluations)
    carried = testing.read_tests(tmp_path / "carried" / "tests.jsonl")
    assert there.tests[: len(carried)] == carried
    assert len(carried) == 1
    again = compare(tmp_path / "there", earlier=tmp_path / "carried", **more)  # what is there stays
    assert without_clock(again.evaluations) == without_clock(there.evaluations)
    with pytest.raises(ValueError, match=r"earlier='.*nowhere': has no journal.jsonl"):
        compare(tmp_path / "new", earlier=tmp_path / "nowhere", **more)
    with pytest.raises(ValueError, match=r"earlier='.*carried': needs `dir` too"):
        compare(earlier=tmp_path / "carried", **more)


def test_a_journal_of_another_comparison_is_refused_or_left_out(tmp_path):
    """Of other ranges; of another seed; of FDS, which begins anew."""
    settings = {"test": "none", "budget": "4 runs"}
    compare(tmp_path / "here", methods=["fds", "random", "bohb"], **settings)
    narrow = {**HYPERS, "lr": replace(HYPERS["lr"], step=1e-3)}
    for method in ("random", "bohb"):
        with pytest.raises(lh.RunError, match="none that this comparison would have made"):
            compare(tmp_path / method, hypers=narrow, methods=[method], earlier=tmp_path / "here", **settings)
    other = compare(tmp_path / "other", methods=["random"], earlier=tmp_path / "here", seed=5, **settings)
    assert {e.seed for e in other.evaluations} == {5}
    anew = compare(tmp_path / "anew", methods=["fds"], earlier=tmp_path / "here", **settings)
    assert {e.method for e in anew.evaluations} == {"fds", "random", "bohb"}
    assert [e.seconds for e in anew.evaluations if e.method == "fds"] != [
        e.seconds for e in Ledger(tmp_path / "here/journal.jsonl").all() if e.method == "fds"
    ]
