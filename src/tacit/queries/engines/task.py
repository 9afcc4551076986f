"""What an engine is asked: whose gradients, of which loss, clipped to what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from tacit.batch import Batch
from tacit.queries.blocks import Blocks
from tacit.queries.bounded_gradient import Loss


@dataclass(frozen=True)
class Task:
    """Clip each record's gradient of `loss` to `norms[h]` in `blocks[h]`, for all blocks h."""

    model: nn.Module
    loss: Loss
    parameters: dict[str, nn.Parameter]
    blocks: Blocks
    norms: tuple[float, ...]


class Engine(Protocol):
    """Gives Σ_i clip(g_i) of each parameter over the records of one physical batch.

    A parameter that no record moves may be left out.
    """

    def clipped_sums(self, task: Task, piece: Batch) -> dict[str, Tensor]: ...
