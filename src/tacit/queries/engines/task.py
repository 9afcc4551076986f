"""What an engine is asked: whose gradients, of which loss, clipped to what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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

    With `factors` m_h, one a block, there is one norm C for all of them: every block of a record
    is scaled by the same min(1, C/‖(m_1·g_1 | … | m_L·g_L)‖). `active` masks entries that count:
    elsewhere a gradient is taken for zero, before its norm is.
    """

    model: nn.Module
    loss: Loss
    parameters: dict[str, nn.Parameter]
    blocks: Blocks
    norms: tuple[float | Tensor, ...]
    rule: ClipRule = CLIP
    views: int = 1
    counted: bool = False
    factors: tuple[float | Tensor, ...] | None = None
    active: Mapping[str, Tensor] = field(default_factory=dict)

    def flat(self) -> Task:
        """The same gradients, all clipped together by the plain rule."""
        return replace(
            self, blocks=(tuple(self.parameters),), rule=CLIP, counted=False, factors=None
        )


@dataclass(frozen=True)
class Clipped:
    """Σ_i clip(g_i) of each parameter, and each block's centred count where it was asked for.

    A parameter that no record moves may be left out, and a count of nobody.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[Tensor, ...] = ()


class Engine(Protocol):
    """Sums and counts over the records of one physical batch.

    An engine checks nothing: the query does, on the logical batch (`tacit.checks`). One that calls
    the model with a single record at a time may say so by `one_by_one = True`: then records stay
    apart by construction. One that records its steps names in `eager` the engine that gives the
    same sums without a recording, for the check.
    """

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped: ...

    def block_norms(self, task: Task, piece: Batch) -> list[Tensor]:
        """‖g_i‖ in each block, for each record of a *public* batch: nothing here is private."""
        ...
