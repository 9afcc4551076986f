"""The precision of arithmetic: what PyTorch may round, how to forbid it, what sums may lose.

Norms and sums are taken in at least float32, whatever precision the model runs in (`wide`).

PyTorch may compute float32 products with fewer digits. Its older interface for that (`allow_tf32`,
`set_float32_matmul_precision`) raises on reading once the newer one was used. So this module uses
only the newer one, `fp32_precision` (torch 2.9 and later), which shows what was set through either.
Its settings form a tree: an operation without a value of its own takes its backend's, and a backend
without one the general value.

  torch.backends.fp32_precision
    torch.backends.cudnn.fp32_precision      (all of CUDA, not cuDNN alone)
      torch.backends.cuda.matmul.fp32_precision
      torch.backends.cudnn.conv.fp32_precision
      torch.backends.cudnn.rnn.fp32_precision
    torch.backends.mkldnn.{matmul,conv,rnn}.fp32_precision      (CPU: "bf16" is possible)

Reading does not tell whether a value is inherited, and writing an inherited value back would detach
the operation from the general one. So the context managers write only what they can put back.

How far can floating point carry a layer, or a sum over records, beyond its bound?

One record. A dot product of n terms is off by at most n·u times the product of the norms, u the
unit rounding, in any order of summation [Higham 2002, §3.1]; TensorFloat-32 first cuts each factor
to 11 bits. Every layer's answers are enlarged by the slack of the arithmetic that it uses.

The batch. What is released is a computed sum, Ŝ = Σ_i ĝ_i + e: ĝ_i are the records' computed
gradients, each within its bound Δ, and e is what rounding made of adding them up. Another record
changes e as well, so between neighbours ‖Ŝ − Ŝ'‖ ≤ Δ + ‖e‖ + ‖e'‖. A kernel in which no term is
rounded more than d times on its way into the sum has ‖e‖ ≤ d·u·Σ_i R_i [Higham 2002, §4.2], with
R_i = Σ_t ‖a_it‖·‖b_it‖ over the positions t of record i. R_i is at most Δ, as every layer's bound
is derived through R_i by Cauchy and Schwarz. So with N records the sum moves by at most

  Δ·(1 + 2·d·u·N).

  bfloat16, float16   u = 2⁻⁸ and 2⁻¹¹. At 8,192 records one rounding of the sum, d = 1, makes it
                      move by up to 64 times Δ in bfloat16: no such sum may be formed. Nor may a
                      record's own numbers be computed so: a kernel that is chosen by the number of
                      rows rounds them in another way when one row is added, N·2⁻⁸ in all. The
                      clipless query computes in float32 whatever the model's type, and without
                      autocast; weights and records are widened without a rounding.
  float64             d ≤ N·T for any order of summation. With N·T ≤ 2²⁷ terms in one pass, and
                      N ≤ 2¹³, 2·d·u·N ≤ 2⁻¹². A proof.
  float32             No order is known for all kernels, and for N·T sequential additions nothing
                      useful would follow. d stands here for the roundings that add up in one
                      direction, `_DEPTH`. It is measured and not derived: one record more among
                      4,096 to 8,192 identical ones, whose numbers lie where roundings agree, has
                      moved sums by at most 2.2·u·N·Δ (linear, bias and convolution kernels of MKL
                      and oneDNN), where 4·u·N·Δ is allowed for. Pieces are added in float64, so
                      that a long sum never meets float32.

N is private. In its place stands the public size of `public_rows`; a pass takes at most
`ROWS_AT_ONCE` rows.

Clipping. The terms are clipped gradients, and where rows are added up R_i is their norm, at most C.
A block's bound is C·(1 + 2·d·u·N) (`slack_of_sum`), 0.2% more than C in float32. The model's own
passes stay in the precision that the user chose; norms and sums are float32 or wider.

What is not proved:
  d in float32 is measured, on CPU kernels (above).
  A contraction of inputs and cotangents (`Contracted`) adds up the positions of all records at
  once. Its R_i may be far above C where the positions of one record cancel. The larger bound
  covers the rounding of its own share only, not what it does to the rounding of the others'.
  A record's gradient that is *clipped* may depend on the number of rows, if a kernel that is chosen
  by that number rounds in another way: by N·u in all, which in bfloat16 is no small number. On a
  CPU, bfloat16 and float16 gave the same rows at all sizes tried: linear layers from 1 to 8,193
  rows, convolutions from 1 to 1,001. On a GPU a `PoissonSampler` gives all batches one shape.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tacit.torch_internals import swapped

_PLAIN = "ieee"

Operation = Literal["matmul", "convolution"]

# The most rows that one pass adds up. Longer batches are cut, and the pieces added in float64.
ROWS_AT_ONCE = 8192
_DEPTH = 2


def uses_tensor_float(operation: Operation, device: torch.device) -> bool:
    """Whether float32 products on this device may first cut their factors to TensorFloat-32."""
    if device.type != "cuda":
        return False
    backends: Any = torch.backends
    setting = backends.cuda.matmul if operation == "matmul" else backends.cudnn.conv
    return bool(setting.fp32_precision == "tf32")


def uses_tf32(operation: Operation, tensor: Tensor) -> bool:
    """Whether such products of this tensor may run in TensorFloat-32."""
    return tensor.dtype == torch.float32 and uses_tensor_float(operation, tensor.device)


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

    The general value becomes "ieee", which all operations without a value of their own follow. The
    others' values can be read, set and put back.
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


@dataclass(frozen=True)
class Rounding:
    """The relative slack of each layer's answers, and that of a sum for each of its rows."""

    name: str
    slack: float
    slack_per_row: float = 0.0

    def slack_of_sum(self, rows: int) -> float:
        """2·d·u·N: how much further than its bound one record moves a sum over `rows` rows."""
        return rows * self.slack_per_row


EXACT = Rounding("exact", 0.0)
FLOAT64 = Rounding("float64", 2.0**-38, 2.0**-25)  # 16,384 terms; 2·2²⁷·2⁻⁵³
FLOAT32 = Rounding("float32", 2.0**-10, _DEPTH * 2.0**-23)  # 16,384 terms
TENSOR_FLOAT = Rounding("TensorFloat-32", 2.0**-9 + 2.0**-10, _DEPTH * 2.0**-23)


def rounding_of(dtype: torch.dtype, device: torch.device) -> Rounding:
    """The rounding of a clipless pass in this type: float32 or wider, or TensorFloat-32 on CUDA."""
    if dtype is torch.float64:
        return FLOAT64
    coarse = uses_tensor_float("matmul", device) or uses_tensor_float("convolution", device)
    return TENSOR_FLOAT if coarse else FLOAT32


def slack_of_sum(dtype: torch.dtype, rows: int) -> float:
    """2·d·u·N of a sum over `rows` rows in this type, with the d that is measured."""
    return _DEPTH * torch.finfo(dtype).eps * rows


def public_rows(expected: float) -> int:
    """A public upper bound on the size of a batch: the expected size plus eight deviations.

    A Poisson sample has at most B deviations of variance, so it passes this with a probability
    below 10⁻¹⁴; a batch of fixed size never does. At least `ROWS_AT_ONCE`.
    """
    return max(ROWS_AT_ONCE, math.ceil(expected + 8 * math.sqrt(expected)))


def floating_type(model: nn.Module) -> torch.dtype | None:
    """The one floating-point type of the model's parameters; None if there are several, or none."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else None
