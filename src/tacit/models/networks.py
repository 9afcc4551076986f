"""Ordinary networks of the papers: perceptrons, mixers and convolutional networks.

Those of DP-SGD Without Clipping are the counterparts of `lipschitz_networks`: GroupSort is a ReLU
again, L2-norm pooling a maximum (a mean over a whole image), and nothing is constrained. Those of
Batch Clipping (Tables 1 and 2) have BatchNorm or not; the tables list the activation with the
convolution, so it comes before the normalisation. The paper's third network is `resnet18`. Those of
Losing Less (Tables 1 to 4) are for images [Papernot 2021] and for scattering features; their
pre-activations, which the tailored loss keeps small, are the outputs of the convolutions and linear
layers. `activation` makes one activation: `nn.Tanh`, or `lambda: TemperedSigmoid(1.5, 2.5, 0.75)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tacit.losses.record_loss import positive
from tacit.models.architectures import register_model
from tacit.models.residual import Norm, normalised, resnet, resnet18, wide_resnet

Activation = Callable[[], nn.Module]


def image_shape(
    shape: Sequence[int], network: str, least: int = 1, multiple: int = 1
) -> tuple[int, int, int]:
    """(channels, height, width), or a ValueError that says what the network needs."""
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


# ---- perceptrons and mixers ----------------------------------------------------------------------


@register_model("mlp")
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

    f and g are two linear layers with GELU between them. All four are square, as in the paper,
    where square matrices can preserve norms exactly.
    """

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm_of_patches, self.norm_of_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches, self.over_channels = (
            nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, size))
            for size in (patches, width)
        )

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


@register_model("mlp-mixer")
def mlp_mixer(
    shape: Sequence[int], num_classes: int, patch: int = 4, width: int = 128, depth: int = 1
) -> MlpMixer:
    """The MLP-Mixer  [Tolstikhin 2021] at the sizes of DP-SGD Without Clipping.

    One block of mixing over 4×4 patches did best there on CIFAR-10. The paper searches over patches
    of 2 to 4, widths of 128 to 512 and 1 to 4 blocks.
    """
    channels, high, wide = image_shape(shape, "mlp_mixer", least=patch, multiple=patch)
    patches = (high // patch) * (wide // patch)
    return MlpMixer(channels, patches, patch, width, depth, num_classes)


# ---- DP-SGD Without Clipping ---------------------------------------------------------------------


@register_model("lenet")
def lenet(shape: Sequence[int], num_classes: int) -> nn.Sequential:
    """The LeNet of its MNIST listing: 3×3 convolutions of 32 and 64 filters, then 512 units."""
    channels, height, width = image_shape(shape, "lenet", least=4)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 512), nn.ReLU(),
        nn.Linear(512, num_classes),
    )  # fmt: skip


@register_model("vgg")
def vgg(shape: Sequence[int], num_classes: int, width: int = 32, depth: int = 1) -> nn.Sequential:
    """Three stages of `depth` convolutions with w, 2w, 4w filters, each pooled, then 8w units.

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


# ---- Batch Clipping ------------------------------------------------------------------------------


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

    The first convolution pads images of 28×28 (`side`) to 32×32. The table's sizes after the second
    pooling and the third convolution are those before them: 5×5 and 1×1 are meant, since no other
    reading feeds the 84 units of LeNet-5.
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


# ---- Losing Less ---------------------------------------------------------------------------------


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
        self.scale, self.inverse_temperature, self.offset = scale, inverse_temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.sigmoid(self.inverse_temperature * x) - self.offset

    def extra_repr(self) -> str:
        return f"{self.scale}, {self.inverse_temperature}, {self.offset}"


def mnist_cnn(
    num_classes: int = 10, channels: int = 1, activation: Activation = nn.Tanh
) -> nn.Sequential:
    """Table 1, for 28×28: two convolutions, each with 2×2 pooling of stride 1, then 32 units."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2), activation(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), activation(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), activation(), nn.Linear(32, num_classes),
    )  # fmt: skip


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
    size = math.prod(image_shape(shape, "scattering_linear"))
    return nn.Sequential(nn.Flatten(), nn.Linear(size, num_classes))


def scattering_mnist_cnn(
    shape: Sequence[int] = (81, 7, 7), num_classes: int = 10, activation: Activation = nn.Tanh
) -> nn.Sequential:
    """Table 3: as Table 1 with 3×3 kernels, on the scattering features of 28×28 images."""
    channels, height, width = image_shape(shape, "scattering_mnist_cnn", least=5)
    # A stride of 2 with padding 1 halves, rounding up; each pooling of stride 1 takes one off.
    left = ((height + 1) // 2 - 2) * ((width + 1) // 2 - 2)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1), activation(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 3, padding=1), activation(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(32 * left, 32), activation(), nn.Linear(32, num_classes),
    )  # fmt: skip


def scattering_cifar_cnn(
    shape: Sequence[int] = (243, 8, 8),
    num_classes: int = 10,
    activation: Activation = nn.Tanh,
    *,
    deep: bool = True,
) -> nn.Sequential:
    """Table 4: two pairs of 3×3 convolutions of 64 filters, on the features of 32×32 images.

    `deep=False` has one convolution on each side of one pooling, the network with which Tramèr &
    Boneh 2021 found Table 5's settings.
    """
    channels, height, width = image_shape(shape, "scattering_cifar_cnn", least=4)
    if not deep:
        return nn.Sequential(
            nn.Conv2d(channels, 64, 3, padding=1), activation(), nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1), activation(),
            nn.Flatten(), nn.Linear(64 * (height // 2) * (width // 2), num_classes),
        )  # fmt: skip
    pairs = _pair(channels, 64, activation) + _pair(64, 64, activation)
    last = nn.Linear(64 * (height // 4) * (width // 4), num_classes)
    return nn.Sequential(*pairs, nn.Flatten(), last)


def _pair(before: int, filters: int, activation: Activation) -> list[nn.Module]:
    """Two 3×3 convolutions and 2×2 pooling."""
    return [
        nn.Conv2d(before, filters, 3, padding=1), activation(),
        nn.Conv2d(filters, filters, 3, padding=1), activation(), nn.MaxPool2d(2),
    ]  # fmt: skip


@register_model("default")
def default_model(shape: Sequence[int], num_classes: int) -> nn.Module:
    """A small network for records of this shape: the papers' where one fits, else an MLP.

    On features of 32×32 images it has two convolutions: at ε = 3 that is four points more accurate
    on CIFAR-10 than the four of Table 4.
    """
    match tuple(shape):
        case (3, 32, 32):
            return cifar_cnn(num_classes)
        case (1, 28, 28):
            return mnist_cnn(num_classes)
        case (243, 8, 8):
            return scattering_cifar_cnn(shape, num_classes, deep=False)
        case (81, 7, 7):
            return scattering_mnist_cnn(shape, num_classes)
    return mlp(shape, num_classes)


# ---- by name, for records of a given shape -------------------------------------------------------


@register_model("linear")
def linear(shape: Sequence[int], num_classes: int) -> nn.Sequential:
    """One linear layer on the flattened record."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))


def _channels_and_side(shape: Sequence[int], name: str, *sides: int) -> tuple[int, int]:
    """Of square images of one of these sides."""
    channels, height, width = image_shape(shape, name)
    if height != width or height not in sides:
        wanted = " or ".join(f"{side}×{side}" for side in sides)
        raise ValueError(
            f"{name} takes images of {wanted}; these records are {channels}×{height}×{width}: "
            "choose another network, such as resnet8 or mlp"
        )
    return channels, height


@register_model("mnist-cnn")
def _mnist_cnn(shape: Sequence[int], num_classes: int) -> nn.Module:
    return mnist_cnn(num_classes, _channels_and_side(shape, "mnist-cnn", 28)[0])


@register_model("cifar-cnn")
def _cifar_cnn(shape: Sequence[int], num_classes: int) -> nn.Module:
    channels, _ = _channels_and_side(shape, "cifar-cnn", 32)
    if channels != 3:
        raise ValueError(f"cifar-cnn takes 3 channels; these records have {channels}")
    return cifar_cnn(num_classes)


@register_model("convnet")
def _convnet(shape: Sequence[int], num_classes: int) -> nn.Module:
    return convnet(num_classes, image_shape(shape, "convnet", least=8)[0])


@register_model("lenet5")
def _lenet5(shape: Sequence[int], num_classes: int) -> nn.Module:
    channels, side = _channels_and_side(shape, "lenet5", 28, 32)
    return lenet5(num_classes, channels, side=side)


@register_model("resnet8")
def _resnet8(shape: Sequence[int], num_classes: int) -> nn.Module:
    return resnet(num_classes, image_shape(shape, "resnet8")[0])


@register_model("resnet18")
def _resnet18(shape: Sequence[int], num_classes: int) -> nn.Module:
    return resnet18(num_classes, image_shape(shape, "resnet18")[0])


@register_model("wide-resnet")
def _wide_resnet(shape: Sequence[int], num_classes: int) -> nn.Module:
    channels, _, _ = image_shape(shape, "wide-resnet")
    return wide_resnet(num_classes=num_classes, channels=channels)
