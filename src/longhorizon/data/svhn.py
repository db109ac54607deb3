"""SVHN, cropped digits: `train_32x32.mat` and `test_32x32.mat`, in `SVHN` or in the data root itself."""

import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longhorizon.data.download import Remote, Source, content_of
from longhorizon.data.error import DataError
from longhorizon.data.images import Images

_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}

SOURCE = Source(
    title="SVHN",
    folders=("SVHN", "svhn", "."),
    files=tuple(_MD5),
    remotes=tuple(
        Remote((f"http://ufldl.stanford.edu/housenumbers/{file}",), file, md5, (file,)) for file, md5 in _MD5.items()
    ),
    md5=_MD5,
)


def read(folder: Path) -> Images:
    """SVHN from its two files.

    Raises:
        DataError: naming the file that is missing or broken, or if scipy is not installed.
    """
    train_images, train_labels = read_mat(folder / "train_32x32.mat")
    test_images, test_labels = read_mat(folder / "test_32x32.mat")
    return Images(
        "SVHN",
        train_images,
        train_labels,
        test_images,
        test_labels,
        classes=10,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
    )


def read_mat(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels of one file: X is (32, 32, 3, count), y (count, 1) with 10 for the digit 0.

    Raises:
        DataError: if the file is truncated or something else, or if scipy is not installed.
    """
    try:
        scipy_io: Any = importlib.import_module("scipy.io")
    except ImportError:
        raise DataError(
            "reading SVHN needs scipy, which is missing: pip install scipy (or 'longhorizon[cli]', which brings it)."
        ) from None
    remedy = "delete it and it will be downloaded again."
    written = content_of(path)
    try:
        content = scipy_io.loadmat(io.BytesIO(written), variable_names=["X", "y"])
    except Exception as error:  # scipy raises whatever the broken bytes lead to
        raise DataError(f"{path} is no MATLAB file that scipy can read ({error}); {remedy}") from None
    if "X" not in content or "y" not in content:
        raise DataError(f"{path} lacks the variable {'X' if 'X' not in content else 'y'}; {remedy}")
    images, labels = np.asarray(content["X"]), np.asarray(content["y"]).reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise DataError(f"{path}: X is {images.dtype} {images.shape}: expected uint8 (32, 32, 3, count); {remedy}")
    if len(labels) != images.shape[3] or len(labels) == 0:
        raise DataError(
            f"{path}: y has {len(labels)} labels for {images.shape[3]} images: expected one each, 1 to 10; {remedy}"
        )
    wrong = labels[~np.isin(labels, np.arange(1, 11))] if labels.dtype.kind in "uif" else labels
    if len(wrong):
        raise DataError(f"{path}: y has the label {wrong[0]}: expected 1 to 10, 10 for the digit 0; {remedy}")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1)))
    return pixels, torch.from_numpy(labels.astype(np.int64) % 10)
