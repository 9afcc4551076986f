"""The papers' networks, and a default for each kind of record."""

from collections.abc import Sequence

from torch import nn

from tacit.models.losing_less import cifar_cnn, mnist_cnn
from tacit.models.mlp import mlp


def default_model(shape: Sequence[int], num_classes: int) -> nn.Module:
    """A small network for records of this shape: the papers' where one fits, else an MLP."""
    if tuple(shape) == (3, 32, 32):
        return cifar_cnn(num_classes)
    if tuple(shape) == (1, 28, 28):
        return mnist_cnn(num_classes)
    return mlp(shape, num_classes)


__all__ = ["cifar_cnn", "default_model", "mlp", "mnist_cnn"]
