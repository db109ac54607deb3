"""What the report says, read from its files. That it also renders is `test_report_browser.py`'s business."""

import json
import math
import re
import struct
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import longhorizon as lh
from longhorizon import drawing, figures
from longhorizon.axes import log_ticks, scale_of, symlog_ticks
from longhorizon.outer_step import best_of
from longhorizon.report import write_report
from records import SPEC, make_records, make_run

NASTY = '</script><img src=x onerror="alert(1)">&$x^{'


class Page(HTMLParser):
    """The page without its scripts and styles: text, tags, and the data of its figures."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.data, self._inside = "", [], "", ""
        self.rows, self.attributes = [], []
        self.feed(text)
        self.rows = [row for row in self.rows if row]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag in ("script", "style"):
            self._inside = dict(attrs).get("id", tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._inside = ""
        if tag == "table":
            self.rows.append([])

    def handle_data(self, data):
        if self._inside == "data":
            self.data += data
        elif not self._inside:
            self.text += data
            if self.rows and self.rows[-1]:
                self.rows[-1][-1] += data.strip()


@pytest.fixture
def whole():
    """Asked for by tests that want pictures and plotly.js."""


@pytest.fixture(autouse=True)
def _light(request, monkeypatch):
    """Most tests read the page alone: no pictures, and not the five megabytes of plotly.js."""
    if "whole" not in request.fixturenames:
        monkeypatch.setattr(drawing, "save_picture", lambda figure, path: path.write_bytes(b""))
        monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js */")


def report(path, **more):
    records = make_run(path, **more)
    page = Page(write_report(path).read_text(encoding="utf-8"))
    return records, page, json.loads(page.data)["panels"]


def size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


@pytest.mark.usefixtures("whole")
def test_files_and_sections(tmp_path):
    _, page, panels = report(tmp_path)
    for title in ("Learnt values", "Validation", "Hypergradients", "Step sizes γ", "Time", "Settings", "Environment"):
        assert title in page.text
    names = ["gamma", "hypergradients", "schedules", "time", "validation"]
    assert sorted(p.stem for p in (tmp_path / "report").iterdir()) == names
    assert all(min(size(p)) > 200 for p in (tmp_path / "report").iterdir())
    assert {key.rsplit("-", 1)[0] for key in panels} == set(names)
    assert not list(tmp_path.glob("*.part"))


def test_figure_four_has_every_schedule_and_the_result_is_bold(tmp_path):
    records, _, panels = report(tmp_path)
    lines = panels["schedules-0"]["data"]
    history = [r.values["lr"] for r in records] + [records[-1].next["lr"]]
    assert len(lines) == len(history)
    for line, values in zip(lines, history, strict=True):
        assert line["y"] == pytest.approx([*values.tolist(), float(values[-1])], rel=1e-5)
        assert (line["x0"], line["dx"], line["line"]["shape"]) == (0, 20, "hv")
    widths = [line["line"]["width"] for line in lines]
    assert widths[-1] > 2 * max(widths[:-1])
    assert len({line["line"]["color"] for line in lines}) == len(lines)
    (constant,) = panels["schedules-1"]["data"]
    assert constant["y"] == pytest.approx([float(r.values["momentum"]) for r in records] + [0.1875], rel=1e-5)


def test_hypergradients_are_window_means_and_gamma_is_after_the_step(tmp_path):
    records, page, panels = report(tmp_path)
    for w, line in enumerate(panels["hypergradients-0"]["data"]):
        assert line["y"] == pytest.approx([float(r.mean["lr"][w]) for r in records], rel=1e-5)
    for line in panels["gamma-1"]["data"]:
        assert line["y"] == pytest.approx([float(r.outer["gamma"]["momentum"]) for r in records], rel=1e-5)
    assert "80–100" in page.text  # the legend names the windows


def test_values_in_numbers(tmp_path):
    records, page, _ = report(tmp_path)
    cells = [row for row in page.rows if row[0] == "momentum"]
    assert cells[0][1:] == ["all", "0", "0.175", "0.1875"]  # start, best run, last
    assert len([row for row in page.rows if row[0] == "lr"]) == 5 + 1  # and one in the settings
    assert records[-1].val_loss == min(r.val_loss for r in records)


def test_diverged_steps_are_marked(tmp_path):
    _, page, panels = report(tmp_path, diverged=(1, 3))
    assert "2 diverged" in page.text
    assert page.attributes.count(("class", "bad")) == 2
    assert "non-finite loss at step 7" in page.text
    assert [s["x0"] for s in panels["validation-0"]["layout"]["shapes"]] == [2, 4]
    assert [s["x0"] for s in panels["validation-1"]["layout"]["shapes"]] == [3.0, 6.0]  # seconds
    assert panels["validation-0"]["data"][0]["y"] == [2.0, None, 0.666667, None]


def test_a_step_that_failed_in_part_is_no_divergence(tmp_path):
    (record,) = make_records(count=1)
    status = {"status": "non-finite tangent at step 3: clip H·Z."}
    make_run(tmp_path, count=0)
    lh.RunDirectory(tmp_path).append(type(record)(**{**vars(record), **status}))
    page = Page(write_report(tmp_path).read_text())
    assert "in part · non-finite tangent" in page.text
    assert "none diverged" in page.text


def test_the_best_run_is_that_of_best_json(tmp_path):
    """No mean of the seeds that survived, and no run whose hypergradient nobody knows."""
    first, second, third = make_records(count=3)
    survivors = replace(second, seeds=[1, 2], status="1 of 2 runs: non-finite loss at step 7: lower `lr`.")
    unknown = replace(third, mean={key: v * math.nan for key, v in third.mean.items()}, status="non-finite tangent")
    assert best_of([first, survivors, unknown]) is first
    assert best_of([first, second, third]) is third


def test_what_became_of_a_doubted_value(tmp_path):
    """One whose hypergradient is not known stays where it is, with or without a gate."""
    moved, lost = make_records(count=2, diverged=(1,))
    make_run(tmp_path, count=0)
    for record, doubt in ((moved, "amplified 2e+01 times"), (lost, "not finite")):
        lh.RunDirectory(tmp_path).append(replace(record, doubts={"lr": [""] * 4 + [doubt], "momentum": [""]}))
    page = Page(write_report(tmp_path).read_text())
    rows = [row for row in page.rows if row[1:2] == ["lr 5"]]
    assert [row[2:4] for row in rows] == [["amplified 2e+01 times", "moved"], ["not finite", "left"]]


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("hypers", "count", "diverged"),
    [
        pytest.param(SPEC, 0, (), id="not yet a step"),
        pytest.param(SPEC, 1, (), id="one step"),
        pytest.param(SPEC, 1, (0,), id="one step, diverged"),
        pytest.param({"lr": lh.Hyper(0.01, scale="log")}, 3, (), id="one constant"),
        pytest.param({"lr": lh.Hyper(0.1, windows=200)}, 3, (1,), id="as many windows as steps"),
        pytest.param({"lr": lh.Hyper(0.1, windows=3), "momentum": lh.Hyper(0.9, learn=False)}, 2, (), id="one fixed"),
        pytest.param({f"lr/{i}": lh.Hyper(0.1) for i in range(7)}, 2, (), id="many groups"),
        pytest.param(SPEC, 90, (), id="many steps"),
    ],
)
def test_every_kind_of_run_renders(tmp_path, hypers, count, diverged):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    _, page, panels = report(tmp_path, hypers=hypers, count=count, diverged=diverged)
    plots = [value for name, value in page.attributes if name == "id" and value in panels]
    assert sorted(plots) == sorted(panels)
    assert bool(panels) == bool(count)
    for panel in panels.values():  # plotly knows every property we use
        graph_objects.Figure({key: panel[key] for key in ("data", "layout")})
        assert len(panel["data"]) <= figures.LINES
    if not count:
        assert "No outer step has finished yet" in page.text


def test_fixed_hyperparameters_are_in_the_table_but_not_in_the_figures(tmp_path):
    hypers = {"lr": lh.Hyper(0.1), "momentum": lh.Hyper(0.9, learn=False)}
    _, page, panels = report(tmp_path, hypers=hypers)
    assert [row for row in page.rows if row[0] == "momentum (fixed)"]
    assert "schedules-1" not in panels


@pytest.mark.usefixtures("whole")
def test_large_runs_stay_small_and_nothing_is_there_twice(tmp_path):
    make_run(tmp_path, hypers={"lr": lh.Hyper(0.1, windows=200)}, count=30)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs()
    assert text.count(script[:4000]) == 1
    assert len(text) - len(script) < 400_000  # 3 · 30 · 200 numbers, the table, the page


def test_hypergradients_of_all_sizes_get_a_readable_axis(tmp_path):
    records = make_records(count=5)
    for i, record in enumerate(records):
        record.mean["lr"][:] = torch.tensor([-1.0, 1, -2, 3, 1]) * 10.0 ** (6 * i - 6)
    panel = figures.hypergradients({"hypers": {}}, records).panels[0]
    assert panel.scale == "symlog"
    texts = [text for _, text in panel.ticks]
    assert "0" in texts
    assert 5 <= len(texts) <= 11
    made = drawing.interactive(panel)
    assert made["symlog"] == panel.linear_below
    assert made["data"][0]["y"][-1] == -1e18  # raw: the page maps it


@pytest.mark.usefixtures("whole")
def test_everything_from_the_user_is_escaped(tmp_path):
    hypers = {f"lr/{NASTY}": lh.Hyper(0.1, windows=2, params=NASTY)}
    make_run(tmp_path, hypers=hypers, recipe=NASTY, metrics=(NASTY, "<b>"))
    scores = {"loss": [0.1, 0.01], NASTY: [0.5, 0.1]}
    (tmp_path / "result.json").write_text(json.dumps({"test": {NASTY: scores}, "seconds": {NASTY: 1.0}}))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    page = Page(text)
    assert "img" not in page.tags
    assert page.tags.count("script") == 3
    assert page.text.count(NASTY) >= 8
    assert NASTY not in text
    assert "<img" not in page.data
    for panel in json.loads(page.data)["panels"].values():  # plotly reads some HTML itself
        assert "<img" not in json.dumps(panel)


def test_the_page_allows_no_request(tmp_path):
    make_run(tmp_path)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'")
    assert "http" not in policy[1]
    assert not [v for k, v in Page(text).attributes if k in ("src", "href") and v != "data:,"]


def test_test_results(tmp_path):
    make_run(tmp_path)
    result = {
        "test": {
            "learnt": {"loss": [0.0721, 0.006], "accuracy": [0.981, 0.003]},
            "constant 0.1": {"loss": [math.nan, math.nan]},
            "odd": 3,
            "short": {"accuracy": [0.5]},
        },
        "test_steps": 500,
        "converged": True,
        "seconds": 8.0,
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    page = Page(write_report(tmp_path).read_text())
    panels = json.loads(page.data)["panels"]
    rows = {row[0]: row[1:] for row in page.rows}
    assert rows["learnt"] == ["0.0721 ± 0.006", "98.10 ± 0.30 %"]
    assert rows["constant 0.1"] == ["–", "–"]
    assert rows["short"] == ["–", "50.00 %"]
    assert panels["test-1"]["data"][0]["x"] == pytest.approx([98.1, 50.0])
    assert panels["time-1"]["data"][0]["x"] == pytest.approx([6.0, 2.0])  # in outer steps, and around them
    assert "for 500 steps" in page.text
    assert "none diverged, converged" in page.text
    assert (tmp_path / "report" / "test.png").exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"test": 4}', '{"test": {"learnt": {"loss": []}}}', '{"seconds": []}']
)
def test_a_result_that_makes_no_sense_is_left_out(tmp_path, content):
    make_run(tmp_path, count=1)
    (tmp_path / "result.json").write_text(content)
    assert "test-0" not in Page(write_report(tmp_path).read_text()).data


def test_elsewhere(tmp_path):
    make_run(tmp_path / "run", count=1)
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    assert write_report(tmp_path / "run", tmp_path / "a" / "b") == tmp_path / "a" / "b" / "report.html"
    assert (tmp_path / "a" / "b" / "report" / "schedules.png").exists()
    assert write_report(tmp_path / "run", tmp_path / "page.html").is_file()
    assert (tmp_path / "page" / "schedules.png").exists()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before


def test_no_run_and_no_place(tmp_path):
    with pytest.raises(lh.RunError, match="does not exist"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(lh.RunError, match=r"no run\.json"):
        write_report(tmp_path)
    make_run(tmp_path / "run", count=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(lh.RunError, match="cannot write"):
        write_report(tmp_path / "run", tmp_path / "file" / "report.html")


@pytest.mark.parametrize("package", ["plotly", "matplotlib"])
def test_missing_package_names_the_extra(tmp_path, monkeypatch, package):
    import importlib

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: real("no_such" if name == package else name))
    with pytest.raises(ImportError, match=rf'{package} is missing: pip install "longhorizon\[report\]"'):
        write_report(tmp_path)


def test_the_library_does_not_import_what_draws(tmp_path):
    import subprocess
    import sys

    code = "import sys, longhorizon.report; print({'plotly', 'matplotlib', 'optuna'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("values", "wish", "scale"),
    [
        ([], "auto", "linear"),
        ([0.0, 0.0], "auto", "linear"),
        ([1.0, 2.0], "auto", "linear"),
        ([0.01, 2.0], "auto", "log"),
        ([0.0, 0.01, 0.02, 2.0], "auto", "symlog"),
        ([0.01, 2.0], "linear", "linear"),
        ([1.0, 1.1], "log", "log"),
        ([-1.0, 1.1], "log", "linear"),
        ([-1e-3, 1e-3, 5.0], "symlog", "symlog"),
    ],
)
def test_scales(values, wish, scale):
    assert scale_of(values, wish) == scale


@pytest.mark.parametrize(
    ("low", "high"), [(0.1, 0.1), (0.013, 0.1), (2e-4, 4e-4), (0.0094, 0.15), (1e-12, 1e9), (0.012, 1.3)]
)
def test_log_ticks_cover_and_are_few(low, high):
    ticks = [value for value, _ in log_ticks(low, high)]
    assert 2 <= len(ticks) <= 9
    assert ticks == sorted(ticks)
    if high / low <= 100:
        assert ticks[0] <= low * 1.01
        assert ticks[-1] >= high * 0.99


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-1e20, 1e20), (0.0, 5.0), (-5.0, -0.1), (-1e-3, 1e12)])
def test_symlog_ticks_are_few_and_apart(low, high):
    ticks = symlog_ticks(low, high, 1e-3)
    values = [value for value, _ in ticks]
    assert values == sorted(set(values))
    assert 0.0 in values
    assert 3 <= len(values) <= 12
    assert len({text for _, text in ticks}) == len(ticks)


@pytest.mark.parametrize("step", [2, 4])
def test_a_test_of_earlier_values_is_not_shown_as_that_of_the_last(tmp_path, step):
    records = make_run(tmp_path)
    schedule = {key: v.tolist() for key, v in records[step - 1].next.items()}
    result = {"schedule": schedule, "outer_steps": step, "converged": True, "seconds": 1e6}
    (tmp_path / "result.json").write_text(json.dumps(result | {"test": {"learnt": {"accuracy": [0.9592, 0.01]}}}))
    (tmp_path / "report").mkdir()
    (tmp_path / "report/test.png").write_bytes(b"of an earlier report")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    current = step == 4
    for shown in ("95.92", "converged", "around them"):
        assert (shown in page.text + page.data) == current, shown
    assert ("is about the values after outer step 2, not about these" in page.text) != current
    assert (tmp_path / "report/test.png").exists() == current
