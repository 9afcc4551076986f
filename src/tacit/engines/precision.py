"""Norms and sums are taken in at least float32, whatever precision the model runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, reduce

import torch
from torch import Tensor, nn

from tacit.engines.torch_internals import swapped
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


def no_autocast(device: torch.device) -> torch.autocast:
    """Switch off the caller's autocast, which is for the model and not for its norms and sums."""
    return torch.autocast(device.type, enabled=False)


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
    in its place, the same copy wherever a tensor is shared. Widening is exact. Yields the copies,
    by the id of the tensor whose place they take.
    """
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    copies = {
        name: wide(tensor.detach()).requires_grad_(tensor.requires_grad)
        for name, tensor in named.items()
        if tensor.is_floating_point() and wide_dtype(tensor.dtype) != tensor.dtype
    }
    with full_precision(device), swapped(model, copies):
        yield {id(named[name]): copy for name, copy in copies.items()}
