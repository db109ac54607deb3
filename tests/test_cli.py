"""The command line, through subprocesses: help, mistakes, stops, pipes, and what a user does with a run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import longhorizon as lh

COMMAND = [sys.executable, "-c", "from longhorizon.cli import main; main()"]
SMALL = ["--steps", "12", "--outer-steps", "2", "--hypers.lr.windows", "3", "--test-seeds", "0"]
COMMANDS = ["tune", "resume", "report", "export", "check", "windows", "compare", "data", "init"]


@pytest.fixture(scope="module", autouse=True)
def _server():
    """One process that has imported the package, and forks a child per command line."""
    global SERVER
    path = Path(__file__).with_name("cli_server.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as SERVER:
        yield
        SERVER.stdin.close()


def call(*words, cwd, code=0):
    SERVER.stdin.write(json.dumps({"words": [str(w) for w in words], "cwd": str(cwd)}) + "\n")
    SERVER.stdin.flush()
    done = SimpleNamespace(**json.loads(SERVER.stdout.readline()))
    assert done.code in (code if isinstance(code, tuple) else (code,)), done.stdout + done.stderr
    return done


def test_the_package_is_a_command_too(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "longhorizon", "--version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout.strip()) == (0, lh.__version__)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small run that others look at."""
    directory = tmp_path_factory.mktemp("finished")
    call("tune", "--dir", "run", "--steps", 12, "--outer-steps", 2, "--test-seeds", 2, cwd=directory)
    return directory


def test_help_names_every_command_and_default(tmp_path):
    said = call("--help", cwd=tmp_path).stdout
    assert all(command in said for command in COMMANDS)
    said = call("tune", "--help", cwd=tmp_path).stdout
    assert "--outer-steps [12]" in said
    assert "--clip [0.0]" in said
    assert "--hypers.weight_decay: start 0.0, step 0.0004" in said


def test_the_package_is_a_command(tmp_path):
    words = [sys.executable, "-m", "longhorizon", "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: longhorizon")


def test_a_value_just_below_one_is_not_shown_as_one(tmp_path):
    hypers = ["--hypers.lr.start", "1e-3", "--hypers.beta2.start", "0.9999", "--hypers.beta2.learn", "false"]
    (tmp_path / "recipe.toml").write_text('[rule]\nname = "adam"\n[hypers.lr]\n[hypers.beta2]\n')
    done = call("tune", "recipe.toml", *hypers, "--steps", 3, "--outer-steps", 1, "--test-seeds", 0, cwd=tmp_path)
    assert "beta2          0.9999" in done.stdout
    assert "beta2 0.9999" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(tmp_path, command):
    assert f"longhorizon {command}" in call(command, "--help", cwd=tmp_path).stdout


def test_a_run_leaves_everything_a_user_needs(finished):
    run = finished / "run"
    names = {path.name for path in run.iterdir()}
    assert {"run.json", "journal.jsonl", "checkpoint.pt", "schedule.json", "best.json", "result.json"} <= names
    result = json.loads((run / "result.json").read_text())
    assert set(result["test"]) == {
        "learnt",
        "constant lr 0.1",
        "constant lr 0.1, momentum 0.9",
        "cosine from 0.1, momentum 0.9",
    }
    assert len(result["test"]["learnt"]["accuracy"]) == 2
    tomllib.loads(json.loads((run / "run.json").read_text())["recipe"])


def test_export_in_every_format(finished):
    space: dict = {}
    exec(call("export", "run", cwd=finished).stdout, space)
    values = json.loads((finished / "run/schedule.json").read_text())["hypers"]["lr"]["values"]
    assert space["hyperparameters"](11, 12)["lr"] == values[-1]
    assert json.loads(call("export", "run", "--format", "json", cwd=finished).stdout)["version"] == 2
    rows = call("export", "run", "--format", "csv", "--steps", 12, cwd=finished).stdout.splitlines()
    assert len(rows) == 13
    assert call("export", "run/best.json", cwd=finished).stdout == call("export", "run", "--best", cwd=finished).stdout


def test_resume_takes_more_outer_steps(finished):
    call("resume", "run", "--outer-steps", 3, cwd=finished)
    lines = (finished / "run/journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]


def test_more_outer_steps_are_still_more_when_it_is_killed_on_the_way(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    path = tmp_path / "run/run.json"
    content = json.loads(path.read_text())
    call("resume", "run", "--outer-steps", 4, cwd=tmp_path)
    recipe = json.loads(path.read_text())["recipe"]
    assert tomllib.loads(recipe)["outer_steps"] == 4
    assert json.loads(path.read_text()) == content | {"recipe": recipe}
    done = call("resume", "run", cwd=tmp_path)
    assert "4 outer steps" in done.stdout


def test_fewer_outer_steps_than_are_done_are_refused(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    done = call("resume", "run", "--outer-steps", 1, cwd=tmp_path, code=2)
    assert "--outer-steps 1: run has done" in done.stderr
    assert "give at least as many" in done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_an_outer_step_of_one_inner_step(tmp_path):
    done = call("tune", "--steps", 1, "--outer-steps", 2, "--hypers.lr.windows", 1, "--test-seeds", 0, cwd=tmp_path)
    assert "outer step 1/2" in done.stderr


OWN = """
import torch, longhorizon as lh
x = torch.ones(4, 3)

def task(loss):
    return lh.Task(lambda: torch.nn.Linear(3, 1), loss, lambda seed: [x] * 50, lambda seed: [x], test=lambda: [x])

def wrong():
    def loss(model, batch):
        inputs, targets = batch
    return task(loss)

def failing(error):
    taken = []
    def loss(model, batch):
        taken.append(batch)
        if len(taken) > 9:
            raise error
        return model(batch).square().mean()
    return task(loss)

def asserts():
    return failing(AssertionError())

def divides():
    return failing(ZeroDivisionError("nothing in it"))
"""


def test_an_error_in_the_user_s_code_says_where(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    said = call("tune", "--task", "mine:wrong", *SMALL, cwd=tmp_path, code=1).stderr
    line = OWN.splitlines().index("        inputs, targets = batch") + 1
    assert f"(mine.py, line {line}; ValueError; LONGHORIZON_DEBUG=1 shows where)" in said
    assert "Traceback" not in said
    line = OWN.splitlines().index("            raise error") + 1
    for name, words, kind in (("asserts", "", "AssertionError"), ("divides", "nothing in it ", "ZeroDivisionError")):
        said = call("tune", "--task", f"mine:{name}", "--engine", "forward", *SMALL, cwd=tmp_path, code=1).stderr
        assert f"longhorizon: {words}(mine.py, line {line}; {kind}; LONGHORIZON_DEBUG=1 shows where) The last" in said
        assert "Traceback" not in said


TESTED = """
import os, torch, longhorizon as lh
x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

def loss(model, batch, hypers):
    return (1 + hypers["push"]) * (model(batch) - 1).square().mean()

def test():
    with open("calls", "a") as file:
        file.write(".")
    if os.path.getsize("calls") == 4:  # a first look and two trainings of the learnt schedule are behind it
        raise KeyboardInterrupt
    return [x]

def task():
    return lh.Task(lambda: torch.nn.Linear(3, 1), loss, lambda seed: [x] * 50, lambda seed: [x], test=test,
                   val_loss=lambda model, batch: (model(batch) - 1).square().mean())
"""


def test_what_is_tested_is_kept_and_a_learnt_loss_compared(tmp_path):
    """The schedules off the shelf take what the loss reads at its start."""
    (tmp_path / "mine.py").write_text(TESTED)
    words = ["--hypers.lr.start", "0.1", "--hypers.push.start", "0.0", "--hypers.push.step", "0.1"]
    counts = ["--steps", "6", "--outer-steps", "1", "--test-seeds", "2"]
    done = call("tune", "--task", "mine:task", "--dir", "run", *words, *counts, cwd=tmp_path, code=130)
    assert "stopped while testing; what is tested, and the schedule, are in run" in done.stderr
    stopped = json.loads((tmp_path / "run/result.json").read_text())
    assert list(stopped["test"]) == ["learnt"]
    assert len(stopped["test_runs"]["learnt"]) == 2

    call("resume", "run", cwd=tmp_path)
    whole = json.loads((tmp_path / "run/result.json").read_text())
    assert len(whole["test"]) == 4
    assert whole["test"]["learnt"] == stopped["test"]["learnt"]
    assert len((tmp_path / "calls").read_text()) == 4 + 1 + 2 * 3  # nothing is trained twice

    done = call("resume", "run", cwd=tmp_path)
    assert len((tmp_path / "calls").read_text()) == 12  # a first look
    assert json.loads((tmp_path / "run/result.json").read_text()) == whole
    assert "testing" not in done.stderr
    assert "test, cosine" in done.stdout


TRIED = """
import os, torch, longhorizon as lh
x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))

def make(test=None, **parts):
    loss = lambda model, batch: (model(batch) - 1).square().mean()
    return lh.Task(lambda: torch.nn.Linear(3, 1), loss, lambda seed: [x] * 30, lambda seed: [x], test=test, **parts)

def sound():
    return make(lambda: [x])

def no_list():
    return make(lambda: (8, x))

def double():
    return make(lambda: [x.double()])

def late():
    return make(lambda: [x] if os.path.exists("mended") else [x, x.double()])
"""


@pytest.mark.parametrize(
    ("task", "more", "words"),
    [
        ("no_list", [], "first batch of Task.test, given to Task.loss; Task.test has to return a list of batches"),
        ("double", [], "This was the first batch of Task.test"),
        (
            "sound",
            ["--test-steps", 100],
            "30 batches, but the run has steps=100 and needs one each (no batch for step "
            "30); make the stream repeat, or lower `test_steps`. The test at the end would",
        ),
    ],
)
def test_a_test_that_would_fail_is_refused_before_tuning(tmp_path, task, more, words):
    (tmp_path / "mine.py").write_text(TRIED)
    given = ["tune", "--task", f"mine:{task}", *SMALL, "--dir", "run"]
    assert words in call(*given, "--test-seeds", 1, *more, cwd=tmp_path, code=1).stderr
    assert not (tmp_path / "run").exists()
    call(*given, *more, cwd=tmp_path)  # there is no test


def test_a_test_that_fails_late_says_that_it_alone_is_done_again(tmp_path):
    (tmp_path / "mine.py").write_text(TRIED)
    said = call("tune", "--task", "mine:late", "--dir", "run", *SMALL, "--test-seeds", 1, cwd=tmp_path, code=1).stderr
    assert "Task.test() has a batch 1 (from 0)" in said
    assert "the schedule is in run/schedule.json. Test it again, without tuning, with: longhorizon resume run" in said
    (tmp_path / "mended").touch()
    journal = (tmp_path / "run/journal.jsonl").read_bytes()
    assert "test, learnt" in call("resume", "run", cwd=tmp_path).stdout
    assert (tmp_path / "run/journal.jsonl").read_bytes() == journal


def test_the_deviation_of_one_test_is_not_known(tmp_path):
    words = ["--steps", "6", "--outer-steps", "1", "--test-seeds", "1", "--compare", "false", "--confirm", "0"]
    done = call("tune", "--dir", "run", *words, cwd=tmp_path)
    assert "1 outer step through 6 training steps each" in done.stdout + done.stderr
    assert "±" not in done.stdout
    mean, deviation = json.loads((tmp_path / "run/result.json").read_text())["test"]["learnt"]["accuracy"]
    assert f"accuracy {mean:.4f}\n" in done.stdout
    assert deviation is None
    said = json.loads(call("resume", "run", "--json", cwd=tmp_path).stdout.splitlines()[-1])
    assert said["test"]["learnt"]["accuracy"] == [mean, None]
    call("report", "run", cwd=tmp_path)
    assert "± 0" not in (tmp_path / "run/report.html").read_text(encoding="utf-8")


def test_a_result_that_is_not_finite_is_still_json(finished, tmp_path):
    words = ["--hypers.lr.start", "0.1", "--hypers.lr.high", "1e31", "--hypers.lr.step", "1e30", "--test-seeds", "2"]
    words += ["--confirm", "0"]  # or it would not be kept
    lines = call("tune", "--json", *SMALL, *words, cwd=tmp_path).stdout.splitlines()

    def refuse(name):
        raise AssertionError(name)

    result = json.loads(lines[-1], parse_constant=refuse)
    assert result["test"]["learnt"]["loss"][0] is None
    json.loads((tmp_path / "runs/digits-001/result.json").read_text(), parse_constant=refuse)


def test_json_is_one_object_per_line(tmp_path):
    lines = call("tune", "--json", *SMALL, cwd=tmp_path).stdout.splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events == ["start", "outer_step", "outer_step", "result"]
    assert json.loads(lines[0])["search_range"]["lr"] == [-0.2, 0.2]
    assert (tmp_path / "runs/digits-001/journal.jsonl").exists()


def test_plain_lines_when_not_a_terminal(tmp_path):
    done = call("tune", *SMALL, cwd=tmp_path)
    assert "outer step 2/2: validation loss" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout
    assert "lh.Schedule.load(" in done.stdout


def test_a_number_may_begin_or_end_with_its_point(tmp_path):
    words = ["--hypers.lr.start", "[.1, -.2, 1.]", "--hypers.momentum.start", ".5", "--hypers.momentum.low", "-1."]
    call("tune", "--dir", "r", *SMALL, *words, cwd=tmp_path)
    hypers = json.loads((tmp_path / "r/run.json").read_text())["settings"]["hypers"]
    assert hypers["lr"]["start"] == [0.1, -0.2, 1.0]
    assert (hypers["momentum"]["start"], hypers["momentum"]["low"]) == ([0.5], -1.0)


def test_a_recipe_from_init_runs_with_overrides_and_own_code(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    call("init", "r.toml", cwd=tmp_path)
    call("init", "r.toml", cwd=tmp_path, code=2)
    call("tune", "r.toml", "--model", "mine:make", "--dir", "out", *SMALL, cwd=tmp_path)
    recipe = tomllib.loads(json.loads((tmp_path / "out/run.json").read_text())["recipe"])
    assert recipe["model"] == "mine:make"
    assert recipe["hypers"]["lr"]["windows"] == 3


def test_an_own_task_is_tuned_with_steps_and_refuses_epochs(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch, longhorizon as lh\n"
        "def make():\n"
        "    x = torch.ones(4, 3)\n"
        "    return lh.Task(lambda: torch.nn.Linear(3, 1), lambda m, b: (m(b) - 1).square().mean(),\n"
        "                   lambda seed: [x] * 50, lambda seed: [x])\n"
    )
    call("tune", "--task", "mine:make", *SMALL, cwd=tmp_path)
    done = call("tune", "--task", "mine:make", "--epochs", 1, cwd=tmp_path, code=2)
    assert "epochs: the length of an epoch of your own task is unknown" in done.stderr
    assert (tmp_path / "runs/mine-001/journal.jsonl").exists()


def test_a_run_is_tested_in_its_own_precision(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch, longhorizon as lh\n"
        "from longhorizon import cuda\n"
        "x = torch.ones(4, 3)\n"
        "def test():\n"
        "    open('asked', 'a').write(f'{cuda._asked} ')\n"
        "    return [x]\n"
        "def make():\n"
        "    return lh.Task(lambda: torch.nn.Linear(3, 1), lambda m, b: (m(b) - 1).square().mean(),\n"
        "                   lambda seed: [x] * 50, lambda seed: [x], test=test)\n"
    )
    call("tune", "--task", "mine:make", "--precision", "tf32", *SMALL, "--test-seeds", "1", cwd=tmp_path)
    assert set((tmp_path / "asked").read_text().split()) == {"tf32"}


def test_a_run_in_float64_says_so_and_goes_on(tmp_path):
    call("init", "r.toml", cwd=tmp_path)  # writes float32 out
    call("tune", "r.toml", "--precision", "float64", "--dir", "run", *SMALL, cwd=tmp_path)
    content = json.loads((tmp_path / "run/run.json").read_text())
    assert content["settings"]["precision"] == content["environment"]["dtype"] == "float64"
    assert content["environment"]["hessian_product_error"] == 0.0
    assert tomllib.loads(content["recipe"])["dtype"] == "float64"
    call("resume", "run", "--outer-steps", 3, cwd=tmp_path)


def test_what_is_wrong_from_the_start_is_said_before_a_download(tmp_path):
    for words, says in (
        (["--steps", 2], "windows=5 but the run only steps=2"),
        (["--hypers.lrr.start", 0.1], "unknown hyperparameter 'lrr'"),
        (["--model", "lent"], "unknown model 'lent'"),
        (["--model", "gpt-1-32", "--init", "he"], "a GPT has only its own initialisation"),
    ):
        # nothing is there, and it could not be made: a download would be the first to fail
        done = call("tune", "--data", "mnist", "--data-root", "/dev/null/x", *words, cwd=tmp_path, code=2)
        assert says in done.stderr


def test_check_compares_the_engines(tmp_path):
    done = call("check", "--inner-steps", 4, cwd=tmp_path)
    assert "all engines agree" in done.stdout
    assert done.stdout.count("ok") == 4


def test_data_says_what_is_there(tmp_path):
    done = call("data", "digits", cwd=tmp_path)
    assert "digits: " in done.stdout
    done = call("data", "cifar10", "--data-root", tmp_path, cwd=tmp_path, code=1)
    assert str(tmp_path) in done.stdout


BAD_RECIPES = {
    "not toml": ("steps = ", "is no TOML"),
    "unknown key": ("outer_step = 3", "unknown key 'outer_step'. Did you mean 'outer_steps'?"),
    "wrong type": ('steps = "many"', "steps = 'many': expected a whole number or a list"),
    "bool for int": ("seed = true", "seed = True: expected a whole number"),
    "unknown hyper key": (
        "[hypers.lr]\nstart = 0.1\nwindow = 5",
        "hypers.lr: unknown key 'window'. Did you mean 'windows'?",
    ),
    "no start": ("[hypers.lr]\nwindows = 5", "hypers.lr has no start"),
    "unknown hyper": ("[hypers.lrr]\nstart = 0.1", "unknown hyperparameter 'lrr'"),
    "integer start": ("[hypers.lr]\nstart = 0", "write 0.0 if it is one"),
    "unknown rule": ('[rule]\nname = "sdg"', "unknown optimizer. Did you mean 'sgd'?"),
    "unknown rule argument": ('[rule]\nname = "sgd"\nnesterow = true', "Did you mean 'nesterov'?"),
    "unknown engine": ('engine = "forwards"', "engine = 'forwards'. Did you mean 'forward'?"),
    "unknown model": ('model = "wnr-16-1"', "unknown model 'wnr-16-1'"),
    "unknown data": ('data = "cifra10"', "cifar10"),
    "no such module": ('model = "nowhere:make"', "no module 'nowhere'"),
    "bad reference": ('model = "nowhere:"', "expected 'module:function'"),
    "windows": ("steps = 3", "windows=5 but the run only steps=3"),
    "fraction": ("val_fraction = 1.5", "val_fraction = 1.5"),
    "outer steps": ("outer_steps = 0", "outer_steps = 0: expected at least 1"),
    "device": ('device = "tpu9"', "device = 'tpu9'"),
    "growth": ("growth = 0.5", "growth = 0.5: expected 1, which is no growth, or more"),
    "outer rate": ("outer_rate = -1.0", "outer_rate = -1.0: expected a positive number"),
    "data": ('data = "cifar"', "Did you mean 'cifar10'?"),
    "data set": ('data = "imagenet"', "unknown data set 'imagenet'"),
    "precision": ('precision = "float16"', "precision = 'float16'. Did you mean"),
    "tf32": (
        'dtype = "float64"\nprecision = "tf32"',
        "precision = 'tf32' with dtype = 'float64': it stands in for float32; choose one of the two",
    ),
    "init": ('model = "wrn-10-1"\ninit = "xaver"', "init = 'xaver'. Did you mean 'xavier'?"),
    "init of a GPT": ('model = "gpt-1-32"\ninit = "he"', "a GPT has only its own initialisation"),
    "init of one's own": ('model = "shutil:rmtree"\ninit = "he"', "model = 'shutil:rmtree' initialises itself"),
    "init of an own task": ('task = "shutil:rmtree"\ninit = "he"', "task = 'shutil:rmtree' initialises itself"),
    "own code": ('task = "shutil:rmtree"', "missing 1 required positional argument"),
    "endless": ("epochs = inf", "epochs = inf: expected finite numbers"),
    "bounds": ("[hypers.lr]\nstart = 0.1\nlow = 0.2", "outside [0.2, inf]"),
}


@pytest.mark.parametrize("kind", BAD_RECIPES)
def test_a_bad_recipe_is_one_line(tmp_path, kind):
    text, words = BAD_RECIPES[kind]
    (tmp_path / "bad.toml").write_text(text)
    done = call("tune", "bad.toml", cwd=tmp_path, code=1 if kind == "own code" else 2)
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/journal.jsonl"))


USAGE = {
    "unknown command": (["tun"], "No such command 'tun'"),
    "missing file": (["tune", "none.toml"], "cannot read none.toml: No such file"),
    "stray word": (["tune", "--seed", "1", "--", "x", "y"], "y"),
    "key without value": (["tune", "--seed"], "--seed needs a value"),
    "unknown override": (["tune", "--steps", "9", "--outer-stepz", "3"], "Did you mean 'outer_steps'?"),
    "resume nowhere": (["resume", "none"], "none does not exist"),
    "report nowhere": (["report", "none"], "none does not exist"),
    "report a file": (["report", "/dev/null"], "/dev/null is a file, not the directory of a run"),
    "export nothing": (["export", "."], "is no run directory: it has no run.json"),
    "export format": (["export", ".", "--format", "xml"], "'xml' is not one of"),
    "export steps": (["export", ".", "--format", "csv", "--steps", "-5"], "-5 is not in the range x>=1"),
    "data name": (["data", "mnits"], "Did you mean 'mnist'?"),
}


@pytest.mark.parametrize("kind", USAGE)
def test_a_usage_error_is_one_line_and_exit_code_2(tmp_path, kind):
    words, message = USAGE[kind]
    done = call(*words, cwd=tmp_path, code=2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_an_existing_run_is_not_overwritten(finished):
    done = call("tune", "--dir", "run", *SMALL, cwd=finished, code=2)
    assert "longhorizon resume run" in done.stderr


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    words = ["tune", "--dir", "r", "--steps", "300", "--outer-steps", "2", "--test-seeds", "0"]
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "r/run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)  # into the inner loop
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "all is saved in r; go on with: longhorizon resume r" in said
    assert (tmp_path / "r/checkpoint.pt").exists()
    call("resume", "r", cwd=tmp_path)
    assert len((tmp_path / "r/journal.jsonl").read_text().splitlines()) == 2


def test_a_closed_pipe_is_no_traceback(finished):
    pipe = subprocess.Popen(
        [*COMMAND, "export", "run", "--format", "csv", "--steps", "200000"],
        cwd=finished,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with pipe:
        assert pipe.stdout.readline() == b"step,lr,momentum,weight_decay\n"
        pipe.stdout.close()
        said = pipe.stderr.read().decode()
    assert said == ""
