"""What a tuning run keeps in the end, the last values or the best: `confirm`, with files and signals around it."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from longhorizon.confirming import Confirmed, confirm, kept_in, seconds_in
from longhorizon.cuda import Precision
from longhorizon.problem import Problem, environment, make_problem
from longhorizon.rundir import CONFIRMED, RunDirectory, RunError, fingerprint
from longhorizon.stopping import Interrupted
from longhorizon.tuning import Tuning, run_seed

FRESH = 10**6  # more than the outer steps of any run: seeds that none of them has


def decide(
    tuning: Tuning,
    directory: RunDirectory | None,
    count: int,
    precision: Precision,
    note: Callable[[str], None] | None,
    asked: list[int],
) -> Confirmed | None:
    """Whether to keep the last values or the best; each training run that is done is on disk.

    Args:
        asked: gets an entry when it is to stop, or has one already.
    """
    if not count or tuning.best is None:
        return None
    # The best first: where every run diverges, what trained once is kept.
    steps, values = tuning.best[1], {"best": tuning.best[2], "last": tuning.values}
    plain = {name: {key: v.tolist() for key, v in own.items()} for name, own in values.items()}
    if plain["last"] == plain["best"]:
        return None
    about = {"steps": steps, "values": plain}
    there = directory.result(CONFIRMED) if directory is not None else {}
    same = {key: there.get(key) for key in about} == about
    known, before = (kept_in(there), seconds_in(there)) if same else ({}, 0.0)
    began, seeds = time.perf_counter(), [run_seed(tuning.seed, FRESH, i) for i in range(count)]

    def save(decided: dict[str, Any]) -> None:
        if directory is not None:
            losses = {n: {str(s): v if math.isfinite(v) else None for s, v in own.items()} for n, own in known.items()}
            directory.save_json(CONFIRMED, about | {"losses": losses, "seconds": before + spent()} | decided)

    def spent() -> float:
        return (time.perf_counter() - began) * bool(left)

    def done(name: str, seed: int, loss: float) -> None:
        known.setdefault(name, {})[seed] = loss
        save({})

    left = [seed for name in values for seed in seeds if seed not in known.get(name, {})]

    def stop_if_asked(*_: int) -> None:
        if asked:
            place = directory.path if directory else ""
            raise Interrupted(
                f"stopped while confirming what to keep; outer steps and finished trainings are saved in {place}",
                "the same call goes on",
            )

    if left:
        stop_if_asked()
    if left and directory is not None:
        with environment(precision):
            given = tuning.task, tuning.rule, tuning.given, steps, left[0], tuning.values, tuning.traces
            check_model(directory, make_problem(*given))
    if left and note is not None:
        note(f"confirming: {count} plain trainings of {steps} steps with the last values, and with the best ones")
    found = confirm(
        tuning.task,
        tuning.rule,
        tuning.given,
        values,
        steps=steps,
        seeds=seeds,
        precision=precision,
        traces=tuning.traces,
        known=known,
        progress=stop_if_asked,
        on_run=done,
    )
    if note is not None:
        bad = not math.isfinite(min(map(min, found.losses.values())))
        note(f"kept the {found.chosen} values{', though neither trains with other seeds' if bad else ''}: {found}")
    save({"seeds": seeds})
    return replace(found, seconds=before + spent())


def check_model(directory: RunDirectory, problem: Problem) -> None:
    """Write down what the model is, or refuse another one than the run was begun with."""
    shapes = {name: list(p.shape) for name, p in problem.start.params.items()}
    own = {"parameters": problem.n_params, "shapes": fingerprint(shapes)}
    known = (directory.describe().get("environment") or {}).get("model")
    if known is None:
        directory.measured("model", own)
    elif known != own:
        what = f"{own['parameters']:,} parameters, and that of the run had {known['parameters']:,}"
        if known["parameters"] == own["parameters"]:
            what = "as many parameters as that of the run, of other names or shapes"
        raise RunError(
            f"{directory.path} holds a run of another model: this one has {what}. "
            "Choose another directory, or the model it was begun with."
        )
