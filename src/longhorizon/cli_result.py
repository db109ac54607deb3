"""What comes out of a tuning run: result.json, with its test, written down training by training."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import longhorizon as lh
from longhorizon.console import numbers
from longhorizon.offtheshelf import off_the_shelf, starts
from longhorizon.outer_step import plain
from longhorizon.recipe import Recipe
from longhorizon.retraining import mean_and_deviation
from longhorizon.rundir import RunDirectory

Run = dict[str, float | None]  # one training's test loss and metrics; None where it is not finite


def write_result(
    directory: RunDirectory,
    chosen: Recipe,
    task: lh.Task,
    rule: lh.Rule,
    hypers: Mapping[str, lh.Hyper],
    tuned: lh.Tuned,
    steps: int,
    seconds: float | None,
    note: Callable[[str], None],
) -> dict[str, Any]:
    """Write what came out, tested if there is test data; what an earlier process tested of this schedule is kept.

    Args:
        steps: of a test training, unless the recipe says otherwise.
        seconds: that the run took; None if it was finished before.
        note: told what is tested.
    """
    result: dict[str, Any] = {
        "schedule": {key: list(v) for key, v in tuned.schedule.values.items()},
        "last": {key: list(v) for key, v in tuned.last.values.items()},
        "best": {key: list(v) for key, v in tuned.best.values.items()},
        "converged": tuned.converged,
        "outer_steps": len(tuned.history),
        "seconds": tuned.seconds if seconds is None else seconds,
        "engine": tuned.history[-1].engine if tuned.history else "",
    }
    if tuned.confirmed is not None:
        result["confirmed"] = tuned.confirmed.chosen
    known = directory.result()
    same = known.get("schedule") == plain(result["schedule"])
    if same and seconds is None:
        result["seconds"] = known.get("seconds", result["seconds"])
    if task.test is None or not chosen.test_seeds:
        directory.save_json("result.json", plain(result))
        return result
    steps = chosen.test_steps or steps
    runs: dict[str, list[Run]] = known.get("test_runs", {}) if same and known.get("test_steps") == steps else {}
    result |= {"test": {}, "test_steps": steps, "test_runs": runs}
    learnt = {key: tuned.schedule[key] for key in hypers}
    todo: dict[str, tuple[Mapping[str, lh.Hyper], Mapping[str, Any]]] = {"learnt": (hypers, learnt)}
    if chosen.compare and rule.name == "sgd":
        todo |= {name: (entries, starts(entries)) for name, entries in off_the_shelf(rule, hypers, steps).items()}
    if any(len(runs.get(name, [])) < chosen.test_seeds for name in todo):
        note(f"testing: {chosen.test_seeds} trainings from scratch of {steps} steps each, per schedule")
    for name, (entries, values) in todo.items():
        found = runs.setdefault(name, [])

        def tested(_: int, scores: dict[str, float], found: list[Run] = found) -> None:
            found.append(plain(scores))
            directory.save_json("result.json", plain(result))

        directory.save_json("result.json", plain(result))
        left = range(len(found), chosen.test_seeds)
        if left:
            lh.retrain(
                task,
                rule,
                entries,
                values,
                steps=steps,
                seeds=left,
                precision=chosen.precision,  # type: ignore[arg-type]
                on_seed=tested,
            )
        result["test"][name] = summary(found[: chosen.test_seeds])
    directory.save_json("result.json", plain(result))
    return result


def summary(runs: list[Run]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of every score; NaN, which is null in result.json, where it is not known."""
    names = dict.fromkeys(name for run in runs for name in run)
    values = {name: [math.nan if run.get(name) is None else run[name] for run in runs] for name in names}
    return {name: mean_and_deviation(v) for name, v in values.items()}  # type: ignore[arg-type]


def _with_spread(mean: float, deviation: float) -> str:
    """A mean, with its deviation where that is known."""
    return f"{mean:.4f}" if math.isnan(deviation) else f"{mean:.4f} ± {deviation:.4f}"


def conclude(result: dict[str, Any], tuned: lh.Tuned, path: Path, as_json: bool) -> None:
    """Say what came out."""
    if as_json:
        print(json.dumps({"event": "result", "dir": str(path), **plain(result)}))
        return
    for key in tuned.schedule.keys():  # noqa: SIM118 - a Schedule is no mapping
        print(f"{key:<14} {numbers(tuned.schedule[key], 12)}")
    if tuned.found_nothing:
        print(f"nothing was learnt: no run ended below {tuned.untrained:.4g}, the validation loss of fresh weights;")
        print("begin at other values, with smaller outer steps (`step`), or on shorter runs (`steps`)")
    for name, found in result.get("test", {}).items():
        cells = ", ".join(f"{what} {_with_spread(*pair)}" for what, pair in found.items())
        print(f"test, {name + ':':<32} {cells}")
    ending = ", until every step had become small," if result["converged"] else ""
    steps = result["outer_steps"]
    print(f"{steps} outer step{'s' * (steps != 1)}{ending} in {result['seconds']:.1f} s; all of it is in {path}")
    print(f"look at it:  longhorizon report {path}")
    print(f'use it:      lh.Schedule.load("{path}/schedule.json").attach(optimizer, steps=…)')
