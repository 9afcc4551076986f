"""Named datasets and users' own files as tensors, with the constants about them that are public."""

from tacit.data.catalogue import available
from tacit.data.channel_scaler import release_channel_scaler
from tacit.data.loading import load
from tacit.data.own_files import load_file
from tacit.data.private_statistics import release_statistics
from tacit.data.records import Records, as_records
from tacit.data.scaling import PublicScaler, RangeScaler, UnitNorm

__all__ = [
    "PublicScaler",
    "RangeScaler",
    "Records",
    "UnitNorm",
    "as_records",
    "available",
    "load",
    "load_file",
    "release_channel_scaler",
    "release_statistics",
]
