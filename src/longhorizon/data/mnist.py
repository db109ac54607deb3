"""MNIST: idx files, compressed or not, in `MNIST/raw`."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longhorizon.data.download import Remote, Source, content_of, find
from longhorizon.data.error import DataError
from longhorizon.data.images import Images

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

_REMEDY = "delete it and it will be downloaded again."
_MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}

SOURCE = Source(
    title="MNIST",
    folders=("MNIST/raw",),
    files=FILES,
    remotes=tuple(Remote(tuple(m + f"{f}.gz" for m in _MIRRORS), f"{f}.gz", _MD5[f"{f}.gz"], (f,)) for f in FILES),
    md5=_MD5,
)


def read(folder: Path) -> Images:
    """MNIST from its four files.

    Raises:
        DataError: naming the file that is missing or broken.
    """
    paths = [find(folder, name) for name in FILES]
    train_images, train_labels = read_pair(*paths[:2])
    test_images, test_labels = read_pair(*paths[2:])
    return Images(
        "MNIST",
        train_images,
        train_labels,
        test_images,
        test_labels,
        classes=10,
        mean=(0.1307,),
        std=(0.3081,),
    )


def read_pair(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    """The images of one file and the labels of another.

    Raises:
        DataError: naming the file that is broken, or is not MNIST's.
    """
    images, labels = read_idx(images_path, ndim=3), read_idx(labels_path, ndim=1)
    if len(images) == 0 or images.shape[1:] != (28, 28):
        shape = " × ".join(map(str, images.shape))
        raise DataError(f"{images_path} holds {shape} pixels: expected some images of 28 × 28; {_REMEDY}")
    if len(labels) != len(images):
        raise DataError(
            f"{labels_path} holds {len(labels)} labels, and {images_path.name} {len(images)} images: expected one "
            "each; delete the one that is wrong and it will be downloaded again."
        )
    if int(labels.max()) > 9:
        raise DataError(f"{labels_path} has the label {int(labels.max())}: expected 0 to 9; {_REMEDY}")
    return images.unsqueeze(1), labels.long()


def read_idx(path: Path, ndim: int) -> Tensor:
    """One idx file of unsigned bytes with `ndim` dimensions.

    The format: two zero bytes, the type (8 for unsigned bytes), the number of dimensions, each dimension as a
    big-endian 32-bit number, the values.

    Raises:
        DataError: if the file is truncated, too long, or something else.
    """
    content = content_of(path)
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); {_REMEDY}") from None
    if content[:4] != bytes((0, 0, 8, ndim)) or len(content) < 4 + 4 * ndim:
        raise DataError(
            f"{path} is no idx file of bytes in {ndim} dimensions: it begins with {content[:4]!r}; {_REMEDY}"
        )
    shape = [int(n) for n in np.frombuffer(content, ">u4", count=ndim, offset=4)]
    got, expected = len(content) - 4 - 4 * ndim, math.prod(shape)
    if got != expected:
        raise DataError(f"{path} promises {' × '.join(map(str, shape))} bytes and has {got}; {_REMEDY}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape).copy())
