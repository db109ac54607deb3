"""The outer loop: hypergradient, outer step, again from a fresh start. It knows no disk.

`Tuning` advances by single inner steps and can be saved between any two of them; `steps` drives it and yields once
per outer step. Whoever wants files, progress or signals wraps it (see `run.py`).
"""

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from numbers import Integral
from typing import Any, Literal

import torch

from longhorizon import failing
from longhorizon import seeds as seeding
from longhorizon.averaging import average, combined, mean_metrics
from longhorizon.batches import Batches, note_step
from longhorizon.engines import Adjoint, Engine, Factorial, FiniteDifference, Forward, Greedy, Hybrid, Run
from longhorizon.engines.choose import ADJOINT_ONLY, instead, trusted
from longhorizon.engines.entry import check_engine
from longhorizon.engines.factorial import reach, within_shifts
from longhorizon.first_look import NotDifferentiable
from longhorizon.hypers import Hyper, check_hypers
from longhorizon.inner import check_names, fitted, left_at_default
from longhorizon.outer import Outer, SignDescent, Values, as_outer, between, halfway, search_range
from longhorizon.outer_step import OuterStep
from longhorizon.problem import Problem, check_parts, environment, make_problem, refuse_unfit
from longhorizon.result import Hypergradient
from longhorizon.rules import Rule
from longhorizon.task import Task
from longhorizon.traces import Traces
from longhorizon.trust import Doubts, among_seeds, doubts

PATIENCE = 3  # outer steps that may diverge before any has gone well
ENGINES = {engine.__name__: engine for engine in (Forward, Adjoint, Greedy, FiniteDifference, Factorial, Hybrid)}
Gates = Literal["off", "wait", "shrink"]


class Tuning:
    """A tuning run in progress.

    Args: as `tune`.
        saved: what `save` returned, to go on from there.
    """

    def __init__(
        self,
        task: Task,
        rule: Rule,
        hypers: Mapping[str, Hyper],
        *,
        steps: int | Sequence[int],
        outer_steps: int = 10,
        outer: Any = None,
        engine: Engine | Literal["auto"] = "auto",
        seed: int = 0,
        seeds: int = 1,
        gate: Gates = "off",
        traces: Traces | None = None,
        saved: dict[str, Any] | None = None,
    ):
        check_parts(task, rule)
        self.horizons = check_steps(steps)
        check_hypers(hypers, min(self.horizons))
        if saved is not None:  # columns of a design, tangents and a torch optimizer are known by their place
            hypers = {key: hypers[key] for key in [*saved["values"], *hypers] if key in hypers}
        self.task, self.rule, self.given, self.hypers = task, rule, dict(hypers), fitted(rule, hypers)
        self.outer_steps = _at_least_one("outer_steps", outer_steps)
        self.seeds = _at_least_one("seeds", seeds)
        self.outer: Outer = as_outer(SignDescent() if outer is None else outer)
        self.gate = _checked_gate(gate, self.outer)
        check_engine(engine)
        self.engine, self.why, self.seed = engine, "", seeding.checked(seed)
        check_names(rule, hypers, task.has_learnt_loss)
        if saved is None:
            self.index, self.values = 0, {key: hyper.values() for key, hyper in hypers.items()}
            self.outer_state = self.outer.init(self.hypers)
            self.good: tuple[float, Values] | None = None  # validation loss and values of the last run that went well
            self.best: tuple[float, int, Values] | None = None  # validation loss, horizon, values
            self.finished: list[dict[str, Any]] = []  # results of this outer step's seeds so far
            self.untrained: float | None = None  # validation loss of fresh weights, once it was looked at
            self.seconds = 0.0
        else:
            self.index, self.values = saved["index"], saved["values"]
            self.outer_state, self.good, self.best = saved["outer"], _good(saved["good"]), saved["best"]
            self.finished, self.seconds = saved["finished"], saved["seconds"]
            self.untrained = saved.get("untrained")  # older ones do not know
            if saved["engine"] is not None:
                kind, given = ENGINES[saved["engine"]["kind"]], saved["engine"]["with"]
                self.engine = kind(**({"clip": None} if kind is Hybrid else {}) | given)  # an older one had none
                self.why = saved["why"]
        self.converged = self.outer.converged(self.outer_state)
        self._inner_saved = saved["run"] if saved else None
        self.traces = Traces() if traces is None else traces
        self._failed: list[
            tuple[int, bool] | None
        ] = []  # while no run has gone well: step, and whether out of the blue
        self._problem: Problem | None = None
        self._prepared: Problem | None = None  # that of the next run
        self._run: Run | None = None

    @property
    def done(self) -> bool:
        return self.index >= self.outer_steps or self.converged

    @property
    def run(self) -> Run | None:
        """The hypergradient in progress."""
        return self._run

    @property
    def problem(self) -> Problem | None:
        """The training run in progress."""
        return self._problem

    def horizon(self, index: int) -> int:
        """Inner steps of an outer step: its entry of `steps`, or the last one."""
        return self.horizons[min(index, len(self.horizons) - 1)]

    def range(self) -> dict[str, tuple[float, float]]:
        """What values the search can reach, where the outer optimizer bounds it."""
        found = search_range(self.hypers, self.outer_steps) if isinstance(self.outer, SignDescent) else {}
        if not isinstance(self.engine, Factorial):
            return found
        return {key: reach(key, self.hypers[key].values(), *bounds) for key, bounds in found.items()}

    def advance(self) -> OuterStep | None:
        """One inner step of work; the record of an outer step when it completes one."""
        began = time.perf_counter()
        run = self._run or self._begin()
        if not run.done:
            try:
                run.advance()
            except NotDifferentiable:
                other = instead(self.engine) if self.why else None  # an engine that was given has no reason
                if other is None:
                    raise
                run = self._begin_with(other)
            except Exception as error:
                note_step(error, f", in outer step {self.index + 1}")
                raise
        if not run.done:
            self.seconds += time.perf_counter() - began
            return None
        result = run.result()
        assert self._problem is not None
        metrics = self._problem.measure(result.params, result.buffers) if result.status.ok else {}
        self.finished.append(_summary(result, metrics, doubts(result, self._problem.steps)))
        if self.good is None:  # what the first one is compared with
            self.finished[-1]["fresh"] = float(self._problem.validation_loss(self._problem.start, 1))
            self.untrained = self.finished[-1]["fresh"] if self.untrained is None else self.untrained
        self._run = None
        self.seconds += time.perf_counter() - began
        return self._complete() if len(self.finished) == self.seeds else None

    def save(self) -> dict[str, Any]:
        """Everything needed to go on: nested dicts, lists and tuples of tensors, numbers and strings."""
        engine = self.engine
        known = not isinstance(engine, str) and type(engine).__name__ in ENGINES
        return {
            "index": self.index,
            "values": self.values,
            "outer": self.outer_state,
            "good": self.good,
            "best": self.best,
            "untrained": self.untrained,
            "finished": self.finished,
            "seconds": self.seconds,
            "engine": {"kind": type(engine).__name__, "with": asdict(engine)} if known else None,  # type: ignore[call-overload]
            "why": self.why,
            "run": self._run.save() if self._run is not None else self._inner_saved,
        }

    def made(self) -> Problem:
        """The next run's model and data, made now, with all that is checked then."""
        self._prepared = self._prepared or self._make()
        return self._prepared

    def prepare(self) -> None:
        """Make the first run's, and refuse what nothing can come of."""
        problem = self.made()
        refuse_unfit(problem)
        longest = max(self.horizon(index) for index in range(self.index, max(self.outer_steps, self.index + 1)))
        if longest > problem.steps:  # a stream of known length that ends too early is refused now, not in hours
            Batches(self.task.train, problem.seed, longest)
        if left := left_at_default(self.rule, self.hypers, "weight_decay", problem.start.params):
            warnings.warn(left, stacklevel=3)
        own = sorted(problem.read_in_validation & {*problem.learnt}) if self.task.val_loss is None else []
        if own:
            warnings.warn(
                f"the validation loss reads {own[0]!r}, which is learnt: it may become smaller by that alone, with "
                "nothing trained better. Give Task(val_loss=…), a loss that does not read it.",
                stacklevel=3,
            )

    def _make(self) -> Problem:
        """Fresh weights and a fresh split."""
        seed = run_seed(self.seed, self.index, len(self.finished))
        return make_problem(self.task, self.rule, self.hypers, self.horizon(self.index), seed, self.values, self.traces)

    def _begin(self) -> Run:
        """A run over a fresh problem."""
        self._problem, self._prepared = self.made(), None
        self._problem.reach, self._problem.runs = self.outer_state.get("gamma"), self.outer_steps * self.seeds
        if self.engine == "auto":  # chosen once, so that a resumed run goes on with the same
            self.engine, self.why = trusted(self._problem)
        assert not isinstance(self.engine, str)
        self._run = self.engine.begin(self._problem, self._inner_saved)
        self._inner_saved = None
        return self._run

    def _begin_with(self, other: Any) -> Run:
        """The same run once more, where forward mode was chosen and finds that it cannot do it."""
        assert self._problem is not None
        self.engine, self.why = other, ADJOINT_ONLY
        run: Run = other.begin(self._problem)
        run.advance()
        self._run = run
        return run

    def _complete(self) -> OuterStep:
        finished, steps = self.finished, self.horizon(self.index)
        grad, mean = average([f["grad"] for f in finished]), average([f["mean"] for f in finished])
        losses = torch.tensor([f["val_loss"] for f in finished], dtype=torch.float64)
        val_loss = float(losses[losses.isfinite()].mean())
        bad = [f["status"] for f in finished if f["status"] != "ok"]
        fine = any(bool(m.isfinite().any()) for m in mean.values()) and bool(losses.isfinite().any())
        exploded = failing.exploded(finished, self.good and self.good[0], val_loss) if fine else ""
        fine = fine and not exploded
        error = combined([f.get("error") for f in finished])
        doubted = among_seeds([f["grad"] for f in finished], [f["doubts"] for f in finished], error)
        held: dict[str, list[int]] = {}
        at = self.values
        if fine:
            self.good = val_loss, at
            whole = bool(losses.isfinite().all())  # the mean of those that survived says nothing about the others
            if whole and (self.best is None or (steps, -val_loss) > (self.best[1], -self.best[0])):
                self.best = (val_loss, steps, at)
            if self.gate != "off":
                windows = {key: [w for w, doubt in enumerate(reasons) if doubt] for key, reasons in doubted.items()}
                held = {key: some for key, some in windows.items() if some}
            self.values, self.outer_state = self.outer.update(at, _without(mean, held), self.outer_state, self.hypers)
            self.values = within_shifts(self.values, at, error)
            if self.gate == "shrink":
                self.outer_state = _shrunk(self.outer_state, held, self.outer)
        elif exploded and (guilty := self._guilty(grad, error)):
            innocent = {key: [w for w in range(len(m)) if w not in guilty.get(key, ())] for key, m in mean.items()}
            moved, self.outer_state = self.outer.update(at, _without(mean, innocent), self.outer_state, self.hypers)
            assert self.good is not None
            self.values = between(moved, at, self.good[1])  # γ may have grown: no further back than where it went well
            exploded = f"{exploded}; {failing.named(guilty, self.hypers)} goes back"
            bad = [exploded] * len(finished)
        else:
            exploded = f"{exploded}; half a step back" if exploded and self.good is not None else exploded
            bad = [exploded] * len(finished) if exploded else bad
            self._failed += [f.get("failed") for f in finished]
            self.outer_state = self.outer.shrink(self.outer_state)
            self.values = at if self.good is None else halfway(self.good[1], at, self.hypers)
        record = OuterStep(
            index=self.index,
            seeds=[run_seed(self.seed, self.index, i) for i in range(self.seeds)],
            steps=steps,
            values=at,
            grad=grad,
            mean=mean,
            val_loss=val_loss,
            metrics=mean_metrics([f["metrics"] for f in finished]),
            status="ok"
            if not bad
            else f"{len(bad)} of {len(finished)} runs: {bad[0]}"
            if len(finished) > 1
            else bad[0],
            next=self.values,
            outer={key: value for key, value in self.outer_state.items() if key != "optimizer"},
            engine=finished[0]["engine"],
            seconds=self.seconds,
            doubts=doubted,
            error={key: torch.where(e.isfinite(), e, torch.nan) for key, e in error.items()},
            held=held,
            exploded=bool(exploded),
        )
        self.index, self.finished, self.seconds = self.index + 1, [], 0.0
        self.converged = self.outer.converged(self.outer_state)
        if self.good is None and self.index >= min(PATIENCE, self.outer_steps):
            why = bad[0] if bad else "no hypergradient is finite"
            runs = f"{self.index} training runs in a row" if self.index > 1 else "the training run"
            data = failing.data_at_fault(self._failed, self._problem)
            raise RuntimeError(f"{runs} diverged at the starting values ({why}). Start lower.{data}")
        return record

    def _guilty(self, grad: Values, error: Values) -> dict[str, list[int]]:
        """Which values made a run explode: only these go back, each by its sign, and the others keep what they gained.

        Other outer optimizers than `SignDescent` go by the size of a slope, which says nothing here.
        """
        if self.good is None or not isinstance(self.outer, SignDescent):
            return {}
        return failing.guilty(grad, error, self.values, self.good[1])


def steps(
    task: Task,
    rule: Rule,
    hypers: Mapping[str, Hyper],
    *,
    steps: int | Sequence[int],
    outer_steps: int = 10,
    outer: Any = None,
    engine: Engine | Literal["auto"] = "auto",
    seed: int = 0,
    seeds: int = 1,
    gate: Gates = "off",
) -> Iterator[OuterStep]:
    """The outer loop as a generator: one record per outer step, to be driven and stopped at will. See `tune`."""
    tuning = Tuning(
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
    with environment():
        tuning.prepare()
    while not tuning.done:
        record = None
        with environment():
            while record is None:
                record = tuning.advance()
        yield record


def run_seed(seed: int, index: int, replicate: int) -> int:
    """The seed of one training run, small enough for every random generator."""
    return seeding.mix(seed, index, replicate) % 2**31


def check_steps(steps: int | Sequence[int]) -> list[int]:
    """Inner steps per outer step, from one number or several."""
    horizons = [steps] if isinstance(steps, Integral) and not isinstance(steps, bool) else steps
    if not isinstance(horizons, Sequence) or isinstance(horizons, str) or not horizons:
        raise TypeError(f"steps={steps!r}: expected a whole number, or one per outer step.")
    for horizon in horizons:
        if isinstance(horizon, bool) or not isinstance(horizon, Integral) or horizon < 1:
            raise ValueError(f"steps={steps!r}: {horizon!r} is no number of training steps; expected at least 1.")
    return [int(h) for h in horizons]


def _summary(result: Hypergradient, metrics: dict[str, float], doubted: Doubts) -> dict[str, Any]:
    return {
        "grad": result.grad,
        "mean": result.mean,
        "val_loss": result.val_loss,
        "began": float(result.train_loss[0]),
        "status": str(result.status),
        "failed": failing.failed_at(result),
        "engine": result.engine,
        "metrics": metrics,
        "doubts": doubted,
        "error": result.error,
    }


def _good(saved: Any) -> tuple[float, Values] | None:
    """From a checkpoint; older ones have no loss with the values."""
    return (math.inf, saved) if isinstance(saved, dict) else saved


def _without(mean: Values, held: Mapping[str, list[int]]) -> Values:
    """NaN, which moves nothing, for values that the gate holds."""
    kept = {key: m.clone() for key, m in mean.items()}
    for key, windows in held.items():
        kept[key][windows] = torch.nan
    return kept


def _shrunk(state: dict[str, Any], held: Mapping[str, list[int]], outer: Outer) -> dict[str, Any]:
    """Smaller γ for values that the gate holds."""
    assert isinstance(outer, SignDescent)
    gamma = {key: g.clone() for key, g in state["gamma"].items()}
    for key, windows in held.items():
        gamma[key][windows] *= outer.factor
    return {**state, "gamma": gamma}


def _checked_gate(gate: str, outer: Outer) -> str:
    if gate not in ("off", "wait", "shrink"):
        raise ValueError(f"gate={gate!r}: expected 'off', 'wait' or 'shrink'.")
    if gate == "shrink" and not isinstance(outer, SignDescent):
        raise ValueError(f"gate='shrink' with {type(outer).__name__}, which has no γ to shrink: use gate='wait'.")
    return gate


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number, at least 1.")
    return int(value)
