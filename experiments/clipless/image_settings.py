"""What one clipless run on images is told, and the loss that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import tacit
from tacit.losses import LipschitzLoss

DELTA = 1e-5


@dataclass(frozen=True)
class Setting:
    """One run.

    `model` names a network and its sizes (`image_networks`). `scale` is the inverse of the loss's
    temperature, `clip` a share of the loss's own constant and `learning_rate` that of gradients
    divided by the clip, so that neither moves when the other does.

    `features`: pixels, scattering (27 groups of each record normalised), raw (the same without),
    mirrored (the mean of the raw ones of an image and its mirror image), log (log(S + 0.1) of the
    raw ones), or filters:k:s:f:p (random ones that are not trained).
    `channels` is the noise multiplier of a released mean and std a channel, `centre` the
    noise multiplier of a released mean, about which records are put on the unit sphere; it is
    charged with the steps. `head`: orthogonal, or ball: a norm of at most 1, beginning at 0.
    `middle` is the share of the clip that is left before a sphere in the middle, and
    `middle_centring` centres each filter's outputs there; `middle_centre` is the noise multiplier
    of the mean that `adapted` networks release there. All layers but the last learn at `body_rate`
    times the learning rate. `views` are averaged within each record.
    """

    model: str
    batch_size: int
    steps: int
    scale: float
    clip: float
    learning_rate: float
    features: str = "pixels"
    centre: float | None = None
    loss: str = "cross-entropy"
    head: str = "orthogonal"
    middle: float = 0.3
    middle_centring: bool = False
    per_layer: bool = True
    ema: float | None = None
    cosine: bool = True
    views: int = 1
    channels: float | None = None
    middle_centre: float = 10.0
    body_rate: float = 1.0

    def gradient_clip(self, classes: int) -> float:
        return self.clip * loss_of(self).lipschitz_for(classes)


def loss_of(setting: Setting) -> LipschitzLoss:
    """Cross-entropy at temperature 1/scale, or a hinge whose margin falls as the scale grows.

    Class scores of a network with constant 1 on the unit sphere are within 1 of 0, so that a scale
    of 20 has a margin of 1 and a scale of 100 one of a fifth.
    """
    if setting.loss == "cross-entropy":
        return tacit.losses.CrossEntropy(1 / setting.scale)
    if setting.loss == "hinge":
        return tacit.losses.MulticlassHinge(margin=20 / setting.scale)
    raise ValueError(f"loss is {setting.loss!r}; give 'cross-entropy' or 'hinge'")


def is_certified(task: str) -> bool:
    return task.endswith("/certified")


def default_epsilon(task: str) -> float:
    """Figures 3b, 14 and 16 are read at ε = 3; Table 1 is to be met within ε = 8."""
    return 8.0 if is_certified(task) else 3.0


def log_between(low: float, high: float, share: float) -> float:
    """low·(high/low)^share."""
    return low * math.exp(share * math.log(high / low))
