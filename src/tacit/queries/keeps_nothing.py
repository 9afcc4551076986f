"""A pass over private records must leave nothing behind in the model but its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from tacit.errors import MixesRecords
from tacit.queries.same_tensors import same_tensors


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
    counters are asked, which waits for no device. Kernels that update running statistics, and what
    is written through `.data`, do not move those counters on. So all are also compared entry by
    entry: buffers always on a CPU; parameters, and what a device would have to be waited for, after
    1, 2, 4, 8 … passes in the same modes. What spectral normalisation keeps is of its weight alone,
    and may be written.
    """
    before, modes, tensors = _held(model)
    due = _looked.setdefault(model, _Looked()).due(modes)
    copies = {
        place: tensor.detach().clone()
        for place, tensor in tensors.items()
        if due or (tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter))
    }
    yield
    after, _, tensors = _held(model)
    written: set[Place] = set()
    if before != after:
        written = {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
    written |= {
        p for p, copy in copies.items() if p in tensors and not same_tensors(copy, tensors[p])
    }
    if written:
        raise MixesRecords(
            f"{_name_of(min(written), model)} was written during a pass over private records, and "
            "would be saved without noise; keep such a state out of training, or in evaluation "
            "mode, and write what is of weights alone in a callback, after the step"
        )


# A module, by id, and the name of a tensor that it holds.
Place = tuple[int, str]


def _held(
    model: nn.Module,
) -> tuple[dict[Place, tuple[int, int]], tuple[bool, ...], dict[Place, Tensor]]:
    """Address and version of every parameter and buffer; all modes; and the tensors themselves.

    Asked twice a step, so that it goes over the modules once.
    """
    states: dict[Place, tuple[int, int]] = {}
    tensors: dict[Place, Tensor] = {}
    modes = []
    for module in model.modules():
        _refuse_what_meets(module, model)
        modes.append(module.training)
        exempt = of_weights_alone(module)
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or name in exempt or is_lazy(tensor):
                    continue
                states[id(module), name] = tensor.data_ptr(), tensor._version
                tensors[id(module), name] = tensor
    return states, tuple(modes), tensors


def _name_of(place: Place, model: nn.Module) -> str:
    holder, name = place
    for path, module in model.named_modules():
        if id(module) == holder:
            kind = "buffer" if name in module._buffers else "parameter"
            return f"{kind} {f'{path}.{name}' if path else name!r}"
    return f"tensor {name!r}"


def of_weights_alone(module: nn.Module) -> Collection[str]:
    """Names of its buffers that are computed from weights and from no record."""
    if isinstance(module, _SpectralNorm):
        return module._buffers.keys()
    if not module._forward_pre_hooks:
        return ()
    hooks = [h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]
    return {f"{hook.name}_{side}" for hook in hooks for side in "uv"}


def _refuse_what_meets(module: nn.Module, model: nn.Module) -> None:
    """What rewrites its weights, or lets mini-sets of several processes meet."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise MixesRecords(
            f"{_called(module, model)} has max_norm, which rewrites the rows that records ask for "
            "without any noise; build it without max_norm"
        )
    if isinstance(module, nn.SyncBatchNorm) and torch.distributed.is_initialized():
        raise MixesRecords(
            f"{_called(module, model)} normalises by the records of all processes together, and so "
            "lets their mini-sets meet; use BatchNorm, which sees one mini-set at a time"
        )


def _called(module: nn.Module, model: nn.Module) -> str:
    name = next(name for name, found in model.named_modules() if found is module)
    return f"module {name!r} ({type(module).__name__})"
