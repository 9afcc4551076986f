"""A GPU kernel for group normalisation's per-record gradients that reads x and b once.

For one group of one record, with mean μ and r = 1/σ as the forward pass saved them:
∂/∂γ_c = Σ_t r·(x_ct − μ)·b_ct and ∂/∂β_c = Σ_t b_ct. A program holds the group in registers, so
that both sums need one pass over memory.
"""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from tacit.engines.kernels import for_compiler

AVAILABLE = importlib.util.find_spec("triton") is not None

_LARGEST = 1 << 14  # numbers of one group that one program holds

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _group_norm_gradients(  # type: ignore[no-untyped-def]
        inputs,
        cotangent,
        mean,
        rstd,
        weight_rows,
        bias_rows,
        channels,
        positions,
        BLOCK_C: tl.constexpr,
        BLOCK_T: tl.constexpr,
    ):
        group = tl.program_id(0).to(tl.int64)
        c, t = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_T)
        exists = (c < channels)[:, None] & (t < positions)[None, :]
        at = group * channels * positions + c[:, None] * positions + t[None, :]
        x = tl.load(inputs + at, mask=exists, other=0.0)
        b = tl.load(cotangent + at, mask=exists, other=0.0)
        centred = tl.where(exists, x - tl.load(mean + group), 0.0)
        rate = tl.load(rstd + group)
        to = group * channels + c
        tl.store(weight_rows + to, tl.sum(centred * b, axis=1) * rate, mask=c < channels)
        tl.store(bias_rows + to, tl.sum(b, axis=1), mask=c < channels)


def fits(inputs: Tensor, num_groups: int) -> bool:
    """Whether the kernel can do it: float32 on a GPU, and groups that are not too large."""
    if for_compiler():
        return False
    if not (AVAILABLE and inputs.is_cuda and inputs.dtype == torch.float32 and inputs.numel()):
        return False
    channels, positions = _sizes(inputs, num_groups)
    return _padded(channels) * _padded(positions) <= _LARGEST


@torch.library.custom_op(
    "tacit::group_norm_rows",
    mutates_args=(),
    device_types="cuda",
    schema=(
        "(Tensor inputs, Tensor mean, Tensor rstd, Tensor cotangent, int num_groups)"
        " -> (Tensor, Tensor)"
    ),
)
def group_norm_rows(
    inputs: Tensor, mean: Tensor, rstd: Tensor, cotangent: Tensor, num_groups: int
) -> tuple[Tensor, Tensor]:
    """(∂/∂γ, ∂/∂β) of each row of a batch, both (N, C); mean and rstd are (N, num_groups)."""
    inputs, cotangent = inputs.contiguous(), cotangent.contiguous()
    channels, positions = _sizes(inputs, num_groups)
    weight_rows = inputs.new_empty(inputs.shape[:2])
    bias_rows = inputs.new_empty(inputs.shape[:2])
    if not inputs.numel():
        return weight_rows, bias_rows
    block_c, block_t = _padded(channels), _padded(positions)
    _group_norm_gradients[(len(inputs) * num_groups,)](
        inputs,
        cotangent,
        mean.contiguous(),
        rstd.contiguous(),
        weight_rows,
        bias_rows,
        channels,
        positions,
        BLOCK_C=block_c,
        BLOCK_T=block_t,
        num_warps=min(8, max(1, block_c * block_t // 1024)),
    )
    return weight_rows, bias_rows


@group_norm_rows.register_fake
def _(
    inputs: Tensor, mean: Tensor, rstd: Tensor, cotangent: Tensor, num_groups: int
) -> tuple[Tensor, Tensor]:
    return inputs.new_empty(inputs.shape[:2]), inputs.new_empty(inputs.shape[:2])


def _sizes(inputs: Tensor, num_groups: int) -> tuple[int, int]:
    """Channels of a group, and positions."""
    return inputs.shape[1] // num_groups, math.prod(inputs.shape[2:])


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()
