"""`compare`: every method with every seed, with a directory, a clock and signals around them."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from longhorizon.cuda import Precision
from longhorizon.engines import Engine
from longhorizon.files import whole_lines, write_aside
from longhorizon.hypers import Hyper
from longhorizon.outer_step import plain
from longhorizon.problem import environment, make_problem
from longhorizon.retraining import check_test
from longhorizon.rivals import registry, workers
from longhorizon.rivals.arena import Arena, GaveUp, Setup, Stop
from longhorizon.rivals.blackbox import BlackBox
from longhorizon.rivals.budget import Budget, Purse, parse_budget
from longhorizon.rivals.ledger import Evaluation, Ledger
from longhorizon.rivals.methods import Method
from longhorizon.rivals.regret import Row, table
from longhorizon.rivals.testing import Key, Tested, Which, read_tests, to_test, try_all
from longhorizon.rules import Rule
from longhorizon.run import settings_of
from longhorizon.rundir import RunDirectory
from longhorizon.seeds import checked
from longhorizon.stopping import Interrupted, stop_signals
from longhorizon.task import Task
from longhorizon.traces import Traces
from longhorizon.tuning import Gates, Tuning

TRIES = 3  # steps that are timed, to see whether a budget pays for a trial
KIND = "compare"  # in run.json, to tell a comparison from a tuning run


@dataclass(frozen=True)
class Comparison:
    """What came out of a comparison.

    Attributes:
        evaluations: every trained and judged model, of all methods, in the order they came.
        tests: of the settings that were the best of their method and seed at some time.
        gave_up: methods that ended before their time, and why, as "METHOD-SEED".
        dir: where it is on disk, if anywhere.
        failed: tests that were asked for and failed with an error, so that all scores are those of validation; the same
            call again tries them again.
    """

    evaluations: list[Evaluation]
    tests: list[Tested]
    gave_up: dict[str, str]
    dir: Path | None = None
    failed: list[Tested] = field(default_factory=list)

    def table(self) -> list[Row]:
        """A row per method: test scores, regret, time to zero regret, steps."""
        return table(self.evaluations, self.tests)


@dataclass
class Watcher:
    """Who is told what goes on."""

    on_method: Callable[[str, int, Arena], None] | None = None  # method, seed: begins
    on_evaluation: Callable[[Evaluation], None] | None = None
    progress: Callable[[Arena, int], None] | None = None  # after every training step
    note: Callable[[str], None] | None = None


def compare(
    task: Task,
    rule: Rule,
    hypers: Mapping[str, Hyper],
    *,
    steps: int | Sequence[int],
    budget: str,
    methods: Sequence[str] = registry.USUAL,
    outer_steps: int = 10,
    outer: Any = None,
    engine: Engine | Any = "auto",
    seed: int = 0,
    seeds: int = 1,
    gate: Gates = "off",
    repeats: int = 1,
    epoch: int = 0,
    horizon: int = 1,
    train_steps: int | None = None,
    workers: int = 1,
    test: Which = "all",
    test_seeds: int = 3,
    precision: Precision = "float32",
    dir: str | os.PathLike[str] | None = None,
    earlier: str | os.PathLike[str] | None = None,
    checkpoint_seconds: float = 30.0,
    recipe: str | None = None,
    watcher: Watcher | None = None,
) -> Comparison:
    """Compare ways to find hyperparameters, on equal terms: task, ranges, training step, splits, clock and budget.

    Args:
        task, rule, hypers: as for `tune`. The range of every value is what `SignDescent` can reach in `outer_steps`.
        steps: inner steps of a training run; a list is for methods that take outer steps, and its largest for all.
        budget: of each method with each seed: "300s", "5m", "20 runs" or "4000 steps".
        methods: names; ["all"] for every one there is.
        outer_steps, outer, engine, seeds, gate: of `fds` (and, but for the engine, of `greedy`), as for `tune`; the
            engine "auto" is the paper's, `Forward(clip=10.0)`.
        seed: of everything.
        repeats: how often every method is run, each time with another seed, for mean and spread.
        epoch: inner steps of an epoch, the least that Hyperband gives a trial. Default: a 27th of a run.
        horizon: how many steps ahead `greedy` looks.
        train_steps: inner steps of a whole training run, if `fds` learns on shorter ones: for all other methods and for
            every test. The values that `fds` ends with are then trained once for so long, and judged.
        workers: processes for each of the black-box methods; they make the task anew, so `recipe` is needed.
        test: which settings to train on all training data and test: "all" that were a method's best at some time, of
            these only what was trained for a "whole" run (and the last), the "last" of each, or "none".
        test_seeds: trainings per test.
        precision: of float32 products on a GPU. With "bf16" what trains side by side is in mixed precision: trials of
            searches and grids, smoothed differences, tests; single runs and derivatives stay in float32.
        dir: where to keep it. If the same comparison is there already it goes on where it stopped; it may be given more
            methods, repeats or budget.
        earlier: a folder with the journal.jsonl and the tests.jsonl of this comparison, from another machine say, to go
            on from where `dir` has none. A search goes on from its journal; `fds` and `greedy` begin anew.
        checkpoint_seconds: how often to save inside a training run.
        recipe: the text of the recipe that all this came from.
        watcher: who is told what goes on.

    Raises:
        Interrupted: after Ctrl-C or SIGTERM, when all is saved; call again to go on.
        ImportError: for a method whose package is missing, with the extra to install.
        ValueError: for bad input, test data that cannot be tested on or a budget too small for one trial, before any
            work.
    """
    tuning = Tuning(  # checks, before anything is written
        task,
        rule,
        hypers,
        steps=steps,
        outer_steps=outer_steps,
        outer=outer,
        engine=engine,
        seed=seed,
        seeds=seeds,
        gate=gate,
    )
    wanted = registry.chosen(methods)
    for name, count in (("repeats", repeats), ("workers", workers), ("test_seeds", test_seeds)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}={count!r}: expected a whole number, at least 1.")
    if workers > 1 and train_steps is not None:
        raise ValueError(
            "workers > 1 with train_steps: workers read a recipe, which has no such key; give one of the two."
        )
    if workers > 1 and (recipe is None or dir is None):
        raise ValueError("workers are processes that make the task themselves: give `recipe` and `dir` too.")
    if test not in ("all", "whole", "last", "none"):
        raise ValueError(f"test={test!r}: expected 'all', 'whole', 'last' or 'none'.")
    if earlier is not None and (dir is None or not (Path(earlier) / "journal.jsonl").exists()):
        what = "needs `dir` too" if dir is None else "has no journal.jsonl"
        raise ValueError(f"earlier={str(earlier)!r}: {what}.")
    longest = max(tuning.horizons)
    if train_steps is not None and (isinstance(train_steps, bool) or not isinstance(train_steps, int)):
        raise ValueError(f"train_steps={train_steps!r}: expected a whole number, or None for that of `steps`.")
    if train_steps is not None and train_steps < longest:
        raise ValueError(f"train_steps={train_steps}: `steps` has runs of {longest}; give at least as many.")
    setup = Setup(
        task,
        rule,
        tuning.hypers,
        tuning.horizons,
        tuning.outer_steps,
        outer,
        engine,
        tuning.seeds,
        epoch,
        horizon,
        train_steps or 0,
        gate,
    )
    limit = parse_budget(budget, setup.steps)
    for method in wanted:
        method.check(setup)
    with environment(precision):
        tuning.prepare()
        if test != "none" and task.test is not None:
            fewer = f"lower `{'steps' if train_steps is None else 'train_steps'}`"
            check_test(task, rule, tuning.hypers, setup.steps, fewer=fewer, precision=precision)
        _check_budget(setup, wanted, limit, budget)
        for method in wanted:
            method.warm()
    settings = settings_of(tuning) | {"kind": KIND, "outer_steps": tuning.outer_steps, "epoch": epoch}
    settings |= {"horizon": horizon, "precision": precision, "test_seeds": test_seeds}
    settings |= {} if train_steps is None else {"train_steps": train_steps}
    plan = {"methods": [m.name for m in wanted], "budget": budget, "repeats": repeats, "workers": workers, "test": test}
    if dir is None:
        with tempfile.TemporaryDirectory() as place:
            there = _Run(setup, wanted, limit, Path(place), precision, checkpoint_seconds, watcher or Watcher())
            return there.all(checked(seed), repeats, 1, test, test_seeds, keep=False)
    with RunDirectory(dir) as directory:
        directory.begin(settings, recipe)
        directory.save_json("plan.json", plan)
        if earlier is not None:
            _take_over(Path(earlier), directory.path, range(checked(seed), checked(seed) + repeats))
        there = _Run(setup, wanted, limit, directory.path, precision, checkpoint_seconds, watcher or Watcher())
        return there.all(checked(seed), repeats, workers, test, test_seeds)


class _Run:
    """A comparison in progress."""

    def __init__(
        self,
        setup: Setup,
        methods: list[Method],
        limit: Budget,
        dir: Path,
        precision: Precision,
        checkpoint_seconds: float,
        watcher: Watcher,
    ):
        self.setup, self.methods, self.limit, self.dir = setup, methods, limit, dir
        self.precision, self.checkpoint_seconds, self.watcher = precision, checkpoint_seconds, watcher
        self._traces, self._tried = Traces(), set[Key]()  # of the tests
        self.ledger, self.gave_up = Ledger(dir / "journal.jsonl"), dict[str, str]()

    def all(self, seed: int, repeats: int, count: int, test: Which, test_seeds: int, keep: bool = True) -> Comparison:
        with stop_signals(keep) as asked:
            try:
                later = {(method.name, own) for own in range(seed, seed + repeats) for method in self.methods}
                for own in range(seed, seed + repeats):
                    for method in self.methods:
                        self._method(method, own, count, asked)
                        later.discard((method.name, own))
                        if self.setup.task.test is not None:
                            self._test(test, test_seeds, asked, later)
            except Stop:
                raise Interrupted(f"stopped; all is saved in {self.dir}") from None
        found, tests = list(self.ledger.all()), read_tests(self.dir / "tests.jsonl")
        asked_for = {e.key for e in to_test(found, test, self.setup.steps)} if self.setup.task.test is not None else ()
        failed = [t for t in tests if t.crashed and t.key in asked_for]
        return Comparison(found, tests, self.gave_up, self.dir if keep else None, failed)

    def _method(self, method: Method, seed: int, count: int, asked: list[int]) -> None:
        watcher = self.watcher
        past = self.ledger.of(method.name, seed)
        spent = sum(e.cost for e in past), sum(e.seconds for e in past)

        def pulse(arena: Arena, done: int) -> None:
            if watcher.progress is not None:
                watcher.progress(arena, done)
            if asked:
                raise Stop

        arena = Arena(
            self.setup,
            method.name,
            seed,
            Purse(self.limit, *spent),
            self.ledger,
            self.dir / f"{method.name}-{seed}",
            checkpoint_seconds=self.checkpoint_seconds,
            pulse=pulse,
            on_evaluation=watcher.on_evaluation,
        )
        if watcher.on_method is not None:
            watcher.on_method(method.name, seed, arena)
        try:
            if count > 1 and isinstance(method, BlackBox):
                workers.run(method, arena, count, asked, self.precision, watcher.on_evaluation)
            else:
                with workers.alone(arena.dir), environment(self.precision):
                    method.run(arena)
        except GaveUp as why:
            self.gave_up[f"{method.name}-{seed}"] = str(why)
            if watcher.note is not None:
                watcher.note(f"{method.name}, seed {seed}, gave up: {why}")
        if asked:
            raise Stop

    def _test(self, which: Which, test_seeds: int, asked: list[int], later: set[tuple[str, int]]) -> None:
        def progress(done: int, total: int) -> None:
            if asked:
                raise Stop

        given = (self.setup, self.ledger.all(), self.dir / "tests.jsonl", which, test_seeds, progress)
        try_all(*given, self._traces, self.precision, self._tried, later)


def _take_over(earlier: Path, here: Path, seeds: range) -> None:
    """Begin with the journal of another folder, unless there is one; written aside and renamed, the journal last.

    Without lines of other seeds, and of methods whose state is not in it.
    """
    if (here / "journal.jsonl").exists():
        return
    for name in ("tests.jsonl", "journal.jsonl"):
        kept = []
        for line in whole_lines(earlier / name):
            content = json.loads(line)
            if content["seed"] in seeds and content["method"] not in ("fds", "greedy"):
                kept.append(line + b"\n")
        write_aside(here / name, b"".join(kept))


def _check_budget(setup: Setup, methods: Sequence[Method], limit: Budget, text: str) -> None:
    """Refuse a budget that does not pay for one trial of every method."""
    # Of steps the most that a trial may take; of seconds what any takes, as smoothed differences may take one run only.
    asked = setup if limit.unit == "steps" else replace(setup, engine="auto")
    dearest = max(methods, key=lambda m: m.least(asked))
    need = dearest.least(asked)
    if limit.unit == "steps":
        if limit.amount < need:
            raise ValueError(
                f"budget {text!r} is {limit.amount:g} training steps, too small for one trial of {dearest.name}, "
                f"which takes {need}; give at least '{need} steps'."
            )
        return
    seconds = need * seconds_per_step(setup)
    if limit.amount < seconds:
        raise ValueError(
            f"budget {text!r} is too small for one trial of {dearest.name}: its {need} training steps take about "
            f"{seconds:.3g} s here; give at least '{seconds * 1.5:.2g}s'."
        )


def seconds_per_step(setup: Setup) -> float:
    """How long a plain training step takes, at its fastest of a few."""
    problem = make_problem(setup.task, setup.rule, setup.hypers, setup.steps, 0)
    state, taken = problem.start, []
    for step in range(min(TRIES, setup.steps)):
        began = time.perf_counter()
        state, loss = problem.train_step(state, step)
        float(loss)  # waits for an accelerator
        taken.append(time.perf_counter() - began)
    return min(taken)


def result_of(comparison: Comparison, seconds: float) -> dict[str, Any]:
    """What result.json holds."""
    return {
        "table": [plain(vars(row)) for row in comparison.table()],
        "gave_up": comparison.gave_up,
        "failed_tests": [vars(t) for t in comparison.failed],
        "seconds": seconds,
        "threads": torch.get_num_threads(),
    }
