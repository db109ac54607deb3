"""Several processes for one method, over one storage and one journal.

    python -m longhorizon.rivals.workers DIR METHOD SEED LEFT WORKER PARENT [TRIAL …]

A worker makes the task from the recipe in run.json, may spend LEFT (its share of what is left of the budget), and first
finishes the trials it is handed. It ends with the process that started it.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from longhorizon.cuda import Precision
from longhorizon.inner import fitted
from longhorizon.problem import environment
from longhorizon.rivals.arena import Arena, GaveUp, Setup, Stop
from longhorizon.rivals.blackbox import BlackBox
from longhorizon.rivals.budget import Budget, Purse, parse_budget
from longhorizon.rivals.ledger import Evaluation, Ledger
from longhorizon.rivals.registry import METHODS
from longhorizon.rivals.studies import quiet
from longhorizon.rundir import RunDirectory, RunError
from longhorizon.stopping import stop_signals

WAIT = 60.0  # seconds that workers of a killed process have to notice
STOPPED, GAVE_UP = 130, 3


@contextmanager
def alone(dir: Path, shared: bool = False) -> Iterator[None]:
    """Hold a method's folder; workers share it, and whoever comes after them waits until they are gone."""
    dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    kind, until = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, time.monotonic() + WAIT
    try:
        while True:
            try:
                fcntl.flock(handle, kind)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise RunError(f"{dir} is still in use by workers of an earlier run; stop them first.") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)


def run(
    method: BlackBox,
    arena: Arena,
    count: int,
    asked: list[int],
    precision: Precision,
    on_evaluation: Callable[[Evaluation], None] | None = None,
) -> None:
    """Let `count` processes work on a method, and wait for them.

    What their shares leave over is shared out again, among fewer, until it is too little for anybody.
    """
    while True:
        with alone(arena.dir), environment(precision), quiet():
            unfinished = method.running(arena)
            need = method.next_steps(arena)
        past = arena.past()
        purse = Purse(
            Budget(arena.purse.whole, arena.purse.unit), sum(e.cost for e in past), sum(e.seconds for e in past)
        )
        if not purse.allows(need) and not (unfinished and purse.allows(method.least(arena.setup))):
            return
        left = purse.left / count
        if purse.unit == "steps":
            left = min(purse.left, max(left // 1, need))
        shares = [left for k in range(count) if (k + 1) * left <= purse.left or k == 0]
        _round(method, arena, shares, unfinished, asked, on_evaluation)
        if len(arena.past()) == len(past):
            return


def _round(
    method: BlackBox,
    arena: Arena,
    shares: list[float],
    unfinished: list[int],
    asked: list[int],
    on_evaluation: Callable[[Evaluation], None] | None,
) -> None:
    """A process for each share."""
    told, count = len(arena.past()), len(shares)
    command = [sys.executable, "-m", "longhorizon.rivals.workers", str(arena.dir.parent), method.name, str(arena.seed)]
    processes = [
        subprocess.Popen([*command, repr(share), str(k), str(os.getpid()), *map(str, unfinished[k::count])])
        for k, share in enumerate(shares)
    ]
    try:
        while any(p.poll() is None for p in processes):
            if asked:
                for p in processes:
                    p.terminate()
                break
            time.sleep(0.05)
            told = _tell(arena, told, on_evaluation)
    finally:
        for p in processes:
            if p.poll() is None:
                p.terminate()
            p.wait()
    _tell(arena, told, on_evaluation)
    if asked or any(p.returncode == STOPPED for p in processes):
        raise Stop
    if any(p.returncode == GAVE_UP for p in processes):
        raise GaveUp(f"its last trials {arena.past()[-1].status}")
    bad = [p.returncode for p in processes if p.returncode != 0]
    if bad:
        raise RunError(f"a worker of {method.name} ended with code {bad[0]}; what it said is above.")


def _tell(arena: Arena, told: int, on_evaluation: Callable[[Evaluation], None] | None) -> int:
    past = arena.past()
    for evaluation in past[told:]:
        if on_evaluation is not None:
            on_evaluation(evaluation)
    return len(past)


def setup_of(dir: Path) -> tuple[Setup, dict[str, object]]:
    """The comparison in a directory, made anew from its recipe, and its plan."""
    from longhorizon import recipe as recipes  # brings every data set along, which `import longhorizon` need not

    directory = RunDirectory(dir)
    chosen = recipes.make_recipe(tomllib.loads(directory.describe()["recipe"]), str(dir))
    task, per_epoch = recipes.task_of(chosen)
    rule = recipes.rule_of(chosen)
    torch.set_num_threads(recipes.threads_of(chosen, task))
    setup = Setup(
        task,
        rule,
        fitted(rule, recipes.hypers_of(chosen)),
        recipes.horizons_of(chosen, per_epoch),
        chosen.outer_steps,
        recipes.outer_of(chosen),
        recipes.engine_of(chosen),
        chosen.seeds,
        per_epoch,
        chosen.horizon,
        gate=chosen.gate,  # type: ignore[arg-type]
    )
    plan = json.loads((dir / "plan.json").read_text())
    return setup, plan | {"precision": chosen.precision, "checkpoint_seconds": chosen.checkpoint_seconds}


def work(dir: Path, name: str, seed: int, left: float, worker: int, parent: int, unfinished: list[int]) -> int:
    """The life of a worker; its exit code."""
    setup, plan = setup_of(dir)
    method = METHODS[name]
    assert isinstance(method, BlackBox)
    ledger = Ledger(dir / "journal.jsonl")
    purse = Purse(replace(parse_budget(str(plan["budget"]), setup.steps), amount=left), 0, 0.0)
    with stop_signals(True) as asked, alone(dir / f"{name}-{seed}", shared=True):

        def pulse(arena: Arena, done: int) -> None:
            if asked or os.getppid() != parent:
                raise Stop

        arena = Arena(
            setup,
            name,
            seed,
            purse,
            ledger,
            dir / f"{name}-{seed}",
            checkpoint_seconds=float(str(plan["checkpoint_seconds"])),
            pulse=pulse,
        )
        try:
            with environment(plan["precision"]), quiet():  # type: ignore[arg-type]
                method.warm()
                method.work(arena, unfinished, worker + 1)
        except Stop:
            return STOPPED
        except GaveUp:
            return GAVE_UP
    return 0


if __name__ == "__main__":
    where, name, seed, left, worker, parent, *unfinished = sys.argv[1:]
    sys.exit(work(Path(where), name, int(seed), float(left), int(worker), int(parent), [int(n) for n in unfinished]))
