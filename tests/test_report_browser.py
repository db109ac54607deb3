"""The report in a real browser: every figure is drawn, nothing complains, nothing is asked of the network."""

import json

import pytest

import browser
import longhorizon as lh
from longhorizon import drawing
from longhorizon.axes import symlog
from longhorizon.report import write_report
from records import SPEC, make_run

pytestmark = pytest.mark.skipif(browser.COMMAND is None, reason="Chromium is missing: apt-get install chromium")

RUNS = {
    "usual": {"hypers": SPEC, "count": 6, "recipe": "</script><script>window.stranger = 1</script>"},
    "diverged": {"hypers": {"lr": lh.Hyper(0.1, windows=3)}, "count": 6, "diverged": (0, 2), "growth": 1e4},
    "per step": {"hypers": {"lr": lh.Hyper(0.1, windows=200)}, "count": 3},
    "begun": {"count": 0},
}
# Per plot: marks that a reader can see (lines, points, bars), and how wide it is.
LOOK = """[...document.querySelectorAll('.plot')].map((plot) => [
    plot.id,
    [...plot.querySelectorAll('.js-line, .point')].filter((e) => e.getBoundingClientRect().width > 0).length,
    plot.querySelectorAll('.xtick').length,
    plot.querySelector('.main-svg')?.getBoundingClientRect().width ?? 0,
])"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    made = {}
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(drawing, "save_picture", lambda figure, path: None)
    for name, content in RUNS.items():
        path = tmp_path_factory.mktemp("runs") / name
        make_run(path, **content)
        if name == "usual":
            scores = {"learnt": {"loss": [0.1, 0.01], "accuracy": [0.98, 0.01]}, "constant": {"loss": [0.2, 0.02]}}
            (path / "result.json").write_text(json.dumps({"test": scores, "seconds": 12.0}))
        made[name] = write_report(path)
    monkeypatch.undo()
    return made


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("name", RUNS)
def test_renders(chromium, pages, name, width):
    chromium.open(pages[name], width)
    assert chromium.complaints() == []
    assert chromium.requests() == []
    plots = chromium.evaluate(LOOK)
    expected = chromium.evaluate("Object.keys(JSON.parse(document.getElementById('data').textContent).panels)")
    assert [plot[0] for plot in plots] != [] or name == "begun"
    assert sorted(plot[0] for plot in plots) == sorted(expected)
    for identity, marks, ticks, wide in plots:
        assert marks > 0, identity
        assert ticks > 1 or identity.startswith("time"), identity
        assert 200 < wide <= width, identity
    assert chromium.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
    assert chromium.evaluate("typeof window.stranger") == "undefined"


def test_lines_are_where_the_values_are(chromium, pages):
    """The map of the symlog axis is written twice: in Python, for the ticks, and in the page."""
    chromium.open(pages["diverged"])
    drawn = chromium.evaluate("document.getElementById('hypergradients-0').data.map((t) => [t.customdata, t.y])")
    data = json.loads(chromium.evaluate("document.getElementById('data').textContent"))
    threshold = data["panels"]["hypergradients-0"]["symlog"]
    records = lh.RunDirectory(pages["diverged"].parent).journal()
    for window, line in enumerate(drawn):
        raw = [float(r.mean["lr"][window]) for r in records if r.status == "ok"]
        told, drawn_at = ([v for v in part if v is not None] for part in line)
        assert told == pytest.approx(raw, rel=1e-5)
        assert drawn_at == pytest.approx([symlog(v, threshold) for v in raw], rel=1e-4)
    assert chromium.evaluate("document.querySelectorAll('#validation-0 .shapelayer path').length") == 2


def test_the_browser_would_tell(chromium, tmp_path):
    """The checks above can fail: a page that throws, complains, and asks for something."""
    page = tmp_path / "bad.html"
    page.write_text("<script src='other.js'></script><script>console.error('oh'); missing()</script>")
    chromium.open(page)
    assert any("oh" in c for c in chromium.complaints())
    assert any("missing is not defined" in c for c in chromium.complaints())
    assert [url.rsplit("/", 1)[1] for url in chromium.requests()] == ["other.js"]
