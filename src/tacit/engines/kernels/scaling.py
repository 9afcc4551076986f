"""A GPU kernel that scales records, or leaves them out, in one pass: s_i·x_i, or x_i·[s_i ≠ 0]."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

from tacit.engines.kernels import for_compiler

AVAILABLE = importlib.util.find_spec("triton") is not None

_BLOCK = 2048

if AVAILABLE:
    import triton
    import triton.language as tl

    @triton.jit
    def _scaled(  # type: ignore[no-untyped-def]
        x, scale, out, size, num_blocks, BY_SCALE: tl.constexpr, BLOCK: tl.constexpr
    ):
        record = (tl.program_id(0) // num_blocks).to(tl.int64)
        at = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
        s = tl.load(scale + record)
        inside = at < size
        values = tl.load(x + record * size + at, mask=inside, other=0.0)
        if BY_SCALE:
            values = values * s
        tl.store(out + record * size + at, tl.where(s != 0, values, 0.0), mask=inside)


def fits(x_B: Tensor) -> bool:
    """Float32 on a GPU, record after record in memory."""
    if for_compiler():
        return False
    return AVAILABLE and x_B.is_cuda and x_B.dtype == torch.float32 and x_B.is_contiguous()


@torch.library.custom_op(
    "tacit::scale_records",
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor x_B, Tensor scale_B, bool by_scale) -> Tensor",
)
def scale_records(x_B: Tensor, scale_B: Tensor, by_scale: bool) -> Tensor:
    """s_i·x_i if `by_scale`, else x_i; zeros where s_i is zero, whatever x_i is."""
    x_B = x_B.contiguous()
    out = torch.empty_like(x_B)
    if x_B.numel() == 0:
        return out
    size = math.prod(x_B.shape[1:])
    num_blocks = triton.cdiv(size, _BLOCK)
    _scaled[(len(x_B) * num_blocks,)](
        x_B,
        scale_B.to(torch.float32).contiguous(),
        out,
        size,
        num_blocks,
        BY_SCALE=by_scale,
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
        num_warps=4,
    )
    return out


@scale_records.register_fake
def _(x_B: Tensor, scale_B: Tensor, by_scale: bool) -> Tensor:
    return x_B.new_empty(x_B.shape)
