"""The setting of one clipless run on images, and its network: `name:size:…` says which.

linear            features or pixels on a sphere, one layer
centred           the same, each record centred first
mlp:w:…           hidden layers of w units
mixer:p:w[:d]     patches of p×p pixels
patches:p:w       disjoint patches, one layer
pooled:k:s:f:p    f filters of k×k at stride s, L2 pooling by p, one layer
convolution:…     pooled, with a second sphere after the pooling
adapted:…         pooled, with two spheres after it, the second about a released centre

All but the last two are Lipschitz from the input sphere on, so that they have certificates. A
sphere in the middle has no constant: cotangents are clipped before it, which keeps gradients'
bounds and loses certificates. `adapted` begins at the random filters of `fixed_filters`, and trains
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tacit
from tacit.lipschitz import (
    BoundedInput,
    ClipGradient,
    LayerCentering,
    MaxMin,
    ScaledL2NormPool2d,
    SpectralBall,
    SpectralConv2d,
    SpectralLinear,
)
from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.losses import LipschitzLoss
from tacit.models.lipschitz_networks import bounded_front


@dataclass(frozen=True)
class Setting:
    """One run.

    `model` names a network and its sizes (above). `scale` is the inverse of the loss's
    temperature, `clip` a share of the loss's own constant and `learning_rate` that of gradients
    divided by the clip, so that neither moves when the other does.

    `features` are one kind of `images.featured`, or filters:k:s:f:p (random ones, not trained).
    `channels` is the noise multiplier of a released mean and std per channel, `centre` the
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


def build(setting: Setting, shape: tuple[int, ...], classes: int) -> nn.Module:
    kind, sizes = kind_and_sizes(setting.model)
    if kind == "linear":
        return tacit.models.lipschitz_linear(shape, classes)
    bodies: dict[str, Callable[[], list[nn.Module]]] = {
        "mlp": lambda: list(tacit.models.lipschitz_mlp(shape, classes, hidden=sizes))[:-1],
        "mixer": lambda: list(tacit.models.lipschitz_mixer(shape, classes, *sizes))[:-1],
        "centred": bounded_front,
        "patches": lambda: _pooled(shape, sizes[0], sizes[0], sizes[1], 1),
        "pooled": lambda: _pooled(shape, *sizes),
        "convolution": lambda: [*_pooled(shape, *sizes), *_second_sphere(setting, classes)],
        "adapted": lambda: _adapted(setting, shape, classes, sizes),
    }
    if kind not in bodies:
        raise ValueError(f"model is {setting.model!r}; give one of linear, {', '.join(bodies)}")
    layers = bodies[kind]()
    width = math.prod(_shape_after(layers, shape))
    head = "ball" if kind == "adapted" else setting.head
    if head == "orthogonal":
        last = SpectralLinear(width, classes)
    elif head == "ball":
        last = SpectralLinear(width, classes, within=SpectralBall)
        nn.init.zeros_(last.weight)
    else:
        raise ValueError(f"head is {head!r}; give 'orthogonal' or 'ball'")
    return nn.Sequential(*nn.Sequential(*layers, nn.Flatten()), last)


def has_certificates(setting: Setting) -> bool:
    """Whether the network is Lipschitz in pixels but for the sphere it begins with."""
    kind, _ = kind_and_sizes(setting.model)
    plain = setting.features == "pixels" and setting.channels is None and setting.centre is None
    return plain and kind not in ("convolution", "adapted")


def fixed_filters(features: str, shape: tuple[int, ...]) -> nn.Module:
    """Filters drawn once, from a public seed, and never trained: `filters:k:s:f:p`."""
    _, sizes = kind_and_sizes(features)
    return nn.Sequential(*_drawn(shape, sizes)).requires_grad_(False)


class Moved(nn.Module, Parameterless):
    """x − c for a constant c that was released: ‖x − c‖ ≤ ‖x‖ + ‖c‖, and the constant is 1."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.centre

    def output_norm(self, x: Bound) -> float:
        return x.norm + float(torch.linalg.vector_norm(self.centre, dtype=torch.float64))


def kind_and_sizes(model: str) -> tuple[str, list[int]]:
    kind, *numbers = model.split(":")
    return kind, [int(number) for number in numbers]


def _pooled(
    shape: tuple[int, ...], kernel: int, stride: int, filters: int, pool: int
) -> list[nn.Module]:
    convolution = SpectralConv2d(shape[0], filters, kernel, stride=stride)
    pooling = [ScaledL2NormPool2d(pool)] if pool > 1 else []
    return [*bounded_front(), convolution, MaxMin(), *pooling]


def _drawn(shape: tuple[int, ...], sizes: list[int]) -> list[nn.Module]:
    """`_pooled` with filters from a public seed, the same in every run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _pooled(shape, *sizes)


def _adapted(
    setting: Setting, shape: tuple[int, ...], classes: int, sizes: list[int]
) -> list[nn.Module]:
    filters = _drawn(shape, sizes)
    sphere = BoundedInput(1.0, sphere=True)
    moved = Moved(_shape_after(filters, shape))
    return [*filters, _limit(setting, classes), sphere, moved, BoundedInput(1.0, sphere=True)]


def _second_sphere(setting: Setting, classes: int) -> list[nn.Module]:
    centring = [LayerCentering((2, 3))] if setting.middle_centring else []
    return [_limit(setting, classes), *centring, BoundedInput(1.0, sphere=True)]


def _limit(setting: Setting, classes: int) -> ClipGradient:
    return ClipGradient(setting.middle * setting.gradient_clip(classes))


@torch.no_grad()
def _shape_after(layers: list[nn.Module], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1:])
