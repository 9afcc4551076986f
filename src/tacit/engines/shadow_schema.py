"""What PyTorch says about an operator: its name, its arguments, and whether it is pointwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_POINTWISE: set[str] = set()


def pointwise_names() -> set[str]:
    """Names of ATen operators that PyTorch itself tags as pointwise."""
    if not _POINTWISE:
        for name in dir(torch.ops.aten):
            packet = getattr(torch.ops.aten, name)
            overloads = getattr(packet, "overloads", None)
            if overloads is None or name.startswith("__"):
                continue
            if any(torch.Tag.pointwise in getattr(packet, o).tags for o in overloads()):
                _POINTWISE.add(name[:-1] if name.endswith("_") else name)
    return _POINTWISE


def base_name(qualified: str) -> str:
    namespace, _, name = qualified.partition("::")
    return name if namespace == "aten" else qualified


def flat(output: Any) -> list[Any]:
    """The outputs of an operator in order; None stands for one that was not asked for."""
    if isinstance(output, (list, tuple)):
        return [leaf for item in output for leaf in flat(item)]
    return [output]


def bind(
    schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any], overwrites: bool
) -> tuple[dict[str, Any], list[str], list[Tensor]]:
    """Arguments by name, the names of those that are read, and the tensors that are written."""
    arguments: dict[str, Any] = {}
    reads: list[str] = []
    mutated: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            value = args[position]
        else:
            value = kwargs.get(argument.name, argument.default_value)
        arguments[argument.name] = value
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes:
            mutated += [t for t in flat(value) if isinstance(t, Tensor)]
        is_out = writes and argument.kwarg_only
        if not is_out and not (overwrites and position == 0):
            reads.append(argument.name)
    return arguments, reads, mutated
