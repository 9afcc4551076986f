"""The precision of float32 arithmetic: how PyTorch may round it, and how to forbid that.

Norms and sums are taken in at least float32, whatever precision the model runs in (`wide`).

PyTorch may compute float32 products with fewer digits. Of its two interfaces for that, the older
one (`allow_tf32`, `set_float32_matmul_precision`) raises on reading once the newer one was used.
The newer one, `fp32_precision`, can always be read and shows what was set through either (torch 2.9
and later), so it alone is used here. Its settings form a tree, in which an operation without a
value of its own takes its backend's, and a backend without one the general value:

  torch.backends.fp32_precision
    torch.backends.cudnn.fp32_precision      (all of CUDA, not cuDNN alone)
      torch.backends.cuda.matmul.fp32_precision
      torch.backends.cudnn.conv.fp32_precision
      torch.backends.cudnn.rnn.fp32_precision
    torch.backends.mkldnn.{matmul,conv,rnn}.fp32_precision      (CPU: "bf16" is possible)

Reading an operation does not tell whether its value is inherited, and writing an inherited value
back would detach the operation from the general one. The context managers below therefore write
only what they can put back.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tacit.torch_internals import swapped

_PLAIN = "ieee"

Operation = Literal["matmul", "convolution"]


def uses_tensor_float(operation: Operation, device: torch.device) -> bool:
    """Whether float32 products on this device may first cut their factors to TensorFloat-32."""
    return device.type == "cuda" and _on_cuda(operation).fp32_precision == "tf32"


def rounds_factors_on_cpu() -> bool:
    """Whether oneDNN may cut factors of float32 products on a CPU, to bfloat16 or TensorFloat-32.

    `torch.set_float32_matmul_precision("medium")` is enough for that.
    """
    return any(node.fp32_precision in ("bf16", "tf32") for node in _mkldnn())


def float32_settings() -> Hashable:
    """All settings that decide how float32 products are computed, for a recording's key."""
    return tuple(node.fp32_precision for node in _below_general())


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Compute every float32 product with all its digits; restore the settings at the end.

    The general value becomes "ieee", and all operations without a value of their own follow. One
    that does not follow has its own value, which can be read, set and put back.
    """
    general: Any = torch.backends
    before = general.fp32_precision
    changed: list[tuple[Any, str]] = []
    general.fp32_precision = _PLAIN
    try:
        for node in _below_general():
            own = node.fp32_precision
            if own != _PLAIN:
                changed.append((node, own))
                node.fp32_precision = _PLAIN
        yield
    finally:
        for node, own in reversed(changed):
            node.fp32_precision = own
        general.fp32_precision = before


def _on_cuda(operation: Operation) -> Any:
    backends: Any = torch.backends
    return backends.cuda.matmul if operation == "matmul" else backends.cudnn.conv


def _mkldnn() -> list[Any]:
    backend: Any = torch.backends.mkldnn
    return [backend.matmul, backend.conv, backend.rnn]


def _below_general() -> list[Any]:
    """Backends before their operations."""
    backends: Any = torch.backends
    cuda = [backends.cudnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    return cuda + _mkldnn()


@cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which norms are taken and records scaled: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def wide(tensor: Tensor) -> Tensor:
    """The tensor in at least float32, which is exact; integers are unchanged."""
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
    """Switch off the caller's autocast, which is meant for the model and not for norms and sums."""
    return torch.autocast(device.type, enabled=False)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """No autocast, and on a CPU no float32 products with bfloat16 factors (oneDNN).

    TensorFloat-32 on CUDA stays as the user has set it, as the norms allow for it. They do not
    allow for bfloat16 factors, so per-record gradients and compiled steps run inside this context.
    """
    cut = device.type == "cpu" and rounds_factors_on_cpu()
    with no_autocast(device), ieee_float32() if cut else nullcontext():
        yield


def matmul_uses_tf32(tensor: Tensor) -> bool:
    """Whether matrix products of this tensor may run in TensorFloat-32."""
    return tensor.dtype == torch.float32 and uses_tensor_float("matmul", tensor.device)


def convolution_uses_tf32(tensor: Tensor) -> bool:
    """Whether convolutions of this tensor may run in TensorFloat-32."""
    return tensor.dtype == torch.float32 and uses_tensor_float("convolution", tensor.device)


@contextmanager
def in_wide_precision(model: nn.Module, device: torch.device) -> Iterator[dict[int, Tensor]]:
    """Run the model in float32 or wider: no autocast, and wide copies of narrow weights.

    Inside, every bfloat16 or float16 parameter and buffer of the model is replaced by a float32
    copy, the same copy wherever a tensor is shared. Widening is exact. Yields the copies, by the id
    of the tensor that they replace.
    """
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    copies = {
        name: wide(tensor.detach()).requires_grad_(tensor.requires_grad)
        for name, tensor in named.items()
        if tensor.is_floating_point() and wide_dtype(tensor.dtype) != tensor.dtype
    }
    with full_precision(device), swapped(model, copies):
        yield {id(named[name]): copy for name, copy in copies.items()}
