"""A model called with other tensors in the places of its own, and left as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


def called_with(model: nn.Module, tensors: Mapping[str, Tensor], args: tuple[Any, ...]) -> Any:
    """model(*args) with `tensors` for its parameters and buffers, by their first names.

    Every place of a shared tensor gets the same one. A module that is registered under two names is
    one place: PyTorch, when it ties weights itself, exchanges such a module twice, and what it
    puts back is not what was there.
    """
    given = {}
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    first = {id(tensor): name for name, tensor in own.items()}
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and first[id(tensor)] in tensors:
                    given[f"{path}.{name}" if path else name] = tensors[first[id(tensor)]]
    return functional_call(model, given, args, tie_weights=False)
