"""How often pooling windows overlap."""

from __future__ import annotations

import torch


def largest_overlap(
    size: int, outputs: int, kernel: int, stride: int, padding: int = 0, dilation: int = 1
) -> int:
    """The most windows that one position of an axis is in, by counting them.

    At most ⌈kernel/stride⌉ without dilation; less where few windows fit.
    """
    starts = torch.arange(outputs) * stride - padding
    taken = (starts[:, None] + torch.arange(kernel) * dilation).flatten()
    inside = taken[(taken >= 0) & (taken < size)]
    return int(torch.bincount(inside).max()) if len(inside) else 0


def largest_adaptive_overlap(size: int, outputs: int) -> int:
    """The same for windows ⌊i·size/outputs⌋ to ⌈(i + 1)·size/outputs⌉, as PyTorch adapts them."""
    change = torch.zeros(size + 1, dtype=torch.long)
    for i in range(outputs):
        change[i * size // outputs] += 1
        change[-(-(i + 1) * size // outputs)] -= 1
    return int(change.cumsum(0).max())
