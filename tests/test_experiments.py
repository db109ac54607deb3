"""Every experiment runs at its size for tests; a killed one goes on and ends with the same result."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longhorizon import compile

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
VOLATILE = {"environment", "seconds", "tuning_seconds", "seconds_per_tuning_run"}
sys.path.insert(0, str(EXPERIMENTS))


def command(script, folder, *more):
    given = ["--smoke", "--out", folder / "result.json", "--work", folder / "work"]
    return [sys.executable, EXPERIMENTS / f"{script}.py", *given, *more]


def surroundings():
    room = {k: v for k, v in os.environ.items() if k != "LONGHORIZON_DATA"}  # digits, wherever this runs
    return room | {"OMP_NUM_THREADS": "1"}  # the tests run side by side


def run(script, folder, *more):
    done = subprocess.run(
        command(script, folder, *more), capture_output=True, text=True, timeout=600, env=surroundings()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """Run a script in this process, which saves the seconds that torch takes to load."""
    monkeypatch.delenv("LONGHORIZON_DATA", raising=False)

    def run(script, *more):
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, command(script, tmp_path, *more)[2:])])
        importlib.import_module(script).main()
        return json.loads((tmp_path / "result.json").read_text())

    return run


def lasting(content):
    """A result without what differs from run to run."""
    if isinstance(content, dict):
        return {key: lasting(value) for key, value in content.items() if key not in VOLATILE}
    return [lasting(value) for value in content] if isinstance(content, list) else content


def stopped(script, folder, ready, how, *more, leaves=False):
    """Start a script, and stop it when `ready` says so; whether it leaves a part of the result."""
    with subprocess.Popen(
        command(script, folder, *more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=surroundings()
    ) as process:
        for _ in range(6000):
            if ready() or process.poll() is not None:
                break
            time.sleep(0.02)
        process.send_signal(how)
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, f"it was done before it was stopped:\n{output}"
    assert (folder / "result.json").exists() == leaves
    return output


def drawn(folder, name, result, said=""):
    """Pictures and a row of the table from a result."""
    import plot
    import tables

    results = folder / "results"
    results.mkdir(exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(result))
    draw = next(draw for prefix, draw in plot.DRAW.items() if name.startswith(prefix))
    for figure in draw(result, results):
        plot.save_picture(figure, folder / f"{figure.name}.png")
        assert (folder / f"{figure.name}.png").stat().st_size > 5000
    assert tables.table(results).count("not run yet") < tables.table(folder / "nothing").count("not run yet")
    assert said in tables.table(results)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("appendix_b", "appendix-b"),
        ("figure2", "figure2-svhn"),
        pytest.param("figure3", "figure3", marks=pytest.mark.slow),
    ],
)
def test_smoke(script, name, tmp_path):
    result = run(script, tmp_path)
    assert result["experiment"] == name
    assert {"environment", "command", "settings", "seconds"} <= result.keys()
    assert result["command"] == f"python experiments/{script}.py --smoke"
    drawn(tmp_path, name, result)
    if script == "appendix_b":
        assert result["holds"]
        assert result["largest_ratio"]["uncorrelated"] == pytest.approx(1, abs=1e-3)
    elif script == "figure2":
        assert result["seeds"] == 4
        assert len(result["hypergradients"]["greedy"][0]) == result["settings"]["steps"] == 12
        assert result["greedy"]["same_sign"] == 1  # so few steps are all greedy
    else:
        assert set(result["sets"]) == {"mnist", "svhn"}
        fds = result["sets"]["svhn"]["methods"]["fds"]
        assert fds["windows"] < len(result["sets"]["svhn"]["methods"]["greedy"]["last"]) == 22
        assert all(status == "ok" for status in fds["status"])


def test_smoke_of_the_meters_bound(tmp_path):
    result = run("trust_bound", tmp_path)
    growths = result["exact_by_growth"]
    assert growths["0 to 1"]["right"] > 0.9 * growths["0 to 1"]["signs"]
    assert growths["100 to inf"]["right"] < 0.6 * growths["100 to inf"]["signs"]
    shares = result["clipped_by_share"]
    assert shares["0 to 1e-06"]["right"] > 0.9 * shares["0 to 1e-06"]["signs"]
    assert shares["0.003 to 0.01"]["right"] < 0.6 * shares["0.003 to 0.01"]["signs"]
    assert result["hybrid"].keys() == {"digits-edge", "digits-hot"}
    hot = result["hybrid"]["digits-hot"]
    assert hot["3"]["smoothed"] > hot["10"]["smoothed"]


def test_smoke_of_digits(tmp_path):
    result = run("digits", tmp_path)
    assert result["table"]["learnt"]["trainings"] == 4


@pytest.mark.parametrize("script", ["digits", "compare_digits"])
def test_smoke_of_the_example_leaves_the_committed_result_alone(script, tmp_path):
    """Without --out, all that a smoke writes is in the work folder."""
    if script == "compare_digits":
        pytest.importorskip("optuna")
    before = (EXPERIMENTS / "results" / f"{script}.json").read_bytes()
    picture = EXPERIMENTS.parent / "docs" / "images" / "compare_digits.png"
    seen = picture.read_bytes()
    done = subprocess.run(
        [sys.executable, EXPERIMENTS / f"{script}.py", "--smoke", "--work", tmp_path],
        capture_output=True,
        text=True,
        timeout=600,
        env=surroundings(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / f"{script}-smoke.json").read_text())
    assert result["experiment"] == script
    assert result["command"] == f"python experiments/{script}.py --smoke"
    assert len(result["table"]) > 4
    assert (tmp_path / "compare_digits-smoke.png").exists() == (script == "compare_digits")
    assert (EXPERIMENTS / "results" / f"{script}.json").read_bytes() == before
    assert picture.read_bytes() == seen


@pytest.mark.slow
def test_figure3_does_what_is_missing(tmp_path, inside):
    whole = inside("figure3", "--data", "mnist")
    path = tmp_path / "result.json"
    methods = {name: row for name, row in whole["sets"]["mnist"]["methods"].items() if name != "together"}
    methods["fds"]["windows"] = "kept"
    part = whole["sets"]["mnist"] | {"methods": methods}
    path.write_text(json.dumps(whole | {"sets": {"mnist": part}}))
    shutil.rmtree(tmp_path / "work")
    again = inside("figure3", "--data", "mnist", "--keep")["sets"]["mnist"]["methods"]
    assert list(again) == list(whole["sets"]["mnist"]["methods"])
    assert again["fds"]["windows"] == "kept"
    old, new = (dict(part["together"]) for part in (whole["sets"]["mnist"]["methods"], again))
    assert "--keep" in new.pop("made")["command"]
    assert "--keep" not in old.pop("made")["command"]
    assert lasting(new) == lasting(old)


def test_figure2_traces_once_whatever_the_number_of_seeds(inside, monkeypatch):
    """On a GPU each of these is compiled, which takes longer than a seed."""
    traced, trace = [], compile._trace

    def counted(fn, *rest):
        traced.append(fn.__qualname__)
        return trace(fn, *rest)

    monkeypatch.setattr(compile, "_trace", counted)
    result = inside("figure2", "--compile", "yes", "--seeds", "3")
    assert result["seeds"] == 3
    assert len(traced) == 3, traced  # the step, the step back, and greedy's validation


@pytest.mark.slow
def test_killed_figure2_goes_on_and_may_grow(tmp_path):
    once, again = tmp_path / "once", tmp_path / "again"
    expected = run("figure2", once)
    work = again / "work" / "figure2-svhn-smoke"
    stopped("figure2", again, lambda: len(list(work.glob("non_greedy-*.json"))) >= 2, signal.SIGKILL)
    kept = {path.name: path.stat().st_mtime_ns for path in work.glob("*greedy-*.json")}
    found = run("figure2", again)
    assert lasting(found) == lasting(expected)
    assert all((work / name).stat().st_mtime_ns == then for name, then in kept.items())  # nothing was done twice
    more = run("figure2", again, "--seeds", "5")
    assert more["hypergradients"]["non_greedy"][:4] == expected["hypergradients"]["non_greedy"]
    assert more["seeds"] == 5


def test_work_of_other_settings_is_refused(tmp_path):
    work = tmp_path / "work" / "appendix-b-smoke"
    work.mkdir(parents=True)
    (work / "settings.json").write_text('{"steps": 7}')
    done = subprocess.run(command("appendix_b", tmp_path), capture_output=True, text=True, env=surroundings())
    assert done.returncode != 0
    assert "made with other settings" in done.stderr


@pytest.mark.slow
def test_terminated_figure4_goes_on(tmp_path):
    once, again = tmp_path / "once", tmp_path / "again"
    expected = run("figure4", once)
    assert len(expected["outer_steps"]) == 2
    assert len(expected["learnt"]["lr"]) == 5
    assert {"learnt", "best"} == expected["test"].keys()
    drawn(tmp_path, "figure4", expected)
    journal = again / "work" / "figure4-smoke" / "tune" / "journal.jsonl"
    begun = lambda: journal.exists() and journal.stat().st_size > 0  # noqa: E731
    output = stopped("figure4", again, begun, signal.SIGTERM, leaves=True)
    assert "the same command goes on" in output
    part = json.loads((again / "result.json").read_text())
    assert len(part["outer_steps"]) == 1
    drawn(tmp_path, "figure4", part, "not done yet: 1 of 2 outer steps")
    elsewhere = tmp_path / "elsewhere"  # where only the result came to
    elsewhere.mkdir()
    shutil.copy(again / "result.json", elsewhere)
    for folder in (again, elsewhere):
        found = run("figure4", folder)
        assert [e["date"] for e in found.pop("earlier")] == [part["environment"]["date"]]
        assert lasting(found) == lasting(expected)


def test_table_is_that_of_the_results():
    import headers
    import tables

    for page in tables.PAGES:
        assert tables.rendered(page.read_text()) == page.read_text(), "run python experiments/tables.py"
    rows = tables.rows_of()
    assert max(len(row[3]) for row in rows if "noise and windows" in row[1]) < 110  # the rest has a table of its own
    assert tables.figure2().count("\n") == 2 + len(tables.FIGURE2)
    assert tables.figure2(EXPERIMENTS / "nothing").count("\n") == 2
    for script in headers.SCRIPTS:
        assert headers.rendered(script, rows) == script.read_text(), "run python experiments/tables.py"
    nothing = headers.ours("figure1.py", tables.rows_of(EXPERIMENTS / "nothing"))
    assert nothing.count("not run yet") == len(nothing.splitlines()) - 1 == 11


def test_help_of_tables_writes_nothing(monkeypatch, capsys):
    import tables

    monkeypatch.setattr(sys, "argv", ["tables.py", "--help"])
    monkeypatch.setattr(tables, "rendered", lambda text: pytest.fail("it looks at pages"))
    with pytest.raises(SystemExit) as end:
        tables.main()
    assert end.value.code == 0
    assert "--check" in capsys.readouterr().out


def test_figure1_is_that_of_its_entrants():
    """What is kept of each is all that the table is made of."""
    import contest
    import record

    from longhorizon.outer_step import plain
    from longhorizon.rivals.regret import table

    found = json.loads((record.RESULTS / "figure1.json").read_text())
    kept = contest.gathered(
        [contest.Entered.read(path) for path in sorted(contest.kept(record.RESULTS / "figure1-entrants"))]
    )
    assert [plain(vars(row)) for row in table(kept.evaluations, kept.tests, found["against"])] == found["table"]


def test_rival_of_figure4_is_shown_where_it_is_known(tmp_path):
    import tables

    found = json.loads((tables.RESULTS / "figure1.json").read_text())
    runs = [{"seed": s, "seconds": 60.0, "test": {"accuracy": [a]}} for s, a in enumerate((0.8, 0.82))]
    (tmp_path / "figure1.json").write_text(json.dumps(found | {"hd_from_zero": runs}))
    assert "81.0 ± 1.4 % (2 seeds)" in tables.table(tmp_path)
    (tmp_path / "figure1.json").write_text(json.dumps(found | {"hd_from_zero": []}))
    assert "hypergradient descent from zero, test accuracy" in tables.table(tmp_path)


def test_front_page_hides_no_seed(tmp_path):
    """One that is not done, or did badly, stands beside the score of the others."""
    import tables

    found = json.loads((tables.RESULTS / "figure1.json").read_text())
    label = next(row["method"] for row in found["table"] if row["method"].startswith("fds-hybrid"))
    found["waiting"] = [{"method": label, "seed": 7, "steps": 9250, "val_loss": 0.9, "accuracy": 0.836}]
    (tmp_path / "figure1.json").write_text(json.dumps(found))
    (row,) = [line for line in tables.front(tmp_path).splitlines() if "hybrid, not bounded" in line]
    assert "seed 7 is not tested yet: 83.6 %" in row
    assert "regret" not in row
    missing = tables.front(tmp_path / "nothing").splitlines()[-1]
    assert missing.startswith("Not run yet")
    assert missing.count("; ") == 9  # of ten


def test_commands_in_the_table_name_what_was_chosen():
    import figure1_rows

    card = {"engine": "forward", "clip": 10.0, "horizons": [1.0, 10.0], "precision": "float32"}
    assert figure1_rows._options(card) == ""  # as before there were gates
    changed = card | {"clip": None, "horizons": [1.0, 5.0], "precision": "tf32", "gate": "wait", "growth": 1.5}
    assert figure1_rows._options(changed) == " --clip 0 --horizons 1,5 --gate wait --growth 1.5 --precision tf32"
    assert figure1_rows._options(card | {"engine": "adjoint"}) == " --clip 10"
    cards = [{"seed": seed, "budget": "2 runs"} for seed in (1, 0)]
    assert figure1_rows._seeds(cards) == " --seeds 0,1 --budget '2 runs'"
    assert figure1_rows._seeds([{"seed": 0, "budget": figure1_rows.PLAIN}]) == ""


def test_scripts_need_no_extras():
    """Only plot.py draws, and only digits need scikit-learn: experiments run where torch and numpy are all there is."""
    for path in EXPERIMENTS.glob("*.py"):
        if path.name not in ("plot.py", "digits.py"):
            text = path.read_text()
            assert not any(f"import {name}" in text for name in ("matplotlib", "plotly", "rich", "sklearn", "click"))


def test_smoke_of_figure1_and_what_goes_with_it(tmp_path, inside, monkeypatch):
    """Entrants in several calls, and in all engines, come together in one result."""
    import plot
    import tables

    first = inside("figure1", "--methods", "fds,bohb")
    assert first["against"] is None
    assert {row["method"] for row in first["table"]} == {"fds-adjoint", "bohb"}
    grid = inside("appendix_f")
    drawn(tmp_path, "appendix-f", grid)
    assert grid["trainings"] == {"1": 135, "2": 45, "7": 15, "22": 5}
    assert grid["winner"]["lr"] in (0.05, 0.1, 0.2, 0.4, 0.6)
    assert grid["winner"]["decay"] in (0.1, 0.2, 0.4)
    inside("figure1", "--engine", "hybrid", "--test", "last")
    both = inside("figure1", "--engine", "forward", "--seeds", "0,1")
    labels = {row["method"]: row for row in both["table"]}
    assert labels.keys() == {"fds-adjoint", "fds-forward-clip10", "fds-hybrid", "bohb", "grid-halving"}
    assert labels["fds-forward-clip10"]["seeds"] == 2
    assert both["against"] == "grid-halving"
    assert labels["grid-halving"]["regret"] == 0
    learnt = {c["method"]: c["values"] for c in both["choices"] if c["seed"] == 0}
    assert learnt["fds-adjoint"] == learnt["fds-forward-clip10"]  # by the signs of the same hypergradients
    assert [s["steps"] for s in both["outer_steps"] if s["method"] == "fds-adjoint"] == [7, 7, 7, 22]
    folder = tmp_path / "work" / "figure1-smoke"
    (folder / "fds-adjoint-0" / "tests.jsonl").unlink()  # begun anew, and not as far as before
    assert inside("figure1", "--gather")["table"] == both["table"]
    shutil.rmtree(folder)
    again = inside("figure1", "--gather")  # from what was kept of each entrant
    assert lasting(again) | {"command": both["command"]} == lasting(both)
    kept = json.loads((tmp_path / "figure1-entrants" / "bohb-0.json").read_text())["evaluations"]
    inside("figure1", "--methods", "bohb", "--from-kept", "--budget", "16 runs")
    journal = [json.loads(line) for line in (folder / "bohb-0" / "journal.jsonl").read_text().splitlines()]
    assert journal[: len(kept)] == kept
    assert len(journal) > len(kept)
    assert "study.log" in {path.name for path in (folder / "bohb-0" / "bohb-0").iterdir()}
    anew = inside("figure1", "--from-kept")  # FDS begins anew
    again = next(row for row in anew["table"] if row["method"] == "fds-adjoint")
    assert again["score"] == labels["fds-adjoint"]["score"]
    hybrid = tmp_path / "figure1-entrants" / "fds-hybrid-0.json"
    (last,) = json.loads(hybrid.read_text())["tests"]
    tested = inside("figure1", "--engine", "hybrid", "--test-kept")
    row = next(row for row in tested["table"] if row["method"] == "fds-hybrid")
    now = json.loads(hybrid.read_text())
    assert last in now["tests"]
    assert len(now["tests"]) == sum(e["best"] for e in now["evaluations"]) > 1
    assert now["card"]["test"] == "all"
    assert len(now["card"]["tested"]) == 1  # where that was
    assert row["score"] == labels["fds-hybrid"]["score"]  # of its last choice
    with pytest.raises(SystemExit, match="--test-kept: fds-hybrid-5 is not among bohb-0, fds-adjoint-0"):
        inside("figure1", "--engine", "hybrid", "--test-kept", "--seeds", "5")
    signs = inside("figure1_signs", "--label", "fds-forward-clip10", "--at", "0,2")
    assert [(p["index"], p["steps"], p["values"]) for p in signs["points"]] == [(0, 7, 9), (2, 7, 9)]
    seen = next(s for s in both["outer_steps"] if (s["method"], s["index"]) == ("fds-forward-clip10", 2))
    followed = [row["followed"] for row in signs["points"][1]["rows"]["lr"]]
    assert followed == [(g > 0) - (g < 0) for g in seen["mean"]["lr"]]
    assert all(p["right"] <= p["sure"] <= p["values"] for p in signs["points"])
    (tmp_path / "results" / "figure1_signs.json").write_text(json.dumps(signs))
    module, asked = importlib.import_module("figure1_signs"), []
    measured = module.measured
    monkeypatch.setattr(
        module, "measured", lambda one, point, *more: asked.append(point.which) or measured(one, point, *more)
    )
    shutil.rmtree(tmp_path / "work" / "figure1_signs-smoke")  # what is known is in the result
    more = inside("figure1_signs", "--label", "fds-forward-clip10,fds-adjoint", "--seeds", "0", "--at", "2,0")
    assert {which[0] for which in asked} == {"fds-adjoint"}
    assert len(asked) == 2
    assert [p for p in more["points"] if p["method"] == "fds-forward-clip10"] == signs["points"]
    assert more["seconds"] > signs["seconds"]
    shutil.rmtree(tmp_path / "work" / "figure1_signs-smoke")
    with pytest.raises(SystemExit, match="--at 9: fds-adjoint has the outer steps 0 to 2"):
        inside("figure1_signs", "--label", "fds-adjoint", "--at", "9")
    with pytest.raises(SystemExit, match="--label nobody --seed 0: not in .*there is bohb"):
        inside("figure1_signs", "--label", "nobody")
    decay = inside("figure1_decay", "--decays", "0,1e-3")
    assert decay["rows"].keys() == {"0", "0.001"}
    assert decay["learnt"] == next(
        c["values"] for c in both["outer_steps"][::-1] if c["method"] == "fds-forward-clip10" and c["seed"] == 0
    )
    assert all(len(row["accuracy"]) == 2 for row in decay["rows"].values())
    (tmp_path / "results" / "figure1_decay.json").write_text(json.dumps(decay))
    rough = inside("figure1_bf16", "--labels", "fds-forward-clip10", "--seeds", "0,1")
    assert rough["change"] == 0  # on a CPU there is no difference
    assert rough["trainings"] == 4
    (tmp_path / "results" / "figure1_bf16.json").write_text(json.dumps(rough))
    with pytest.raises(SystemExit, match="--labels nobody --seeds 0,1,2: none is there; there is bohb"):
        inside("figure1_bf16", "--labels", "nobody")
    shutil.rmtree(folder)
    (tmp_path / "figure1-entrants").rename(tmp_path / "work" / "figure1-entrants")  # kept, but not beside --out
    assert inside("figure1_signs", "--label", "fds-forward-clip10", "--at", "0,2")["points"] == signs["points"]
    (tmp_path / "results" / "figure1.json").write_text(json.dumps(both))
    text = tables.table(tmp_path / "results")
    assert "regret 0.00 against the best of grid-halving" not in text  # the grid is no row of Figure 1
    assert "against the best of grid-halving" in text
    assert "fds-forward-clip10, outer step 3, on " in text
    assert "that are sure, " in text
    assert "| with weight decay 0, 0.001 |" in text
    figure, learnt = plot.figure1(both, tmp_path)
    for one in (figure, learnt):
        plot.save_picture(one, tmp_path / f"{one.name}.png")
    scored = [row for row in both["table"] if row["score"] is not None]  # a choice may diverge in its test
    assert len(scored) >= 4
    assert [len(panel.lines) for panel in figure.panels] == [len(scored), len(scored), 1]
    assert [len(panel.lines) for panel in learnt.panels] == [4, 4, 4, 3, 3]  # three engines; then all of them
    assert len(set(plot._colours(list(labels)))) == 5


def test_smokes_of_what_goes_with_figure1_make_it_first(tmp_path, inside):
    """As the page promises, each has a smoke: nothing has to be run before, or to be named."""
    rough = inside("figure1_bf16")
    assert [(row["label"], row["seed"]) for row in rough["rows"]] == [("fds-forward-clip10-growth1.5", 0)]
    assert inside("figure1_decay")["rows"].keys() == {"0", "0.0002", "0.0004", "0.0008"}
    folder = tmp_path / "work" / "figure1-smoke"
    made = (folder / "fds-forward-clip10-0" / "entrant.json").stat().st_mtime_ns
    assert [p["index"] for p in inside("figure1_signs")["points"]] == [1, 2]
    assert (folder / "fds-forward-clip10-0" / "entrant.json").stat().st_mtime_ns == made  # it was there already


def test_smoke_of_figure1_on_mnist(tmp_path, inside):
    """The same protocol at a size for a CPU: its own result, rows, picture and table on the front page."""
    import figure1_rows
    import plot
    import tables

    assert tables.front_mnist(tmp_path / "nothing").count("\n") == 2  # nothing but its head
    result = inside("figure1", "--data", "mnist", "--methods", "fds,grid", "--engine", "bounded")
    assert result["experiment"] == "figure1-mnist"
    assert result["against"] == "grid"
    assert result["settings"]["model"] == "mlp-32"
    assert {(s["method"], s["steps"]) for s in result["outer_steps"]} == {("fds-bounded", result["settings"]["steps"])}
    assert (tmp_path / "figure1-mnist-entrants" / "fds-bounded-0.json").exists()
    results = tmp_path / "results"
    results.mkdir()
    (results / "figure1-mnist.json").write_text(json.dumps(result))
    fds, grid = figure1_rows.rows_of_mnist(result)
    assert fds.command == "python experiments/figure1.py --data mnist --methods fds --engine bounded"
    assert fds.runs == 3
    assert fds.unfinished == ""
    assert grid.runs == 135
    assert "as good as the best of the grid" in tables.front_mnist(results)
    assert tables.table(results).count("| Figure 1, MNIST |") == 2
    names = [figure.name for figure in plot.figure1(result, results)]
    assert names == ["figure1-mnist", "figure1-mnist-learnt"]


@pytest.mark.slow
def test_terminated_figure1_goes_on(tmp_path):
    once, again = tmp_path / "once", tmp_path / "again"
    expected = run("figure1", once, "--methods", "fds,hd")
    journal = again / "work" / "figure1-smoke" / "fds-adjoint-0" / "journal.jsonl"
    output = stopped("figure1", again, journal.exists, signal.SIGTERM, "--methods", "fds,hd")
    assert "the same command goes on" in output
    found = run("figure1", again, "--methods", "fds,hd")
    for part in ("choices", "outer_steps"):
        assert without_clock(found[part]) == without_clock(expected[part])


def without_clock(rows):
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--methods", "fsd"), "--methods fsd: unknown method 'fsd'. Did you mean 'fds'?"),
        (("--seeds", "0,x"), "--seeds 0,x: expected numbers"),
        (("--horizons", "1,60"), "--horizons 1,60: expected epochs, more than 0 and at most 50"),
        (("--budget", "5"), "--budget '5': expected a unit too"),
        (("--clip", "-1"), "--clip -1: expected a positive bound"),
        (("--test-seeds", "0"), "--test-seeds 0: expected more than nothing"),
    ],
)
def test_figure1_refuses_before_any_work(given, said, tmp_path, inside):
    with pytest.raises(SystemExit) as stop:
        inside("figure1", *given)
    assert said in str(stop.value)
    assert not (tmp_path / "work").exists()


def test_smoke_of_figure4s_rival(tmp_path, inside):
    import tables

    result = inside("figure1", "--methods", "hd", "--seeds", "0,1", "--shared", "--budget", "3 runs")
    runs = result["hd_from_zero"]
    assert [run["seed"] for run in runs] == [0, 1]
    assert all(run["values"]["lr"][0] == 0 and run["values"]["lr"][-1] > 0 for run in runs)  # online
    (tmp_path / "figure1.json").write_text(json.dumps(result))
    row = next(line for line in tables.table(tmp_path).splitlines() if "from zero" in line)
    assert "(2 seeds) | `python experiments/figure1.py --methods hd --seeds 0,1 --budget '3 runs'` |" in row
    assert "a seed, device shared" in row


def script_in(name, folder, *more):
    """Run a script that keeps its result in its work folder."""
    words = [sys.executable, EXPERIMENTS / f"{name}.py", "--smoke", "--work", folder, *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, env=surroundings())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def truth_of_digits(tmp_path_factory):
    """The result of truth.py, on disk."""
    folder = tmp_path_factory.mktemp("truth")
    script_in("truth", folder, "--task", "digits-calm")
    return folder / "truth-digits-calm-smoke.json"


def test_smoke_of_truth(tmp_path, truth_of_digits):
    result = json.loads(truth_of_digits.read_text())
    assert result["experiment"] == "truth-digits-calm"
    assert result["scores"]["exact"]["values"] >= 3
    assert result["scores"]["exact"]["sign"] > 0.9  # thirty calm steps
    assert len(result["estimates"]["clip 10"]) == 4
    assert len(result["estimates"]["clip 10"][0]["clipped"]) == 5
    shutil.copy(truth_of_digits, tmp_path / "result.json")  # on another machine there is only the result
    more = run("truth", tmp_path, "--task", "digits-calm", "--seeds", "6")
    assert [e["date"] for e in more["earlier"]] == [result["environment"]["date"]]
    kept, added = result["by_seed"]["seeds"], more["by_seed"]["seeds"]
    assert len(added) == 6
    assert kept.items() <= added.items()
    assert more["truth"] != result["truth"]


def test_smoke_of_estimators(tmp_path, truth_of_digits):
    """They are judged by the truth that is there, and drawn."""
    shutil.copy(truth_of_digits, tmp_path)
    script_in("estimators", tmp_path, "--task", "digits-calm")
    result = json.loads((tmp_path / "estimators-digits-calm-smoke.json").read_text())
    truth = json.loads((tmp_path / "truth-digits-calm-smoke.json").read_text())
    assert result["scores"]["exact"] == pytest.approx(
        truth["scores"]["exact"], rel=0.01, nan_ok=True
    )  # scored from its mean and error as from its seeds
    for label in ("smoothed", "hybrid", "hybrid, not clipped", "adjoint, clip auto"):
        assert result["scores"][label]["sign"] > 0.9
    assert {"smoothed", "hybrid", "hybrid, not clipped"} <= result["cost"].keys()
    assert all(cost["runs"] > 0 for cost in result["cost"].values())
    assert 0 <= result["sure"]["smoothed"]["1.0"]["share"] <= 1
    import plot

    (tmp_path / "estimators-digits-calm.json").write_text(json.dumps(result))
    (figure,) = plot.trust({}, tmp_path)
    assert figure.panels[0].lines[0].labels[0] == "exact"
    plot.save_picture(figure, tmp_path / "trust.png")


def test_estimates_for_a_gpu_are_made_in_pieces(tmp_path, monkeypatch, capsys):
    """In any order, before the truth is there; exact ones are those that the hybrid began with."""
    monkeypatch.delenv("LONGHORIZON_DATA", raising=False)

    def call(script, *more):
        words = ["--smoke", "--work", tmp_path, "--device", "cpu", "--task", "cifar-5", *more]
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
        importlib.import_module(script).main()

    call("estimators", "--make", "hybrid, not clipped", "--make", "clip 10")
    made = sorted(path.name for path in (tmp_path / "estimators-cifar-5-smoke").glob("*-?.json"))
    assert made == ["clip 10-0.json", "clip 10-1.json", "hybrid, not clipped-0.json", "hybrid, not clipped-1.json"]
    call("estimators")
    assert "no truth yet" in capsys.readouterr().out
    call("truth")
    truth = json.loads((tmp_path / "truth-cifar-5-smoke.json").read_text())
    assert truth["estimates"] == {}
    call("estimators")
    result = json.loads((tmp_path / "estimators-cifar-5-smoke.json").read_text())
    assert {"exact", "clip 10", "smoothed", "hybrid", "adjoint, clip auto"} <= result["scores"].keys()
    assert "adjoint, clip auto" not in result["estimates"]  # what the hybrid begins with
    hybrid, exact = result["estimates"]["hybrid, not clipped"][0], result["estimates"]["exact"][0]
    assert exact["grad"] == hybrid.get("exact", hybrid["grad"])
    assert result["cost"].keys() == {"clip 10", "smoothed", "hybrid", "hybrid, not clipped"}
    call("estimators", "--keep", "--estimates", 3, "--make", "smoothed")  # more, to those that are there
    more = json.loads((tmp_path / "estimators-cifar-5-smoke.json").read_text())
    assert more["estimates_made"] == result["estimates_made"] | {"smoothed": 3}
    assert more["estimates"]["smoothed"][:2] == result["estimates"]["smoothed"]
    assert len({str(row["grad"]) for row in more["estimates"]["smoothed"]}) == 3
    call("estimators", "--keep", "--make", "smoothed, half the distance")  # not made unless it is asked for
    other = json.loads((tmp_path / "estimators-cifar-5-smoke.json").read_text())
    assert other["estimates_made"] == more["estimates_made"] | {"smoothed, half the distance": 2}
    with pytest.raises(SystemExit, match="nobody: --task cifar-5 has smoothed, hybrid, hybrid, not clipped, clip 10, "):
        call("estimators", "--make", "nobody")


def test_smoke_of_trust_tune(tmp_path):
    result = run("trust_tune", tmp_path, "--set", "digits", "--method", "paper", "--method", "hybrid, wait")
    assert result["table"].keys() == {"paper", "hybrid, wait"}
    assert result["runs"]["paper"][0]["inner_steps"] == 2 * 20
    assert result["runs"]["hybrid, wait"][0]["inner_steps"] == 2 * 2 * 20  # there and back, and calm
    assert 0 < result["table"]["paper"]["learnt"]["accuracy"] <= 1
    assert {row["kept"] for rows in result["runs"].values() for row in rows} <= {"learnt", "best"}
    again = run("trust_tune", tmp_path, "--set", "digits", "--method", "paper", "--keep")
    assert again["runs"] == result["runs"]  # nothing is tuned anew


def test_a_test_that_diverged_is_in_the_summary():
    import trust_tune

    row = {"accuracy": [0.1, 0.9], "loss": [None, 0.2]}
    rows = [{"learnt": row, "best": row, "kept": "best", "outer_steps": 1, "inner_steps": 1, "plain_runs": 1.0}] * 2
    assert trust_tune.summary(rows)["kept"] == {"accuracy": 0.5, "error": 0.0, "worst": 0.5, "loss": None}


def test_smoke_of_trust_windows(tmp_path):
    result = run("trust_windows", tmp_path, "--task", "digits-hot")
    (told,) = result["tasks"].values()
    assert told["values"] == 42
    assert told["steps"]["smoothed, shared"]["smoothed"] == 42
    assert told["steps"]["exact"]["smoothed"] == 0


def test_smoke_of_trust_steps(tmp_path):
    result = run("trust_steps", tmp_path, "--task", "digits-edge")
    steps = result["tasks"]["digits-edge"]["steps"]
    assert steps.keys() == {"the truth's", "exact", "clip 10", "adjoint, clip auto", "smoothed", "hybrid"}
    assert all(len(row["changes"]) == 2 for label, row in steps.items() if label != "the truth's")
    more = run("trust_steps", tmp_path, "--task", "digits-calm")
    assert more["tasks"].keys() == {"digits-calm", "digits-edge"}
    assert more["tasks"]["digits-edge"] == result["tasks"]["digits-edge"]


def test_a_step_is_against_the_signs():
    import trust_steps

    grad = {"lr": [1.0, -2.0, 0.0, None, 3.0], "momentum": [-1.0], "weight_decay": [5.0]}
    moved = trust_steps.stepped("digits-calm", grad)
    assert moved["lr"] == pytest.approx([0.035, 0.065, 0.05, 0.05, 0.035])
    assert moved["momentum"] == pytest.approx([0.525])
    assert moved["weight_decay"] == pytest.approx([5e-4])
    calm, wild = trust_steps.summary([0.5, 0.5], {"a": [0.4, 0.4]}), trust_steps.summary([0.5, 0.5], {"a": [None, 1e9]})
    assert calm["change"] == pytest.approx(-0.1)
    assert wild["change"] == pytest.approx(2.3026 - 0.5, abs=1e-3)
