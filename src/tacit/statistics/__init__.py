"""BatchNorm's running statistics: kept out of training, and set from public or released values.

A query runs its passes `without_running_statistics`. Afterwards `PublicStatistics` sets them from
public records, or `ReleasedStatistics` from private ones with noise that the ledger charges.
`refuse_private_statistics` guards whatever is saved.
"""

from tacit.statistics.running_statistics import PublicStatistics, ReleasedStatistics
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
