"""How per-sample clipping gets its sums: record by record, or by book-keeping."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from tacit.batch import Batch
from tacit.queries.blocks import Blocks
from tacit.queries.bounded_gradient import Loss
from tacit.queries.engines.book_keeping import BookKeeping
from tacit.queries.engines.per_record import PerRecord
from tacit.queries.engines.replay import Replay


class Engine(Protocol):
    """Gives Σ_i clip(g_i) of each parameter over the records of one physical batch.

    A parameter that no record moves may be left out.
    """

    def clipped_sums(
        self,
        model: nn.Module,
        loss: Loss,
        parameters: dict[str, nn.Parameter],
        blocks: Blocks,
        norms: Sequence[float],
        piece: Batch,
    ) -> dict[str, Tensor]: ...


__all__ = ["BookKeeping", "Engine", "PerRecord", "Replay"]
