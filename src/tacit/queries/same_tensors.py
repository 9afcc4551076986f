"""Equal to the last entry, where NaN equals NaN."""

from __future__ import annotations

from torch import Tensor


def same_tensors(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
