"""A recipe: what to tune, in a TOML file.

One frozen dataclass holds every setting with its default; `--key value` on the command line overrides a key of the
file, dotted for a table (`--hypers.lr.windows 7`). Unknown keys and values of the wrong type are errors.
"""

import importlib
import math
import os
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longhorizon import data, rules
from longhorizon.engines import Adjoint, Engine, Factorial, Forward, Greedy, Hybrid
from longhorizon.engines.clipping import Clip
from longhorizon.hypers import Hyper, nearest
from longhorizon.outer import GradientDescent, SignDescent, TorchOuter
from longhorizon.recipe_values import RecipeError, override, typed
from longhorizon.rules import Rule
from longhorizon.task import Task

RULES: dict[str, Callable[..., Rule]] = {"sgd": rules.sgd, "adam": rules.adam, "adamw": rules.adamw}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
ENGINES = ("auto", "forward", "adjoint", "greedy", "smoothed", "hybrid")
GATES = ("off", "wait", "shrink")
PRECISIONS = ("float32", "tf32", "bf16", "float64")
INITS = ("he", "xavier")
PROTOCOL = {"batch_size": 256, "val_fraction": 0.05}  # the paper's, for every built-in set but the digits
SMALL = 2_000_000  # parameters times examples in a batch
OUTERS = ("sign", "gradient", "adam")


def _default_hypers() -> dict[str, dict[str, Any]]:
    return {
        "lr": {"start": 0.0, "windows": 5, "step": 0.1, "low": -1.0, "high": 1.0},
        "momentum": {"start": 0.0, "step": 0.15, "low": -1.5, "high": 1.5},
        "weight_decay": {"start": 0.0, "step": 4e-4, "low": -4e-3, "high": 4e-3},
    }


def _setting(default: Any, doc: str, factory: Callable[[], Any] | None = None) -> Any:
    if factory is not None:
        return field(default_factory=factory, metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Recipe:
    """Every setting of a tuning run; the defaults are the embedded example."""

    # What is trained
    task: str = _setting("", "your own 'module:function' that returns a longhorizon.Task; replaces model and data")
    model: str = _setting("mlp-64", "a built-in model (mlp-64, lenet, wrn-16-1, resnet-18 …) or your 'module:function'")
    data: str = _setting("digits", "digits, mnist, svhn, cifar10 or cifar100")
    data_root: str = _setting("", "where data sets are; default: the variable LONGHORIZON_DATA, then the cache")
    batch_size: int = _setting(64, "training examples in a batch; 256 for other data than digits")
    val_fraction: float = _setting(
        0.2,
        "share of the training set held out for validation, anew in every outer step; 0.05 for other data than digits",
    )
    init: str = _setting("", "initialisation of a built-in model: he or xavier; default: its own")
    device: str = _setting("auto", "cpu, cuda, or auto")
    dtype: str = _setting("float32", "float32 or float64")
    precision: str = _setting(
        "float32",
        "of products: float32; tf32, on a GPU faster and rougher; bf16, on a GPU mixed precision for plain training "
        "runs side by side; or float64, which makes dtype so",
    )
    threads: int = _setting(0, "processor threads; 0: one for a small model, else as many as there are cores")
    rule: dict[str, Any] = _setting(
        None, "optimizer: name (sgd, adam, adamw) and its arguments", lambda: {"name": "sgd"}
    )
    # What is learnt, and how
    hypers: dict[str, dict[str, Any]] = _setting(
        None, "per name: start, windows, step, low, high, scale, params, learn", _default_hypers
    )
    steps: int | list[int] = _setting(200, "optimizer steps of a training run; a list gives one per outer step")
    epochs: float | list[float] = _setting(0.0, "the same in epochs; replaces steps when given")
    outer_steps: int = _setting(12, "hypergradients to take at most")
    outer: str = _setting("sign", "outer optimizer: sign (the paper's), gradient, or adam")
    outer_rate: float = _setting(0.1, "its rate, for gradient and adam")
    growth: float = _setting(1.0, "for sign: what an outer step size grows by while its sign stays; 1 for none")
    engine: str = _setting(
        "auto",
        "auto (adjoint, smoothed where doubted; in bf16 all smoothed), forward, adjoint, greedy, smoothed, or hybrid",
    )
    horizon: int = _setting(1, "how many steps ahead the greedy engine looks")
    clip: float | str = _setting(
        0.0, "elementwise bound on Hessian products (the paper's is 10), 'auto', or 0 for none (hybrid: its own)"
    )
    distance: float = _setting(1.0, "how far smoothed and hybrid shift a value, as a fraction of its outer step")
    pairs: int = _setting(0, "at least how many pairs of runs they train; 0: three more than values")
    gate: str = _setting("off", "what a doubted value does: off (moves all the same), wait, or shrink (its outer step)")
    seed: int = _setting(0, "of everything")
    seeds: int = _setting(1, "training runs that each hypergradient is averaged over")
    # Afterwards
    confirm: int = _setting(
        3, "plain trainings with the last values, and with the best, that decide which are kept; 0: the last"
    )
    test_seeds: int = _setting(
        5, "trainings from scratch with the result, on all training data, to test it; 0 for none"
    )
    test_steps: int = _setting(0, "optimizer steps of these; default: the longest of steps")
    compare: bool = _setting(True, "also test three schedules off the shelf (sgd only)")
    checkpoint_seconds: float = _setting(30.0, "how often a training run is saved on its way")


def load_recipe(path: str | os.PathLike[str] | None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a file (or the defaults), with overrides by dotted key."""
    content: dict[str, Any] = {}
    if path is not None:
        try:
            content = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise RecipeError(f"cannot read {path}: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(f"{path} is no TOML: {error}.") from None
    defaults: dict[str, dict[str, Any]] = {"rule": {"name": "sgd"}, "hypers": _default_hypers()}
    for key, value in (overrides or {}).items():
        override(content, key, value, defaults)
    return make_recipe(content, str(path) if path else "recipe")


def make_recipe(content: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """A recipe from the content of a file; names the key that is wrong, and the nearest right one."""
    known = {f.name: f for f in fields(Recipe)}
    given: dict[str, Any] = {}
    for key, value in content.items():
        if key not in known:
            raise RecipeError(f"{origin}: unknown key {key!r}.{nearest(key, list(known))}")
        given[key] = typed(key, value, known[key].type)
    for key in ("model", "task"):
        if ":" in str(given.get(key, "")):
            _split_reference(key, given[key])
    if not given.get("task") and _is_of_the_paper(given.get("data", "digits"), origin):
        given = PROTOCOL | given
    if given.get("precision") == "float64":
        given["dtype"] = "float64"
    recipe = Recipe(**given)
    _check(recipe, origin)
    return recipe


def _is_of_the_paper(name: str, origin: str) -> bool:
    try:
        return data.key_of(name) != "digits"
    except ValueError as error:
        raise RecipeError(f"{origin}: data = {name!r}: {error}") from None


def hypers_of(recipe: Recipe) -> dict[str, Hyper]:
    """The hyperparameters of a recipe."""
    known = [f.name for f in fields(Hyper)]
    made = {}
    for key, entry in recipe.hypers.items():
        if not isinstance(entry, Mapping):
            raise RecipeError(f"hypers.{key} = {entry!r}: expected a table, e.g. {{start = 0.0, windows = 5}}.")
        for name in entry:
            if name not in known:
                raise RecipeError(f"hypers.{key}: unknown key {name!r}.{nearest(name, known)}")
        if "start" not in entry:
            raise RecipeError(f"hypers.{key} has no start.")
        made[key] = Hyper(**entry)
    return made


def rule_of(recipe: Recipe) -> Rule:
    """The optimizer of a recipe."""
    arguments = dict(recipe.rule)
    name = arguments.pop("name", "sgd")
    if name not in RULES:
        raise RecipeError(f"rule.name = {name!r}: unknown optimizer.{nearest(str(name), list(RULES))}")
    grad_clip, clip_by = arguments.pop("grad_clip", None), arguments.pop("clip_by", None)
    known = [*RULES[name]().defaults, *RULES[name]().options]
    for argument in arguments:
        if argument not in known:
            raise RecipeError(f"rule.{argument}: {name} has no such argument.{nearest(argument, known)}")
    rule = RULES[name](**arguments)
    if clip_by is not None and (grad_clip is None or clip_by not in ("value", "norm")):
        raise RecipeError(f"rule.clip_by = {clip_by!r}: expected 'value' or 'norm', beside rule.grad_clip, the level.")
    return rule if grad_clip is None else rules.clipped(rule, grad_clip, clip_by or "value")


def engine_of(recipe: Recipe) -> Engine | str:
    """The engine of a recipe."""
    clip: Clip = "auto" if isinstance(recipe.clip, str) else recipe.clip or None
    if recipe.engine == "forward":
        return Forward(clip=clip)
    if recipe.engine == "adjoint":
        return Adjoint(clip=clip)
    if recipe.engine == "greedy":
        return Greedy(recipe.horizon, clip=clip)
    if recipe.engine == "smoothed":
        return Factorial(recipe.distance, recipe.pairs or None)
    if recipe.engine == "hybrid":
        return Hybrid(distance=recipe.distance, pairs=recipe.pairs or None, clip=clip or "auto")
    return "auto" if clip is None else Forward(clip=clip)  # the paper's clip is one of tangents


def outer_of(recipe: Recipe) -> Any:
    """The outer optimizer of a recipe."""
    if recipe.outer == "gradient":
        return GradientDescent(recipe.outer_rate)
    if recipe.outer == "adam":
        return TorchOuter(partial(torch.optim.Adam, lr=recipe.outer_rate))
    return SignDescent(growth=recipe.growth)


def task_of(recipe: Recipe, progress: Any = None) -> tuple[Task, int]:
    """The task of a recipe, and the optimizer steps of one epoch (0 if unknown)."""
    if recipe.task:
        task = _load(recipe.task, "task")()
        if not isinstance(task, Task):
            raise RecipeError(f"task = {recipe.task!r} returned {type(task).__name__}: expected a longhorizon.Task.")
        return task, 0
    model: Any = _load(recipe.model, "model") if ":" in recipe.model else recipe.model
    try:
        images = data.image_data(
            recipe.data,
            recipe.batch_size,
            recipe.val_fraction,
            device=None if recipe.device == "auto" else recipe.device,
            dtype=DTYPES[recipe.dtype],
            root=recipe.data_root or None,
            progress=progress,
        )
        return images.task(model, init=recipe.init or None), images.steps_per_epoch
    except ValueError as error:
        raise RecipeError(str(error)) from error


def threads_of(recipe: Recipe, task: Task) -> int:
    """Processor threads for a run: as the recipe says, or by the size of the model.

    Operations of a small model are over before a second thread has begun; on a busy machine waiting for it costs
    more than ten times the work.
    """
    if recipe.threads:
        return recipe.threads
    size = sum(p.numel() for p in task.model().parameters())
    return 1 if size * recipe.batch_size < SMALL else torch.get_num_threads()


def horizons_of(recipe: Recipe, steps_per_epoch: int) -> list[int]:
    """Inner steps per outer step."""
    epochs = recipe.epochs if isinstance(recipe.epochs, list) else [recipe.epochs]
    if not any(epochs):
        return recipe.steps if isinstance(recipe.steps, list) else [recipe.steps]
    if not steps_per_epoch:
        raise RecipeError("epochs: the length of an epoch of your own task is unknown; give steps instead.")
    return [max(1, round(e * steps_per_epoch)) for e in epochs]


def _check(recipe: Recipe, origin: str) -> None:
    choices: dict[str, tuple[Any, Any]] = {
        "engine": (recipe.engine, ENGINES),
        "outer": (recipe.outer, OUTERS),
        "dtype": (recipe.dtype, tuple(DTYPES)),
        "precision": (recipe.precision, PRECISIONS),
        "init": (recipe.init, ("", *INITS)),
        "gate": (recipe.gate, GATES),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            raise RecipeError(f"{origin}: {key} = {value!r}.{nearest(value, [a for a in allowed if a])}")
    for key, low in (
        ("outer_steps", 1),
        ("seeds", 1),
        ("batch_size", 1),
        ("confirm", 0),
        ("test_seeds", 0),
        ("test_steps", 0),
        ("threads", 0),
        ("pairs", 0),
    ):
        if getattr(recipe, key) < low:
            raise RecipeError(f"{origin}: {key} = {getattr(recipe, key)}: expected at least {low}.")
    if recipe.clip != "auto" and (isinstance(recipe.clip, str) or recipe.clip < 0 or math.isnan(recipe.clip)):
        raise RecipeError(f"{origin}: clip = {recipe.clip!r}: expected a bound, 'auto', or 0 for none.")
    if not 0 < recipe.distance < math.inf:
        raise RecipeError(f"{origin}: distance = {recipe.distance}: expected a positive fraction of the outer step.")
    if recipe.gate == "shrink" and recipe.outer != "sign":
        raise RecipeError(f"{origin}: gate = 'shrink' with outer = {recipe.outer!r}, which has no γ: use 'wait'.")
    if not 1 <= recipe.growth < math.inf:
        raise RecipeError(f"{origin}: growth = {recipe.growth}: expected 1, which is no growth, or more.")
    if not 0 < recipe.outer_rate < math.inf:
        raise RecipeError(f"{origin}: outer_rate = {recipe.outer_rate}: expected a positive number.")
    if not recipe.checkpoint_seconds >= 0:
        raise RecipeError(f"{origin}: checkpoint_seconds = {recipe.checkpoint_seconds}: expected at least 0.")
    if not 0 < recipe.val_fraction < 1:
        raise RecipeError(f"{origin}: val_fraction = {recipe.val_fraction}: expected a share between 0 and 1.")
    if recipe.precision in ("tf32", "bf16") and recipe.dtype == "float64":
        raise RecipeError(
            f"{origin}: precision = {recipe.precision!r} with dtype = 'float64': it stands in for float32; "
            "choose one of the two."
        )
    if recipe.init and (recipe.task or ":" in recipe.model):
        own = f"task = {recipe.task!r}" if recipe.task else f"model = {recipe.model!r}"
        raise RecipeError(f"{origin}: init = {recipe.init!r} is for built-in models; {own} initialises itself.")
    epochs = recipe.epochs if isinstance(recipe.epochs, list) else [recipe.epochs]
    if not all(map(math.isfinite, epochs)):
        raise RecipeError(f"{origin}: epochs = {recipe.epochs}: expected finite numbers.")
    if recipe.engine == "greedy" and recipe.horizon < 1:
        raise RecipeError(f"{origin}: horizon = {recipe.horizon}: expected at least 1.")
    if recipe.device != "auto":
        try:
            torch.empty(0, device=recipe.device)
        except (RuntimeError, AssertionError) as error:
            raise RecipeError(f"{origin}: device = {recipe.device!r}: {str(error).splitlines()[0]}") from None
    hypers_of(recipe)
    rule_of(recipe)


def _split_reference(key: str, text: str) -> tuple[str, str]:
    module, _, name = text.partition(":")
    if not module or not name:
        raise RecipeError(f"{key} = {text!r}: expected 'module:function'.")
    return module, name


def _load(reference: str, key: str) -> Callable[[], Any]:
    """The user's function behind 'module:function', found from the working directory too."""
    module, name = _split_reference(key, reference)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{key} = {reference!r}: no module {error.name!r} here or among installed packages."
        ) from None
    except Exception as error:
        raise RecipeError(
            f"{key} = {reference!r}: importing {module} failed ({type(error).__name__}: {error})."
        ) from error
    if not callable(getattr(found, name, None)):
        names = [n for n in vars(found) if callable(getattr(found, n)) and not n.startswith("_")]
        raise RecipeError(f"{key} = {reference!r}: {module} has no function {name!r}.{nearest(name, names)}")
    return getattr(found, name)  # type: ignore[no-any-return]
