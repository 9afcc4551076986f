"""Modules that only move a record's numbers about, as long as they stay within the record."""

from __future__ import annotations

from torch import nn

from tacit.lipschitz.axes import own_axis
from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.lipschitz.refused import Refused


class Moving(Parameterless):
    """An isometry, and exact."""

    exact = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class _WithAxis(Moving):
    """One whose axis may turn out to be the batch's, once it is known how many there are."""

    def __init__(self, module: nn.Module, axis: int) -> None:
        super().__init__(module)
        self.axis = axis

    def output_norm(self, x: Bound) -> float:
        own_axis(self.axis, len(x.shape) + 1, type(self.module).__name__)
        return x.norm


class _PixelShuffle(Moving):
    """Takes channels to be the third axis from the end, which in a record of two is the batch."""

    def output_norm(self, x: Bound) -> float:
        if len(x.shape) < 3:
            raise Refused(f"takes records of three axes (C, H, W); this one is {x.shape}")
        return x.norm


def flatten(module: nn.Flatten) -> Moving:
    return _WithAxis(module, module.start_dim)


def unflatten(module: nn.Unflatten) -> Moving:
    if not isinstance(module.dim, int):
        raise Refused("names its axis; give it a number")
    return _WithAxis(module, module.dim)


def pixel_shuffle(module: nn.Module) -> Moving:
    return _PixelShuffle(module)
