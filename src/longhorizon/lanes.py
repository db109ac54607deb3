"""Several training runs at once: one batched step takes all of them a step further.

A step of a small network spends most of its time between operations. With the weights of all runs stacked, every
operation is done for all of them in one go. Runs may differ in their seed (weights, data), in the values of their
hyperparameters and in their length; the model and the rule are one. Measured by benchmarks/lanes.py.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from longhorizon import compile, convolution, cuda, tree
from longhorizon.batches import free_memory, joined
from longhorizon.inner import State
from longhorizon.problem import Problem

MOST = 32  # runs at once
COMPILED = range(8, 13)  # runs at once on a GPU: more gain nothing, and every number of them is a compilation
WIDE = range(16, 26)  # in bfloat16, where there are many: what is done once for all of them counts for more there
ROOM = 2**24  # parameters of all of them


class Lanes:
    """Runs of one shape, each a lane of a batched step.

    Args:
        problems: one per run, made with one `Traces`.
        start: their stacked states to go on from; without it, their own starts.
        count: of lanes; those left over repeat the last run, so that a shorter row fits the trace of a full one.
        steps: of all rows of this size together, which decides whether tracing the step pays; without it, of this one.
    """

    def __init__(self, problems: Sequence[Problem], start: State | None = None, count: int = 0, steps: int = 0):
        self.problems = list(problems)
        first, spare = self.problems[0], max(0, count - len(self.problems))
        self.in_lanes = [*self.problems, *[self.problems[-1]] * spare]  # the last one again in those to spare
        self.state: State = stacked([p.start for p in self.in_lanes]) if start is None else start
        self._values = {key: pad_sequence([p.on_device[key] for p in self.in_lanes], True) for key in first.hypers}
        steps = steps or first.steps
        on_cpu = first.device.type == "cpu"
        self._traced = steps >= compile.WORTH_TRACING if on_cpu else first.worth_compiling(steps)
        self._half = in_half(first.device)
        self._order: tuple[tuple[int, ...], Tensor] = (), torch.empty(0)
        self._chosen: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._form = _form(first.batch(0))  # the shape that is traced; batches of others are rare, or all differ

    def step(self, t: int | Sequence[int]) -> Tensor:
        """Take all runs a step further, from one step or each from its own; returns the losses before it."""
        at = [t] * len(self.in_lanes) if isinstance(t, int) else [*t]
        at += at[-1:] * (len(self.in_lanes) - len(at))
        given = self.given(at)
        if given is None:
            return self._one_by_one(at)
        batch, hypers, usual = given
        with cuda.half() if self._half else nullcontext():
            self.state, losses = self.traced(batched(self.problems[0]), "lanes", at, usual)(self.state, batch, hypers)
        found: Tensor = losses[: len(self.problems)]
        return found.detach()

    def given(self, at: Sequence[int]) -> tuple[Any, dict[str, Tensor], bool] | None:
        """What a step is given: batches and hyperparameters, stacked, and whether they are of the usual shape.

        None where runs have to be taken one by one.
        """
        first = self.problems[0]
        if any(p.inner is not first.inner for p in self.problems):
            return None
        batch, forms = self._joined(at), {self._form}
        if batch is None:
            batches = self._batches(at)
            forms = {_form(batch) for batch in {id(batch): batch for batch in batches}.values()}
            if len(forms) > 1:
                return None
            batch = stacked(batches)
        return batch, {key: self._hyper(key, values, at) for key, values in self._values.items()}, forms == {self._form}

    def traced(self, fn: Callable[..., Any], name: str, at: Sequence[int], usual: bool = True) -> Callable[..., Any]:
        """A function of all lanes, traced where that pays."""
        first = self.problems[0]
        if not (self._traced and usual):
            return fn
        return compile.traced(fn, first.inner.cache, (name, len(self.in_lanes)), lambda: first.seed_step(at[0]))

    def put(self, i: int, problem: Problem, state: State) -> None:
        """Another run in a lane, where it begins or goes on."""
        values = {
            key: pad_sequence([*values[:i], problem.on_device[key], *values[i + 1 :]], True)  # a short run may have few
            for key, values in self._values.items()
        }
        state = tree.map(lambda x, own: _with(x, i, own) if isinstance(x, Tensor) else x, self.state, state)
        self.problems[i] = self.in_lanes[i] = problem
        self._values, self.state = values, state
        self._chosen.clear()

    def repeat(self, i: int, other: int) -> None:
        """Let a lane that nobody needs read the batches of another one."""
        self.problems[i] = self.in_lanes[i] = self.problems[other]

    def _hyper(self, key: str, values: Tensor, at: Sequence[int]) -> Tensor:
        """Each run's value of a hyperparameter now."""
        windows = tuple(p.window(key, t) for p, t in zip(self.in_lanes, at, strict=True))
        if self._chosen.get(key, (None,))[0] != windows:  # which changes now and then only
            alike = len(set(windows)) == 1
            now = values[:, windows[0]].contiguous() if alike else values[range(len(windows)), windows]
            self._chosen[key] = windows, now
        return self._chosen[key][1]

    def _one_by_one(self, at: Sequence[int]) -> Tensor:
        """Where batches differ in shape, or models in what is neither a weight nor a buffer."""
        made = [p.train_step(self.lane(i), t) for i, (p, t) in enumerate(zip(self.in_lanes, at, strict=True))]
        self.state = stacked([tree.detach(state) for state, _ in made])
        return torch.stack([loss.detach() for _, loss in made[: len(self.problems)]])

    def validation_losses(self, t: int) -> list[Tensor]:
        """The validation loss of every run, each on its own split; NaN where training diverged."""
        return [p.validation_loss(self.lane(i), t) for i, p in enumerate(self.problems)]

    def lane(self, i: int) -> State:
        """The state of one run."""
        state: State = tree.map(lambda x: x[i] if isinstance(x, Tensor) else x, self.state)
        return state

    def _joined(self, at: Sequence[int]) -> Any:
        """All batches, stacked, if their sources can make them in one go; those that are equal are made once."""
        keys = [(id(p.batches), t) for p, t in zip(self.in_lanes, at, strict=True)]
        distinct = {key: (p.batches, t) for key, p, t in zip(keys, self.in_lanes, at, strict=True)}
        batch = joined(*zip(*distinct.values(), strict=True))
        if batch is None or len(distinct) == len(keys):
            return batch
        order = tuple(list(distinct).index(key) for key in keys)
        if self._order[0] != order:  # which stays, mostly
            self._order = order, torch.tensor(order, device=self.problems[0].device)
        return tree.map(lambda x: x[self._order[1]], batch)

    def _batches(self, at: Sequence[int]) -> list[Any]:
        """Runs that share their data share the work of making a batch."""
        made: dict[tuple[int, int], Any] = {}
        for p, t in zip(self.in_lanes, at, strict=True):
            if (id(p.batches), t) not in made:
                made[id(p.batches), t] = p.batch(t)
        return [made[id(p.batches), t] for p, t in zip(self.in_lanes, at, strict=True)]


class Alone:
    """One run, with the face of `Lanes`."""

    def __init__(self, problem: Problem, start: State | None, steps: int):
        self.problem, self._step = problem, problem.stepper(steps)
        self.state: State = problem.start if start is None else start

    def step(self, t: int) -> Tensor:
        self.state, loss = self._step(self.state, t)
        return loss[None]

    def validation_losses(self, t: int) -> list[Tensor]:
        return [self.problem.validation_loss(self.state, t)]

    def lane(self, _: int) -> State:
        return self.state


def at_once(problem: Problem, runs: int, goes: int = 1) -> int:
    """How many of so many runs like this one to make at once; 1 where a batched step is no gain or cannot be had.

    `goes`: how often so many are made; where there are many in all, a wider step pays for being compiled.

    No gain: convolutions, which vmap turns into grouped ones, other than those of convolution.py. Cannot be had: random
    numbers in the model, weights that are not trained (each run has its own), operations that vmap refuses, batches
    that are not tensors or come in a row only, more than fits into half of the free memory. Tried on the first step,
    and compared with the plain one. Where there are too many for one go, the goes are alike (the last one is filled
    up: `Lanes(count=)`), so that one trace serves them.
    """
    most, module = min(runs, MOST, ROOM // max(1, problem.n_params)), problem.inner.functional.module
    if most < 2 or problem.draws or not problem.batches.is_sequence:
        return 1
    layers = [layer for layer in module.modules() if isinstance(layer, nn.modules.conv._ConvNd)]
    if layers and not (
        problem.device.type == "cuda"
        and problem.dtype == torch.float32
        and convolution.available()
        and all(isinstance(layer, nn.Conv2d) and convolution.suits_layer(layer) for layer in layers)
    ):
        return 1
    if not all(p.requires_grad for p in module.parameters()):
        return 1
    inner, batch = problem.inner, problem.batch(0)
    if not all(isinstance(x, Tensor) for x in pytree.tree_leaves(batch)):
        return 1
    nothing = not any(bool(v.any()) for v in problem.values.values())  # then a step moves nothing, and shows less
    kind = problem.device, cuda.current_precision(), _form(batch), nothing
    if kind not in inner.step_bytes:
        with _Bytes() as made:
            problem.train_step(problem.start, 0)
        inner.step_bytes[kind] = made.total
    most = min(most, int(free_memory(problem.device) / 2 / max(1, inner.step_bytes[kind])))
    if most < 2:
        return 1
    if kind not in inner.side_by_side:
        inner.side_by_side[kind] = _works(problem, batch)
    wide = cuda.current_precision() == "bf16" and goes * runs > 2 * WIDE[-1]
    return _share(runs, most, problem.device.type, wide) if inner.side_by_side[kind] else 1


def _works(problem: Problem, batch: Any) -> bool:
    """Whether a batched step is the same step."""
    expected = problem.train_step(problem.start, 0)
    pairs = (stacked([part] * 2) for part in (problem.start, batch, problem.hypers_at(0)))
    try:
        with cuda.half() if in_half(problem.device) else nullcontext():  # not traced, it is in float32 all the same
            found = tree.map(lambda x: x[1] if isinstance(x, Tensor) else x, batched(problem)(*pairs))
    except Exception:  # vmap may refuse anything that a user's model can invent
        return False
    return compile.difference(tree.detach(expected), tree.detach(found)) is None


def _share(runs: int, most: int, device: str, wide: bool = False) -> int:
    """Runs of one go, with few lanes left over in the last one.

    >>> [_share(runs, 32, "cuda") for runs in (3, 8, 16, 19, 24, 40)]
    [3, 8, 8, 10, 8, 8]
    >>> [_share(runs, 32, "cuda", wide=True) for runs in (19, 100, 135, 152)]
    [19, 25, 17, 19]
    >>> [_share(runs, 32, "cpu") for runs in (3, 16, 24, 40)]
    [3, 16, 24, 20]
    """
    wide = wide and most >= WIDE[0]
    sizes = [size for size in (WIDE if wide else COMPILED) if size <= most]
    if device == "cuda" and sizes and runs > sizes[-1]:
        return min(sizes, key=lambda size: (-runs % size, -size if wide else size))
    return -(-runs // -(-runs // most))


class _Bytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what all operations make: more than is alive at any time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if not op.is_view:
            self.total += sum(x.nbytes for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
        return result


def _form(batch: Any) -> Any:
    return compile.leaves_and_form(batch)[1]


def in_half(device: torch.device) -> bool:
    """Whether lanes are to be in bfloat16."""
    return device.type != "cpu" and cuda.current_precision() == "bf16"


def batched(problem: Problem) -> Callable[..., Any]:
    """A training step of several runs."""
    inner = problem.inner

    def step(state: State, batch: Any, hypers: Any) -> tuple[State, Tensor]:
        return inner.pure_step(state, batch, hypers)

    return together(step)


def together(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of what one run has as one of what several have, stacked."""

    def of_all(*args: Any) -> Any:
        # pieces of a vector of all parameters would be copied one by one afterwards
        return tree.map(
            lambda x: x.contiguous() if isinstance(x, Tensor) else x, torch.vmap(fn, randomness="error")(*args)
        )

    return of_all


def _with(whole: Tensor, i: int, own: Tensor) -> Tensor:
    """A copy with another row."""
    whole = whole.clone()
    whole[i] = own
    return whole


def stacked(trees: Sequence[Any]) -> Any:
    """Leaves of several trees of one structure, along a new first axis; what is no tensor is that of the first."""
    return tree.map(lambda *same: torch.stack(same) if isinstance(same[0], Tensor) else same[0], *trees)
