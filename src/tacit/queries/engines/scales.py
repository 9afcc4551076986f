"""From the norms of a record's blocks to the scale of each, layer by layer or all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.queries.adaptive_norm import centred_count
from tacit.queries.clipping import clip_scale
from tacit.queries.engines.task import Task


def scales_and_counts(
    norms: Sequence[Tensor], task: Task, counted_B: Tensor, dtypes: Sequence[torch.dtype]
) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """The scale of each block of each record, from the blocks' norms; and counts, where asked.

    Layer by layer, block h is scaled by its own norm to its own C_h. With factors m_h all blocks
    get one scale, from n = (Σ_h m_h²·‖g_h‖²)^(1/2): then ‖(m_1·s·g_1 | … | m_L·s·g_L)‖ ≤ C. n comes
    with a few roundings of its own and so does the multiplication after it, hence the 1 + 8u.
    """
    compared = list(norms)
    if task.factors is not None:
        weighted = [norm * m for norm, m in zip(norms, task.factors, strict=True)]
        slack = 1 + 8 * torch.finfo(weighted[0].dtype).eps
        compared = [torch.stack(weighted).square().sum(dim=0).sqrt() * slack]
    pairs = list(zip(compared, task.norms, strict=True))
    scales = [clip_scale(norms_B, max_norm, dtypes, task.rule) for norms_B, max_norm in pairs]
    counts = tuple(centred_count(n, c, counted_B) for n, c in pairs) if task.counted else ()
    return scales * len(norms) if task.factors is not None else scales, counts
