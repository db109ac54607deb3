"""The public face, and the rules of the house that a machine can check."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import longhorizon as lh

PACKAGE = Path(lh.__file__).parent

# Imports point one way: a module may import only modules further down this list (and the standard library, torch, numpy
# and what its extra names).
LAYERS = [
    ["__main__"],
    ["cli"],
    ["cli_compare", "cli_data", "cli_result", "cli_windows"],
    ["arguments", "console"],
    ["rivals"],
    ["checking", "report", "recorders", "export", "recipe_text"],
    ["html_page"],
    ["drawing"],
    ["figures"],
    ["recipe"],
    ["recipe_values"],
    ["data"],
    ["models"],
    ["offtheshelf", "run", "truth", "theory"],
    ["deciding"],
    ["confirming"],
    ["retraining"],
    ["rundir"],
    ["schedule"],
    ["attaching"],
    ["tuning"],
    ["averaging", "failing"],
    ["outer_step"],
    ["outer"],
    ["engines"],
    ["accuracy", "trust", "lanes"],
    ["problem"],
    ["first_look"],
    ["result", "compile", "traces"],
    ["simplify"],
    ["swaps"],
    ["columns", "lane_graph"],
    ["norm_graph"],
    ["halves"],
    ["nodes"],
    ["convolution", "lane_kernels", "norm_kernels"],
    ["kernels"],
    ["inner"],
    ["functional"],
    ["batches"],
    ["task", "rules", "hypers"],
    ["lane_norm"],
    ["tree", "seeds", "cuda", "meter", "normalise"],
    ["axes", "extras", "files", "stopping"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

ENGINE_LAYERS = [
    ["entry"],
    ["choose"],
    ["greedy", "hybrid"],
    ["adjoint", "forward", "difference", "factorial"],
    ["silent"],
    ["missing"],
    ["base", "vjp", "reader", "design"],
    ["clipping"],
]
ENGINE_RANK = {name: rank for rank, names in enumerate(ENGINE_LAYERS) for name in names}


def imports(path: Path) -> set[str]:
    """Dotted names of the package's own modules that a file imports when it runs, wherever in it."""
    found, tree = set(), ast.parse(path.read_text())
    for_types = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    left_out = {id(child) for n in for_types for child in ast.walk(n)}
    for node in (n for n in ast.walk(tree) if id(n) not in left_out):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("longhorizon.") for name in found if name.startswith("longhorizon.")}


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in RANK, f"{own} has no place in the layers"
    for name in imports(path):
        other = name.split(".")[0]
        if not (PACKAGE / f"{other}.py").exists() and not (PACKAGE / other).is_dir():
            continue  # a name in the package itself
        if other != own:
            assert RANK[other] > RANK[own], f"{own} imports {other}"


def test_engines_do_not_import_in_circles():
    for path in (PACKAGE / "engines").glob("*.py"):
        if path.stem == "__init__":
            continue
        assert path.stem in ENGINE_RANK, f"engines/{path.name} has no place in the layers"
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "engines" and parts[1] in ENGINE_RANK and parts[1] != path.stem:
                assert ENGINE_RANK[parts[1]] > ENGINE_RANK[path.stem], f"{path.stem} imports {parts[1]}"


def test_engines_know_no_optimizer_by_name():
    """Forward and adjoint are the JVP and VJP of the one inner step."""
    for path in [*(PACKAGE / "engines").glob("*.py"), PACKAGE / "inner.py", PACKAGE / "problem.py"]:
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"sgd", "adam", "adamw", "SgdState", "AdamState", "velocity"}, path.name


@pytest.mark.parametrize("name", lh.__all__)
def test_public_names_exist_and_say_what_they_are(name):
    thing = getattr(lh, name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        doc = inspect.getdoc(thing)
        assert doc, f"{name} has no docstring"
        assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclass makes"
        assert thing.__module__.startswith("longhorizon.")


def test_all_is_complete_and_without_repeats():
    assert len(set(lh.__all__)) == len(lh.__all__)
    public = {n for n, v in vars(lh).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == set(lh.__all__)


@pytest.mark.parametrize("name", sorted({"sgd", "adam", "adamw", "clipped", "hypergradient"}))
def test_arguments_are_documented(name):
    """Every one has a line of its own, behind the word that begins them."""
    thing = getattr(lh, name)
    _, _, said = inspect.getdoc(thing).partition("Args:\n")
    missing = [p for p in inspect.signature(thing).parameters if f"    {p}: " not in said]
    assert not missing


@pytest.mark.parametrize(
    "thing",
    [lh.Task, lh.Hyper, lh.Rule, lh.Forward, lh.Adjoint, lh.Greedy, lh.FiniteDifference, lh.Factorial, lh.Hybrid],
)
def test_fields_are_documented(thing):
    doc = inspect.getdoc(thing)
    missing = [p for p in inspect.signature(thing).parameters if p not in doc]
    assert not missing


def test_import_is_light():
    """Core dependencies are torch and numpy; nothing of the extras is loaded by `import longhorizon`."""
    heavy = [
        "sklearn",
        "rich",
        "click",
        "plotly",
        "matplotlib",
        "optuna",
        "scipy",
        "schedulefree",
        "prodigyopt",
        "tensorboard",
        "pandas",
        "higher",
        "torchopt",
    ]
    code = f"import sys, longhorizon; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version():
    import importlib.metadata

    assert importlib.metadata.version("longhorizon") == lh.__version__
