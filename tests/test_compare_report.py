"""What a comparison shows: regret worked out by hand, the page, the picture, the command line."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner

import longhorizon as lh
from longhorizon import cli_compare
from longhorizon.cli import cli
from longhorizon.rivals import packaged, testing
from longhorizon.rivals.driver import Watcher
from longhorizon.rivals.ledger import Evaluation, Ledger
from longhorizon.rivals.page import COLOURS, head, regret_figure, words, write_page
from longhorizon.rivals.registry import METHODS
from longhorizon.rivals.regret import curves, scores, table
from rivals_task import HYPERS, compare, make_task


def told(directory, rows):
    """A journal of (method, seed, seconds, cost, loss), each of a trial of its own and a whole run."""
    ledger = Ledger(directory / "journal.jsonl")
    for trial, (method, seed, seconds, cost, loss) in enumerate(rows):
        ledger.append(Evaluation(method, seed, trial, 10, cost, cost, seconds, loss, {}, {"lr": [loss]}))
    return ledger.all()


ROWS = [
    ("fds", 0, 4.0, 10, 0.9),
    ("fds", 0, 4.0, 10, 0.5),
    ("random", 0, 1.0, 10, 0.8),
    ("random", 0, 1.0, 10, math.inf),
    ("random", 0, 1.0, 10, 0.7),
    ("fds", 1, 6.0, 10, 0.6),
    ("random", 1, 2.0, 10, 0.9),
]
# Test accuracies of two trainings each, by trial of ROWS.
ACCURACY = {0: [0.5, 0.5], 1: [0.89, 0.91], 2: [0.7, 0.7], 4: [0.6, 0.6], 5: [0.88, 0.88], 6: [0.8, 0.8]}


def outcomes(evaluations):
    return [
        testing.Tested(*e.key, {"loss": [1.0, 1.0], "accuracy": ACCURACY[e.trial]})
        for e in testing.to_test(evaluations, "all")
    ]


def test_the_journal_keeps_totals_and_the_best(tmp_path):
    found = told(tmp_path, ROWS)
    assert [e.total_seconds for e in found] == [4.0, 8.0, 1.0, 2.0, 3.0, 6.0, 2.0]
    assert [e.total_steps for e in found] == [10, 20, 10, 20, 30, 10, 10]
    assert [e.best for e in found] == [True, True, True, False, True, True, True]
    assert [e.best_loss for e in found] == [0.9, 0.5, 0.8, 0.8, 0.7, 0.6, 0.9]
    assert [e.trial for e in testing.to_test(found, "last")] == [1, 4, 5, 6]
    assert [e.trial for e in testing.to_test(found, "whole", found[0].steps)] == [e.trial for e in found if e.best]
    assert [e.trial for e in testing.to_test(found, "whole", 10**6)] == [1, 4, 5, 6]
    assert testing.to_test(found, "none") == []
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert json.loads(lines[3])["val_loss"] is None
    again = Ledger(tmp_path / "journal.jsonl")
    again.append(found[2])  # told twice, written once
    assert again.all() == found


def test_longer_training_is_preferred_whatever_the_loss(tmp_path):
    ledger = Ledger(tmp_path / "journal.jsonl")
    for steps, loss in ((6, 0.1), (18, 0.5), (6, 0.05), (18, 0.4)):
        ledger.append(Evaluation("bohb", 0, steps * 100 + int(loss * 100), steps, 1, 1, 1.0, loss, {}, {}))
    assert [e.best for e in ledger.all()] == [True, True, False, True]


def test_regret_by_hand(tmp_path):
    """The best known is trial 1's 0.90 ± 0.014.

    fds:    seed 0 has regret 0.4 from 4 s on and 0 from 8 s; seed 1 0.02 from 6 s. Both: 6 s: 0.21; 8 s: 0.01
    random: seed 0 has 0.2 from 1 s and 0.3 from 3 s;         seed 1 0.1 from 2 s.  Both: 2 s: 0.15; 3 s: 0.2
    """
    found = told(tmp_path, ROWS)
    known = scores(found, outcomes(found))
    assert known.name == "test accuracy"
    assert known.best == pytest.approx(0.9)
    assert known.tolerance == pytest.approx(0.01 * math.sqrt(2))
    fds, random = curves(found, outcomes(found))
    assert (fds.method, fds.times) == ("fds", [6.0, 8.0])
    assert fds.mean == pytest.approx([0.21, 0.01])
    assert fds.spread == pytest.approx([0.19 * math.sqrt(2), 0.01 * math.sqrt(2)])
    assert (random.method, random.times) == ("random", [2.0, 3.0])
    assert random.mean == pytest.approx([0.15, 0.2])
    first, second = table(found, outcomes(found))
    assert (first.method, first.seeds, first.zero, first.seconds_to_zero) == ("fds", 2, 1, None)
    assert first.score == pytest.approx(0.89)
    assert first.regret == pytest.approx(0.01)
    assert (first.seconds, first.steps, first.trials, first.failed) == (7.0, 15, 1.5, 0)
    assert (second.method, second.zero) == ("random", 0)
    by_steps = curves(found, outcomes(found), "steps")
    assert by_steps[0].times == [10.0, 20.0]


def test_zero_regret_has_to_last(tmp_path):
    rows = [("hd", 0, 1.0, 1, 0.9), ("hd", 0, 1.0, 1, 0.8), ("hd", 0, 1.0, 1, 0.7), ("hd", 0, 1.0, 1, 0.6)]
    found = told(tmp_path, rows)
    accuracy = {0: 0.9, 1: 0.5, 2: 0.9, 3: 0.9}
    tests = [testing.Tested(*e.key, {"accuracy": [accuracy[e.trial]]}) for e in found]
    assert table(found, tests)[0].seconds_to_zero == 3.0


def test_without_tests_regret_is_one_of_validation(tmp_path):
    found = told(tmp_path, ROWS)
    known = scores(found, outcomes(found)[:2])
    assert (known.name, known.best, known.lower) == ("validation loss", -0.5, True)
    assert scores([], []) is None
    assert curves([], []) == []
    assert table([], []) == []


def test_a_choice_that_diverges_when_retrained_has_no_score(tmp_path):
    found = told(tmp_path, ROWS)
    tests = [
        testing.Tested(*e.key, {"accuracy": [0.5, None] if e.method == "random" else [0.5, 0.6]})
        for e in found
        if e.best
    ]
    rows = {row.method: row for row in table(found, tests)}
    assert rows["random"].score is None
    assert words(rows["random"])[1:4] == ["–", "–", "–"]


@pytest.mark.parametrize(
    "random", [{"loss": [None, 0.1], "accuracy": [0.1, 0.9]}, {"loss": [None, 0.1], "accuracy": [0.9]}]
)
def test_a_training_whose_loss_is_not_finite_has_no_accuracy(tmp_path, random):
    """A network of NaNs still guesses one class; and journals may lack the metrics of such a training."""
    found = told(tmp_path, ROWS)
    fine = {"loss": [0.1, 0.1], "accuracy": [0.5, 0.6]}
    tests = [testing.Tested(*e.key, random if e.method == "random" else fine) for e in found if e.best]
    rows = {row.method: row for row in table(found, tests)}
    assert rows["random"].score is rows["random"].regret is None
    assert rows["fds"].score == pytest.approx(0.55)
    assert scores(found, tests).best == pytest.approx(0.55)


def test_diverged_trainings_of_a_test_are_written_down_as_such(monkeypatch):
    """The second of three, of an optimizer of another package and of a schedule."""
    made = 0

    class Fails(torch.optim.SGD):
        def __init__(self, params):
            nonlocal made
            super().__init__(params, lr=0.1)
            made += 1
            self.bad = made == 4  # one to warm up, one in the search, then the tests

        def step(self):
            super().step()
            for p in self.param_groups[0]["params"] if self.bad else ():
                p.data.fill_(math.nan)

    def retrain(*given, on_seed, **more):
        return real(
            *given, on_seed=lambda s, found: on_seed(s, found | {"loss": math.nan} if s == 1 else found), **more
        )

    real = testing.retrain
    monkeypatch.setattr(testing, "retrain", retrain)
    monkeypatch.setitem(packaged.OPTIMIZERS, "prodigy", ("torch", Fails))
    found = compare(methods=["prodigy", "cosine"], budget="1 runs", test_seeds=3)
    for tested in found.tests:
        for name in ("loss", "accuracy"):
            assert [v is None for v in tested.scores[name]] == [False, True, False], tested
    assert [row.score for row in found.table()] == [None, None]


def test_a_seed_that_found_nothing_is_not_left_out(tmp_path):
    """Two of three seeds diverged throughout: no score, no line, and no first place for the third."""
    rows = [("random", seed, 1.0, 10, loss) for seed, loss in enumerate([0.1, math.inf, math.inf])]
    found = told(tmp_path, rows + [("fds", seed, 1.0, 10, 0.2) for seed in range(3)])
    accuracy = {"random": 0.95, "fds": 0.9}
    tests = [testing.Tested(*e.key, {"loss": [0.1], "accuracy": [accuracy[e.method]]}) for e in found if e.best]
    first, last = table(found, tests)
    assert (first.method, first.score) == ("fds", pytest.approx(0.9))
    (alone,) = table([e for e in found if (e.method, e.seed) == ("fds", 0)], tests)
    assert (alone.deviation, words(alone)[1]) == (None, "90.00 %")  # of one training
    assert (last.method, last.score, last.deviation, last.regret) == ("random", None, None, None)
    assert {curve.method: len(curve.times) for curve in curves(found, tests)} == {"random": 0, "fds": 1}
    with pytest.raises(ValueError, match="against='random': it has chosen nothing that trains"):
        table(found, tests, against="random")


def test_every_method_has_a_colour():
    assert set(COLOURS) == set(METHODS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_the_page_and_the_picture(tmp_path):
    found = compare(tmp_path / "r", methods=["random", "hd", "cosine"], repeats=2, budget="2 runs")
    page = write_page(tmp_path / "r")
    text = page.read_text()
    assert "comparison report" in text
    assert "Regret over time" in text
    assert not re.findall(r"""(?:src|href)=["']https?://""", text.split("<script>")[0])
    for row in found.table():
        assert f"<td>{row.method}</td>" in text
    assert (tmp_path / "r/report/regret.png").read_bytes().startswith(b"\x89PNG")
    figure = regret_figure(found.evaluations, found.tests)
    assert [panel.x_title for panel in figure.panels] == ["time (s)", "inner steps"]
    assert all(panel.log_x for panel in figure.panels)
    assert {line.name for line in figure.panels[0].lines} == {"random", "hd", "cosine"}
    assert head(found.table())[1] == "test accuracy"


def test_equal_settings_are_tested_once(tmp_path, monkeypatch):
    calls = []
    real = testing.retrain
    monkeypatch.setattr(testing, "retrain", lambda *a, **k: calls.append(list(k["seeds"])) or real(*a, **k))
    found = compare(tmp_path / "r", methods=["cosine"], repeats=3, budget="1 runs")
    assert calls == [[0, 1]]  # the trainings of one test, though three seeds came to the setting
    assert len({json.dumps(t.scores) for t in found.tests}) == 1
    assert [t.seed for t in testing.read_tests(tmp_path / "r/tests.jsonl")] == [0, 1, 2]


def call(*words, code=0):
    """A command line, in this process."""
    done = CliRunner().invoke(cli, [str(w) for w in words])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def command(*words):
    return [sys.executable, "-c", "from longhorizon.cli import main; main()", *map(str, words)]


def environment():
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("kind", ["_Plain", "_Live", "_Json"])
def test_what_is_shown_on_the_way(tmp_path, monkeypatch, capsys, kind):
    show = getattr(cli_compare, kind)()
    for name in ("every", "refresh"):
        monkeypatch.setattr(show, name, 0.0, raising=False)
    watcher = Watcher(show.method, show.evaluation, show.progress, show.note)
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        if calls == 30:
            raise OSError("gone")
        return make_task().loss(model, batch)

    try:
        compare(tmp_path / "r", make_task(loss=loss), methods=["random", "fds"], test="none", watcher=watcher)
    finally:
        show.stop()
    out, said = capsys.readouterr()
    if kind == "_Json":
        assert [json.loads(line)["method"] for line in out.splitlines()] == ["random"] * 4 + ["fds"] * 3
        return
    assert out == ""
    assert "crashed: OSError: gone" in said
    assert "random, seed 0" in said
    assert "fds, seed 0" in said
    assert "loss 0." in said
    if kind == "_Plain":
        assert re.search(r"random, seed 0: \d evaluations, \d+ % of the budget", said)


RECIPE = 'task = "rivals_task:make_task"\nsteps = 18\nouter_steps = 3\ntest_seeds = 2\n[hypers.lr]\nstart = 0.1\n'


def test_the_command_line_stops_and_goes_on(tmp_path, monkeypatch):
    """Ctrl-C saves and says how; resume ends with a table; report writes the page."""
    (tmp_path / "r.toml").write_text(RECIPE)
    words = [
        "compare",
        "r.toml",
        "--methods",
        "random,hd,cosine",
        "--budget",
        "60 runs",
        "--dir",
        "r",
        "--test",
        "last",
    ]
    with subprocess.Popen(
        command(*words), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "r/journal.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=120)
    assert process.returncode == 130, out + said
    assert "stopped; all is saved in r; go on with: longhorizon resume r" in said
    monkeypatch.chdir(tmp_path)
    done = call("resume", "r", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert {e["event"] for e in events} == {"evaluation", "result"}
    assert {row["method"] for row in events[-1]["table"]} == {"random", "hd", "cosine"}
    assert all(row["steps"] == row["counted"] for row in events[-1]["table"])
    assert len(Ledger(tmp_path / "r/journal.jsonl").all()) == 121
    shown = call("compare", "r.toml", *words[2:])
    assert re.search(r"^method +test accuracy|validation", shown.stdout, re.M)
    assert call("report", "r").stdout.strip() == "r/report.html"
    exported = call("export", "r", "--format", "json")
    won = events[-1]["table"][0]["method"]
    assert f"r is a comparison; this is what won it: {won}, seed 0, trial" in exported.stderr
    best = [e for e in Ledger(tmp_path / "r/journal.jsonl").all() if e.method == won and e.best][-1]
    assert {k: v["values"] for k, v in json.loads(exported.stdout)["hypers"].items()} == best.values


LATE = """
import os
from rivals_task import X, Y, make_task

def make():
    return make_task(test=lambda: [(X, Y)] if os.path.exists("mended") else [(X, Y), (X.double(), Y)])
"""


def test_a_test_that_fails_is_said_and_tried_again(tmp_path, monkeypatch):
    (tmp_path / "late.py").write_text(LATE)
    (tmp_path / "r.toml").write_text(RECIPE.replace("rivals_task:make_task", "late:make"))
    monkeypatch.chdir(tmp_path)
    words = ["compare", "r.toml", "--methods", "cosine,multistep", "--budget", "1 runs", "--dir", "r"]
    done = call(*words, code=1)
    why = "crashed: RuntimeError: Task.test() has a batch 1 (from 0)"
    assert re.search(r"^method +validation accuracy", done.stdout, re.M)
    assert f"2 of 2 tests FAILED, as of cosine, seed 0: {why}" in done.stdout
    assert "test again with: longhorizon resume r" in done.stdout
    failed = json.loads((tmp_path / "r/result.json").read_text())["failed_tests"]
    assert [t["method"] for t in failed] == ["cosine", "multistep"]
    page = write_page(tmp_path / "r").read_text()
    assert "Tests failed with an error" in page
    assert f"test {why}" in page
    assert json.loads(call("resume", "r", "--json", code=1).stdout)["failed_tests"]  # and no evaluation again
    call(*words, "--test", "none")  # asks for no test

    (tmp_path / "mended").touch()
    done = call(*words)
    assert re.search(r"^method +test accuracy", done.stdout, re.M)
    assert "FAILED" not in done.stdout
    assert "Tests failed" not in write_page(tmp_path / "r").read_text()
    assert [t.status for t in testing.read_tests(tmp_path / "r/tests.jsonl")] == ["ok", "ok"]


def test_a_test_that_fails_is_tried_once_in_a_call_and_again_in_the_next(tmp_path, monkeypatch):
    calls, real = [], testing.retrain

    def retrain(*given, **more):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the disk went away")
        return real(*given, **more)

    monkeypatch.setattr(testing, "retrain", retrain)
    settings = {"methods": ["cosine", "multistep", "constant"], "budget": "1 runs"}
    found = compare(tmp_path / "r", **settings)
    assert [(t.method, t.status) for t in found.failed] == [("cosine", "crashed: OSError: the disk went away")]
    assert len(calls) == 3
    again = compare(tmp_path / "r", **settings)
    assert (len(calls), again.failed) == (4, [])
    assert head(again.table())[1] == "test accuracy"


def test_a_comparison_that_has_no_schedule_says_why(tmp_path):
    compare(tmp_path / "r", methods=["random"], budget="2 runs")
    done = CliRunner().invoke(cli, ["export", str(tmp_path / "r")])
    assert "is a comparison that was begun from Python: what was chosen is in" in str(done.exception)
    assert re.search(r"journal.jsonl \(random, seed 0, trial \d", str(done.exception))


def test_wrong_calls_are_one_line(tmp_path):
    (tmp_path / "r.toml").write_text(RECIPE)
    lh.tune(make_task(), lh.sgd(), HYPERS, steps=4, outer_steps=1, dir=tmp_path / "tuned")
    wrong = {
        "unknown method 'hyperbnd'. Did you mean 'hyperband'?": ["--methods", "hyperbnd"],
        "too small for one trial of fds, which takes 18; give at least '18 steps'": ["--budget", "5 steps"],
        "unknown key 'bugdet'": ["--bugdet", "5 steps"],
        "holds a tuning run; choose another directory": ["--dir", str(tmp_path / "tuned")],
    }
    for message, more in wrong.items():
        done = CliRunner().invoke(cli, ["compare", str(tmp_path / "r.toml"), "--methods", "fds,random", *more])
        assert done.exit_code != 0
        assert message in str(done.exception), done.exception


@pytest.mark.slow
def test_all_methods_on_digits_killed_and_resumed(tmp_path):
    """The experiment in full: about seven minutes on two cores."""
    script = os.path.join(os.path.dirname(__file__), "..", "experiments", "compare_digits.py")
    out = ["--out", tmp_path / "out.json", "--picture", tmp_path / "out.png"]
    done = subprocess.run(
        [sys.executable, script, *map(str, out)], env=environment(), capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    assert {row["method"] for row in content["table"]} == set(METHODS)
    assert content["killed_after_evaluations"] >= 300
    assert all(row["steps"] == row["counted"] for row in content["table"])
    assert (tmp_path / "out.png").exists()
