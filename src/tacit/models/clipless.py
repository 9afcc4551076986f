"""Ordinary counterparts of the convolutional networks of DP-SGD Without Clipping.

GroupSort is a ReLU again, L2-norm pooling a maximum (a mean over a whole image), and nothing is
constrained.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tacit.models.image_shape import image_shape


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
