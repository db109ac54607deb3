"""Batches by step number, whatever the user's stream is.

The adjoint reads batches backwards. A sequence is simply indexed. An iterable is read in order; where batches
are needed again they are kept, and the adjoint refuses beforehand what would not fit.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from longhorizon import seeds
from longhorizon.task import USUAL, Called

_latest: tuple[int, int] | None = None  # step and seed of the training batch that was asked for last, for errors


class Batches:
    """The training stream of one run.

    Args:
        train: the task's `train`.
        seed: the run's seed.
        steps: how many batches the run reads.
        called: what to call `train` in messages.
    """

    def __init__(self, train: Callable[[int], Iterable[Any]], seed: int, steps: int, called: Called = USUAL):
        self._train, self._seed, self._steps, self._called = train, seed, steps, called
        self._kept: dict[int, Any] | None = None
        self._restart()
        length = len(self._source) if self.is_sequence and hasattr(self._source, "__len__") else steps
        if length < steps:
            raise self._ended(length)

    @property
    def is_sequence(self) -> bool:
        """Whether any batch can be had by its number alone."""
        return hasattr(self._source, "__getitem__")

    def keep(self) -> None:
        """Hold on to batches that could not be had again."""
        if not self.is_sequence and self._kept is None:
            self._kept = {}

    def __getitem__(self, step: int) -> Any:
        self._ask(step)
        if self._kept is not None and step in self._kept:
            return self._kept[step]
        if self.is_sequence:
            seeds.seed_all(seeds.mix(self._seed, step, seeds.FETCH))
            try:
                return self._source[step]
            except IndexError:
                if hasattr(self._source, "__len__"):  # long enough: the error is the user's own
                    raise
                raise self._ended(step) from None
        if step < self._cursor:  # an iterable cannot go back: start it again
            self._restart()
        while True:
            seeds.seed_all(seeds.mix(self._seed, self._cursor, seeds.FETCH))
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise self._ended(self._cursor) from None
            self._cursor += 1
            if self._kept is not None:
                self._kept[self._cursor - 1] = batch
            if self._cursor == step + 1:
                return batch

    def _ask(self, step: int) -> None:
        global _latest
        _latest = step, self._seed

    def _restart(self) -> None:
        seeds.seed_all(seeds.mix(self._seed, seeds.FETCH))
        try:
            self._source: Any = self._train(self._seed)
        except Exception as error:
            error.add_note(f"This was the call of Task.{self._called.train}({self._seed}).")
            raise
        if not hasattr(self._source, "__getitem__") and not hasattr(self._source, "__iter__"):
            found = type(self._source).__name__
            raise TypeError(f"Task.{self._called.train} returned {found}: expected batches, in an iterable.")
        self._iterator = iter(()) if self.is_sequence else iter(self._source)
        self._cursor = 0

    def _ended(self, got: int) -> ValueError:
        return ValueError(
            f"Task.{self._called.train}({self._seed}) ended after {got} batches, but the run has steps={self._steps} "
            f"and needs one each (no batch for step {got}); make the stream repeat, or {self._called.fewer}."
        )


def joined(streams: Sequence[Batches], steps: Sequence[int]) -> Any:
    """The batches of several runs, each at its step, stacked, where their sources can make them in one go; or None.

    The class of such a source has a static `_joined(sources, steps)` itself, not from a class that it changes. All its
    batches have one shape, and what is random about them comes from a seed of its own.
    """
    sources = [stream._source for stream in streams]
    make = vars(type(sources[0])).get("_joined")
    if not isinstance(make, staticmethod) or any(type(source) is not type(sources[0]) for source in sources):
        return None
    for stream, step in zip(streams, steps, strict=True):
        stream._ask(step)
    return make(sources, steps)


def note_step(error: Exception, where: str = "") -> None:
    """Add to an error of a training step where training was."""
    if _latest is not None:
        step, seed = _latest
        error.add_note(f"The last training batch asked for was that of step {step} (from 0), with seed {seed}{where}.")


def free_memory(device: torch.device) -> int:
    """Bytes that a run may still take on a device (physical memory that is available, on the CPU)."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    try:
        with open("/proc/meminfo") as info:
            return next(int(line.split()[1]) * 1024 for line in info if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return 4 * 1024**3


def device_of(params: dict[str, Tensor]) -> torch.device:
    """Where a model lives."""
    return next(iter(params.values())).device
