"""scikit-learn's digits: 1,797 handwritten digits of 8 × 8 pixels, which come with scikit-learn itself."""

import importlib
from typing import Any

import torch

from longhorizon.data.error import DataError
from longhorizon.data.images import Images

# scikit-learn knows no test set. Every seventh image is ours; the digits come in tens, which seven does not divide.
TEST_EVERY = 7


def read() -> Images:
    """The digits: 1,540 to train on and 257 to test with.

    Raises:
        DataError: if scikit-learn is not installed.
    """
    try:
        datasets: Any = importlib.import_module("sklearn.datasets")
    except ImportError:
        raise DataError("digits come with scikit-learn, which is missing: pip install 'longhorizon[cli]'.") from None
    digits = datasets.load_digits()
    # 17 grey levels, spread so that they look like an image; normalising undoes the factor.
    images = (torch.from_numpy(digits.images) * 15).to(torch.uint8).unsqueeze(1)
    labels = torch.from_numpy(digits.target).long()
    test = torch.arange(len(labels)) % TEST_EVERY == 0
    return Images("digits", images[~test], labels[~test], images[test], labels[test], classes=10)
