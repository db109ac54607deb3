"""A set of labelled images, as every reader returns it and as a user can make it from tensors."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Augment:
    """How training images are varied; validation and test images never are.

    Args:
        pad: pixels of black added on each side before a window of the original size is cut out at random.
        flip: mirror half of the images, left to right.
    """

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.pad, bool) or not isinstance(self.pad, int) or self.pad < 0:
            raise ValueError(f"Augment(pad={self.pad!r}): expected a whole number of pixels, 0 or more.")


PLAIN = Augment(pad=0, flip=False)


@dataclass(frozen=True, eq=False)
class Images:
    """A training set and a test set of labelled images.

    Args:
        name: what reports call it.
        train_images: uint8, (count, channels, height, width).
        train_labels: int64, (count,), from 0 to `classes` - 1.
        test_images: like `train_images`.
        test_labels: like `train_labels`.
        classes: how many there are.
        mean: of each channel, black being 0 and white 1; left out, it is computed from the training images.
        std: likewise.
        augment: what is customary for this set when it is trained on.

    Raises:
        TypeError, ValueError: naming the argument that does not fit.
    """

    name: str
    train_images: Tensor = field(repr=False)
    train_labels: Tensor = field(repr=False)
    test_images: Tensor = field(repr=False)
    test_labels: Tensor = field(repr=False)
    classes: int
    mean: tuple[float, ...] = field(default=(), repr=False)
    std: tuple[float, ...] = field(default=(), repr=False)
    augment: Augment = PLAIN

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            self._check(part, getattr(self, f"{part}_images"), getattr(self, f"{part}_labels"))
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"{self.name}: train_images are {tuple(self.train_images.shape[1:])} each and test_images "
                f"{tuple(self.test_images.shape[1:])}: expected one shape."
            )
        if not self.mean or not self.std:
            mean, std = channel_statistics(self.train_images)
            object.__setattr__(self, "mean", self.mean or mean)
            object.__setattr__(self, "std", self.std or std)
        if not len(self.mean) == len(self.std) == self.channels or min(self.std) <= 0:
            raise ValueError(
                f"{self.name}: mean={self.mean}, std={self.std}: expected one each for {self.channels} channels, "
                "std above 0."
            )

    @property
    def channels(self) -> int:
        return self.train_images.shape[1]

    @property
    def size(self) -> int:
        """Height in pixels."""
        return self.train_images.shape[2]

    def _check(self, part: str, images: Tensor, labels: Tensor) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise TypeError(
                f"{self.name}: {part}_images is {images.dtype} of shape {tuple(images.shape)}: "
                "expected uint8 (count, channels, height, width)."
            )
        if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
            raise TypeError(
                f"{self.name}: {part}_labels is {labels.dtype} of shape {tuple(labels.shape)}: expected int64, one for "
                f"each of {len(images)} images."
            )
        if len(labels) == 0:
            raise ValueError(f"{self.name}: {part}_images is empty.")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.classes:
            raise ValueError(
                f"{self.name}: {part}_labels run from {low} to {high}: expected 0 to {self.classes - 1}, as classes="
                f"{self.classes}."
            )


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, black being 0 and white 1.

    >>> channel_statistics(torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2))
    ((0.5,), (0.5,))
    """
    means, stds = [], []
    for channel in images.unbind(1):  # by histogram: exact, and no copy in floating point
        counts = torch.bincount(channel.reshape(-1), minlength=256).double()
        values = torch.arange(256, dtype=torch.float64) / 255
        mean = (counts @ values) / counts.sum()
        means.append(float(mean))
        stds.append(float(((counts @ (values - mean) ** 2) / counts.sum()).sqrt()))
    return tuple(means), tuple(stds)
