"""The networks of Losing Less.

Tempered sigmoids: bounded activations with three settings.

The networks of Losing Less, Tables 1 to 4: on images [Papernot 2021], on scattering features.

`activation` makes one activation: `nn.Tanh`, or `lambda: TemperedSigmoid(1.5, 2.5, 0.75)`. The
pre-activations that the tailored loss keeps small are the outputs of the convolutions and linear
layers here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tacit.losses.record_loss import positive
from tacit.models.convolutional import image_shape


class TemperedSigmoid(nn.Module):
    """φ(x) = s·σ(T·x) − o, within [−o, s − o].  [Papernot 2021]

    s = 2, T = 2, o = 1 is tanh. A smaller s·T makes activations, and so gradients, smaller.
    """

    def __init__(
        self, scale: float = 2.0, inverse_temperature: float = 2.0, offset: float = 1.0
    ) -> None:
        super().__init__()
        positive("scale", scale)
        positive("inverse_temperature", inverse_temperature)
        self.scale = scale
        self.inverse_temperature = inverse_temperature
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.inverse_temperature * x) - self.offset

    def extra_repr(self) -> str:
        return f"{self.scale}, {self.inverse_temperature}, {self.offset}"


Activation = Callable[[], nn.Module]


def mnist_cnn(
    num_classes: int = 10, channels: int = 1, activation: Activation = nn.Tanh
) -> nn.Sequential:
    """Table 1, for 28×28: two convolutions, each with 2×2 pooling of stride 1, then 32 units."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        activation(),
        nn.Linear(32, num_classes),
    )


def cifar_cnn(
    num_classes: int = 10, width: int = 32, activation: Activation = nn.Tanh
) -> nn.Sequential:
    """Table 2, for 32×32: pairs of 3×3 convolutions of 32, 64, 128 filters, then 128 units."""
    layers: list[nn.Module] = []
    before = 3
    for filters in (width, 2 * width, 4 * width):
        layers += _pair(before, filters, activation)
        before = filters
    layers += [nn.Flatten(), nn.Linear(before * 4 * 4, 128), activation()]
    return nn.Sequential(*layers, nn.Linear(128, num_classes))


def scattering_linear(shape: Sequence[int], num_classes: int = 10) -> nn.Sequential:
    """One linear layer on scattering features (K, height, width).  [Tramèr 2021]"""
    channels, height, width = image_shape(shape, "scattering_linear")
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, num_classes))


def scattering_mnist_cnn(
    shape: Sequence[int] = (81, 7, 7), num_classes: int = 10, activation: Activation = nn.Tanh
) -> nn.Sequential:
    """Table 3: as Table 1 with 3×3 kernels, on the scattering features of 28×28 images."""
    channels, height, width = image_shape(shape, "scattering_mnist_cnn", least=5)
    # A stride of 2 with padding 1 halves, rounding up; each pooling of stride 1 takes one off.
    left = ((height + 1) // 2 - 2) * ((width + 1) // 2 - 2)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 3, padding=1),
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * left, 32),
        activation(),
        nn.Linear(32, num_classes),
    )


def scattering_cifar_cnn(
    shape: Sequence[int] = (243, 8, 8),
    num_classes: int = 10,
    activation: Activation = nn.Tanh,
    *,
    deep: bool = True,
) -> nn.Sequential:
    """Table 4: two pairs of 3×3 convolutions of 64 filters, on the features of 32×32 images.

    `deep=False` has one convolution on each side of one pooling, which is the network that Tramèr &
    Boneh 2021 found Table 5's recipe with.
    """
    channels, height, width = image_shape(shape, "scattering_cifar_cnn", least=4)
    if not deep:
        return nn.Sequential(
            nn.Conv2d(channels, 64, 3, padding=1),
            activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            activation(),
            nn.Flatten(),
            nn.Linear(64 * (height // 2) * (width // 2), num_classes),
        )
    pairs = _pair(channels, 64, activation) + _pair(64, 64, activation)
    last = nn.Linear(64 * (height // 4) * (width // 4), num_classes)
    return nn.Sequential(*pairs, nn.Flatten(), last)


def _pair(before: int, filters: int, activation: Activation) -> list[nn.Module]:
    """Two 3×3 convolutions and 2×2 pooling."""
    return [
        nn.Conv2d(before, filters, 3, padding=1),
        activation(),
        nn.Conv2d(filters, filters, 3, padding=1),
        activation(),
        nn.MaxPool2d(2),
    ]
