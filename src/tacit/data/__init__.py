"""Named datasets and users' own files as tensors, with the constants about them that are public."""

from tacit.data.augmentation import Augmentation, RandomCropFlip
from tacit.data.catalogue import available
from tacit.data.loading import load
from tacit.data.preprocessing import Preprocessing, load_preprocessing
from tacit.data.private_scaling import release_channel_scaler, release_statistics
from tacit.data.scaling import PublicScaler, RangeScaler, UnitNorm
from tacit.data.splits import split_public
from tacit.data.tables import load_file
from tacit.records import Records, as_records

__all__ = [
    "Augmentation",
    "Preprocessing",
    "PublicScaler",
    "RandomCropFlip",
    "RangeScaler",
    "Records",
    "UnitNorm",
    "as_records",
    "available",
    "load",
    "load_file",
    "load_preprocessing",
    "release_channel_scaler",
    "release_statistics",
    "split_public",
]
