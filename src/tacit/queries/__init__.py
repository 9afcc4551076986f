"""Gradients that carry their own sensitivity."""

from tacit.engines import Automatic, BookKeeping, PerRecord
from tacit.engines.clipping import Clip, Normalise
from tacit.queries.adaptive_norm import AdaptiveNorm
from tacit.queries.blocks import all_together, by_layer, by_parameter, by_prefix
from tacit.queries.bounded_gradient import (
    Block,
    BoundedGradient,
    GradientQuery,
    Loss,
    Statistic,
)
from tacit.queries.clipless import Clipless
from tacit.queries.grouping import group_by_norm
from tacit.queries.layerwise import Decaying, LayerFactors, LayerwiseNorms
from tacit.queries.mini_sets import (
    BatchClip,
    LocalRun,
    MeanGradient,
    SetBySet,
    SetsAsRecords,
)
from tacit.queries.per_sample_clip import PerSampleClip

__all__ = [
    "AdaptiveNorm",
    "Automatic",
    "BatchClip",
    "Block",
    "BookKeeping",
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
    "PerRecord",
    "PerSampleClip",
    "SetBySet",
    "SetsAsRecords",
    "Statistic",
    "all_together",
    "by_layer",
    "by_parameter",
    "by_prefix",
    "group_by_norm",
]
