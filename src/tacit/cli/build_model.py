"""From settings to the network, the loss, the optimizer and the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from tacit.cli.recipes import Recipe, TailoredRecipe
from tacit.cli.settings import ModelSettings, TrainingSettings
from tacit.lipschitz.twin import lipschitz_twin
from tacit.losses.record_loss import needs_pre_activations
from tacit.losses.registry import Task, loss_named, numbers_of, registered_losses
from tacit.models import lipschitz_networks, networks, residual
from tacit.models.make_trainable import Trainable, make_trainable

Shape = Sequence[int]
Builder = Callable[[Shape, int], nn.Module]


def network_for(
    name: str, shape: Shape, num_classes: int, query: str, convert: bool = False
) -> Trainable:
    """The network, and what was changed in it so that the query can bound its gradients.

    Clipless replaces an ordinary network by its Lipschitz twin. Clipping of single records needs
    records to be kept apart. Batch clipping takes BatchNorm as it is, unless asked to `convert` it.
    """
    if query == "clipless":
        if name in _CLIPLESS:
            return Trainable(_CLIPLESS[name](shape, num_classes), ())
        return Trainable(*lipschitz_twin(NETWORKS[name](shape, num_classes)))
    network = NETWORKS[name](shape, num_classes)
    if query == "batch-clip" and not convert:
        return Trainable(network, ())
    return make_trainable(network)


def change_note(changes: Sequence[str]) -> list[str]:
    """One line for the run's report; each change is in its configuration."""
    if not changes:
        return []
    rest = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
    return [f"the network was changed: {changes[0]}{rest}"]


def _square(build: Callable[..., nn.Module], name: str, *sides: int) -> Builder:
    """A network for square images of one of these sides."""

    def built(shape: Shape, classes: int) -> nn.Module:
        channels, height, width = networks.image_shape(shape, name)
        if height != width or height not in sides:
            wanted = " or ".join(f"{side}×{side}" for side in sides)
            raise ValueError(
                f"{name} takes images of {wanted}; these records are {channels}×{height}×{width}: "
                "choose another --model, such as resnet8 or mlp"
            )
        return build(classes, channels, height)

    return built


def _cifar_cnn(classes: int, channels: int, side: int) -> nn.Module:
    if channels != 3:
        raise ValueError(f"cifar-cnn takes 3 channels; these records have {channels}")
    return networks.cifar_cnn(classes)


def _any_side(build: Callable[..., nn.Module], name: str, least: int = 1) -> Builder:
    """A network that ends in a mean over positions: for images of `least` pixels a side."""

    def built(shape: Shape, classes: int) -> nn.Module:
        channels, _, _ = networks.image_shape(shape, name, least)
        return build(num_classes=classes, channels=channels)

    return built


NETWORKS: dict[str, Builder] = {
    "default": networks.default_model,
    "linear": lambda shape, classes: networks.mlp(shape, classes, hidden=()),
    "mlp": networks.mlp,
    "mnist-cnn": _square(lambda k, channels, _: networks.mnist_cnn(k, channels), "mnist-cnn", 28),
    "cifar-cnn": _square(_cifar_cnn, "cifar-cnn", 32),
    "convnet": _any_side(networks.convnet, "convnet", least=8),
    "lenet": networks.lenet,
    "lenet5": _square(lambda k, c, side: networks.lenet5(k, c, side=side), "lenet5", 28, 32),
    "vgg": networks.vgg,
    "mlp-mixer": networks.mlp_mixer,
    "resnet8": _any_side(residual.resnet, "resnet8"),
    "resnet18": _any_side(residual.resnet18, "resnet18"),
    "wide-resnet": _any_side(residual.wide_resnet, "wide-resnet"),
    "lipschitz-linear": lipschitz_networks.lipschitz_linear,
    "lipschitz-mlp": lipschitz_networks.lipschitz_mlp,
    "lipschitz-lenet": lipschitz_networks.lipschitz_lenet,
    "lipschitz-vgg": lipschitz_networks.lipschitz_vgg,
    "lipschitz-resnet": lipschitz_networks.lipschitz_resnet,
    "lipschitz-mixer": lipschitz_networks.lipschitz_mixer,
}
# What clipless takes without a twin.
_CLIPLESS = {name: build for name, build in NETWORKS.items() if name.startswith("lipschitz-")} | {
    "default": lipschitz_networks.lipschitz_mlp,
    "linear": lambda shape, classes: lipschitz_networks.lipschitz_mlp(shape, classes, hidden=()),
    "mlp": lipschitz_networks.lipschitz_mlp,
}


def loss_numbers(m: ModelSettings, recipe: Recipe, tailored: TailoredRecipe) -> dict[str, float]:
    """The numbers of the loss: those given, else the recipe's, else the loss's own defaults.

    Raises if no loss has this name, or if a number was given that it does not take.
    """
    options = ("temperature", "threshold_epoch", "beta", "gamma")
    given = {name: getattr(m, name) for name in options if getattr(m, name) is not None}
    taken = numbers_of(m.loss)
    for number, value in given.items():
        if number not in taken:
            option = "--" + number.replace("_", "-")
            others = [f"--loss {o}" for o in registered_losses() if number in numbers_of(o)]
            raise ValueError(
                f"{option} is {value:g}, and --loss is {m.loss}; it goes with "
                f"{' or '.join(others)}: give that, or leave {option} out"
            )
    usual: dict[str, dict[str, float]] = {
        "cross-entropy": {"temperature": recipe.temperature},
        "tailored": asdict(tailored),
        "focal": {"gamma": tailored.gamma},
    }
    numbers = usual.get(m.loss, {}) | given
    for number, has_default in taken.items():
        if number not in numbers and not has_default:
            raise ValueError(
                f"--loss {m.loss} needs a number {number!r}, which no option gives; give it a "
                "default where the loss is registered"
            )
    return numbers


def loss_for(name: str, numbers: dict[str, float], query: str) -> Any:
    """The loss with these numbers, if it is one for classification that the query can bound."""
    loss = loss_named(name, **numbers)
    task = getattr(loss, "task", None)
    if task is not None and task is not Task.CLASSIFICATION:
        raise ValueError(
            f"--loss {name} is for {Task(task).value}, and tacit train trains networks with one "
            "output per class; use a loss for classification, or train in Python"
        )
    if query == "clipless" and needs_pre_activations(loss):
        raise ValueError(
            f"--loss {name} has a penalty on pre-activations, and --query clipless bounds the "
            "gradient in the outputs alone; use --query clip"
        )
    return loss


def optimizer_for(t: TrainingSettings, network: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    lr = recipe.learning_rate if t.lr is None else t.lr
    if t.optimizer == "adam":
        return torch.optim.Adam(network.parameters(), lr=lr)
    momentum = recipe.momentum if t.momentum is None else t.momentum
    return torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum)


def scheduler_for(
    t: TrainingSettings, recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    if (t.schedule or ("cosine" if recipe.cosine else "constant")) == "constant":
        return None
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps))


def device_for(name: str) -> torch.device:
    """The device of this name, or an error if this machine has none; auto prefers a GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    names = ["cpu", *["cuda"][:gpus], *(f"cuda:{i}" for i in range(gpus))]
    if name not in names:
        raise ValueError(
            f"--device is {name!r}, and PyTorch finds {gpus or 'no'} CUDA GPUs here; give auto or "
            f"{' or '.join(names)}"
        )
    return torch.device(name)
