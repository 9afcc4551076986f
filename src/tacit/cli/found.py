"""What a run of `tacit train` found on its way, all of it made of what was released or public."""

from __future__ import annotations

from typing import Any

from tacit.queries.clipped_query import ClippedQuery
from tacit.training.callbacks import Sparsification
from tacit.training.trainer import Trainer


def found_on_the_way(trainer: Trainer, sparsification: Sparsification | None) -> dict[str, Any]:
    """Blocks, the path of adaptive thresholds, the layers' norms, and the share that is frozen."""
    found: dict[str, Any] = {}
    query = trainer.mechanism.query
    if query_thresholds := getattr(query, "thresholds", ()):
        found["thresholds"] = query_thresholds
    if isinstance(query, ClippedQuery):
        blocks = query.blocks_of(trainer.model)
        found["num_blocks"] = len(blocks)
        if query.estimates:
            # At the first step and at the last one when norms were estimated.
            found["blocks"] = blocks
            found["expected_norms"] = [query.estimates[0], query.estimates[-1]]
    if sparsification is not None:
        found["share_frozen"] = sparsification.share_frozen
    return found
