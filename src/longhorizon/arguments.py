"""What the commands have in common: a recipe, its keys among the words of a command line, where a run goes."""

from pathlib import Path
from typing import Any

import click

from longhorizon import models
from longhorizon import recipe as recipes
from longhorizon.hypers import check_hypers
from longhorizon.inner import check_names
from longhorizon.recipe import Recipe
from longhorizon.recipe_values import RecipeError, parse_value

RECIPE = click.argument("recipe", required=False, type=click.Path(path_type=Path), metavar="[RECIPE.toml]")
EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True, "max_content_width": 130}


def file_or_key(recipe: Path | None, words: list[str]) -> tuple[Path | None, list[str]]:
    """Tell a recipe from a key: click takes the first free word for the recipe, even that of a `--key value` pair."""
    if recipe is not None and str(recipe).startswith("--"):
        return None, [str(recipe), *words]
    return recipe, words


def overrides(arguments: list[str]) -> dict[str, Any]:
    """`--key value` and `--key=value` pairs as a dictionary."""
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise click.UsageError(f"unexpected argument {word!r}; recipe keys are written --key value.")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise click.UsageError(f"--{key} needs a value.")
            value = rest.pop(0)
        found[key] = parse_value(value)
    return found


def check_early(recipe: Recipe) -> None:
    """Refuse what is wrong whatever the data are, before any are downloaded."""
    if recipe.task:
        return  # downloads nothing of ours, and may learn what we do not know
    hypers, rule = recipes.hypers_of(recipe), recipes.rule_of(recipe)
    try:
        if ":" not in recipe.model:
            models.make(recipe.model, init=recipe.init or None)
        check_names(rule, hypers, learnt_loss=False)
        if not recipe.epochs:
            check_hypers(hypers, min(recipes.horizons_of(recipe, 0)))
    except (TypeError, ValueError) as error:
        raise RecipeError(str(error)) from error


def next_directory(parent: Path, name: str) -> Path:
    """The first of NAME-001, NAME-002 … that is free."""
    taken = {path.name for path in parent.glob(f"{name}-*")} if parent.exists() else set()
    number = 1
    while f"{name}-{number:03d}" in taken:
        number += 1
    return parent / f"{name}-{number:03d}"
