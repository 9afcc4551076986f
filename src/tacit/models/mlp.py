"""A multilayer perceptron with tanh units."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn


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
