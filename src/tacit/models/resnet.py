"""Residual networks for small images: a 3×3 stem and no pooling before the end  [He 2016]."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from tacit.models.normalisation import Norm, normalised


class BasicBlock(nn.Module):
    """relu(f(x) + s(x)): f two 3×3 convolutions, s the identity or a 1×1 convolution."""

    def __init__(self, before: int, filters: int, stride: int, norm: Norm | None) -> None:
        super().__init__()
        first = nn.Conv2d(before, filters, 3, stride, padding=1, bias=False)
        second = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.body = nn.Sequential(
            *normalised(first, norm, filters), nn.ReLU(), *normalised(second, norm, filters)
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or before != filters:
            project = nn.Conv2d(before, filters, 1, stride, bias=False)
            self.shortcut = nn.Sequential(*normalised(project, norm, filters))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(
    num_classes: int = 10,
    channels: int = 3,
    blocks: Sequence[int] = (1, 1, 1),
    width: int = 32,
    norm: Norm | None = nn.BatchNorm2d,
) -> nn.Sequential:
    """Stages of `width`, 2·`width`, … filters, each but the first halving the sides.

    The default, eight layers deep, has the blocks and the width of the small residual networks
    that DP-SGD Without Clipping searches over. `norm=None` leaves normalisation out.
    """
    stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    layers = [*normalised(stem, norm, width), nn.ReLU()]
    before = width
    for stage, count in enumerate(blocks):
        filters = width * 2**stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(BasicBlock(before, filters, stride, norm))
            before = filters
    head = nn.Linear(before, num_classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def resnet18(
    num_classes: int = 10, channels: int = 3, norm: Norm | None = nn.BatchNorm2d
) -> nn.Sequential:
    """The resnet-18 of Batch Clipping: four stages of two blocks, 64 to 512 filters.

    With BatchNorm it has 62 parameter tensors, the L of the paper's layerwise clipping.
    """
    return resnet(num_classes, channels, blocks=(2, 2, 2, 2), width=64, norm=norm)
