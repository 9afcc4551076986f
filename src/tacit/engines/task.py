"""What an engine is asked: whose gradients, of which loss, clipped to what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor, nn

from tacit.batch import Batch
from tacit.engines.clipping import CLIP, ClipRule

Blocks = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Task:
    """Clip each record's gradient of `loss` to `norms[h]` in `blocks[h]`, for all blocks h.

    A norm is a number, or a scalar on the device that engines read and never ask for. With
    `views` of K, rows iK … iK + K − 1 of a batch are views of record i, whose gradient is their
    mean. `counted` asks for the centred count of norms below each block's constant.

    With `factors` m_h, one per block, there is one norm C for all of them: every block of a record
    is scaled by the same min(1, C/‖(m_1·g_1 | … | m_L·g_L)‖). `active` masks entries that count:
    elsewhere a gradient is taken for zero, before its norm is.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
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

    A parameter that no record moves may be left out, and so may the counts of an empty batch.
    `flat` is all sums as one vector in the parameters' order, where they lie in memory like that.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[Tensor, ...] = ()
    flat: Tensor | None = None


class Engine(Protocol):
    """Sums and counts over the records of one physical batch."""

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped: ...

    def block_norms(self, task: Task, piece: Batch) -> list[Tensor]:
        """‖g_i‖ in each block, for each record of a *public* batch: nothing here is private."""
        ...
