"""`longhorizon compare`: the command, and what a person sees while it runs."""

import json
import sys
import time
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

import longhorizon as lh
from longhorizon import recipe as recipes
from longhorizon import recipe_text
from longhorizon.arguments import EXTRA, RECIPE, check_early, file_or_key, next_directory, overrides
from longhorizon.console import arriving
from longhorizon.outer_step import plain
from longhorizon.recipe import Recipe
from longhorizon.recipe_values import RecipeError
from longhorizon.rivals.arena import Arena
from longhorizon.rivals.driver import KIND, Comparison, Watcher, result_of
from longhorizon.rivals.ledger import Evaluation, Ledger, incumbents
from longhorizon.rivals.page import head, words
from longhorizon.rivals.registry import USUAL
from longhorizon.rivals.regret import table
from longhorizon.rivals.space import hypers_for
from longhorizon.rivals.testing import Which, read_tests

BUDGET = "30 runs"


def options(command: Any) -> Any:
    """What `compare` takes besides a recipe and its keys."""
    for option in reversed(
        [
            click.option("--methods", default=",".join(USUAL), show_default=True, help="Names, or 'all'."),
            click.option(
                "--budget",
                default=BUDGET,
                show_default=True,
                help="Of each method with each seed: '300s', '5m', '20 runs' or '4000 steps'.",
            ),
            click.option("--repeats", default=1, show_default=True, help="Runs of every method, with other seeds."),
            click.option("--workers", default=1, show_default=True, help="Processes per black-box method."),
            click.option(
                "--test",
                default="all",
                show_default=True,
                type=click.Choice(["all", "whole", "last", "none"]),
                help="Which choices to train on all data and test; whole: those of whole runs, and the last.",
            ),
            click.option(
                "--dir", default="", help="Where to keep it.  [default: the next free runs/NAME-compare-NUMBER]"
            ),
            click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout, for machines."),
        ]
    ):
        command = option(command)
    return command


@click.command(context_settings=EXTRA)
@click.pass_context
@RECIPE
@options
def compare(context: click.Context, recipe: Path | None, dir: str, as_json: bool, **plan: Any) -> None:
    """Compare ways to find hyperparameters on equal terms: FDS, black-box search, grids, schedules off the shelf.

    Takes the recipe keys of `tune`. Methods: fds, random, bo, hyperband, bohb, hd, greedy, grid, grid-halving,
    constant, cosine, multistep, onecycle, schedulefree, prodigy.
    """
    recipe, words = file_or_key(recipe, context.args)
    chosen = recipes.load_recipe(recipe, overrides(words))
    name = recipe.stem if recipe else chosen.task.partition(":")[0] or chosen.data
    path = Path(dir).expanduser() if dir else next_directory(Path("runs"), f"{name}-compare")
    if (path / "run.json").exists() and not is_comparison(path):
        raise lh.RunError(f"{path} holds a tuning run; choose another directory.")
    run(chosen, path, as_json=as_json, **plan)


def is_comparison(dir: Path) -> bool:
    """Whether a directory holds a comparison and not a tuning run."""
    return bool(lh.RunDirectory(dir).describe()["settings"].get("kind") == KIND)


def winner(dir: Path) -> tuple[lh.Schedule, str]:
    """What the best method of a comparison chose, with the seed whose choice has the lowest loss; and its name."""
    evaluations = Ledger(dir / "journal.jsonl").all()
    ranked = [row for row in table(evaluations, read_tests(dir / "tests.jsonl")) if row.score is not None]
    if not ranked:
        raise lh.RunError(f"{dir} is a comparison in which nothing was found yet; go on with: longhorizon resume {dir}")
    last = {e.seed: e for e in incumbents(evaluations) if e.method == ranked[0].method}
    best = min(last.values(), key=lambda e: e.val_loss)
    named = f"{best.method}, seed {best.seed}, trial {best.trial + 1}"
    text = lh.RunDirectory(dir).describe().get("recipe")
    if not best.values or not text:
        why = "was begun from Python" if best.values else f"was won by {best.method}, which has nothing to set"
        raise lh.RunError(f"{dir} is a comparison that {why}: what was chosen is in {dir / 'journal.jsonl'} ({named}).")
    recipe = recipes.make_recipe(tomllib.loads(text), str(dir))
    rule = recipes.rule_of(recipe)
    hypers = hypers_for(best.values, recipes.hypers_of(recipe), rule, best.steps)
    return lh.Schedule.of(hypers, {key: hyper.values() for key, hyper in hypers.items()}, rule), named


def plan_of(dir: Path) -> dict[str, Any]:
    """What a comparison was last asked for."""
    try:
        content = json.loads((dir / "plan.json").read_text())
    except (OSError, ValueError) as error:
        raise lh.RunError(
            f"{dir / 'plan.json'} cannot be read ({error}); call compare again with --dir {dir}."
        ) from None
    return {**content, "methods": ",".join(content["methods"])}


def run(
    chosen: Recipe,
    path: Path,
    *,
    methods: str,
    budget: str,
    repeats: int,
    workers: int,
    test: Which,
    as_json: bool,
) -> None:
    """Compare, show it, and say what came out."""
    began = time.monotonic()
    names = [name.strip() for name in methods.split(",") if name.strip()]
    show = _Json() if as_json else _Live() if sys.stderr.isatty() else _Plain()
    hypers, rule = recipes.hypers_of(chosen), recipes.rule_of(chosen)
    check_early(chosen)
    with arriving() as progress:
        task, per_epoch = recipes.task_of(chosen, progress)
    chosen = replace(chosen, threads=recipes.threads_of(chosen, task))
    torch.set_num_threads(chosen.threads)
    try:
        found = lh.compare(
            task,
            rule,
            hypers,
            steps=recipes.horizons_of(chosen, per_epoch),
            budget=budget,
            methods=names,
            outer_steps=chosen.outer_steps,
            outer=recipes.outer_of(chosen),
            engine=recipes.engine_of(chosen),
            seed=chosen.seed,
            seeds=chosen.seeds,
            gate=chosen.gate,  # type: ignore[arg-type]
            repeats=repeats,
            epoch=per_epoch,
            horizon=chosen.horizon,
            workers=workers,
            test="none" if chosen.test_seeds == 0 else test,
            test_seeds=max(1, chosen.test_seeds),
            precision=chosen.precision,  # type: ignore[arg-type]
            dir=path,
            checkpoint_seconds=chosen.checkpoint_seconds,
            recipe=recipe_text.to_toml(chosen),
            watcher=Watcher(show.method, show.evaluation, show.progress, show.note),
        )
    except lh.Interrupted as stop:
        show.stop()
        raise lh.Interrupted(stop.where, f"go on with: longhorizon resume {path}") from None
    except (TypeError, ValueError) as error:
        raise RecipeError(" ".join([str(error), *getattr(error, "__notes__", ())])) from error
    finally:
        show.stop()
    result = result_of(found, time.monotonic() - began)
    lh.RunDirectory(path).save_json("result.json", plain(result))
    if as_json:
        print(json.dumps({"event": "result", "dir": str(path), **plain(result)}))
    else:
        _show(found, path)
    if found.failed:
        sys.exit(1)


def _show(found: Comparison, path: Path) -> None:
    """The table, and which tests failed."""
    rows = found.table()
    cells = [head(rows), *(words(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print(
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        )
    for why, count in Counter(t.status for t in found.failed).items():
        one = next(t for t in found.failed if t.status == why)
        print(f"{count} of {len(found.tests)} tests FAILED, as of {one.method}, seed {one.seed}: {why}")
    if found.failed:
        print(f"so the scores are of validation; when that is mended, test again with: longhorizon resume {path}")
    print(f"all of it is in {path}")
    print(f"look at it:  longhorizon report {path}")


class _Json:
    """One JSON object per evaluation on stdout."""

    def method(self, name: str, seed: int, arena: Arena) -> None: ...

    def evaluation(self, e: Evaluation) -> None:
        print(json.dumps({"event": "evaluation", **e.to_dict()}), flush=True)

    def progress(self, arena: Arena, done: int) -> None: ...

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def stop(self) -> None: ...


class _Plain:
    """A line per method, per better setting and per failure, and one now and then between."""

    every = 15.0  # seconds

    def __init__(self) -> None:
        self._spoke = time.monotonic()

    def method(self, name: str, seed: int, arena: Arena) -> None:
        known = len(arena.past())
        self.note(f"{name}, seed {seed}" + (f": {known} evaluations are there already" if known else ""))

    def evaluation(self, e: Evaluation) -> None:
        if e.best or e.status.startswith("crashed"):
            self.note(one_line(e))

    def progress(self, arena: Arena, done: int) -> None:
        if time.monotonic() - self._spoke < self.every:
            return
        past = arena.past()
        share = 100 * (1 - max(0.0, arena.purse.left) / arena.purse.whole)
        self.note(f"{arena.method}, seed {arena.seed}: {len(past)} evaluations, {share:.0f} % of the budget")

    def note(self, text: str) -> None:
        self._spoke = time.monotonic()
        print(text, file=sys.stderr, flush=True)

    def stop(self) -> None: ...


class _Live:
    """A bar per method, filled as its budget is spent."""

    refresh = 0.1  # seconds

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn

        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description:>18}"), BarColumn(bar_width=30), TextColumn("{task.fields[said]}"))
        self.bars = Progress(*columns, console=self.console)
        self._drawn, self._bar, self._best, self._count = 0.0, TaskID(0), "", 0
        self._started = False

    def method(self, name: str, seed: int, arena: Arena) -> None:
        if not self._started:
            self.bars.start()
            self._started = True
        past = arena.past()
        self._count = len(past)
        self._best = next((_short(e) for e in reversed(past) if e.best), "")
        self._bar = self.bars.add_task(f"{name}, seed {seed}", total=arena.purse.whole, said=self._best)
        self.progress(arena, 0)

    def evaluation(self, e: Evaluation) -> None:
        self._count += 1
        if e.best:
            self._best = _short(e)
        self.bars.update(self._bar, said=f"{self._count} evaluations, best {self._best}")
        if e.status.startswith("crashed"):
            self.note(one_line(e))

    def progress(self, arena: Arena, done: int) -> None:
        now = time.monotonic()
        if now - self._drawn >= self.refresh:
            self._drawn = now
            self.bars.update(self._bar, completed=arena.purse.whole - arena.purse.left)

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        if self._started:
            self.bars.stop()
            self._started = False


def _short(e: Evaluation) -> str:
    metrics = "".join(f", {name} {value:.4g}" for name, value in e.metrics.items())
    return f"loss {e.val_loss:.4g}{metrics}"


def one_line(e: Evaluation) -> str:
    """An evaluation in words."""
    if e.status.startswith("crashed"):
        return f"{e.method}, trial {e.trial + 1} {e.status}"
    at = f"{e.total_seconds:.1f} s, {e.total_steps} steps"
    return f"{e.method}, trial {e.trial + 1}, {e.steps} steps of training: validation {_short(e)} (after {at})"
