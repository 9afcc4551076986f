"""A GPU kernel for GroupNorm's per-record gradients that reads x and b once.

For one group of one record, with n numbers x, mean μ = Σx/n and r = (Σ(x − μ)²/n + ε)^(−½):
∂/∂γ_c = Σ_t r·(x_ct − μ)·b_ct and ∂/∂β_c = Σ_t b_ct. The group is held in registers, so that
moments, x̂ and both sums need one pass over memory instead of eight.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None

_LARGEST = 1 << 14  # numbers of one group that one program holds

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _group_norm_gradients(  # type: ignore[no-untyped-def]
        inputs,
        cotangent,
        weight_rows,
        bias_rows,
        channels,
        positions,
        epsilon,
        BLOCK_C: tl.constexpr,
        BLOCK_T: tl.constexpr,
    ):
        group = tl.program_id(0).to(tl.int64)
        c, t = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_T)
        exists = (c < channels)[:, None] & (t < positions)[None, :]
        at = group * channels * positions + c[:, None] * positions + t[None, :]
        x = tl.load(inputs + at, mask=exists, other=0.0)
        b = tl.load(cotangent + at, mask=exists, other=0.0)
        count = channels * positions
        centred = tl.where(exists, x - tl.sum(x) / count, 0.0)
        rate = 1.0 / tl.sqrt_rn(tl.sum(centred * centred) / count + epsilon)
        to = group * channels + c
        tl.store(weight_rows + to, tl.sum(centred * b, axis=1) * rate, mask=c < channels)
        tl.store(bias_rows + to, tl.sum(b, axis=1), mask=c < channels)


def fits(inputs: Tensor, num_groups: int) -> bool:
    """Whether the kernel can do it: float32 on a GPU, and groups that are not too large."""
    if not (AVAILABLE and inputs.is_cuda and inputs.dtype == torch.float32 and inputs.numel()):
        return False
    channels, positions = _sizes(inputs, num_groups)
    return _padded(channels) * _padded(positions) <= _LARGEST


def group_norm_rows(
    inputs: Tensor, cotangent: Tensor, num_groups: int, epsilon: float
) -> tuple[Tensor, Tensor]:
    """(∂/∂γ, ∂/∂β) of each record, both (B, C)."""
    inputs, cotangent = inputs.contiguous(), cotangent.contiguous()
    channels, positions = _sizes(inputs, num_groups)
    weight_rows = inputs.new_empty(inputs.shape[:2])
    bias_rows = inputs.new_empty(inputs.shape[:2])
    block_c, block_t = _padded(channels), _padded(positions)
    _group_norm_gradients[(len(inputs) * num_groups,)](
        inputs,
        cotangent,
        weight_rows,
        bias_rows,
        channels,
        positions,
        epsilon,
        BLOCK_C=block_c,
        BLOCK_T=block_t,
        num_warps=min(8, max(1, block_c * block_t // 1024)),
    )
    return weight_rows, bias_rows


def _sizes(inputs: Tensor, num_groups: int) -> tuple[int, int]:
    """Channels of a group, and positions."""
    return inputs.shape[1] // num_groups, inputs[0, 0].numel()


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()
