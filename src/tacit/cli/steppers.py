"""What moves the weights, as `tacit train` is asked for it: optimizer, schedule, noise."""

from __future__ import annotations

import enum

import torch

from tacit.cli.layerwise_options import LayerwiseName, LayerwiseOptions
from tacit.cli.networks import QueryName
from tacit.cli.recipes import Recipe
from tacit.noise import Allocation, GlobalNoise, OptimisedNoise, PerLayerNoise


class NoiseName(enum.StrEnum):
    GLOBAL = "global"
    PER_LAYER = "per-layer"
    OPTIMISED = "optimised"


class OptimizerName(enum.StrEnum):
    SGD = "sgd"
    ADAM = "adam"


class ScheduleName(enum.StrEnum):
    CONSTANT = "constant"
    COSINE = "cosine"


NOISE: dict[NoiseName, Allocation] = {
    NoiseName.GLOBAL: GlobalNoise(),
    NoiseName.PER_LAYER: PerLayerNoise(),
    NoiseName.OPTIMISED: OptimisedNoise(),
}


def usual_noise(query: QueryName, layers: LayerwiseOptions) -> NoiseName:
    """Per layer, as in the batch-clipping paper, where batch-clip or --layerwise has blocks."""
    paper = query is QueryName.BATCH_CLIP or layers.name is not LayerwiseName.NONE
    return NoiseName.PER_LAYER if paper and layers.several else NoiseName.GLOBAL


def optimizer_for(
    name: OptimizerName,
    network: torch.nn.Module,
    lr: float,
    momentum: float | None,
    default_momentum: float,
) -> torch.optim.Optimizer:
    if name is OptimizerName.ADAM:
        return torch.optim.Adam(network.parameters(), lr=lr)
    used = default_momentum if momentum is None else momentum
    return torch.optim.SGD(network.parameters(), lr=lr, momentum=used)


def scheduler_for(
    name: ScheduleName | None, recipe: Recipe, stepper: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The schedule by name, or else the recipe's."""
    if name is None:
        name = ScheduleName.COSINE if recipe.cosine else ScheduleName.CONSTANT
    if name is ScheduleName.CONSTANT:
        return None
    return torch.optim.lr_scheduler.CosineAnnealingLR(stepper, T_max=max(1, steps))
