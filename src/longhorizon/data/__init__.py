"""Data: sets read from disk or downloaded, streams of batches that live on the device, and bridges to your own."""

from longhorizon.data.download import Progress
from longhorizon.data.error import DataError, MissingDataError
from longhorizon.data.images import PLAIN, Augment, Images
from longhorizon.data.loader import Epochs, from_loader, val_from_loader
from longhorizon.data.root import data_root
from longhorizon.data.sets import NAMES, key_of, load
from longhorizon.data.stream import Batch, Resident, Stream, equal_batches, split, to_device
from longhorizon.data.tasks import ImageData, accuracy, cross_entropy, image_data, image_task

__all__ = [
    # Sets by name, and one's own
    "NAMES",
    "key_of",
    "load",
    "Images",
    "Augment",
    "PLAIN",
    "data_root",
    "DataError",
    "MissingDataError",
    "Progress",
    # A task from a set
    "image_task",
    "image_data",
    "ImageData",
    "cross_entropy",
    "accuracy",
    # Batches on the device
    "Batch",
    "Resident",
    "to_device",
    "Stream",
    "split",
    "equal_batches",
    # A bridge for torch's loaders
    "from_loader",
    "val_from_loader",
    "Epochs",
]
