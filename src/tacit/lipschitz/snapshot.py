"""Copies of layers that hold a layer's data and nothing of what was done to the instance.

A copy is an instance of the class that the answers are for. It is made of the layer's parameters
and buffers, which are shared, and of its settings, which are copied as plain numbers and strings.
It has no hooks. So what a user does to a layer later reaches the copy only through the values of
its parameters, and those are what the sets of the layer constrain.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from tacit.checks.model_table import frozen
from tacit.foreign_hooks import foreign_hooks
from tacit.lipschitz.integrity import members, ours, require_no_hidden_code
from tacit.lipschitz.refused import Refused

# Attributes that every module has; a copy begins with its own.
_TABLES = frozenset(vars(nn.Module()))
_LEFT_OUT = object()

Child = Callable[[str, nn.Module], nn.Module]


def snapshot(module: nn.Module, kind: type, child: Child) -> Any:
    """The copy of `module` as an instance of `kind`; `child(name, m)` takes a child's place."""
    require_no_hidden_code(module, kind)
    made: Any = object.__new__(kind)
    nn.Module.__init__(made)
    for name, value in vars(module).items():
        if name in _TABLES:
            continue
        if ours(kind):
            value = _setting(kind, name, value)
        if value is not _LEFT_OUT:
            vars(made)[name] = value
    made.training = module.training
    for name, parameter in module._parameters.items():
        # A subclass of Parameter may compute something else with every operation.
        if parameter is not None and type(parameter) is not nn.Parameter:
            raise Refused(
                f"its {name} is a {type(parameter).__name__}; make it a plain torch.nn.Parameter"
            )
        made._parameters[name] = parameter
    for name, buffer in module._buffers.items():
        if ours(kind) and buffer is not None and type(buffer) is not Tensor:
            raise Refused(f"its {name} is a {type(buffer).__name__}; make it a plain torch.Tensor")
        made._buffers[name] = buffer
    made._non_persistent_buffers_set.update(module._non_persistent_buffers_set)
    for name, part in module._modules.items():
        if part is not None and not isinstance(part, nn.Module):
            raise Refused(f"its child {name!r} is a {type(part).__name__} and no module")
        made._modules[name] = part if part is None else child(name, part)
    return made


def whole(module: nn.Module) -> Any:
    """The copy of a module and of all that is in it, each of its own class."""
    return snapshot(module, type(module), lambda name, part: whole(part))


def _setting(kind: type, name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        raise Refused(
            f"its {name} is a tensor that is neither a parameter nor a buffer, so nothing keeps it "
            f"in its set; make it a torch.nn.Parameter, and remove parametrizations"
        )
    found = _plain(value)
    # A set of weights may be a user's own, as a layer may.
    return value if found is _LEFT_OUT and name in getattr(kind, "objects", ()) else found


def _plain(value: Any) -> Any:
    """The same value made of Python's own types; objects of unknown classes are left out."""
    if value is None or isinstance(value, bool | torch.dtype | torch.device | torch.Size):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple | list):
        kind = tuple if isinstance(value, tuple) else list
        return kind(_plain(v) for v in list(value))
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if dataclasses.is_dataclass(value) and ours(type(value)):
        # Without __init__: its fields are as it made them.
        made = object.__new__(type(value))
        for field in dataclasses.fields(value):
            own = getattr(value, field.name)
            object.__setattr__(made, field.name, own if isinstance(own, Tensor) else _plain(own))
        return made
    return value if value is Ellipsis else _LEFT_OUT


def fingerprint(model: nn.Module) -> Hashable:
    """All that a program is compiled from: modules, tensors, settings, modes and hooks.

    While it stays the same, so does the program. Where it misses a change inside an object, the
    program goes on as it was compiled, and its bounds are still its own.
    """
    return tuple([_state(module) for _, module in members(model)])


def _state(module: nn.Module) -> Hashable:
    return (
        type(module),
        id(module),
        tuple(foreign_hooks(module)),
        tuple([(n, id(part)) for n, part in module._modules.items()]),
        tuple([(n, *_tensor(p)) for n, p in module._parameters.items()]),
        tuple([(n, *_tensor(b)) for n, b in module._buffers.items()]),
        module.training,
        tuple([(n, frozen(v)) for n, v in vars(module).items() if n not in _TABLES]),
    )


def _tensor(tensor: Tensor | None) -> tuple[Hashable, ...]:
    if tensor is None:
        return ()
    return type(tensor), id(tensor), tensor.requires_grad, tensor.shape, tensor.dtype, tensor.device
