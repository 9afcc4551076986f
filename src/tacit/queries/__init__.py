"""Gradients that carry their own sensitivity."""

from tacit.engines.clipping import Clip, Normalise
from tacit.queries.batch_clip import BatchClip
from tacit.queries.bounded_gradient import (
    Block,
    BoundedGradient,
    GradientQuery,
    Loss,
    Statistic,
    all_together,
    by_layer,
    by_parameter,
    by_prefix,
)
from tacit.queries.clipless import Clipless
from tacit.queries.per_sample_clip import PerSampleClip
from tacit.queries.set_gradients import (
    LocalRun,
    MeanGradient,
    SetBySet,
    SetEngine,
    SetGradient,
    SetsAsRecords,
)
from tacit.queries.thresholds import (
    AdaptiveNorm,
    Decaying,
    LayerFactors,
    LayerwiseNorms,
    group_by_norm,
)

__all__ = [
    "AdaptiveNorm",
    "BatchClip",
    "Block",
    "BoundedGradient",
    "Clip",
    "Clipless",
    "Decaying",
    "GradientQuery",
    "LayerFactors",
    "LayerwiseNorms",
    "LocalRun",
    "Loss",
    "MeanGradient",
    "Normalise",
    "PerSampleClip",
    "SetBySet",
    "SetEngine",
    "SetGradient",
    "SetsAsRecords",
    "Statistic",
    "all_together",
    "by_layer",
    "by_parameter",
    "by_prefix",
    "group_by_norm",
]
