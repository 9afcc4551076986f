"""What an engine is asked: whose gradients, of which loss, clipped to what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from tacit.batch import Batch
from tacit.queries.blocks import Blocks
from tacit.queries.bounded_gradient import Loss
from tacit.queries.clip_rules import CLIP, ClipRule


@dataclass(frozen=True)
class Task:
    """Clip each record's gradient of `loss` to `norms[h]` in `blocks[h]`, for all blocks h.

    A norm is a number, or a scalar on the device that engines read and never ask for. With
    `views` of K, rows iK … iK + K − 1 of a batch are views of record i, whose gradient is their
    mean. `counted` asks for the centred count of norms below each block's constant.
    """

    model: nn.Module
    loss: Loss
    parameters: dict[str, nn.Parameter]
    blocks: Blocks
    norms: tuple[float | Tensor, ...]
    rule: ClipRule = CLIP
    views: int = 1
    counted: bool = False


@dataclass(frozen=True)
class Clipped:
    """Σ_i clip(g_i) of each parameter, and each block's centred count where it was asked for.

    A parameter that no record moves may be left out, and a count of nobody.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[Tensor, ...] = ()


class Engine(Protocol):
    """Sums and counts over the records of one physical batch."""

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped: ...
