"""Choices of `tacit train` about per-sample clipping, as objects."""

from __future__ import annotations

import enum

from tacit.data.augmentation import Augmentation, RandomCropFlip
from tacit.engines.clipping import Clip, ClipRule, Normalise
from tacit.queries.thresholds import AdaptiveNorm


class RuleName(enum.StrEnum):
    CLIP = "clip"
    NORMALISE = "normalise"


RULES: dict[RuleName, ClipRule] = {RuleName.CLIP: Clip(), RuleName.NORMALISE: Normalise()}


def threshold_from(max_norm: float, quantile: float | None) -> float | AdaptiveNorm:
    """`max_norm` for good, or as the first threshold of one that follows a quantile."""
    return max_norm if quantile is None else AdaptiveNorm(max_norm, quantile)


def augmentation_from(views: int | None, shape: tuple[int, ...]) -> Augmentation | None:
    """Crops shifted by up to an eighth of the image, and mirror images; for images only."""
    if views is None:
        return None
    if len(shape) != 3:
        raise ValueError(f"--augment is for images; these records have shape {shape}: leave it out")
    return Augmentation(views, RandomCropFlip(padding=max(1, min(shape[1:]) // 8)))
