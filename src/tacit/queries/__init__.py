"""Gradients that carry their own sensitivity."""

from tacit.queries.blocks import all_together, by_layer, by_parameter, by_prefix
from tacit.queries.bounded_gradient import Block, BoundedGradient, GradientQuery, Loss
from tacit.queries.engines import BookKeeping, PerRecord, Replay
from tacit.queries.per_sample_clip import PerSampleClip

__all__ = [
    "Block",
    "BookKeeping",
    "BoundedGradient",
    "GradientQuery",
    "Loss",
    "PerRecord",
    "PerSampleClip",
    "Replay",
    "all_together",
    "by_layer",
    "by_parameter",
    "by_prefix",
]
