"""A step over private records must leave nothing behind in the model but its gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from tacit.checks.known_modules import refuse_rewriting
from tacit.checks.views import same_tensors
from tacit.errors import MixesRecords
from tacit.foreign_hooks import foreign_hooks, process_wide_hooks

_MOST_KEYS = 64
_steps: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, int]] = weakref.WeakKeyDictionary()

# A module, by id, and the name of a tensor that it holds.
Place = tuple[int, str]


@contextmanager
def watched_step(
    model: nn.Module, check: Callable[[], bool] | None = None, key: Hashable = None
) -> Iterator[None]:
    """Raise MixesRecords if a buffer or a parameter is written while this lasts.

    Both are part of the model and are saved with it, so what a forward pass writes there (a
    running mean, a codebook, a count) is released without noise. The tensors' version counters are
    compared around every step, which waits for no device. Kernels that update running statistics
    and writes through `.data` do not move those counters. So entries are compared too: of buffers
    on the CPU at every step; of everything else at steps 1, 2, 4, 8 …. What spectral normalisation
    writes depends on its weight alone and is allowed.

    `check` runs before steps 1, 8, 64, 512 … of the model under the same `key`, modes and hooks:
    what a model does only after many passes is found at the next of these. It returns whether its
    records could tell; where they could not, the next step asks again.
    """
    modes: list[Hashable] = []
    modules = list(model.modules())
    for module in modules:
        refuse_rewriting(module, model)
        modes.append((module.training, *foreign_hooks(module)))
    key = (key, *modes, *process_wide_hooks())
    counts = _steps.setdefault(model, {})
    step = counts.get(key, 0) + 1
    due = step & (step - 1) == 0
    told = True
    if due and check is not None and step.bit_length() % 3 == 1:  # a power of 8
        told = check()
    before = _Snapshot.of(modules)
    copies = {
        place: tensor.detach().clone()
        for place, tensor in before.tensors.items()
        if due or (tensor.device.type == "cpu" and not isinstance(tensor, nn.Parameter))
    }
    yield
    _refuse_writes(model, before, copies)
    if len(counts) >= _MOST_KEYS:  # hooks that are registered anew in each step
        counts.clear()
    counts[key] = step if told else step - 1


@dataclass(frozen=True)
class _Snapshot:
    """Address and version of every parameter and buffer, and the tensors themselves."""

    versions: dict[Place, tuple[int, int]]
    tensors: dict[Place, Tensor]

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> _Snapshot:
        versions: dict[Place, tuple[int, int]] = {}
        tensors: dict[Place, Tensor] = {}
        for module in modules:
            if not module._parameters and not module._buffers:
                continue
            exempt = of_weights_alone(module)
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None or name in exempt or is_lazy(tensor):
                        continue
                    versions[id(module), name] = tensor.data_ptr(), tensor._version
                    tensors[id(module), name] = tensor
        return cls(versions, tensors)


def _refuse_writes(model: nn.Module, before: _Snapshot, copies: dict[Place, Tensor]) -> None:
    after = _Snapshot.of(model.modules())
    written: set[Place] = set()
    if before.versions != after.versions:
        places = before.versions.keys() | after.versions.keys()
        written = {p for p in places if before.versions.get(p) != after.versions.get(p)}
    written |= {
        place
        for place, copy in copies.items()
        if place in after.tensors and not same_tensors(copy, after.tensors[place])
    }
    if written:
        raise MixesRecords(
            f"{_name_of(min(written), model)} was written during a pass over private records, and "
            "would be saved without noise; keep such a state out of training, or in evaluation "
            "mode, and write what depends on weights alone in a callback, after the step"
        )


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
