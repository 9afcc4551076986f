"""The largest amount of memory a run held."""

from __future__ import annotations

import resource
import sys

import torch


class PeakMemory:
    """Bytes: of the GPU's allocator on a GPU, of the whole process elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
