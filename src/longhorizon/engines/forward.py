"""Forward-mode differentiation with sharing (FDS): tangents travel along with training.

Every learnt value has a column Z = dθ/dλ (and one for each float of the optimizer's memory and of the buffers). One
step of all columns is one batched JVP of the inner step, evaluated next to the step itself:

    dg = H·Z + ∂g/∂λ          JVP of the gradient, the Hessian product, where `clip` acts
    dθ', dv' = …              JVP of the rule

At the end dL/dλ = ∂L/∂θ · Z. Nothing of the past is kept, so memory does not grow with the number of steps.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from longhorizon import compile, tree
from longhorizon.engines.base import Progress, Watch, explain, finish, nothing
from longhorizon.engines.clipping import Clip, check_clip, clipped, in_words, share
from longhorizon.engines.reader import Reader
from longhorizon.engines.silent import check_losses
from longhorizon.functional import PlainLosses
from longhorizon.hypers import window_start
from longhorizon.inner import Hypers, Inner, State, busy
from longhorizon.problem import Problem
from longhorizon.result import Hypergradient, Status

AT_ONCE = 10  # columns of a compiled step on a GPU: more gain nothing, and take memory and another compilation

_OUT_DIMS: Any = (None, None, 0, 0)
Tangents = list[Tensor]  # one per float leaf of the state, columns first


@dataclass(frozen=True)
class Forward:
    """All hypergradients in one forward sweep.

    Choose it for few values (up to about ten) or when memory must not grow with the run. Cost per step: one gradient
    plus about two per column that has begun. Memory: the model's activations times the columns of a chunk.

    Args:
        clip: elementwise bound on H·Z (the paper uses 1 to 100, mostly 10), or "auto" for one that is relative to Z.
            The hypergradient is then no longer exact, but one batch cannot dominate it.
        chunk: how many columns to push through the model at once; lower it to save memory. By default all, and about
            ten where the step is compiled for a GPU.
        compile: "auto" traces the step to plain tensor operations where a run is long enough to pay for it; True always
            traces, False never does. A traced step is compared with the plain one before it is used.
    """

    clip: Clip = None
    chunk: int | None = None
    compile: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check_clip("Forward", self.clip)
        chunk = self.chunk
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise ValueError(f"Forward(chunk={chunk!r}): expected a whole number of columns, or None to let it choose.")
        if self.compile not in (True, False, "auto"):
            raise ValueError(f"Forward(compile={self.compile!r}): expected True, False or 'auto'.")

    def begin(self, problem: Problem, saved: dict[str, Any] | None = None) -> "ForwardRun":
        return ForwardRun(self, problem, saved)

    def __str__(self) -> str:
        return f"forward{in_words('H·Z', self.clip)}"


class ForwardRun:
    """A forward sweep in progress."""

    def __init__(self, engine: Forward, problem: Problem, saved: dict[str, Any] | None):
        self.engine, self.problem = engine, problem
        # Columns in order of their window's first step, so that those which have begun are a prefix.
        self.columns = sorted(
            (window_start(w, problem.steps, problem.hypers[key].windows), i, key, w)
            for i, key in enumerate(problem.learnt)
            for w in range(problem.hypers[key].windows)
        )
        self.starts = [column[0] for column in self.columns]
        self._edges = sorted({*self.starts, problem.steps})  # where the number of columns changes
        self._place = {(key, w): place for place, (_, _, key, w) in enumerate(self.columns)}
        # On a GPU one compiled shape serves all: columns that have not begun are zeros, and so are those that fill up
        # the last chunk.
        self._padded = problem.device.type == "cuda" and self._compiles(0)
        parts = -(-len(self.columns) // AT_ONCE)
        self._chunk = engine.chunk or (-(-len(self.columns) // parts) if self._padded else None)
        self._units: tuple[Any, Hypers] = (None, {})  # of the windows in hand
        self.watch = Watch(problem, saved and saved["watch"])
        self.failed = self.watch.first
        self.reader = Reader(
            "tangents", problem, len(self.columns), engine.clip is not None, saved=saved and saved.get("meter")
        )
        if saved is None:
            check_losses(problem, tangents=True)
            self.t, self.state = 0, problem.start
            self.tangents = [leaf.new_zeros((0, *leaf.shape)) for leaf in tree.split(self.state)[0]]
            self._bad = torch.full((len(self.columns),), -1, dtype=torch.int64, device=problem.device)
        else:
            self.t, self.state = saved["t"], tree.unpack(problem.start, saved["state"])
            self.tangents = [leaf.to(problem.device) for leaf in saved["tangents"]]
            self._bad = saved["bad"].to(problem.device, copy=True)

    @property
    def done(self) -> bool:
        return self.t == self.problem.steps or self.failed is not None

    @property
    def progress(self) -> Progress:
        return Progress("train", self.t, self.problem.steps)

    def save(self) -> dict[str, Any]:
        return {
            "t": self.t,
            "state": tree.pack(self.state),
            "tangents": tree.pack([leaf[: self.active(self.t - 1)] for leaf in self.tangents]),
            "bad": self._bad.clone(),
            "watch": self.watch.save(),
            "meter": self.reader.save(),
        }

    def active(self, step: int) -> int:
        """How many columns have begun by a step."""
        return bisect_right(self.starts, step)

    def stretch(self, step: int) -> int:
        """How many steps in a row have as many columns as this one: those that share one traced shape."""
        after = bisect_right(self._edges, step)
        return self._edges[after] - self._edges[after - 1]

    def advance(self) -> None:
        problem, t = self.problem, self.t
        batch, hypers = problem.batch(t), problem.hypers_at(t)
        count = self.active(t)
        chunk = self._chunk or count
        width = -(-count // chunk) * chunk if self._padded else count
        if len(self.tangents[0]) < width:
            self.tangents = [_grown(leaf, width) for leaf in self.tangents]
        elif self._padded and (before := self.active(t - 1)) < count:  # a zero times an infinity may have been there
            self.tangents = [_grown(_grown(leaf[:before], count), width) for leaf in self.tangents]
        ones = self._ones(t, width)
        parts, readings = [], []
        try:
            for low in range(0, width, chunk):
                part = slice(low, low + chunk)
                some = self.tangents if chunk >= width else [leaf[part] for leaf in self.tangents]
                problem.seed_step(t)
                state, dstate, loss, reading = self._step(t)(
                    self.state, batch, hypers, some, {key: one[part] for key, one in ones.items()}
                )
                parts.append(dstate)
                readings.append(reading)
        except (RuntimeError, NotImplementedError) as error:
            raise explain(error, "Forward") from error
        self.state = state
        self.tangents = parts[0] if len(parts) == 1 else [torch.cat(same) for same in zip(*parts, strict=True)]
        size, largest, cut = (readings[0] if len(readings) == 1 else torch.cat(readings, 1))[:, :count]
        bad = self._bad[:count]
        self._bad[:count] = torch.where((bad < 0) & ~largest.isfinite(), t, bad)
        if self.reader.due(t + 1):
            self.reader.take(t + 1, size, cut)
        self.failed = self.watch.see(t, loss)
        self.t += 1

    def result(self) -> Hypergradient:
        problem = self.problem
        if self.failed is not None:
            status = Status("loss", self.failed)
            return finish(problem, str(self.engine), nothing(problem), torch.nan, self.state, status, self.watch.losses)
        val_loss, cotangents, direct = problem.validate(self.state, problem.steps)
        pairs = zip(tree.split(cotangents)[0], self.tangents, strict=True)
        flat = torch.stack([_rows(leaf) @ cotangent.flatten() for cotangent, leaf in pairs]).sum(0)[: len(self.columns)]
        for key in problem.learnt:  # the validation loss sees the last window's value
            flat[self._place[key, problem.hypers[key].windows - 1]] += direct[key]
        ends = (self._bad < 0) & ~flat.isfinite() & val_loss.isfinite()
        self._bad = torch.where(ends, problem.steps - 1, self._bad)
        flat = torch.where(self._bad < 0, flat, torch.nan)
        grads = {}
        for key in problem.learnt:
            places = [self._place[key, w] for w in range(problem.hypers[key].windows)]
            grads[key] = flat[places]
        bad = self._bad[self._bad >= 0]
        status = Status("tangent", int(bad.min())) if len(bad) else Status()
        meter = self.reader.meter([self._place[key, w] for key in grads for w in range(len(grads[key]))])
        return finish(problem, str(self.engine), grads, val_loss, self.state, status, self.watch.losses, None, meter)

    def _ones(self, step: int, width: int) -> Hypers:
        """dλ/dλ: per key, one column has a 1, that of the window the step lies in."""
        problem = self.problem
        places = tuple(self._place[key, problem.window(key, step)] for key in problem.learnt)
        if self._units[0] != (places, width):  # a window has begun
            units = torch.zeros(len(places), width, dtype=problem.dtype, device=problem.device)
            units[range(len(places)), places] = 1
            self._units = (places, width), dict(zip(problem.learnt, units, strict=True))
        return self._units[1]

    def _compiles(self, t: int) -> bool:
        """Whether the step is traced: where enough steps share its shape."""
        if self.engine.compile != "auto":
            return self.engine.compile
        if self.problem.device.type == "cuda":
            return self.problem.worth_compiling(self.problem.steps)
        return self.stretch(t) >= compile.WORTH_TRACING

    def _step(self, t: int) -> Callable[..., tuple[State, Tangents, Tensor, Tensor]]:
        """The batched step, traced where that pays."""
        engine, problem = self.engine, self.problem
        inner = problem.inner

        def step(
            state: State, batch: Any, hypers: Hypers, tangents: Tangents, ones: Hypers
        ) -> tuple[State, Tangents, Tensor, Tensor]:
            after, tangents, loss, cut = tangent_step(inner, state, batch, hypers, tangents, ones, engine.clip)
            n = len(state.params)
            readings = [_largest(tangents[:n]), _largest(tangents), cut]  # of dθ/dλ; of all, to see what is lost
            return after, tangents, loss, torch.stack(readings)

        if self._compiles(t):
            key, reseed = (engine.clip,), lambda: problem.seed_step(t)
            return compile.traced(step, inner.cache, key, reseed, None, problem.compared, _with_random_tangents)
        return step


def tangent_step(
    inner: Inner,
    state: State,
    batch: Any,
    hypers: Hypers,
    tangents: Tangents,
    ones: Hypers,
    clip: Clip = None,
) -> tuple[State, Tangents, Tensor, Tensor]:
    """One training step and the step of its tangents: a JVP of `inner`, batched over columns.

    Args:
        tangents: per float leaf of the state, its derivative, columns first.
        ones: per learnt key, the derivative of its current value, one number per column.
        clip: bound on H·Z.

    Returns:
        The state after the step, its tangents, the loss before it, and per column the share of H·Z that was clipped.
    """

    def column(dstate: Tangents, dlearnt: Hypers) -> tuple[State, Tensor, Tangents, Tensor]:
        return _one_column(inner, state, batch, hypers, dstate, dlearnt, clip)

    new_state, loss, dstate, cut = vmap(column, out_dims=_OUT_DIMS, randomness="same")(tangents, ones)
    return new_state, dstate, loss, cut


def _one_column(
    inner: Inner, state: State, batch: Any, hypers: Hypers, dstate: Tangents, dlearnt: Hypers, clip: Clip
) -> tuple[State, Tensor, Tangents, Tensor]:
    """The step and one tangent of it. Returns the new state, the loss, the state's tangent, and the share clipped."""
    params, (buffers, with_buffers), (memory, with_memory) = (
        state.params,
        tree.split(state.buffers),
        tree.split(state.memory),
    )
    n, m = len(params), len(buffers)
    dparams = dict(zip(params, dstate[:n], strict=True))
    dbuffers, dmemory = dstate[n : n + m], dstate[n + m :]
    learnt = {key: hypers[key] for key in dlearnt}

    def gradient(params: Any, buffers: Any, learnt: Any) -> Any:
        def loss(params: Any) -> Any:
            with PlainLosses():
                value, after = inner.functional.loss(params, with_buffers(buffers), batch, hypers | learnt)
            return value, (value, after)

        grads, (value, after) = grad(loss, has_aux=True)(params)
        return (grads, tree.split(after)[0]), (grads, after, value)

    def update(params: Any, grads: Any, memory: Any, learnt: Any) -> Any:
        after = inner.pure_update(params, grads, with_memory(memory), hypers | learnt)
        return (list(after[0].values()), tree.split(after[1])[0]), after

    _, (dgrads, dbuffers), (grads, new_buffers, loss) = _jvp(
        gradient, (params, buffers, learnt), (dparams, dbuffers, dlearnt)
    )
    cut = loss.new_zeros(())
    if clip is not None:
        direct: Any = dict.fromkeys(dgrads, 0.0)  # ∂g/∂λ, which no clip is meant for
        if inner.functional.has_learnt_loss:
            direct = jvp(lambda learnt: gradient(params, buffers, learnt)[0][0], (learnt,), (dlearnt,))[1]
        product = [dgrads[name] - direct[name] for name in dgrads]
        cut = share(product, dstate[:n], clip)
        bounded = clipped(product, dstate[:n], clip)
        dgrads = {name: b + direct[name] for name, b in zip(dgrads, bounded, strict=True)}
    _, (dparams_list, dmemory), (new_params, new_memory) = _jvp(
        update, (params, grads, memory, learnt), (dparams, dgrads, dmemory, dlearnt)
    )
    after = [*dparams_list, *dbuffers, *dmemory]
    after = [d.to(z.dtype) for d, z in zip(after, dstate, strict=True)]  # torch makes float64 of 0-dim ones in float32
    return State(new_params, new_buffers, new_memory), loss, after, cut


def _with_random_tangents(
    state: State, batch: Any, hypers: Hypers, tangents: Tangents, ones: Hypers
) -> tuple[Any, ...]:
    """Arguments to compare a trace at: in the first step tangents are zero, and so is the Hessian product."""
    return busy(state), batch, hypers, tree.random(tangents), ones


def _jvp(fn: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """(outputs, their tangents, what else `fn` returned)."""
    return jvp(fn, primals, tangents, has_aux=True)


def _rows(leaf: Tensor) -> Tensor:
    """Columns as the rows of a matrix; a scalar parameter's too."""
    return leaf.reshape(len(leaf), -1)


def _largest(leaves: Tangents) -> Tensor:
    """Per column, the largest absolute entry; NaN if there is one."""
    return torch.stack([_rows(leaf).abs().amax(1) for leaf in leaves if leaf.numel()]).amax(0)


def _grown(leaf: Tensor, count: int) -> Tensor:
    """Columns that have just begun start at zero."""
    missing = count - len(leaf)
    return leaf if not missing else torch.cat([leaf, leaf.new_zeros((missing, *leaf.shape[1:]))])
