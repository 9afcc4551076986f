"""The Lipschitz networks of DP-SGD Without Clipping, at the paper's sizes.

Each begins by centring a record and scaling it onto a sphere, so that the bound on the input is
enforced and no noise is spent on shorter records. Activations and pooling keep the norms of
gradients where they can  [clipless paper, App. C.2].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from tacit.lipschitz.layers.activations import MaxMin
from tacit.lipschitz.layers.branches import AverageResidual
from tacit.lipschitz.layers.convolution_layers import SpectralConv2d
from tacit.lipschitz.layers.limits import BoundedInput, LayerCentering
from tacit.lipschitz.layers.linear import SpectralLinear
from tacit.lipschitz.layers.rearranging import Permute, ScaledL2NormPool2d, Tokens
from tacit.lipschitz.sets import SpectralBall
from tacit.models.architectures import register_model
from tacit.models.networks import image_shape


def bounded_front(input_norm: float = 1.0) -> list[nn.Module]:
    """Per-record centring and the sphere. Both read one record and cost no privacy."""
    return [LayerCentering(), BoundedInput(input_norm, sphere=True)]


@register_model("lipschitz-linear")
def lipschitz_linear(
    shape: Sequence[int], num_classes: int, input_norm: float = 1.0
) -> nn.Sequential:
    """One layer on the sphere with a spectral norm of at most 1, initialised at 0.

    For informative features, such as scattering ones. Its loss is convex in the weights, so it
    needs no random start; the ball keeps noise from carrying the weights away, and a norm of
    exactly 1, as orthogonal layers have, would constrain a single layer too much.
    """
    last = SpectralLinear(math.prod(shape), num_classes, within=SpectralBall)
    nn.init.zeros_(last.weight)
    return nn.Sequential(BoundedInput(input_norm, sphere=True), nn.Flatten(), last)


@register_model("lipschitz-mlp")
def lipschitz_mlp(
    shape: Sequence[int],
    num_classes: int,
    hidden: Sequence[int] = (512,),
    input_norm: float = 1.0,
) -> nn.Sequential:
    """Orthogonal linear layers with MaxMin between them."""
    layers = [*bounded_front(input_norm), nn.Flatten()]
    width = math.prod(shape)
    for size in hidden:
        layers += [SpectralLinear(width, size), MaxMin()]
        width = size
    return nn.Sequential(*layers, SpectralLinear(width, num_classes))


@register_model("lipschitz-lenet")
def lipschitz_lenet(
    shape: Sequence[int], num_classes: int, input_norm: float = 1.0
) -> nn.Sequential:
    """3×3 convolutions of 32 and 64 filters, L2 pooling by 2 after each, then 512 units."""
    channels, height, width = image_shape(shape, "lipschitz_lenet", least=4)
    half = (height // 2, width // 2)
    return nn.Sequential(
        *bounded_front(input_norm),
        SpectralConv2d(channels, 32, 3, padding=1, input_size=(height, width)),
        MaxMin(), ScaledL2NormPool2d(2),
        SpectralConv2d(32, 64, 3, padding=1, input_size=half),
        MaxMin(), ScaledL2NormPool2d(2),
        nn.Flatten(), SpectralLinear(64 * (half[0] // 2) * (half[1] // 2), 512), MaxMin(),
        SpectralLinear(512, num_classes),
    )  # fmt: skip


@register_model("lipschitz-vgg")
def lipschitz_vgg(
    shape: Sequence[int],
    num_classes: int,
    width: int = 32,
    depth: int = 1,
    input_norm: float = 1.0,
) -> nn.Sequential:
    """Three stages of `depth` convolutions with w, 2w, 4w filters, each pooled by 2, then 8w units.

    The first stage has 5×5 kernels, the others 3×3.
    """
    before, height, wide = image_shape(shape, "lipschitz_vgg", least=8)
    layers = bounded_front(input_norm)
    size = (height, wide)
    for stage in range(3):
        filters, kernel = width * 2**stage, 5 if stage == 0 else 3
        for _ in range(depth):
            conv = SpectralConv2d(before, filters, kernel, padding=kernel // 2, input_size=size)
            layers += [conv, MaxMin()]
            before = filters
        layers.append(ScaledL2NormPool2d(2))
        size = (size[0] // 2, size[1] // 2)
    layers += [nn.Flatten(), SpectralLinear(before * size[0] * size[1], 8 * width), MaxMin()]
    return nn.Sequential(*layers, SpectralLinear(8 * width, num_classes))


@register_model("lipschitz-resnet")
def lipschitz_resnet(
    shape: Sequence[int],
    num_classes: int,
    width: int = 32,
    blocks: Sequence[int] = (1, 1, 1),
    input_norm: float = 1.0,
) -> nn.Sequential:
    """Stages of residual blocks ½(x + f(x)), f two 3×3 convolutions; each stage pools by 2."""
    before, height, wide = image_shape(shape, "lipschitz_resnet", least=2 ** len(blocks))
    layers = bounded_front(input_norm)
    size = (height, wide)
    for stage, count in enumerate(blocks):
        filters = width * 2**stage
        layers += [SpectralConv2d(before, filters, 3, padding=1, input_size=size), MaxMin()]
        for _ in range(count):
            f = nn.Sequential(
                SpectralConv2d(filters, filters, 3, padding=1, input_size=size),
                MaxMin(),
                SpectralConv2d(filters, filters, 3, padding=1, input_size=size),
            )
            layers += [AverageResidual(f), MaxMin()]
        layers.append(ScaledL2NormPool2d(2))
        size = (size[0] // 2, size[1] // 2)
        before = filters
    head = SpectralLinear(before * size[0] * size[1], num_classes)
    return nn.Sequential(*layers, nn.Flatten(), head)


@register_model("lipschitz-mixer")
def lipschitz_mixer(
    shape: Sequence[int],
    num_classes: int,
    patch: int = 4,
    width: int = 128,
    depth: int = 1,
    input_norm: float = 1.0,
) -> nn.Sequential:
    """Disjoint patches, then `depth` pairs of square layers over patches and over channels.

    Square orthogonal matrices and patches that do not overlap: norms of gradients are kept
    exactly, and every weight's bound is X·G  [clipless paper, App. C.2.4].
    """
    channels, high, wide = image_shape(shape, "lipschitz_mixer", least=patch, multiple=patch)
    tokens = (high // patch) * (wide // patch)
    layers: list[nn.Module] = [
        *bounded_front(input_norm),
        SpectralConv2d(channels, width, patch, stride=patch),
        Tokens(),
    ]
    for _ in range(depth):
        layers += [Permute(2, 1), SpectralLinear(tokens, tokens), Permute(2, 1), MaxMin(axis=-1)]
        layers += [SpectralLinear(width, width), MaxMin(axis=-1)]
    return nn.Sequential(*layers, nn.Flatten(), SpectralLinear(tokens * width, num_classes))
