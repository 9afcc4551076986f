"""Norms and sums are taken in at least float32, whatever precision the model runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor, nn

from tacit.tensor_float import all_digits, cuts_factors_on_cpu, uses_tensor_float


@cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms are taken, and records scaled, in at least float32."""
    return torch.promote_types(dtype, torch.float32)


def wide(tensor: Tensor) -> Tensor:
    """The tensor in at least float32, which is exact; integers (tokens) stay what they are."""
    if tensor.dtype in (torch.float32, torch.float64) or not tensor.is_floating_point():
        return tensor
    return tensor.to(wide_dtype(tensor.dtype))


def wide_together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the widest of their types, and in at least float32."""
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes == {torch.float32}:
        return tensors
    dtype = reduce(torch.promote_types, dtypes, torch.float32)
    return tuple(tensor.to(dtype) for tensor in tensors)


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """Switch off the caller's autocast, which is for the model and not for its norms and sums."""
    with torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, and on a CPU no float32 products with bfloat16 factors (oneDNN).

    TensorFloat-32 on CUDA stays as the user has set it: the norms allow for it. They do not allow
    for bfloat16 factors, so per-record gradients must be computed inside this context, and a
    compiled step must be run inside it.
    """
    cut = device.type == "cpu" and cuts_factors_on_cpu()
    with no_autocast(device), all_digits() if cut else nullcontext():
        yield


def cuts_products(tensor: Tensor) -> bool:
    """Whether matrix products of this tensor may run in TensorFloat-32."""
    return tensor.dtype == torch.float32 and uses_tensor_float("matmul", tensor.device)


def cuts_convolutions(tensor: Tensor) -> bool:
    """Whether convolutions of this tensor may run in TensorFloat-32."""
    return tensor.dtype == torch.float32 and uses_tensor_float("convolution", tensor.device)


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
