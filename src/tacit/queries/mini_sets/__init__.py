"""General batch clipping: mini-sets of records, each clipped as a whole."""

from tacit.queries.mini_sets.batch_clip import BatchClip
from tacit.queries.mini_sets.engines import SetBySet, SetEngine, SetsAsRecords
from tacit.queries.mini_sets.set_gradients import LocalRun, MeanGradient, SetGradient

__all__ = [
    "BatchClip",
    "LocalRun",
    "MeanGradient",
    "SetBySet",
    "SetEngine",
    "SetGradient",
    "SetsAsRecords",
]
