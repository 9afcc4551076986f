"""The lightweight networks of Batch Clipping (Tables 1 and 2), with or without BatchNorm.

Both tables list the activation with the convolution, so it comes before the normalisation. The
paper's third network is `resnet18`.
"""

from __future__ import annotations

from torch import nn

from tacit.models.normalisation import Norm, normalised


def convnet(
    num_classes: int = 10, channels: int = 3, norm: Norm | None = nn.BatchNorm2d
) -> nn.Sequential:
    """Table 1, for 32×32: four 3×3 convolutions of 32, 64, 64, 128 filters, averaged between."""
    layers: list[nn.Module] = []
    before = channels
    for filters in (32, 64, 64, 128):
        layers += [nn.Conv2d(before, filters, 3, padding=1)]
        layers += [*normalised(nn.ReLU(), norm, filters), nn.AvgPool2d(2)]
        before = filters
    layers[-1] = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, num_classes))


def lenet5(
    num_classes: int = 10,
    channels: int = 1,
    norm: Norm | None = nn.BatchNorm2d,
    side: int = 28,
) -> nn.Sequential:
    """Table 2, BN-LeNet-5, for 32×32: 5×5 convolutions of 6, 16 and 120 filters, then 84 units.

    Images of 28×28 (`side`) are padded to 32×32 by the first convolution. The table's sizes after
    the second pooling and the third convolution are those before them: 5×5 and 1×1 are meant,
    since no other reading feeds the 84 units of LeNet-5.
    """
    if side not in (28, 32):
        raise ValueError(f"side is {side}; lenet5 takes images of 28×28 or 32×32")
    first = nn.Conv2d(channels, 6, 5, padding=(32 - side) // 2)
    return nn.Sequential(
        first, *normalised(nn.Tanh(), norm, 6), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), *normalised(nn.Tanh(), norm, 16), nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5), *normalised(nn.Tanh(), norm, 120), nn.Flatten(),
        nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, num_classes),
    )  # fmt: skip
