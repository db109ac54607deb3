"""Adjoint differentiation: train first, then walk the trajectory back.

The walk needs the state before every step, not the graph of the step. States are kept whole, or only at every √T-th
step and replayed between two kept ones. A step back is a VJP of the inner step, from p = dL/dθ, q = dL/dv after
it to those before it; one Hessian product, however many hyperparameters there are, and it yields the hypergradient
of every single step. Sharing over windows is a sum afterwards.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from longhorizon import compile, tree
from longhorizon.batches import free_memory
from longhorizon.engines.base import Progress, ReplayError, Watch, check_repeated, explain, finish, nothing
from longhorizon.engines.clipping import Clip, check_clip, in_words
from longhorizon.engines.missing import check_derivative
from longhorizon.engines.reader import Reader, largest
from longhorizon.engines.silent import check_buffers, check_losses, check_twice
from longhorizon.engines.vjp import pure_step_back, step_back
from longhorizon.inner import Hypers, State, busy
from longhorizon.problem import Problem
from longhorizon.result import Hypergradient, Status

WORTH_TRACING_BACK = 300  # steps of a run on the CPU that pay for tracing the step back
MEMORY_SHARE = 0.5  # of the free memory that a trajectory (and kept batches) may take


@dataclass(frozen=True)
class Adjoint:
    """All hypergradients of all steps in one sweep forth and one back.

    Choose it for many values, or for most runs when memory allows: its cost does not depend on the number of
    values. Per step: one gradient, one Hessian product of two to three more, and one gradient of replay if states were
    not kept.

    Args:
        store: "all" keeps every state (bytes of parameters and optimizer memory, times steps), "sqrt" every √T-th and
            replays, "auto" keeps all if they fit into half of the free memory.
        clip: elementwise bound on H·q, the adjoint's counterpart of the paper's clip of H·Z (the two are not equal);
            "auto" for a tenth of the largest entry of the adjoint. The meter shows how it would have grown without.
        per_step: also return the hypergradient of every single step.
        compile: "auto" compiles both the step and the step back on a GPU, if runs are long and all states are kept
            (a replay needs kernels that give the same bits twice), and traces the step back of a long run on the CPU;
            True always, False never.
    """

    store: Literal["auto", "all", "sqrt"] = "auto"
    clip: Clip = None
    per_step: bool = False
    compile: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.store not in ("auto", "all", "sqrt"):
            raise ValueError(f"Adjoint(store={self.store!r}): expected 'auto', 'all' or 'sqrt'.")
        check_clip("Adjoint", self.clip)
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"Adjoint(compile={self.compile!r}): expected True, False or 'auto'.")

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> "AdjointRun":
        return AdjointRun(self, problem, saved)

    def keeps_all(self, problem: Problem) -> bool:
        """Whether every state is kept."""
        if self.store != "auto":
            return self.store == "all"
        return trajectory_bytes(problem, "all") < MEMORY_SHARE * free_memory(problem.device)

    def __str__(self) -> str:
        return f"adjoint (store={self.store}{in_words('H·q', self.clip)})"


def trajectory_bytes(problem: Problem, store: Literal["all", "sqrt"]) -> int:
    """Memory for the states of a run; for "sqrt", the kept points and one stretch between two of them."""
    count = problem.steps if store == "all" else 2 * math.isqrt(problem.steps) + 2
    return count * tree.nbytes(problem.start)


class AdjointRun:
    """A sweep over the steps from `first` to `last` (default: the whole run), forth and back.

    Phases: "train" to the end, keeping states; then for each stretch between kept points, "replay" it if its states
    are gone, and go "back" through it.
    """

    def __init__(
        self,
        engine: Adjoint,
        problem: Problem,
        saved: dict[str, Any] | None = None,
        *,
        first: int = 0,
        last: int | None = None,
        start: State | None = None,
        watch: Watch | None = None,
    ):
        self.engine, self.problem = engine, problem
        self.first, self.last = first, problem.steps if last is None else last
        self.stretch = max(1, math.isqrt(self.last - first))
        self.keep_all = engine.keeps_all(problem) if saved is None else saved.get("keep_all", engine.keeps_all(problem))
        worth = self.keep_all and problem.worth_compiling(problem.steps)
        self.compile = worth if engine.compile == "auto" else engine.compile
        on_cpu = engine.compile == "auto" and problem.device.type == "cpu"
        self.compile_back = self.compile or (on_cpu and problem.steps >= WORTH_TRACING_BACK)
        problem.batches.keep()
        _check_kept_batches(problem)
        self.watch = watch or Watch(problem, saved and saved["watch"])
        meter = saved.get("meter") if saved else None
        cuts = engine.clip is not None and (meter is None or "uncut" in meter)  # older ones did not look
        self.reader = Reader("adjoint", problem, 1, cuts=cuts, saved=meter)
        self.status, self.val_loss = Status(), torch.tensor(torch.nan)
        self.per_step = {
            key: torch.full((problem.steps,), torch.nan, dtype=problem.dtype, device=problem.device)
            for key in problem.learnt
        }
        self.cotangent: State | None = None
        self._uncut = torch.zeros((), dtype=torch.float64, device=problem.device)  # ln of how much larger it would be
        self.window: dict[int, State] = {}  # states of the stretch in hand, by step
        self._replayed = problem.start  # where a replay has got to,
        self._at = 0  # and at which step
        self._again: dict[int, Tensor] = {}  # losses of a replay that is not exact
        # Where all states were kept, fast kernels were used; a resumed run on a GPU repeats them to rounding only, and
        # that may grow from one step to the next.
        self.exact = problem.device.type == "cpu" or not self.keep_all
        if saved is None:
            start = problem.start if start is None else start
            self.phase, self.t = "train", first
            self.state = start
            self.points = {first: start}
            if first == 0:
                check_losses(problem)
                _probe(problem, start, first)
        else:
            self._load(saved)

    @property
    def done(self) -> bool:
        return self.phase == "done"

    @property
    def progress(self) -> Progress:
        length, at = self.last - self.first, self.t - self.first
        return Progress(self.phase, at if self.phase == "train" else 2 * length - at, 2 * length)

    def advance(self) -> None:
        with deterministic(self.problem, not self.keep_all):
            {"train": self._train, "replay": self._replay, "back": self._back}[self.phase]()

    def save(self) -> dict[str, Any]:
        # Of a trajectory kept whole, only every √T-th state is saved: the rest can be replayed.
        return {
            "phase": "back" if self.phase == "replay" else self.phase,
            "keep_all": self.keep_all,  # free memory may be another when it goes on
            "t": self.t,
            "state": tree.pack(self.state),
            "points": {str(t): tree.pack(s) for t, s in self.points.items()},
            "cotangent": [] if self.cotangent is None else tree.pack(self.cotangent),
            "per_step": {key: g.clone() for key, g in self.per_step.items()},
            "val_loss": self.val_loss.clone(),
            "status": [self.status.what, self.status.step],
            "watch": self.watch.save(),
            "meter": self.reader.save(),
            "uncut": self._uncut.clone(),
        }

    def result(self) -> Hypergradient:
        problem = self.problem
        per_step = {k: g.detach().to("cpu", torch.float64) for k, g in self.per_step.items()}
        grads = problem.share(per_step) if self.cotangent is not None else nothing(problem)
        return finish(
            problem,
            f"adjoint, {'all states kept' if self.keep_all else 'replayed'}{in_words('H·q', self.engine.clip)}",
            grads,
            self.val_loss,
            self.state,
            self.status,
            self.watch.losses,
            per_step if self.engine.per_step else None,
            self.reader.meter([0]),
        )

    def _load(self, saved: dict[str, Any]) -> None:
        self.phase, self.t = saved["phase"], saved["t"]
        start = self.problem.start
        self.state = tree.unpack(start, saved["state"])
        self.points = {int(t): tree.unpack(start, s) for t, s in saved["points"].items()}
        self.cotangent = tree.unpack(start, saved["cotangent"]) if saved["cotangent"] else None
        device = self.problem.device
        self.per_step = {key: g.to(device, copy=True) for key, g in saved["per_step"].items()}
        self.val_loss = saved["val_loss"].to(device)
        self._uncut = saved["uncut"].to(device) if "uncut" in saved else self._uncut
        self.status = Status(*saved["status"])

    def _train(self) -> None:
        if self.keep_all:
            self.window[self.t] = self.state
        if (self.t - self.first) % self.stretch == 0:
            self.points[self.t] = self.state
        self.state, loss = self._step(self.state, self.t)
        failed = self.watch.see(self.t, loss)
        self.t += 1
        if failed is not None:
            self.status, self.phase = Status("loss", failed), "done"
        elif self.t == self.last:
            self._turn()

    def _step(self, state: State, step: int) -> tuple[State, Tensor]:
        """One training step, compiled if that was decided."""
        return (self.problem.compiled_step if self.compile else self.problem.train_step)(state, step)

    def _step_back(self, state: State, step: int, cotangent: State) -> tuple[State, dict[str, Tensor], Tensor, Any]:
        """The VJP of a step, compiled if that was decided and the step is a pure function."""
        problem, clip = self.problem, self.engine.clip
        if not self.compile_back or problem.draws:
            return step_back(problem, state, step, cotangent, clip)
        batch, hypers = problem.batch(step), problem.hypers_at(step)
        problem.seed_step(step)

        def back(state: State, batch: Any, hypers: Hypers, learnt: Hypers, cotangent: State) -> Any:
            return pure_step_back(problem.inner, state, batch, hypers, learnt, cotangent, clip)

        fast = compile.traced(
            back,
            problem.inner.cache,
            ("back", clip),
            lambda: problem.seed_step(step),
            lambda state, batch, hypers, learnt, cotangent: step_back(problem, state, step, cotangent, clip),
            problem.compared,
            lambda *args: (busy(problem.start), *args[1:4], _random_like(args[4])),  # where nothing has grown
        )
        before, grads, loss, grown = fast(state, batch, hypers, {key: hypers[key] for key in problem.learnt}, cotangent)
        return before, grads, loss, grown

    def _turn(self) -> None:
        """From the end of training to the way back."""
        problem = self.problem
        failed = self.watch.first
        if failed is not None:
            self.status, self.phase = Status("loss", failed), "done"
            return
        often = self.compile and self.last - self.first < problem.steps  # one of many sweeps
        self.val_loss, self.cotangent, direct = problem.validate(self.state, self.last, often)
        for key in problem.learnt:
            self.per_step[key][self.last - 1] = direct[key]
        if not torch.isfinite(self.val_loss):
            self.status, self.phase, self.cotangent = Status("validation loss", self.last), "done", None
            return
        self.reader.take(self.last, largest(list(self.cotangent.params.values()))[None])
        self.phase = "back"

    def _replay(self) -> None:
        """One step of the stretch that leads to the step in hand; at its end, a check that it led there."""
        self._replayed, loss = self._step(self._replayed, self._at)
        if not self.exact:
            if not self._again:  # it begins with the very state
                check_repeated(self._at, self.watch.losses[self._at], loss)
            self._again[self._at] = loss
        self._at += 1
        if self._at < self.t:
            self.window[self._at] = self._replayed
            return
        end = self.state if self.t == self.last else self.points.get(self.t)
        if self.exact and end is not None and not tree.equal(self._replayed, end):
            raise ReplayError(
                f"repeating training from step {min(self.window)} to {self.t} gave other weights than the run itself: "
                "Task.train or the model is random beyond its seed, or a kernel is not deterministic (then use "
                "Adjoint(store='all') or lh.Forward())."
            )
        self.phase = "back"

    def _back(self) -> None:
        """One step back: the state before it, then the VJP."""
        step = self.t - 1
        if step not in self.window:
            self._at = self.first + (step - self.first) // self.stretch * self.stretch
            self._replayed = self.points[self._at]
            self.window, self._again = {self._at: self._replayed}, {}
            self.phase = "replay"
            return
        assert self.cotangent is not None
        self.cotangent, hypers, loss, grown = self._step_back(self.window.pop(step), step, self.cotangent)
        for factor in grown:
            self._uncut = self._uncut + factor.double().log()
        if step == self.first or (self.last - step) % self.watch.every == 0:
            check_repeated(step, self._again.get(step, self.watch.losses[step]), loss)
        for key, g in hypers.items():
            old = self.per_step[key][step]
            self.per_step[key][step] = g + (old if step == self.last - 1 else 0)
        self.t = step
        if self.reader.due(step):
            size = largest(list(self.cotangent.params.values())).double()[None]
            self.reader.take(step, size, uncut=size * self._uncut.clamp(max=600.0).exp())
        if step == self.first:
            self.phase = "done"
        if step == self.first or (self.last - step) % self.watch.every == 0:
            self._look(step)

    def _look(self, step: int) -> None:
        """End the walk where the adjoint stopped being finite; later windows stay exact."""
        seen = torch.stack([self.per_step[key][step : self.last] for key in self.problem.learnt]).isfinite().all(0)
        assert self.cotangent is not None
        alive = torch.stack([leaf.sum() for leaf in tree.split(self.cotangent)[0]]).isfinite().all()
        if bool(seen.all() & alive):
            return
        bad = step + int((~seen).nonzero().max()) if not bool(seen.all()) else step
        for g in self.per_step.values():
            g[self.first : bad + 1] = torch.nan
        self.status, self.phase = Status("adjoint", bad), "done"


@contextmanager
def deterministic(problem: Problem, replays: bool) -> Iterator[None]:
    """On CUDA, kernels that give the same result twice, where a replay depends on it."""
    if problem.device.type != "cuda" or not replays:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark


def _random_like(cotangent: State) -> State:
    """Random numbers, but zeros for parameters that have none: some rows of an embedding get no gradient."""
    random, idle = tree.random(cotangent), {name: x == 0 for name, x in cotangent.params.items()}

    def hidden(part: Any) -> Any:  # also in what the rule remembers of them
        if isinstance(part, dict):
            return {name: torch.where(idle[name], 0.0, x) if name in idle else x for name, x in part.items()}
        if not isinstance(part, tuple):
            return part
        return type(part)(*map(hidden, part)) if hasattr(part, "_fields") else tuple(map(hidden, part))

    found: State = hidden(random)
    return found


def _probe(problem: Problem, state: State, step: int) -> None:
    """Try one step back before the first step forth, so that what cannot be differentiated is known at once."""
    try:
        step_back(problem, state, step, tree.map(torch.zeros_like, state))
    except (RuntimeError, NotImplementedError) as error:
        raise explain(error, "Adjoint") from error
    params = {name: p.detach().requires_grad_() for name, p in state.params.items()}
    buffers = {name: b.detach().requires_grad_(tree.is_real(b)) for name, b in state.buffers.items()}
    batch, hypers = problem.batch(step), problem.hypers_at(step)
    problem.seed_step(step)
    grads, after, _ = problem.inner.gradient(params, buffers, batch, hypers, create_graph=True)
    check_twice(grads)
    check_buffers(problem, state, step, after)
    check_derivative(problem, tangents=False)


def _check_kept_batches(problem: Problem) -> None:
    if problem.batches.is_sequence:
        return
    need, free = problem.steps * tree.nbytes(problem.batch(0)), free_memory(torch.device("cpu"))
    if need > MEMORY_SHARE * free:
        raise ValueError(
            f"the adjoint reads batches backwards, and Task.train returns an iterator, so all "
            f"{problem.steps} would be kept: {need / 2**30:.1f} GiB of {free / 2**30:.1f} GiB free. Return a sequence "
            "(anything with __getitem__ by step) or use engine=lh.Forward()."
        )
