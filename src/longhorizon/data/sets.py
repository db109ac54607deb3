"""The data sets that are known by name."""

import os
from collections.abc import Callable
from pathlib import Path

from longhorizon.data import cifar, digits, mnist, svhn
from longhorizon.data.download import Progress, Source, obtain
from longhorizon.data.images import Images
from longhorizon.data.root import data_root
from longhorizon.hypers import nearest

_ON_DISK: dict[str, tuple[Source, Callable[[Path], Images]]] = {
    "mnist": (mnist.SOURCE, mnist.read),
    "svhn": (svhn.SOURCE, svhn.read),
    "cifar10": (cifar.SOURCE_10, cifar.read_10),
    "cifar100": (cifar.SOURCE_100, cifar.read_100),
}

NAMES = ("digits", *_ON_DISK)


def key_of(name: str) -> str:
    """The name in `NAMES` that is meant.

    Raises:
        ValueError: if it is unknown.

    >>> key_of("CIFAR-10")
    'cifar10'
    """
    key = name.lower().replace("-", "").replace("_", "")
    if key not in NAMES:
        raise ValueError(f"unknown data set {name!r}.{nearest(key, NAMES)}")
    return key


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    verify: bool = False,
    progress: Progress | None = None,
) -> Images:
    """A data set by its name: digits, mnist, svhn, cifar10 or cifar100.

    Args:
        name: which one; "CIFAR-10" is as good as "cifar10".
        root: the data root; see `data_root`. Digits need none.
        download: fetch files that are missing from their official addresses, checked by md5.
        verify: check the md5 of files that were there already. Without it, their structure is checked.
        progress: called with (file name, bytes so far, bytes in all or None) while something is downloaded, and with
            "md5 of " and the name while it is checked.

    Raises:
        ValueError: if the name is unknown.
        DataError: naming the file that is missing or broken, and what to do.
    """
    key = key_of(name)
    if key == "digits":
        return digits.read()
    source, read = _ON_DISK[key]
    return read(obtain(source, data_root(root), download, verify, progress))
