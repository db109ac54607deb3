"""The pages in docs/ are right: their Python runs, their tables are up to date, their links lead somewhere."""

import importlib.util
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import longhorizon as lh
from longhorizon import recipe as recipes

ROOT = Path(lh.__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]
PACKAGE = Path(lh.__file__).parent

_spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
assert _spec is not None
assert _spec.loader is not None
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)


def blocks(page, kind):
    """The fenced blocks of a kind in a page, with the line that each begins on."""
    text = page.read_text()
    return [
        (text[: found.start(1)].count("\n"), found[1])
        for found in re.finditer(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S)
    ]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.name)
def test_python_runs(page, tmp_path, monkeypatch):
    """All blocks of a page, one after the other, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    space = {"__name__": "page"}
    for line, source in blocks(page, "python"):
        exec(compile("\n" * line + source, str(page), "exec"), space)


def test_python_that_is_not_run_is_rare():
    counts = {page.name: len(blocks(page, "python no-run")) for page in PAGES}
    assert sum(counts.values()) <= 3, counts
    for page in PAGES:
        for _, source in blocks(page, "python no-run"):
            compile(source, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_up_to_date(page):
    text = page.read_text()
    assert tables.rendered(text) == text, "run: python docs/tables.py"


def test_help_of_tables_writes_nothing(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tables.py", "--help"])
    monkeypatch.setattr(tables, "pages", lambda: pytest.fail("it looks at pages"))
    with pytest.raises(SystemExit) as end:
        tables.main()
    assert end.value.code == 0
    assert "--check" in capsys.readouterr().out


def test_every_recipe_key_is_documented():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "recipes.md").read_text(), re.M)
    assert set(rows) >= {f.name for f in fields(recipes.Recipe)}


def test_every_field_of_a_hyper_is_documented():
    text = (DOCS / "recipes.md").read_text()
    assert [f.name for f in fields(lh.Hyper) if f"| `{f.name}` |" not in text] == []


def test_every_field_of_a_journal_line_is_documented():
    text = (DOCS / "tuning.md").read_text()
    assert [f.name for f in fields(lh.OuterStep) if f"| `{f.name}` |" not in text] == []


def test_recipes_in_the_pages_are_valid():
    found = [(page.name, line, source) for page in PAGES for line, source in blocks(page, "toml")]
    assert found
    for name, line, source in found:
        recipes.make_recipe(tomllib.loads(source), f"{name}, line {line}")


def test_every_module_has_its_line_in_the_architecture():
    text = (DOCS / "architecture.md").read_text()
    modules = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert [name for name in modules if f"`{name}`" not in text] == []
    named = re.findall(r"`([a-z]+(?:/[a-z]+)?\.py)`", text)
    assert [name for name in named if name not in modules and not re.search(rf"not `{name}`", text)] == []


def anchors(page):
    """What a heading is called in a link."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page):
    for name in re.findall(r"`((?:benchmarks|examples|tests|docs|experiments|src)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


def test_the_schedule_file_in_the_pages_is_what_we_write():
    ((_, example),) = blocks(DOCS / "tuning.md", "json")
    content = json.loads(example)
    assert lh.Schedule.from_dict(content).to_dict() == content


def test_the_run_directory_has_the_documented_files(tmp_path):
    text = (DOCS / "tuning.md").read_text()
    task = lh.Task(
        lambda: torch.nn.Linear(2, 1),
        lambda model, batch: model(batch).square().mean(),
        lambda seed: [torch.ones(3, 2)] * 4,
        lambda seed: [torch.ones(3, 2)],
    )
    lh.tune(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=4, outer_steps=1, dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if f"`{path.name}`" not in text] == []
    described = re.search(r"### run.json\n(.*?)\n###", text, re.S)
    assert described is not None
    content = json.loads((tmp_path / "run.json").read_text())
    assert [key for key in content if f"| `{key}` |" not in described[1]] == []
