"""The command line. The only file, with console.py, that parses arguments or prints."""

import json
import os
import sys
import time
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import torch

import longhorizon as lh
from longhorizon import cli_compare as comparing
from longhorizon import export as exporting
from longhorizon import recipe as recipes
from longhorizon import recipe_text
from longhorizon.arguments import EXTRA, RECIPE, check_early, file_or_key, next_directory, overrides
from longhorizon.checking import check_engines
from longhorizon.cli_data import data
from longhorizon.cli_result import conclude, write_result
from longhorizon.cli_windows import windows
from longhorizon.console import arriving, make_display
from longhorizon.outer_step import OuterStep
from longhorizon.recipe import Recipe
from longhorizon.recipe_values import RecipeError
from longhorizon.report import write_report
from longhorizon.retraining import check_test
from longhorizon.rivals.page import write_page
from longhorizon.tuning import Tuning

_DEBUG = "LONGHORIZON_DEBUG"  # set it to see tracebacks
_OURS = Path(__file__).parent


def main() -> None:
    """Entry point: errors become one line and an exit code (2 for a wrong call, 1 for a failed run, 130 for Ctrl-C)."""
    try:
        sys.exit(cli(standalone_mode=False, prog_name="longhorizon") or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        _die(f"{error.format_message()} Try 'longhorizon --help'.", 2)
    except (RecipeError, lh.RunError) as error:
        _die(str(error), 2)
    except (KeyboardInterrupt, click.Abort) as error:
        # click turns our Interrupted, a KeyboardInterrupt, into an Abort
        _die(str(error.__cause__) if isinstance(error.__cause__, lh.Interrupted) else "interrupted", 130)
    except BrokenPipeError:  # the reader of our output went away; nothing is wrong with the run
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, TypeError, KeyError, RuntimeError, ImportError, OSError) as error:
        _die(_said(error), 1)
    except (LookupError, AttributeError, AssertionError, ArithmeticError) as error:
        if not _place(error):  # nothing that we say on purpose
            raise
        _die(_said(error), 1)


def _said(error: Exception) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    return " ".join([f"{text}{_place(error)}".strip(), *getattr(error, "__notes__", ())])


def _place(error: BaseException) -> str:
    """Where an error came from that is not our own: the last line of the user's code, and how to see more."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename).is_relative_to(_OURS):
        return ""  # our own words say what is wrong
    outside = (_OURS, Path(sys.prefix), Path(sys.base_prefix), Path(torch.__file__).parent)
    theirs = [f for f in frames if os.path.exists(f.filename) and not _within(f.filename, outside)]
    where = f"{os.path.relpath(theirs[-1].filename)}, line {theirs[-1].lineno}; " if theirs else ""
    return f" ({where}{type(error).__name__}; {_DEBUG}=1 shows where)"


def _within(filename: str, folders: tuple[Path, ...]) -> bool:
    return any(Path(filename).is_relative_to(folder) for folder in folders)


def _die(text: str, code: int) -> None:
    if os.environ.get(_DEBUG):
        traceback.print_exc()
    print(f"longhorizon: {text}", file=sys.stderr)
    sys.exit(code)


def _settings_help() -> str:
    """Every recipe key with its default, for `tune --help`."""
    default = Recipe()
    rows = ["Recipe keys (in the file, or as --key value; tables are dotted: --hypers.lr.windows 7):", "", "\b"]
    for f in fields(Recipe):
        value = getattr(default, f.name)
        shown = ", ".join(value) if f.name == "hypers" else value.get("name") if f.name == "rule" else value
        name = {"rule": "rule.name", "hypers": "hypers.NAME.KEY"}.get(f.name, f.name.replace("_", "-"))
        head = f"--{name} [{shown if shown != '' else 'none'}]"
        rows.append(f"{head:<28} {f.metadata['doc']}" if len(head) < 29 else f"{head}\n{'':<28} {f.metadata['doc']}")
    rows.append("")
    rows.append("\b")
    for key, entry in default.hypers.items():
        rows.append(f"--hypers.{key}: " + ", ".join(f"{k} {v}" for k, v in entry.items()))
    return "\n".join(rows)


_DIR = click.argument("dir", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout, for machines.")


def _recorded(command: Callable[..., None]) -> Callable[..., None]:
    """Options for writing a run down elsewhere too."""
    command = click.option(
        "--optuna-storage", default="", metavar="URL", help="Also record the run as an Optuna study there."
    )(command)
    return click.option("--tensorboard", is_flag=True, help="Also write TensorBoard events into the directory.")(
        command
    )


@click.group(help="Tune the hyperparameters of a whole training run with gradients.")
@click.version_option(lh.__version__, message="%(version)s")
def cli() -> None:
    """Collect the commands."""


cli.add_command(comparing.compare)
cli.add_command(windows)
cli.add_command(data)


@cli.command(context_settings=EXTRA, epilog=_settings_help())
@click.pass_context
@RECIPE
@click.option("--dir", default="", help="Where to keep the run.  [default: the next free runs/NAME-NUMBER]")
@_JSON
@_recorded
def tune(
    context: click.Context, recipe: Path | None, dir: str, as_json: bool, tensorboard: bool, optuna_storage: str
) -> None:
    """Learn a schedule, from a recipe or (without one) for the embedded example: an MLP on scikit-learn's digits."""
    recipe, words = file_or_key(recipe, context.args)
    chosen = recipes.load_recipe(recipe, overrides(words))
    name = recipe.stem if recipe else chosen.task.partition(":")[0] or chosen.data
    path = Path(dir).expanduser() if dir else next_directory(Path("runs"), name)
    if lh.RunDirectory(path).begun:
        raise lh.RunError(f"{path} holds a run already; go on with it by 'longhorizon resume {path}'.")
    _tune(chosen, path, as_json, tensorboard, optuna_storage)


@cli.command()
@_DIR
@click.option(
    "--outer-steps", default=0, type=click.IntRange(0), help="Go on to this many outer steps.  [default: as begun]"
)
@_JSON
@_recorded
def resume(dir: Path, outer_steps: int, as_json: bool, tensorboard: bool, optuna_storage: str) -> None:
    """Go on with a run or a comparison that was stopped, killed, or (a run) is to take more outer steps."""
    if comparing.is_comparison(dir):
        if outer_steps:
            raise click.UsageError(f"{dir} is a comparison: its outer steps define the search, and stay.")
        comparing.run(_recipe_of(dir), dir, as_json=as_json, **comparing.plan_of(dir))
        return
    done = len(lh.RunDirectory(dir).journal())
    if 0 < outer_steps < done:
        raise click.UsageError(f"--outer-steps {outer_steps}: {dir} has done {done} already; give at least as many.")
    _tune(_recipe_of(dir, outer_steps), dir, as_json, tensorboard, optuna_storage)


@cli.command()
@_DIR
@click.option("--out", type=click.Path(path_type=Path), help="Where to write the page.  [default: DIR/report.html]")
def report(dir: Path, out: Path | None) -> None:
    """Write one HTML page and PNGs that show a run or a comparison."""
    print((write_page if comparing.is_comparison(dir) else write_report)(dir, out))


@cli.command()
@_DIR
@click.option("--format", default="python", show_default=True, type=click.Choice(["python", "json", "csv"]))
@click.option("--best", is_flag=True, help="The best by validation loss instead of what was kept.")
@click.option(
    "--steps", default=1000, show_default=True, type=click.IntRange(1), help="csv: length of the run to write out."
)
def export(dir: Path, format: str, best: bool, steps: int) -> None:
    """Print the learnt schedule (of a run, or in a schedule file) as plain Python, JSON or CSV.

    Of a comparison it prints what won.
    """
    schedule = _schedule(dir, best)
    text = {
        "python": lambda: exporting.to_python(schedule),
        "json": lambda: json.dumps(schedule.to_dict(), indent=2) + "\n",
        "csv": lambda: exporting.to_csv(schedule, steps),
    }[format]()
    sys.stdout.write(text)


def _schedule(path: Path, best: bool) -> lh.Schedule:
    if path.is_dir() or not path.exists():
        if comparing.is_comparison(path):
            schedule, named = comparing.winner(path)
            print(f"{path} is a comparison; this is what won it: {named}", file=sys.stderr)
            return schedule
        path = path / ("best.json" if best else "schedule.json")
    if not path.exists():
        raise lh.RunError(f"{path} is not there: no outer step is done yet, or it was deleted; resume writes it again.")
    return lh.Schedule.load(path)


@cli.command(context_settings=EXTRA)
@click.pass_context
@RECIPE
@click.option("--inner-steps", default=8, show_default=True, help="How many training steps to differentiate through.")
@_JSON
def check(context: click.Context, recipe: Path | None, inner_steps: int, as_json: bool) -> None:
    """Check the engines against each other and against finite differences, on your own recipe, in float64."""
    recipe, words = file_or_key(recipe, context.args)
    with arriving() as progress:
        rows, passed = check_engines(recipes.load_recipe(recipe, overrides(words)), inner_steps, progress)
    if as_json:
        print(json.dumps({"passed": passed, "rows": rows}))
    else:
        for row in rows:
            print(f"{row['engine']:<28} {row['error']:<10} {row['verdict']}")
        print("all engines agree" if passed else "the engines DISAGREE")
    if not passed:
        sys.exit(1)


@cli.command()
@click.argument("path", default="recipe.toml", type=click.Path(path_type=Path))
def init(path: Path) -> None:
    """Write a commented recipe to start from."""
    if path.exists():
        raise click.UsageError(f"{path} exists already; choose another name.")
    path.write_text(recipe_text.template())
    print(f"wrote {path}; edit it, then run: longhorizon tune {path}")


def _recipe_of(dir: Path, outer_steps: int = 0) -> Recipe:
    """The recipe that a run was begun with."""
    text = lh.RunDirectory(dir).describe().get("recipe")
    if not text:
        raise lh.RunError(f"{dir} was begun from Python, not from a recipe: call longhorizon.tune again to go on.")
    content = tomllib.loads(text)
    if outer_steps:
        content["outer_steps"] = outer_steps
    return recipes.make_recipe(content, str(dir))


def _tune(chosen: Recipe, path: Path, as_json: bool, tensorboard: bool, optuna_storage: str) -> None:
    hypers, rule = recipes.hypers_of(chosen), recipes.rule_of(chosen)
    display = make_display(as_json)
    began = time.monotonic()
    check_early(chosen)
    with arriving() as progress:
        task, per_epoch = recipes.task_of(chosen, progress)
    horizons = recipes.horizons_of(chosen, per_epoch)
    _check_run(chosen, task, rule, hypers, horizons)
    # Settled now and written down: another number of threads may round differently.
    chosen = replace(chosen, threads=recipes.threads_of(chosen, task))
    torch.set_num_threads(chosen.threads)
    if task.test is not None and chosen.test_seeds:
        steps, fewer = chosen.test_steps or max(horizons), f"lower `{'test_steps' if chosen.test_steps else 'steps'}`"
        check_test(task, rule, hypers, steps, fewer=fewer, precision=chosen.precision)  # type: ignore[arg-type]
    recorders = _recorders(chosen, hypers, path, tensorboard, optuna_storage)
    shown = False
    done: set[int] = set()  # outer steps of this process

    def inner(tuning: Tuning) -> None:
        nonlocal shown
        if not shown:
            display.start(tuning)
            shown = True
        display.inner(tuning)

    def outer(record: OuterStep) -> None:
        done.add(record.index)
        for recorder in recorders:
            recorder.step(record)
        display.outer(record)

    try:
        tuned = lh.tune(
            task,
            rule,
            hypers,
            steps=horizons,
            outer_steps=chosen.outer_steps,
            outer=recipes.outer_of(chosen),
            engine=recipes.engine_of(chosen),  # type: ignore[arg-type]
            gate=chosen.gate,  # type: ignore[arg-type]
            seed=chosen.seed,
            seeds=chosen.seeds,
            precision=chosen.precision,  # type: ignore[arg-type]
            dir=path,
            checkpoint_seconds=chosen.checkpoint_seconds,
            recipe=recipe_text.to_toml(chosen),
            confirm=chosen.confirm,
            on_step=outer,
            progress=inner,
            note=display.note,
        )
    except lh.Interrupted as stop:
        display.stop()
        raise lh.Interrupted(stop.where, f"go on with: longhorizon resume {path}") from None
    finally:
        display.stop()
        for recorder in recorders:
            recorder.close()
    # Outer steps of an earlier process count; so does what this one spent around its own.
    seconds = time.monotonic() - began + sum(record.seconds for record in tuned.history if record.index not in done)
    try:
        with lh.RunDirectory(path) as directory:
            result = write_result(
                directory, chosen, task, rule, hypers, tuned, max(horizons), seconds if done else None, display.note
            )
    except KeyboardInterrupt:
        raise lh.Interrupted(
            f"stopped while testing; what is tested, and the schedule, are in {path}. "
            f"Test the rest with: longhorizon resume {path}"
        ) from None
    except Exception as error:
        error.add_note(
            f"The test failed, and no more than that: the schedule is in {path / 'schedule.json'}. "
            f"Test it again, without tuning, with: longhorizon resume {path}"
        )
        raise
    conclude(result, tuned, path, as_json)


def _check_run(chosen: Recipe, task: lh.Task, rule: lh.Rule, hypers: dict[str, lh.Hyper], horizons: list[int]) -> None:
    """A recipe whose parts do not fit together is a wrong one, not a run that failed."""
    try:
        Tuning(task, rule, hypers, steps=horizons, outer_steps=chosen.outer_steps, outer=recipes.outer_of(chosen))
    except (TypeError, ValueError) as error:
        raise RecipeError(str(error)) from error


def _recorders(
    chosen: Recipe, hypers: dict[str, lh.Hyper], path: Path, tensorboard: bool, optuna_storage: str
) -> list[Any]:
    found: list[Any] = []
    if tensorboard or optuna_storage:
        from longhorizon import recorders

        if tensorboard:
            found.append(recorders.TensorBoardRecorder(path / "tensorboard"))
        if optuna_storage:
            ranges = (
                lh.search_range(hypers, chosen.outer_steps, recipes.rule_of(chosen)) if chosen.outer == "sign" else None
            )
            found.append(recorders.OptunaRecorder(optuna_storage, path.name, ranges))
    known = lh.RunDirectory(path).journal() if (path / "run.json").exists() else []
    for recorder in found:  # what a kill kept from them; a step they know already is not taken twice
        for record in known:
            recorder.step(record)
    return found
