"""One training run, checked and ready: what every engine is handed."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from longhorizon import compile, cuda, seeds, tree
from longhorizon.batches import Batches, device_of
from longhorizon.first_look import NotDifferentiable, check_batch, check_losses, check_metrics
from longhorizon.functional import Buffers, Functional
from longhorizon.hypers import Hyper, check_hypers, check_values, nearest, window_of
from longhorizon.inner import Hypers, Inner, State, fitted, make_groups
from longhorizon.rules import Params, Rule
from longhorizon.task import USUAL, Called, Task
from longhorizon.traces import Traces


@dataclass
class Problem:
    """A run of `steps` steps from a seed, at given hyperparameter values.

    Everything here is a function of the run's seed and of the step number, so any step can be repeated alone.
    """

    task: Task
    rule: Rule
    hypers: dict[str, Hyper]
    steps: int
    seed: int
    values: dict[str, Tensor]  # float64, one per window
    inner: Inner
    start: State
    batches: Batches
    val: list[Any]
    traces: Traces
    reach: dict[str, Tensor] | None = None  # γ: how far the outer step will move each value, where it is known
    called: Called = USUAL
    runs: int = 1  # training runs of this shape that are to be expected, this one included: what compiling pays for

    def __post_init__(self) -> None:
        params = self.start.params
        self.device = device_of(params)
        self.dtype = next(iter(params.values())).dtype
        self.on_device = {key: v.to(self.device, self.dtype) for key, v in self.values.items()}
        self.compared: set[Any] = set()  # traces that were compared with plain steps in this run
        self.draws = False  # whether a training step draws random numbers; seen when the losses are first called
        self.unfit = ""  # why nothing can come of it, seen then too,
        self.read_in_validation: set[str] = set()  # and which hyperparameters the validation loss reads
        self.learnt = [key for key, hyper in self.hypers.items() if hyper.learn]
        self.n_values = sum(self.hypers[key].windows for key in self.learnt)
        self.n_params = sum(p.numel() for p in params.values())

    def window(self, key: str, step: int) -> int:
        """The window of `key` that a step lies in."""
        return window_of(step, self.steps, self.hypers[key].windows)

    def hypers_at(self, step: int) -> Hypers:
        """The value of every entry at a step, as 0-dim tensors."""
        return {key: values[self.window(key, step)] for key, values in self.on_device.items()}

    def batch(self, step: int) -> Any:
        """The batch of a step, the same whenever it is asked for."""
        return self.batches[step]

    def seed_step(self, step: int) -> None:
        """Make the model's own randomness (dropout) a function of the step."""
        seeds.seed_torch(seeds.mix(self.seed, step, seeds.STEP))

    def train_step(self, state: State, step: int) -> tuple[State, Tensor]:
        """One plain training step; returns the loss before it."""
        batch = self.batch(step)
        self.seed_step(step)
        return self.inner.step(state, batch, self.hypers_at(step))

    def compiled_step(self, state: State, step: int) -> tuple[State, Tensor]:
        """The same step, traced and on a GPU compiled: for many steps, or many runs of one shape."""
        inner, batch = self.inner, self.batch(step)
        self.seed_step(step)
        fast = compile.traced(
            lambda state, batch, hypers: inner.pure_step(state, batch, hypers),  # make_fx counts a method's self
            inner.cache,
            "step",
            lambda: self.seed_step(step),
            inner.step,
            self.compared,
        )
        new_state, loss = fast(state, batch, self.hypers_at(step))
        return new_state, loss

    def worth_compiling(self, steps: int) -> bool:
        """Whether so many steps of every run pay for compiling one; on a GPU only."""
        return self.device.type == "cuda" and steps * self.runs >= compile.WORTH_COMPILING

    def stepper(self, steps: int) -> Callable[[State, int], tuple[State, Tensor]]:
        """The faster of the two for so many steps. On the CPU a trace gains little, and rounds differently."""
        return self.compiled_step if self.worth_compiling(steps) else self.train_step

    def validation_loss(self, state: State, step: int) -> Tensor:
        """The validation loss after `step` steps, without derivatives."""
        seeds.seed_torch(seeds.mix(self.seed, step, seeds.VALIDATE))
        hypers = self.hypers_at(step - 1)
        losses = []
        for i, batch in enumerate(self.val):
            with torch.no_grad(), self._judging(i, step):
                losses.append(self.inner.functional.loss(state.params, state.buffers, batch, hypers, "val")[0])
        return torch.stack(losses).mean()

    def validate(self, state: State, step: int, compiled: bool = False) -> tuple[Tensor, State, Hypers]:
        """The validation loss after `step` steps, its derivative in the state, and its direct one in the hypers.

        Args:
            compiled: take it traced, and on a GPU compiled: for many validations.
        """

        def reseed() -> None:
            seeds.seed_torch(seeds.mix(self.seed, step, seeds.VALIDATE))

        reseed()
        (real, rebuild), hypers = tree.split(state), self.hypers_at(step - 1)
        judged: Callable[..., Any] = self._judged
        if compiled and not self.draws:
            judged = compile.traced(self._pure_judged(), self.inner.cache, "validate", reseed, self._judged)
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        sums = [torch.zeros_like(x) for x in [*real, *hypers.values()]]
        for i, batch in enumerate(self.val):
            with self._judging(i, step):
                loss, grads = judged(state, batch, hypers)
            total, sums = total + loss, [s + g for s, g in zip(sums, grads, strict=True)]
        n = len(self.val)
        sums = [s / n for s in sums]
        return total / n, rebuild(sums[: len(real)]), dict(zip(hypers, sums[len(real) :], strict=True))

    @contextmanager
    def _judging(self, i: int, step: int) -> Iterator[None]:
        """Say which validation batch failed; only the first was tried before the run, since all would cost too much."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            if i == 0 or isinstance(error, NotDifferentiable | torch.OutOfMemoryError):
                raise
            raise RuntimeError(
                f"{self.called.judged_on(self.seed)} has a batch {i} (from 0) on which validation failed, after {step} "
                f"steps of training: {error} Batch 0 was fine; make all of one kind."
            ) from error

    def _judged(self, state: State, batch: Any, hypers: Hypers) -> tuple[Tensor, list[Tensor]]:
        """The loss of a validation batch, and its derivative in the floats of the state and in the hypers."""
        real, rebuild = tree.split(state)
        real = [leaf.detach().requires_grad_() for leaf in real]
        hypers = {key: h.detach().requires_grad_() for key, h in hypers.items()}
        inputs, (params, buffers, _) = real + list(hypers.values()), rebuild(real)
        with torch.enable_grad():
            loss, _ = self.inner.functional.loss(params, buffers, batch, hypers, "val")
            if not loss.requires_grad:
                raise NotDifferentiable(
                    "the validation loss does not depend on the parameters; remove `detach` or `no_grad` from it."
                )
            with self.inner.functional.again(params, buffers):
                grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        return loss.detach(), [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]

    def _pure_judged(self) -> Callable[[State, Any, Hypers], tuple[Tensor, list[Tensor]]]:
        """The same as a pure function, to be traced."""
        functional = self.inner.functional

        def judged(state: State, batch: Any, hypers: Hypers) -> tuple[Tensor, list[Tensor]]:
            real, rebuild = tree.split(state)

            def loss(real: list[Tensor], hypers: Hypers) -> Tensor:
                params, buffers, _ = rebuild(real)
                return functional.loss(params, buffers, batch, hypers, "val")[0]

            (dreal, dhypers), value = torch.func.grad_and_value(loss, argnums=(0, 1))(real, hypers)
            return value, [*dreal, *dhypers.values()]

        return judged

    def measure(self, params: Params, buffers: Buffers) -> dict[str, float]:
        """The task's metrics on the validation set, means over its batches."""
        found = [self.inner.functional.measure(params, buffers, batch) for batch in self.val]
        return {name: sum(float(m[name]) for m in found) / len(found) for name in found[0]}

    def share(self, per_step: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum the hypergradients of single steps over windows."""
        shared = {}
        for key, g in per_step.items():
            windows = torch.tensor([self.window(key, t) for t in range(self.steps)], device=g.device)
            shared[key] = torch.zeros(self.hypers[key].windows, dtype=g.dtype, device=g.device).index_add(0, windows, g)
        return shared


def make_problem(
    task: Task,
    rule: Rule,
    hypers: Mapping[str, Hyper],
    steps: int,
    seed: int,
    values: Mapping[str, Any] | None = None,
    traces: Traces | None = None,
    called: Called = USUAL,
) -> Problem:
    """Check everything that can be checked before the first step, and gather it.

    Args:
        traces: of earlier runs, to be used again where they fit.
        called: what to call the parts of the task in messages.

    Raises:
        TypeError, ValueError: naming the argument, its value and the remedy.
    """
    check_parts(task, rule)
    check_hypers(hypers, steps)
    seed = seeds.checked(seed)
    hypers = fitted(rule, hypers)
    chosen = _chosen_values(hypers, values)
    seeds.seed_all(seeds.mix(seed, seeds.INIT))
    functional = Functional(task, task.model())
    params, _ = functional.initial()
    inner = Inner(functional, rule, make_groups(rule, hypers, params, task.has_learnt_loss))
    traces = Traces() if traces is None else traces
    if not isinstance(traces, Traces):
        raise TypeError(f"traces={traces!r}: expected a Traces, to be shared with other calls, or None.")
    inner = traces.shared(task, inner)
    batches = Batches(task.train, seed, steps, called)
    seeds.seed_all(seeds.mix(seed, seeds.VALIDATE))
    try:
        given = task.val(seed)
    except Exception as error:
        error.add_note(f"This was the call of {called.judged_on(seed)}.")
        raise
    if not isinstance(given, Iterable) and not hasattr(given, "__getitem__"):
        raise TypeError(f"{called.judged_on(seed)} returned {type(given).__name__}: expected a list of batches.")
    val = list(given)
    if not val:
        what = "test" if called.val == "test" else "validation"
        raise ValueError(f"{called.judged_on(seed)} returned no batches: the {what} loss needs at least one.")
    start = inner.start()
    problem = Problem(
        task, rule, dict(hypers), int(steps), seed, chosen, inner, start, batches, val, traces, called=called
    )
    cuda.check_precision(problem.dtype)
    check_batch(problem)
    known = (task.train, task.val, list(hypers))
    for *one, draws, read in inner.checked:  # a run like this one with another seed: there may be very many
        if one[0] is known[0] and one[1] is known[1] and one[2] == known[2]:
            problem.draws, problem.read_in_validation = draws, read
            return problem
    check_losses(problem)
    check_metrics(problem)
    if not problem.unfit:
        inner.checked.append((*known, problem.draws, problem.read_in_validation))
    return problem


def refuse_unfit(problem: Problem) -> None:
    """Refuse a loss that is no number from the start, at values that a user gave.

    At values that something else chose (an outer step, a search), it is a run that diverged.
    """
    if problem.unfit:
        raise ValueError(problem.unfit)


def check_parts(task: object, rule: object) -> None:
    """Refuse what is no task or no rule."""
    if not isinstance(task, Task):
        raise TypeError(f"task={task!r}: expected a Task.")
    if not isinstance(rule, Rule):
        raise TypeError(f"rule={rule!r}: expected a rule such as longhorizon.sgd().")


@contextmanager
def environment(precision: cuda.Precision = "float32") -> Iterator[None]:
    """What every differentiated run needs around it.

    Random generators are put back afterwards, attention takes the only form that can be differentiated twice, and
    products on a GPU have the precision asked for.
    """
    with seeds.isolated(), sdpa_kernel(SDPBackend.MATH), cuda.precision(precision):
        yield


def _chosen_values(hypers: Mapping[str, Hyper], values: Mapping[str, Any] | None) -> dict[str, Tensor]:
    chosen = {key: hyper.values() for key, hyper in hypers.items()}
    for key, given in (values or {}).items():
        if key not in hypers:
            raise ValueError(f"values has the unknown hyperparameter {key!r}.{nearest(key, list(hypers))}")
        chosen[key] = torch.as_tensor(given, dtype=torch.float64).detach().cpu().reshape(-1).clone()
        check_values(key, hypers[key], chosen[key])
    return chosen
