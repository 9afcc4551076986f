"""A pass over private records must leave nothing behind in the model but its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tacit.errors import MixesRecords

_compared: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def keeps_nothing(model: nn.Module) -> Iterator[None]:
    """Raise MixesRecords if a module's buffer was written while the model saw private records.

    A buffer is part of the model and is saved with it, so what a forward pass writes there (a
    running mean, a codebook, a count) is released without noise. Each time the tensors' version
    counters are asked, which waits for no device. Kernels that update running statistics do not
    move those counters on, so a model's first pass is also compared entry by entry.
    """
    refuse_what_meets(model)
    before = {name: _state(buffer) for name, buffer in model.named_buffers()}
    first = model not in _compared
    held = {n: b.detach().clone() for n, b in model.named_buffers()} if first else {}
    yield
    for name, buffer in model.named_buffers():
        changed = before.get(name) != _state(buffer)
        if changed or (name in held and not _same(held[name], buffer)):
            raise MixesRecords(
                f"buffer {name!r} was written during a pass over private records, and would be "
                "saved without noise; keep such a state out of training, or in evaluation mode"
            )
    _compared.add(model)


def refuse_what_meets(model: nn.Module) -> None:
    """Modules that rewrite their weights, or that let mini-sets of several processes meet."""
    for name, module in model.named_modules():
        where = f"module {name!r} ({type(module).__name__})"
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise MixesRecords(
                f"{where} has max_norm, which rewrites the rows that records ask for without any "
                "noise; build it without max_norm"
            )
        if isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized():
            raise MixesRecords(
                f"{where} normalises by the records of all processes together, and so lets their "
                "mini-sets meet; use BatchNorm, which sees one mini-set at a time"
            )


def _state(buffer: Tensor) -> tuple[int, int]:
    return buffer.data_ptr(), buffer._version


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a)).all())
