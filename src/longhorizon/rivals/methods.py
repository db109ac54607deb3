"""What a method is, and the methods that differentiate: FDS, the greedy scheme, hypergradient descent.

A method spends its purse in an arena. All it knows when it is called again, after a stop or a kill, is what the journal
says and what it saved; it goes on from there.
"""

import math
import time
from functools import partial
from typing import Any, Protocol

from longhorizon import seeds
from longhorizon.engines import Adjoint, Forward, Greedy
from longhorizon.engines.base import trainings
from longhorizon.outer import TorchOuter
from longhorizon.outer_step import OuterStep, plain
from longhorizon.rivals import rows
from longhorizon.rivals.arena import Arena, GaveUp, Setup, Stop, Trial, settle, words_of
from longhorizon.rivals.counting import Counted
from longhorizon.rivals.descent import Descent
from longhorizon.rivals.descents import Descents
from longhorizon.rivals.space import Setting, draw
from longhorizon.rivals.training import Judged, Training
from longhorizon.run import from_journal
from longhorizon.rundir import RunDirectory
from longhorizon.tuning import Tuning

DRAW = 7  # a purpose of its own for random starts
DESCENT = rows.Kind(
    lambda problem, counter, saved: Descent(problem, counter, saved=saved), Descents, Descents.like, Descents.learnt
)


class Method(Protocol):
    """A way to find hyperparameters."""

    @property
    def name(self) -> str: ...

    @property
    def packages(self) -> tuple[str, ...]:
        """What it needs besides torch and numpy."""
        return ()

    def check(self, setup: Setup) -> None:
        """Refuse a task that it cannot do."""
        return

    def warm(self) -> None:
        """Load what its package loads at first use, so that this is on nobody's clock."""
        return

    def least(self, setup: Setup) -> int:
        """The training steps of its first evaluation."""
        ...

    def run(self, arena: Arena) -> None:
        """Spend what is left of the purse, or finish earlier."""
        ...


class Fds(Method):
    """The hypergradient of the whole run, outer step by outer step: `tune`, with a purse."""

    name = "fds"

    def least(self, setup: Setup) -> int:
        return setup.horizons[0] * setup.seeds * _trainings(as_in_the_paper(setup.engine), setup)

    def run(self, arena: Arena) -> None:
        drive(arena, as_in_the_paper(arena.setup.engine))


class GreedyScheme(Method):
    """The same outer loop on hypergradients that look `horizon` steps ahead, the paper's section 3.2.

    No tricks: values are not carried from step to step as hypergradient descent carries them. All move at once; the
    paper's section 5.2 learns one step's before the next is taken, which is `stepwise.py`.
    """

    name = "greedy"

    def least(self, setup: Setup) -> int:
        return setup.horizons[0] * setup.seeds

    def run(self, arena: Arena) -> None:
        engine = as_in_the_paper(arena.setup.engine)
        clip = engine.clip if isinstance(engine, Forward | Adjoint | Greedy) else None
        drive(arena, Greedy(arena.setup.horizon, clip=clip))


def as_in_the_paper(engine: Any) -> Any:
    """FDS clips H·Z at 10, unless an engine is asked for."""
    return Forward(clip=10.0) if engine == "auto" else engine


def _trainings(engine: Any, setup: Setup) -> int:
    return trainings(engine, sum(hyper.windows for hyper in setup.hypers.values() if hyper.learn))


def drive(arena: Arena, engine: Any) -> None:
    """Take outer steps until they end or the purse does; each is an evaluation of the values it began at."""
    setup = arena.setup
    make = partial(
        Tuning,
        setup.task,
        setup.rule,
        setup.hypers,
        steps=setup.horizons,
        outer_steps=setup.outer_steps,
        outer=setup.outer,
        engine=engine,
        seed=arena.seed,
        seeds=setup.seeds,
        gate=setup.gate,
        traces=arena.traces,
    )
    journal = RunDirectory(arena.dir)  # what each outer step saw and doubted, as in a run of `tune`
    saved, history, tuning = arena.load("tuning.pt"), journal.journal(), make()
    if saved is None and history and not isinstance(tuning.outer, TorchOuter):
        saved = {"tuning": from_journal(tuning, history), "counted": 0}
    if saved is not None:
        tuning = make(saved=saved["tuning"])
    tuning.engine = Counted(engine, arena.counter)
    runs = _trainings(engine, setup)
    first = arena.counter.steps - (saved["counted"] if saved else 0)  # where the outer step in progress began
    saved_at = time.monotonic()
    while not tuning.done:
        steps = tuning.horizon(tuning.index)
        if not arena.purse.allows(steps * setup.seeds * runs) and arena.found(tuning.index, steps) is None:
            return
        index, seconds, began = tuning.index, tuning.seconds, time.perf_counter()
        try:
            record = tuning.advance()
        except Exception as error:  # several runs in a row diverged, the model has no such derivative, the user's code
            crash = Judged(status=f"crashed: {words_of(error)}")
            counted = arena.counter.steps - first
            seconds += time.perf_counter() - began
            arena.record(index, steps, counted, counted, seconds, crash, plain(tuning.values))
            raise GaveUp(words_of(error)) from error
        counted = arena.counter.steps - first
        if record is not None:
            _record(arena, record, counted, runs)
            journal.append(record)
            first, counted = arena.counter.steps, 0
        asked = _asked(arena, counted)
        if record is not None or asked or time.monotonic() - saved_at >= arena.checkpoint_seconds:
            if tuning.problem is not None and record is None:
                began = time.perf_counter()
                settle(tuning.problem.device)
                tuning.seconds += time.perf_counter() - began
            arena.save("tuning.pt", {"tuning": tuning.save(), "counted": counted})  # off the clock
            saved_at = time.monotonic()
        if asked:
            raise Stop
    if setup.steps > max(setup.horizons):
        _whole(arena, tuning)


def _whole(arena: Arena, tuning: Tuning) -> None:
    """Learnt on shorter runs than the others train: the values it ended with, trained once in full and judged."""
    setting, steps = plain(tuning.values), arena.setup.steps
    if arena.found(tuning.outer_steps, steps) is None and not arena.purse.allows(steps):
        return
    one = Trial(
        arena,
        tuning.outer_steps,
        setting,
        lambda saved: Training(arena.problem(setting, tuning.outer_steps), arena.counter, saved),
    )
    one.to(steps)
    one.forget()


def _record(arena: Arena, record: OuterStep, counted: int, runs: int) -> None:
    fine = record.status == "ok"
    # A run that ended early, and an engine that may take several runs, are charged what they took.
    cost = record.steps * len(record.seeds) if fine and runs == 1 else counted
    loss = record.val_loss if math.isfinite(record.val_loss) else math.inf
    status = record.status if fine or math.isfinite(loss) else f"diverged: {record.status}"
    values: Setting = plain(record.values)
    arena.record(
        record.index, record.steps, cost, counted, record.seconds, Judged(loss, record.metrics, status), values
    )


def _asked(arena: Arena, done: int) -> bool:
    try:
        arena.pulse(done)
    except Stop:
        return True
    return False


class HypergradientDescent(Method):
    """Online hypergradients, run after run: the first from the user's starts, others from random ones (Figure 1)."""

    name = "hd"

    def least(self, setup: Setup) -> int:
        return setup.steps

    def run(self, arena: Arena) -> None:
        steps = arena.setup.steps
        if not arena.purse.allows(steps):
            return
        # One run needs no row, if it is not in one already.
        only = not arena.past() and not arena.purse.allows(2 * steps) and not any(arena.dir.glob(rows.FILES))
        if not only:
            rows.recompile(arena, DESCENT)
        while arena.purse.allows(steps):
            trial = len(arena.past())
            jobs = [rows.Job(number, self.start(arena, number)) for number in range(trial, trial + rows.WIDTH)]
            if only:
                rows.alone(arena, jobs[0], steps, DESCENT)
            else:
                rows.evaluate(arena, jobs, steps, DESCENT)

    def start(self, arena: Arena, trial: int) -> Setting:
        """Where a run begins."""
        setup = arena.setup
        if trial == 0:
            return {key: hyper.values().tolist() for key, hyper in setup.hypers.items()}
        return draw(setup.hypers, setup.axes, seeds.mix(arena.seed, trial, DRAW))
