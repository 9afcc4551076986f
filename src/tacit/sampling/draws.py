"""Random subsets of 0 … n−1 without a Python loop over records."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def index_generator(seed: int | None) -> np.random.Generator:
    """A generator for sampling: from `seed` or, with None, 128 bits of the operating system's."""
    return np.random.default_rng(seed)


def bernoulli_indices(num: int, rate: float, generator: np.random.Generator) -> np.ndarray:
    """The sorted indices that come up when each of `num` is kept with probability `rate`.

    For a small rate the gaps between kept indices are drawn, geometric with parameter `rate`,
    so the price is that of the batch and not that of the dataset.
    """
    if num == 0:
        return np.empty(0, dtype=np.int64)
    if rate > 0.2:
        return np.flatnonzero(generator.random(num) < rate)
    expected = num * rate
    size = int(expected + 6 * np.sqrt(expected) + 16)
    pieces, last = [], -1
    while last < num:
        # A gap may be astronomically long at a tiny rate: past the end is past the end.
        gaps = np.minimum(generator.geometric(rate, size), num + 1)
        piece = last + np.cumsum(gaps)
        pieces.append(piece)
        last = int(piece[-1])
    indices = np.concatenate(pieces)
    return indices[indices < num]


def subset_indices(num: int, size: int, generator: np.random.Generator) -> np.ndarray:
    """`size` of `num` without replacement, all subsets equally likely."""
    return generator.choice(num, size=size, replace=False, shuffle=False)


def to_device(indices: np.ndarray, device: torch.device) -> Tensor:
    """Indices as a tensor on `device`, without waiting for the work queued there."""
    tensor = torch.from_numpy(np.ascontiguousarray(indices, dtype=np.int64))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
