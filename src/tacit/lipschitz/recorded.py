"""Work on a GPU that is asked for once and replayed: many small launches become one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from tacit.engines.recorder import capture


class Recorded:
    """Runs a function as it is off a GPU, and from its second use as a CUDA graph on one.

    The function must read and write the same tensors in place each time, wait for nothing and
    return nothing. `key` says when a recording no longer fits: the tensors' places and what else
    the function depends on. `holds` keeps those alive, so that no other can come to have their key.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._graph: Any = None
        self._holds: object = None

    def __call__(
        self, work: Callable[[], None], key: Hashable, holds: object, device: torch.device
    ) -> None:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            work()
            return
        if self._key != key:
            self._graph, self._key, self._holds = None, key, holds
            work()
            return
        if self._graph is None:
            self._graph, _ = capture(work, warm_ups=1)
        self._graph.replay()
