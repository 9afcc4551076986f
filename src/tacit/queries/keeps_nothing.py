"""A pass over private records must leave nothing behind in the model but its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from tacit.errors import MixesRecords


@dataclass
class _Looked:
    """How often a model was watched, in which modes, and when it is compared entry by entry."""

    modes: tuple[bool, ...] = ()
    passes: int = 0

    def due(self, modes: tuple[bool, ...]) -> bool:
        """After 1, 2, 4, 8 … passes in the same modes; another mode begins anew."""
        self.passes = self.passes + 1 if modes == self.modes else 1
        self.modes = modes
        return self.passes & (self.passes - 1) == 0


_looked: weakref.WeakKeyDictionary[nn.Module, _Looked] = weakref.WeakKeyDictionary()


@contextmanager
def keeps_nothing(model: nn.Module) -> Iterator[None]:
    """Raise MixesRecords if a buffer or a parameter was written while records were seen.

    Both are part of the model and are saved with it, so what a forward pass writes there (a
    running mean, a codebook, a count) is released without noise. Each time the tensors' version
    counters are asked, which waits for no device. Kernels that update running statistics do not
    move those counters on, so buffers are also compared entry by entry: always on a CPU, and where
    a device would have to be waited for after 1, 2, 4, 8 … passes in the same modes. What spectral
    normalisation keeps is of its weight alone, and may be written.
    """
    refuse_what_meets(model)
    exempt = _of_weights_alone(model)
    before = {name: _state(tensor) for name, tensor in _held(model, exempt)}
    buffers = {n: b for n, b in model.named_buffers() if n not in exempt}
    modes = tuple(module.training for module in model.modules())
    due = _looked.setdefault(model, _Looked()).due(modes)
    copies = {n: b.detach().clone() for n, b in buffers.items() if due or b.device.type == "cpu"}
    yield
    for name, tensor in _held(model, exempt):
        changed = before.get(name) != _state(tensor)
        if changed or (name in copies and not _same(copies[name], tensor)):
            kind = "buffer" if name in buffers else "parameter"
            raise MixesRecords(
                f"{kind} {name!r} was written during a pass over private records, and would be "
                "saved without noise; keep such a state out of training, or in evaluation mode"
            )


def _held(model: nn.Module, exempt: set[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in exempt and not is_lazy(tensor):
            yield name, tensor


def _of_weights_alone(model: nn.Module) -> set[str]:
    """Names of buffers that are computed from weights and from no record."""
    found = set()
    for name, module in model.named_modules():
        own = [n for n, _ in module.named_buffers(recurse=False)]
        if isinstance(module, _SpectralNorm):
            found |= {f"{name}.{n}" if name else n for n in own}
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                kept = [n for n in own if n in (f"{hook.name}_u", f"{hook.name}_v")]
                found |= {f"{name}.{n}" if name else n for n in kept}
    return found


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
