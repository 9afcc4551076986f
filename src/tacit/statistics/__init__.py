"""Running statistics of BatchNorm: kept out of training, and set from what may be known."""

from tacit.statistics.marks import declare_public, refuse_private_statistics
from tacit.statistics.public import PublicStatistics
from tacit.statistics.released import ReleasedStatistics
from tacit.statistics.tracking import without_running_statistics

__all__ = [
    "PublicStatistics",
    "ReleasedStatistics",
    "declare_public",
    "refuse_private_statistics",
    "without_running_statistics",
]
