"""Small convolutional networks of the papers.

Does a record have the shape of an image that a network can take?

Ordinary counterparts of the convolutional networks of DP-SGD Without Clipping.

GroupSort is a ReLU again, L2-norm pooling a maximum (a mean over a whole image), and nothing is
constrained.

The lightweight networks of Batch Clipping (Tables 1 and 2), with or without BatchNorm.

Both tables list the activation with the convolution, so it comes before the normalisation. The
paper's third network is `resnet18`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tacit.models.residual import Norm, normalised


def image_shape(
    shape: Sequence[int], network: str, least: int = 1, multiple: int = 1
) -> tuple[int, int, int]:
    """(channels, height, width), or a ValueError that says what the network asks for."""
    given = "×".join(str(size) for size in shape)
    if len(shape) != 3:
        raise ValueError(
            f"{network} takes images (channels, height, width); these records have the shape "
            f"{given or 'of one number'}: use mlp"
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise ValueError(
            f"{network} takes images of at least {least}×{least}; these records are {given}: "
            "use a network with less pooling, or mlp"
        )
    if height % multiple or width % multiple:
        raise ValueError(
            f"{network} cuts images into patches of {multiple}×{multiple}, which do not fill "
            f"{given}; choose a patch that divides both sides"
        )
    return channels, height, width


def lenet(shape: Sequence[int], num_classes: int) -> nn.Sequential:
    """The LeNet of its MNIST listing: 3×3 convolutions of 32 and 64 filters, then 512 units."""
    channels, height, width = image_shape(shape, "lenet", least=4)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 512), nn.ReLU(),
        nn.Linear(512, num_classes),
    )  # fmt: skip


def vgg(shape: Sequence[int], num_classes: int, width: int = 32, depth: int = 1) -> nn.Sequential:
    """Three stages of `depth` convolutions with w, 2w, 4w filters, pooled over, then 8w units.

    The first stage has 5×5 kernels, the others 3×3. On CIFAR-10, w = 32 and w = 128 are the
    paper's range of CNNs, from 130 thousand to 2 million parameters.
    """
    # Two poolings by 2: below 12×12 the last stage would be smaller than its own kernel.
    before, _, _ = image_shape(shape, "vgg", least=12)
    layers: list[nn.Module] = []
    for stage in range(3):
        filters, kernel = width * 2**stage, 5 if stage == 0 else 3
        for _ in range(depth):
            layers += [nn.Conv2d(before, filters, kernel, padding=kernel // 2), nn.ReLU()]
            before = filters
        layers += [nn.MaxPool2d(2) if stage < 2 else nn.AdaptiveAvgPool2d(1)]
    layers += [nn.Flatten(), nn.Linear(before, 8 * width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8 * width, num_classes))


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
