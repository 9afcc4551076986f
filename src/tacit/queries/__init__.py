"""Gradients that carry their own sensitivity: the formula and the bound of each route.

A query turns a batch into a `BoundedGradient`, which the mechanism adds noise to. `Clipless` bounds
the gradients of a Lipschitz network by construction, `PerSampleClip` clips every record's gradient,
and `BatchClip` that of a mini-set. `thresholds` has clipping constants that adapt, and
`bounded_gradient` the protocol for a query of your own. How sums are computed is the business of
`tacit.engines`.
"""

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
from tacit.queries.per_sample_clip import ClippedQuery, Frozen, PerSampleClip
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
    "ClippedQuery",
    "Decaying",
    "Frozen",
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
