"""Multilayer perceptrons, and mixers made of them.

A multilayer perceptron with tanh units.

The MLP-Mixer  [Tolstikhin 2021] at the sizes of DP-SGD Without Clipping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from tacit.models.convolutional import image_shape


def mlp(shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (64,)) -> nn.Sequential:
    """Flatten, then linear layers with tanh between them.

    Bounded activations keep gradients from growing, which clipping would cut  [Papernot 2021].
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for size in hidden:
        layers += [nn.Linear(width, size), nn.Tanh()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


class Mixing(nn.Module):
    """x + f(norm(x)ᵀ)ᵀ over patches, then x + g(norm(x)) over channels.

    f and g are two linear layers with GELU between them, and all four are square, as in the
    paper, where square matrices can preserve norms exactly.
    """

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm_of_patches, self.norm_of_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches = _two_layers(patches)
        self.over_channels = _two_layers(width)

    def forward(self, x_BPC: Tensor) -> Tensor:
        mixed = self.over_patches(self.norm_of_patches(x_BPC).transpose(1, 2))
        x_BPC = x_BPC + mixed.transpose(1, 2)
        return x_BPC + self.over_channels(self.norm_of_channels(x_BPC))


class MlpMixer(nn.Module):
    """Patches to `width` channels each, mixed `depth` times, averaged and classified."""

    def __init__(
        self, channels: int, patches: int, patch: int, width: int, depth: int, num_classes: int
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(Mixing(patches, width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x_BPC = self.embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x_BPC)).mean(dim=1))


def mlp_mixer(
    shape: Sequence[int], num_classes: int, patch: int = 4, width: int = 128, depth: int = 1
) -> MlpMixer:
    """One block of mixing over 4×4 patches, which did best there on CIFAR-10.

    The paper searches over patches of 2 to 4, widths of 128 to 512 and 1 to 4 blocks.
    """
    channels, high, wide = image_shape(shape, "mlp_mixer", least=patch, multiple=patch)
    patches = (high // patch) * (wide // patch)
    return MlpMixer(channels, patches, patch, width, depth, num_classes)


def _two_layers(size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size))
