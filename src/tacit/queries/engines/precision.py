"""Norms and sums are taken in at least float32, whatever precision the model runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tacit.queries.clipping import wide_dtype


def wide(tensor: Tensor) -> Tensor:
    """The tensor in at least float32; tokens stay what they are."""
    return tensor.to(wide_dtype(tensor.dtype)) if tensor.is_floating_point() else tensor


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """The caller's autocast is for the model, not for its norms and sums."""
    with torch.autocast(device.type, enabled=False):
        yield
