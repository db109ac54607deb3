"""CIFAR-10 and CIFAR-100, python version: pickled arrays in `cifar-10-batches-py` and `cifar-100-python`.

A pickle can run any code when it is read. Ours is read by an unpickler that knows numpy arrays and nothing else.
"""

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longhorizon.data.download import Remote, Source, content_of
from longhorizon.data.error import DataError
from longhorizon.data.images import Augment, Images

_MD5_10 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
_MD5_100 = {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"}


def _source(title: str, folder: str, archive: str, archive_md5: str, md5: dict[str, str]) -> Source:
    url = f"https://www.cs.toronto.edu/~kriz/{archive}"
    return Source(
        title=title,
        folders=(folder, f"{title.replace('-', '')}/{folder}"),
        files=tuple(md5),
        remotes=(Remote((url,), archive, archive_md5, tuple(md5), is_archive=True),),
        md5=md5,
    )


SOURCE_10 = _source(
    "CIFAR-10", "cifar-10-batches-py", "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", _MD5_10
)
SOURCE_100 = _source(
    "CIFAR-100", "cifar-100-python", "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", _MD5_100
)


def read_10(folder: Path) -> Images:
    """CIFAR-10 from its six files.

    Raises:
        DataError: naming the file that is missing or broken.
    """
    files = [folder / name for name in SOURCE_10.files]
    return _images("CIFAR-10", files[:-1], files[-1], "labels", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def read_100(folder: Path) -> Images:
    """CIFAR-100, fine labels, from its two files.

    Raises:
        DataError: naming the file that is missing or broken.
    """
    train, test = (folder / name for name in SOURCE_100.files)
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    return _images("CIFAR-100", [train], test, "fine_labels", 100, mean, std)


def _images(
    name: str,
    train: Sequence[Path],
    test: Path,
    key: str,
    classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Images:
    parts = [read_batch(path, key, classes) for path in train]
    train_images, train_labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    test_images, test_labels = read_batch(test, key, classes)
    return Images(name, train_images, train_labels, test_images, test_labels, classes, mean, std, Augment())


def read_batch(path: Path, key: str, classes: int) -> tuple[Tensor, Tensor]:
    """Images and labels of one file.

    Raises:
        DataError: if the file is truncated, asks for code to be run, or holds something else.
    """
    remedy = "delete it and it will be downloaded again."
    pickled = content_of(path)
    try:
        content = _Unpickler(io.BytesIO(pickled), encoding="latin1").load()
    except Exception as error:  # broken bytes make a pickle raise nearly anything
        raise DataError(f"{path} is no CIFAR file ({type(error).__name__}: {error}); {remedy}") from None
    data, labels = _entry(content, "data"), _entry(content, key)
    if (
        not isinstance(data, np.ndarray)
        or data.dtype != np.uint8
        or data.ndim != 2
        or data.shape[1] != 3 * 32 * 32
        or not len(data)
    ):
        found = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise DataError(f"{path}: 'data' is {found}: expected a uint8 array (count, 3072); {remedy}")
    if not isinstance(labels, list) or len(labels) != len(data):
        found = f"{len(labels)} labels" if isinstance(labels, list) else type(labels).__name__
        raise DataError(f"{path}: {key!r} is {found}: expected a list of {len(data)}, one for each image; {remedy}")
    if not all(isinstance(label, int) and 0 <= label < classes for label in labels):
        raise DataError(f"{path}: {key!r} has a label outside 0 to {classes - 1}; {remedy}")
    return torch.from_numpy(data.reshape(-1, 3, 32, 32).copy()), torch.tensor(labels, dtype=torch.int64)


def _entry(content: Any, key: str) -> Any:
    if not isinstance(content, dict):
        return None
    return content.get(key, content.get(key.encode()))  # bytes if it was written with Python 3


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into the older pickle protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
_FROM_BUFFER: Any = np.zeros(1).__reduce_ex__(5)[0]


class _Unpickler(pickle.Unpickler):
    """Reads numbers, strings, lists, dictionaries and numpy arrays."""

    allowed = {  # noqa: RUF012 - a constant
        # numpy moved these between its versions; all spellings mean the same functions
        ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
        ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
        ("numpy.core.numeric", "_frombuffer"): _FROM_BUFFER,
        ("numpy._core.numeric", "_frombuffer"): _FROM_BUFFER,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _latin1,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not read from data files")
        return self.allowed[module, name]
