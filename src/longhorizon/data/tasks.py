"""Training on images by the paper's protocol: batches of 256, and 5 % held out for validation, anew for every seed."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longhorizon import models
from longhorizon.data.download import Progress
from longhorizon.data.images import PLAIN, Augment, Images
from longhorizon.data.sets import load
from longhorizon.data.stream import Batch, Resident, Stream, equal_batches, split, to_device
from longhorizon.task import Task, check_model

MakeModel = Callable[[], nn.Module]


@dataclass(frozen=True, eq=False)
class ImageData:
    """A data set on a device, and every part of it that training, tuning and testing need.

    Made by `image_data`. `train` and `val` are what a `Task` takes; `train_full` is for training again with what was
    learnt, and `test` for judging it.
    """

    images: Images
    train_set: Resident = field(repr=False)
    test_set: Resident = field(repr=False)
    batch_size: int
    val_fraction: float
    val_batch_size: int
    augment: Augment
    fixed_split: bool

    def split(self, seed: int) -> tuple[Tensor, Tensor]:
        """Which training images a run trains on, and which it validates with."""
        return split(len(self.train_set), self.val_fraction, 0 if self.fixed_split else seed)

    def train(self, seed: int) -> Stream:
        """Training batches without the validation images, endless, by step number."""
        return Stream(self.train_set, self.batch_size, seed, self.split(seed)[0], self.augment)

    def val(self, seed: int) -> list[Batch]:
        """The validation images, unvaried, in equal batches."""
        return equal_batches(self.train_set, self.val_batch_size, self.split(seed)[1])

    def train_full(self, seed: int) -> Stream:
        """Training batches of the whole training set, validation images included."""
        return Stream(self.train_set, self.batch_size, seed, None, self.augment)

    def test(self) -> list[Batch]:
        """The test images, in equal batches."""
        return equal_batches(self.test_set, self.val_batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch of `train`."""
        return len(self.split(0)[0]) // self.batch_size

    def task(
        self, model: str | MakeModel, val_mode: Literal["eval", "train"] = "eval", init: str | None = None
    ) -> Task:
        """A classification task; see `image_task`."""
        check_model("image_task", model)
        images, device, dtype = self.images, self.train_set.labels.device, self.train_set.scale.dtype

        def make() -> nn.Module:
            if not isinstance(model, str):
                return model().to(device, dtype)
            shape = {"classes": images.classes, "channels": images.channels, "size": images.size}
            return models.make(model, **shape, init=init).to(device, dtype)

        if isinstance(model, str):
            make()  # a name that does not fit is an error now
        elif init is not None:
            raise ValueError(f"init={init!r} applies to a model given by its name; yours initialises itself.")
        return Task(
            make,
            cross_entropy,
            self.train,
            self.val,
            val_mode=val_mode,
            metrics=accuracy,
            full=self.train_full,
            test=self.test,
        )


def image_data(
    data: str | Images,
    batch_size: int = 256,
    val_fraction: float = 0.05,
    *,
    augment: Augment | bool | None = None,
    val_batch_size: int | None = None,
    fixed_split: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    root: str | os.PathLike[str] | None = None,
    download: bool = True,
    verify: bool = False,
    progress: Progress | None = None,
) -> ImageData:
    """Lay a data set out on a device, ready to be trained on.

    Args:
        data: a name that `load` knows, or images of your own.
        batch_size: training images in a batch; images left over at the end of an epoch are left out.
        val_fraction: share of the training images held out for validation.
        augment: how training images are varied. None: as is customary for the set (CIFAR: 4 pixels of padding and
            flips; others not at all); True: padding and flips; False: not at all.
        val_batch_size: at most so many images in a validation or test batch; as `batch_size` without it.
        fixed_split: hold out the same images for every seed, not others for each.
        device: without it, CUDA if there is one.
        dtype: of the batches, and of models made by `task`.
        root: the data root, for a name; see `data_root`.
        download: whether missing files may be downloaded.
        verify: check the md5 of files that were there already; see `load`.
        progress: called with (file name, bytes so far, bytes in all or None) while something is downloaded.

    Raises:
        ValueError: naming the argument that does not fit.
        DataError: if the data set is missing or broken.
    """
    for name, size in (("batch_size", batch_size), ("val_batch_size", 1 if val_batch_size is None else val_batch_size)):
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise ValueError(f"{name}={size!r}: expected a whole number of images, at least 1.")
    if augment is not None and not isinstance(augment, bool | Augment):
        raise TypeError(f"augment={augment!r}: expected longhorizon.data.Augment, True, False or None.")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype!r}: expected torch.float32 or another type of floating point.")
    if isinstance(data, str):
        data = load(data, root, download=download, verify=verify, progress=progress)
    elif not isinstance(data, Images):
        raise TypeError(f"data={data!r}: expected a name or longhorizon.data.Images.")
    if augment is None:
        augment = data.augment
    elif isinstance(augment, bool):
        augment = Augment() if augment else PLAIN
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    made = ImageData(
        data,
        to_device(data.train_images, data.train_labels, data.mean, data.std, augment.pad, device, dtype),
        to_device(data.test_images, data.test_labels, data.mean, data.std, 0, device, dtype),
        batch_size,
        val_fraction,
        val_batch_size or batch_size,
        augment,
        fixed_split,
    )
    made.train(0)  # sizes that do not fit are an error now
    return made


def image_task(
    data: str | Images,
    model: str | MakeModel,
    batch_size: int = 256,
    val_fraction: float = 0.05,
    *,
    augment: Augment | bool | None = None,
    val_batch_size: int | None = None,
    val_mode: Literal["eval", "train"] = "eval",
    fixed_split: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    root: str | os.PathLike[str] | None = None,
    download: bool = True,
    verify: bool = False,
    progress: Progress | None = None,
    init: str | None = None,
) -> Task:
    """A classification task on images: `image_data(...).task(model)`.

    Its loss is the cross-entropy, its metric the accuracy; it has the test set, and the whole training set for
    training again with what was learnt.

    Args:
        data: a name that `load` knows, or images of your own.
        model: a name that `models.make` knows, or a function that makes a model; it is moved to the device.
        val_mode: see `Task`.
        init: for a model given by its name, how it is initialised; see `models.make`.

    The other arguments are those of `image_data`.
    """
    check_model("image_task", model)  # before anything is downloaded
    made = image_data(
        data,
        batch_size,
        val_fraction,
        augment=augment,
        val_batch_size=val_batch_size,
        fixed_split=fixed_split,
        device=device,
        dtype=dtype,
        root=root,
        download=download,
        verify=verify,
        progress=progress,
    )
    return made.task(model, val_mode, init)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of a batch of images and labels."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The share of a batch that is classified rightly, as a metric of a task."""
    images, labels = batch
    return {"accuracy": (model(images).argmax(1) == labels).double().mean()}
