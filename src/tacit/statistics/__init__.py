"""Running statistics of BatchNorm: kept out of training, and set from what may be known."""

from tacit.statistics.public_statistics import PublicStatistics
from tacit.statistics.released_statistics import ReleasedStatistics
from tacit.statistics.tracking import (
    declare_public,
    refuse_private_statistics,
    without_running_statistics,
)

__all__ = [
    "PublicStatistics",
    "ReleasedStatistics",
    "declare_public",
    "refuse_private_statistics",
    "without_running_statistics",
]
