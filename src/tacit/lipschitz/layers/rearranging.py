"""Each record's numbers in another order: isometries, and exact."""

from __future__ import annotations

import math

from torch import Tensor, nn

from tacit.lipschitz.bounds import Parameterless
from tacit.lipschitz.refused import Refused


class Permute(nn.Module, Parameterless):
    """A record's axes in another order, numbered from 1: the batch stays where it is.

    `Permute(2, 1)` turns tokens (B, T, C) into (B, C, T), so that a linear layer mixes tokens.
    """

    exact = True

    def __init__(self, *order: int) -> None:
        super().__init__()
        if sorted(order) != list(range(1, len(order) + 1)):
            raise ValueError(
                f"Permute{order}: name each of a record's axes once, from 1; axis 0 is the batch"
            )
        self.order = tuple(order)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != len(self.order) + 1:
            raise Refused(f"Permute{self.order} of a record that has {x.dim() - 1} axes")
        return x.permute(0, *self.order)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.order))


class Reshape(nn.Module, Parameterless):
    """Each record in the given shape, of as many numbers. Unlike `view`, it cannot reach across."""

    exact = True

    def __init__(self, *shape: int) -> None:
        super().__init__()
        if any(size < 1 for size in shape):
            raise ValueError(f"Reshape{shape}: say each size of one record; nothing is inferred")
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        if math.prod(x.shape[1:]) != math.prod(self.shape):
            raise Refused(f"Reshape{self.shape} of a record of shape {tuple(x.shape[1:])}")
        return x.reshape(x.shape[0], *self.shape)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))


class Tokens(nn.Module, Parameterless):
    """Images (B, C, H, W) as tokens (B, H·W, C), one a position: what mixers work on."""

    exact = True

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 3:
            raise Refused(f"Tokens of a record that has {x.dim() - 1} axes; it needs positions")
        return x.flatten(2).transpose(1, 2)
