"""A bridge for any `torch.utils.data.DataLoader`."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longhorizon import seeds, tree

MakeLoader = Callable[[int], Iterable[Any]]


class Epochs:
    """A loader's epochs one after another, endless; each batch is a function of the seed and of its number.

    It is read in order: a loader cannot give one batch alone.
    """

    def __init__(self, make_loader: MakeLoader, seed: int, device: torch.device | str | None):
        self._make_loader, self._seed, self._device = make_loader, seed, device

    def __iter__(self) -> Iterator[Any]:
        step, epoch = 0, 0
        with _seeded(self._seed):
            loader = self._make_loader(self._seed)
        while True:
            with _seeded(self._seed, epoch):
                batches = iter(loader)
            first = step
            while True:
                with _seeded(self._seed, epoch, step):
                    batch = next(batches, _END)
                if batch is _END:
                    break
                yield _move(batch, self._device)
                step += 1
            if step == first:
                raise ValueError(
                    f"the loader for seed {self._seed} gave no batch in epoch {epoch}: check its data set, "
                    "batch_size and drop_last, and make it anew on each call."
                )
            epoch += 1


def from_loader(make_loader: MakeLoader, device: torch.device | str | None = None) -> Callable[[int], Epochs]:
    """A task's `train` from a data loader.

    The loader is made and read under seeds of the run, so that its shuffling, and what its workers draw, repeat
    exactly; the caller's random generators are left as they were. Make everything random inside `make_loader`: a
    generator that outlives it would go on from where the last run left it.

    Args:
        make_loader: `(seed) -> loader`, called at the start of each run.
        device: where batches (tensors in any nesting of tuples, lists and dicts) are moved.

    >>> from torch.utils.data import DataLoader
    >>> train = from_loader(lambda seed: DataLoader(range(4), batch_size=2))
    >>> stream = iter(train(0))
    >>> [next(stream).tolist() for _ in range(3)]
    [[0, 1], [2, 3], [0, 1]]
    """
    _check_function("from_loader", make_loader)
    return lambda seed: Epochs(make_loader, seed, device)


def val_from_loader(make_loader: MakeLoader, device: torch.device | str | None = None) -> Callable[[int], list[Any]]:
    """A task's `val` from a data loader: one pass over it, as a list.

    Args:
        make_loader: `(seed) -> loader`; give it batches of equal size, as the validation loss is their plain mean.
        device: where batches are moved.
    """
    _check_function("val_from_loader", make_loader)

    def val(seed: int) -> list[Any]:
        with _seeded(seed):
            return [_move(batch, device) for batch in make_loader(seed)]

    return val


_END = object()


def _check_function(name: str, make_loader: object) -> None:
    if not callable(make_loader):
        raise TypeError(
            f"{name}(make_loader={make_loader!r}): expected a function of a seed, e.g. "
            f"{name}(lambda seed: DataLoader(…))."
        )


@contextmanager
def _seeded(*parts: int) -> Iterator[None]:
    """Seed everything for a moment."""
    with seeds.restored():  # a run may read its batches in another thread, so nobody is kept waiting here
        seeds.seed_all(seeds.mix(*parts, seeds.FETCH))
        yield


def _move(batch: Any, device: torch.device | str | None) -> Any:
    if device is None:
        return batch
    return tree.map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)
