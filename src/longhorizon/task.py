"""What is trained and judged: a model, a loss, a stream of training batches and a validation set."""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

Loss = Callable[..., Tensor]

FORMS = {
    "model": "() -> nn.Module",
    "loss": "(model, batch) -> scalar",
    "train": "(seed) -> batches",
    "val": "(seed) -> list of batches",
    "val_loss": "(model, batch) -> scalar",
    "metrics": '(model, batch) -> {"accuracy": …}',
    "full": "(seed) -> batches",
    "test": "() -> list of batches",
}
REQUIRED = ("model", "loss", "train", "val")


@dataclass(frozen=True)
class Task:
    """A training problem, described by four functions.

    Args:
        model: `() -> nn.Module`, called under the run's seed. Parameters that do not require a gradient stay fixed.
        loss: `(model, batch) -> scalar`, or `(model, batch, hypers) -> scalar` if the loss itself has learnt
            hyperparameters; `hypers` then holds the current value of every entry by its key. A third parameter with a
            default is the loss's own, unless it is called `hypers`.
        train: `(seed) -> batches`, at least as many as the run has steps. A sequence (anything with `__getitem__`) is
            read by step number; an iterable is read in order. Equal seeds must give equal batches.
        val: `(seed) -> list of batches`. The validation loss is the plain mean over them, so make them of equal size.
        val_loss: judges the trained model where that differs from `loss` (for instance without label smoothing); needed
            where a learnt hyperparameter could make `loss` smaller by itself, such as a weight of the loss.
        val_mode: "eval" judges as the model will be used: no dropout, BatchNorm by its running statistics, through
            whose history we differentiate too. "train" uses batch statistics and dropout, as in training.
        metrics: `(model, batch) -> {"accuracy": …}`, numbers to watch besides the loss; taken in eval mode.
        full: `(seed) -> batches` of training and validation data together, for training with the result.
        test: `() -> list of batches` that nothing has seen.
    """

    model: Callable[[], nn.Module]
    loss: Loss
    train: Callable[[int], Iterable[Any]]
    val: Callable[[int], Sequence[Any]]
    val_loss: Loss | None = None
    val_mode: Literal["eval", "train"] = "eval"
    metrics: Callable[[nn.Module, Any], Mapping[str, Tensor]] | None = None
    full: Callable[[int], Iterable[Any]] | None = None
    test: Callable[[], Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        check_model("Task", self.model)
        for name in FORMS:
            given, needed = getattr(self, name), name in REQUIRED
            if needed or given is not None:
                _check_function(name, given, "" if needed else " or None")
        if self.val_mode not in ("eval", "train"):
            raise ValueError(f"Task(val_mode={self.val_mode!r}): expected 'eval' or 'train'.")

    @property
    def has_learnt_loss(self) -> bool:
        """Whether `loss` takes the hyperparameters as a third argument."""
        return takes_hypers(self.loss)


@dataclass(frozen=True)
class Called:
    """What messages call the parts of a run; a test trains on `full` and is judged on `test`.

    Attributes:
        train, val: the parts of the task that the run trains on and is judged on.
        fewer: what to do for a run of fewer steps.
    """

    train: str = "train"
    val: str = "val"
    fewer: str = "lower `steps`"

    def judged_on(self, seed: int) -> str:
        """The call that made the batches a run is judged on; a test has no seed."""
        return f"Task.{self.val}({'' if self.val == 'test' else seed})"


USUAL = Called()


def check_model(where: str, model: object) -> None:
    """Refuse a model where a function that makes one is expected."""
    if isinstance(model, nn.Module):
        raise TypeError(
            f"{where}(model=…): expected a function that makes the model (every run starts from a fresh one); "
            "write `model=lambda: MyModel()`."
        )


def _check_function(name: str, given: Any, alternative: str) -> None:
    """Refuse what cannot be called as a task's functions are, where its signature tells."""
    expected = f"expected a function `{FORMS[name]}`{alternative}."
    if not callable(given):
        raise TypeError(f"Task({name}={_in_short(given)}): {expected}")
    inner = given.func if isinstance(given, partial) else given
    if name in ("loss", "val_loss") and str(getattr(inner, "__module__", "")).startswith("torch.nn."):
        raise TypeError(
            f"Task({name}={_in_short(given)}): torch's own losses take outputs and targets; {expected} For instance "
            f"`{name}=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])`."
        )
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    count = FORMS[name].partition(")")[0].count(",") + (FORMS[name][1] != ")")
    count += name in ("loss", "val_loss") and takes_hypers(given)
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise TypeError(f"Task({name}=…) has the parameters {signature}: {expected}") from None


def _in_short(value: object) -> str:
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def takes_hypers(loss: Loss) -> bool:
    """Whether a loss takes `(model, batch, hypers)` rather than `(model, batch)`."""
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3:
        return False
    third = positional[2]
    return third.default is third.empty or third.name == "hypers"  # `weight=0.5` is no place for a dictionary


def call_loss(loss: Loss, model: nn.Module, batch: Any, hypers: Mapping[str, Tensor]) -> Tensor:
    """The loss, with the hyperparameters if it takes them."""
    return loss(model, batch, hypers) if takes_hypers(loss) else loss(model, batch)
