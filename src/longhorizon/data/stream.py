"""Images that live on the device, and an endless stream of batches made there.

What is random about an epoch (its order, and how each image is cut and mirrored) is drawn at once, from the seed and
the epoch's number alone, and on the CPU: so any step's batch can be had alone, and every kind of device sees the
same batches. What is left for a step is a handful of kernels.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from longhorizon import seeds
from longhorizon.data.images import PLAIN, Augment

Batch = tuple[Tensor, Tensor]  # normalised images, labels

_SHUFFLE, _SPLIT = 16, 17  # purposes of a seed, beside those of `seeds`


@dataclass(frozen=True, eq=False)
class Resident:
    """Labelled images on a device, as bytes, with a margin of black around them.

    Made by `to_device`.
    """

    pixels: Tensor = field(repr=False)  # uint8 (count, channels, height + 2 pad, width + 2 pad)
    labels: Tensor = field(repr=False)  # int64 (count,)
    pad: int
    scale: Tensor = field(repr=False)  # (channels, 1, 1), as `shift`: byte · scale + shift has mean 0 and variance 1
    shift: Tensor = field(repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def windows(self) -> Tensor:
        """Every crop of the original size, (count, channels, rows, columns, height, width); a view."""
        height, width = (side - 2 * self.pad for side in self.pixels.shape[2:])
        return self.pixels.unfold(2, height, 1).unfold(3, width, 1)

    @property
    def centre(self) -> Tensor:
        """The images without their margin; a view."""
        return self.windows[:, :, self.pad, self.pad]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes as numbers of mean 0 and variance 1."""
        return (pixels * self.scale).add_(self.shift)  # in place: memory is what this costs

    def batch(self, index: Tensor) -> Batch:
        """The images of an index, as they are."""
        return self.normalise(self.centre.index_select(0, index)), self.labels[index]


def to_device(
    images: Tensor,
    labels: Tensor,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    pad: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Resident:
    """Lay labelled images out on a device.

    Args:
        images: uint8 (count, channels, height, width).
        labels: int64 (count,).
        mean: of each channel, white being 1.
        std: likewise.
        pad: width of the black margin.
        device: where to.
        dtype: of the batches.
    """
    pixels = images.to(device)
    spread = 255 * torch.tensor(std, dtype=torch.float64)
    shift = -255 * torch.tensor(mean, dtype=torch.float64) / spread
    return Resident(
        F.pad(pixels, (pad, pad, pad, pad)) if pad else pixels,
        labels.to(device),
        pad,
        (1 / spread).to(device, dtype).view(-1, 1, 1),
        shift.to(device, dtype).view(-1, 1, 1),
    )


class Stream:
    """An endless sequence of training batches; `stream[step]` is the same whenever it is asked for.

    Each epoch is a fresh permutation, cut into batches; images left over at its end are left out.

    Args:
        data: the images; its margin must be at least `augment.pad`.
        batch_size: images in a batch.
        seed: of the run.
        index: which images belong to it; all of them without it.
        augment: how they are varied.

    Raises:
        ValueError: if a batch is larger than the set, or the margin too narrow.
    """

    def __init__(
        self, data: Resident, batch_size: int, seed: int, index: Tensor | None = None, augment: Augment = PLAIN
    ):
        count = len(data) if index is None else len(index)
        if not 1 <= batch_size <= count:
            raise ValueError(f"batch_size={batch_size}: expected 1 to {count}, the number of training images.")
        if augment.pad > data.pad:
            raise ValueError(f"augment.pad={augment.pad} is wider than the margin of the images, {data.pad}.")
        self._data, self._seed, self._augment = data, seed, augment
        self._index = torch.arange(count) if index is None else index.cpu()
        self._batch_size = batch_size
        self._windows, self._centre = data.windows, data.centre
        self._epoch = -1  # that of `_drawn`
        self._drawn: list[tuple[Tensor, ...]] = []

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return len(self._index) // self._batch_size

    def __getitem__(self, step: int) -> Batch:
        return self._made(*self._chosen(step))

    @staticmethod
    def _joined(streams: Sequence["Stream"], steps: Sequence[int]) -> Batch | None:
        """The batches of several streams, each at its step, stacked; None if they differ in more than their images."""
        first = streams[0]
        if any(s._kind() != first._kind() for s in streams):
            return None
        parts = zip(*(s._chosen(step) for s, step in zip(streams, steps, strict=True)), strict=True)
        images, labels = first._made(*(torch.cat(part) for part in parts))
        both = (len(streams), first._batch_size)
        return images.view(*both, *images.shape[1:]), labels.view(both)

    def _kind(self) -> tuple[object, ...]:
        return id(self._data), self._batch_size, self._augment

    def _chosen(self, step: int) -> tuple[Tensor, ...]:
        """What was drawn for a step."""
        if step < 0:
            raise IndexError(f"step {step}: an endless stream has no end to count from.")
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._drawn, self._epoch = self._draw(epoch), epoch
        return self._drawn[place]

    def _made(self, index: Tensor, row: Tensor, column: Tensor, mirrored: Tensor, labels: Tensor) -> Batch:
        """The images of an index, cut out and mirrored as was drawn."""
        if self._augment.pad:
            images = self._windows[index, :, row, column]
        else:
            images = self._centre.index_select(0, index)
        if self._augment.flip:
            images = torch.where(mirrored, images.flip(3), images)
        return self._data.normalise(images), labels

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, itertools.count())

    def _draw(self, epoch: int) -> list[tuple[Tensor, ...]]:
        """All that is random about an epoch, by step: index, row, column and mirrored of each image, and its label."""
        generator = torch.Generator().manual_seed(seeds.mix(self._seed, epoch, _SHUFFLE))
        count, pad = self.steps_per_epoch * self._batch_size, self._augment.pad
        order = self._index[torch.randperm(len(self._index), generator=generator)[:count]]
        offset = torch.randint(2 * pad + 1, (2, count), generator=generator) + self._data.pad - pad
        mirrored = torch.randint(2, (count, 1, 1, 1), generator=generator, dtype=torch.bool)
        device = self._data.labels.device
        index, row, column = _sent(torch.cat((order[None], offset)), device)
        drawn = (index, row, column, _sent(mirrored, device), self._data.labels[index])
        return list(zip(*(tensor.split(self._batch_size) for tensor in drawn), strict=True))


def _sent(drawn: Tensor, device: torch.device) -> Tensor:
    """On its way to a device; from pinned memory, so that nobody waits until the device is done with its work."""
    return drawn.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else drawn.to(device)


def split(count: int, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Divide `count` images at random into a part to train on and a part to validate with.

    Args:
        count: how many there are.
        fraction: of them that goes to validation; `1000 / 60_000` takes exactly 1,000 of 60,000.
        seed: equal seeds divide equally.

    Returns:
        The indices of the training part and of the validation part.

    Raises:
        ValueError: if either part would be empty.

    >>> train, val = split(50_000, 0.05, seed=0)
    >>> len(train), len(val)
    (47500, 2500)
    """
    held_out = round(count * fraction)
    if not 0 < fraction < 1 or not 0 < held_out < count:
        raise ValueError(
            f"val_fraction={fraction}: of {count} training images it takes {held_out}; "
            "choose a share between 0 and 1 that leaves some on both sides."
        )
    generator = torch.Generator().manual_seed(seeds.mix(seed, _SPLIT))
    order = torch.randperm(count, generator=generator)
    return order[held_out:], order[:held_out]


def equal_batches(data: Resident, batch_size: int, index: Tensor | None = None) -> list[Batch]:
    """All images of an index, unvaried, in as few batches as `batch_size` allows; sizes differ by at most one.

    A mean over equal batches is a mean over images, which is how a task's validation loss is defined.
    """
    index = torch.arange(len(data)) if index is None else index
    batches = -(-len(index) // batch_size)
    return [data.batch(part) for part in index.to(data.labels.device).tensor_split(batches)]
