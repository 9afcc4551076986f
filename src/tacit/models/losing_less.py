"""The end-to-end networks of Losing Less (Tables 1 and 2), which are those of [Papernot 2021]."""

from __future__ import annotations

from torch import nn


def mnist_cnn(
    num_classes: int = 10, channels: int = 1, activation: type[nn.Module] = nn.Tanh
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
    num_classes: int = 10, width: int = 32, activation: type[nn.Module] = nn.Tanh
) -> nn.Sequential:
    """Table 2, for 32×32: pairs of 3×3 convolutions of 32, 64, 128 filters, then 128 units."""
    layers: list[nn.Module] = []
    before = 3
    for filters in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(before, filters, 3, padding=1), activation()]
        layers += [nn.Conv2d(filters, filters, 3, padding=1), activation(), nn.MaxPool2d(2)]
        before = filters
    layers += [nn.Flatten(), nn.Linear(before * 4 * 4, 128), activation()]
    return nn.Sequential(*layers, nn.Linear(128, num_classes))
