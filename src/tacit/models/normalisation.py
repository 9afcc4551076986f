"""The normalisation of a network, chosen as a function from channels to a module."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

Norm = Callable[[int], nn.Module]


def group_norm(groups: int = 16, least: int = 2) -> Norm:
    """GroupNorm in `groups` groups, or the most below that divide the channels.

    Each group is normalised by one record's own mean and variance  [Wu 2018], so records stay
    apart. Groups have `least` channels or more, where there are as many: on inputs without
    positions a channel is one number, and one number less its own mean is zero.
    """
    if groups < 1 or least < 1:
        raise ValueError(f"groups is {groups} and least is {least}; give numbers of at least 1")

    def norm(channels: int) -> nn.GroupNorm:
        fitting = (g for g in range(2, groups + 1) if channels % g == 0 and channels >= g * least)
        return nn.GroupNorm(max(fitting, default=1), channels)

    return norm


def normalised(layer: nn.Module, norm: Norm | None, channels: int) -> list[nn.Module]:
    """The layer and then its normalisation, if there is one."""
    return [layer] if norm is None else [layer, norm(channels)]
