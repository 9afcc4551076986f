"""The networks that `tacit train --model` names, built for the data's shape."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn

from tacit.lipschitz.twin import lipschitz_twin
from tacit.models import default_model
from tacit.models.convolutional import convnet, image_shape, lenet, lenet5, vgg
from tacit.models.lipschitz_networks import (
    lipschitz_lenet,
    lipschitz_linear,
    lipschitz_mixer,
    lipschitz_mlp,
    lipschitz_resnet,
    lipschitz_vgg,
)
from tacit.models.losing_less import cifar_cnn, mnist_cnn
from tacit.models.make_trainable import Trainable, make_trainable
from tacit.models.perceptrons import mlp, mlp_mixer
from tacit.models.residual import resnet, resnet18, wide_resnet

Shape = Sequence[int]


class QueryName(enum.StrEnum):
    CLIP = "clip"
    BATCH_CLIP = "batch-clip"
    CLIPLESS = "clipless"


class ModelName(enum.StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    MLP = "mlp"
    MNIST_CNN = "mnist-cnn"
    CIFAR_CNN = "cifar-cnn"
    CONVNET = "convnet"
    LENET = "lenet"
    LENET5 = "lenet5"
    VGG = "vgg"
    MLP_MIXER = "mlp-mixer"
    RESNET8 = "resnet8"
    RESNET18 = "resnet18"
    WIDE_RESNET = "wide-resnet"
    LIPSCHITZ_LINEAR = "lipschitz-linear"
    LIPSCHITZ_MLP = "lipschitz-mlp"
    LIPSCHITZ_LENET = "lipschitz-lenet"
    LIPSCHITZ_VGG = "lipschitz-vgg"
    LIPSCHITZ_RESNET = "lipschitz-resnet"
    LIPSCHITZ_MIXER = "lipschitz-mixer"


class Inputs(Protocol):
    """What a network is built for: the shape of one record, and the number of classes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_classes(self) -> int | None: ...


def network_for(
    name: ModelName, records: Inputs, query: QueryName, convert: bool = False
) -> Trainable:
    """The network, and what was changed in it so that the query can bound its gradients.

    Clipless takes an ordinary network by its Lipschitz twin; clipping of records needs them kept
    apart. Batch clipping takes BatchNorm as it is, unless asked to `convert` it.
    """
    assert records.num_classes is not None
    if query is QueryName.CLIPLESS:
        if name in _LIPSCHITZ:
            return Trainable(_LIPSCHITZ[name](records.shape, records.num_classes), ())
        return Trainable(*lipschitz_twin(_BUILDERS[name](records.shape, records.num_classes)))
    built = (_BUILDERS | _LIPSCHITZ_ONLY)[name](records.shape, records.num_classes)
    if query is QueryName.BATCH_CLIP and not convert:
        return Trainable(built, ())
    return make_trainable(built)


def notes_on(changes: Sequence[str]) -> tuple[str, ...]:
    """One line for the run's report; each change is in its configuration."""
    if not changes:
        return ()
    rest = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
    return (f"the network was changed: {changes[0]}{rest}",)


def _of_side(shape: Shape, name: str, *sides: int) -> tuple[int, int]:
    """(channels, side) of a square image of one of these sides."""
    channels, height, width = image_shape(shape, name)
    if height != width or height not in sides:
        wanted = " or ".join(f"{side}×{side}" for side in sides)
        raise ValueError(
            f"{name} takes images of {wanted}; these records are {channels}×{height}×{width}: "
            "choose another --model, such as resnet8 or mlp"
        )
    return channels, height


def _mnist_cnn(shape: Shape, classes: int) -> nn.Module:
    channels, _ = _of_side(shape, "mnist-cnn", 28)
    return mnist_cnn(classes, channels)


def _cifar_cnn(shape: Shape, classes: int) -> nn.Module:
    channels, _ = _of_side(shape, "cifar-cnn", 32)
    if channels != 3:
        raise ValueError(f"cifar-cnn takes 3 channels; these records have {channels}")
    return cifar_cnn(classes)


def _lenet5(shape: Shape, classes: int) -> nn.Module:
    channels, side = _of_side(shape, "lenet5", 28, 32)
    return lenet5(classes, channels, side=side)


def _by_channels(
    name: str, build: Callable[[int, int], nn.Module], least: int = 1
) -> Callable[[Shape, int], nn.Module]:
    """For a network that ends in a mean over positions: any image of `least` pixels a side."""

    def built(shape: Shape, classes: int) -> nn.Module:
        channels, _, _ = image_shape(shape, name, least)
        return build(classes, channels)

    return built


_BUILDERS: dict[ModelName, Callable[[Shape, int], nn.Module]] = {
    ModelName.DEFAULT: default_model,
    ModelName.LINEAR: lambda shape, classes: mlp(shape, classes, hidden=()),
    ModelName.MLP: mlp,
    ModelName.MNIST_CNN: _mnist_cnn,
    ModelName.CIFAR_CNN: _cifar_cnn,
    ModelName.CONVNET: _by_channels("convnet", convnet, least=8),
    ModelName.LENET: lenet,
    ModelName.LENET5: _lenet5,
    ModelName.VGG: vgg,
    ModelName.MLP_MIXER: mlp_mixer,
    ModelName.RESNET8: _by_channels("resnet8", resnet),
    ModelName.RESNET18: _by_channels("resnet18", resnet18),
    ModelName.WIDE_RESNET: _by_channels(
        "wide-resnet", lambda classes, channels: wide_resnet(num_classes=classes, channels=channels)
    ),
}

_LIPSCHITZ_ONLY: dict[ModelName, Callable[[Shape, int], nn.Module]] = {
    ModelName.LIPSCHITZ_LINEAR: lipschitz_linear,
    ModelName.LIPSCHITZ_MLP: lipschitz_mlp,
    ModelName.LIPSCHITZ_LENET: lipschitz_lenet,
    ModelName.LIPSCHITZ_VGG: lipschitz_vgg,
    ModelName.LIPSCHITZ_RESNET: lipschitz_resnet,
    ModelName.LIPSCHITZ_MIXER: lipschitz_mixer,
}
_LIPSCHITZ = _LIPSCHITZ_ONLY | {
    ModelName.DEFAULT: lipschitz_mlp,
    ModelName.LINEAR: lambda shape, classes: lipschitz_mlp(shape, classes, hidden=()),
    ModelName.MLP: lipschitz_mlp,
}
