"""Norms and sums are taken in at least float32, whatever precision the model runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tacit.queries.clipping import wide_dtype
from tacit.tensor_float import all_digits, cuts_factors_on_cpu


def wide(tensor: Tensor) -> Tensor:
    """The tensor in at least float32; tokens stay what they are."""
    return tensor.to(wide_dtype(tensor.dtype)) if tensor.is_floating_point() else tensor


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """The caller's autocast is for the model, not for its norms and sums."""
    with torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def in_wide_precision(model: nn.Module, device: torch.device) -> Iterator[dict[int, Tensor]]:
    """Run the model in float32 or wider: no autocast, and wide copies of narrow weights.

    While it lasts, every bfloat16 or float16 parameter and buffer of the model has its float32 copy
    in its place, the same copy wherever a tensor is shared. Widening is exact. TensorFloat-32 stays
    as the user has set it on CUDA; on a CPU oneDNN must not cut factors to bfloat16. Yields the
    copies, by the id of the tensor whose place they take.
    """
    with ExitStack() as stack:
        stack.enter_context(no_autocast(device))
        if device.type == "cpu" and cuts_factors_on_cpu():
            stack.enter_context(all_digits())
        copies: dict[int, Tensor] = {}
        for module in model.modules():
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            for table in tables:
                for name, tensor in table.items():
                    if tensor is None or not _narrow(tensor):
                        continue
                    if id(tensor) not in copies:
                        copy = wide(tensor.detach()).requires_grad_(tensor.requires_grad)
                        copies[id(tensor)] = copy
                    stack.callback(table.__setitem__, name, tensor)
                    table[name] = copies[id(tensor)]
        yield copies


def _narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and wide_dtype(tensor.dtype) != tensor.dtype
