"""Records scaled and records left out, so that what is not finite in one never reaches a sum.

0·NaN is NaN: a record that must not count is replaced by zeros, not scaled by zero. A GPU is not
asked whether there is one: the answer would have to be waited for, and a recording cannot ask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.queries.engines import scaling_triton


def scaled(x_B: Tensor, scale_B: Tensor) -> Tensor:
    """s_i·x_i, and zeros where s_i is zero, whatever x_i is."""
    if scaling_triton.fits(x_B):
        return scaling_triton.scaled(x_B, scale_B, by_scale=True)
    return present(x_B * _column(scale_B.to(x_B.dtype), x_B), scale_B)


def present(x_B: Tensor, scale_B: Tensor) -> Tensor:
    """x_i, and zeros where s_i is zero."""
    if scaling_triton.fits(x_B):
        return scaling_triton.scaled(x_B, scale_B, by_scale=False)
    if x_B.device.type == "cpu":
        left_out = (scale_B == 0).nonzero().flatten()
        return x_B.index_fill(0, left_out, 0.0) if len(left_out) else x_B
    return torch.where(_column(scale_B != 0, x_B), x_B, 0.0)


def _column(values_B: Tensor, like: Tensor) -> Tensor:
    return values_B.view(-1, *(1 for _ in like.shape[1:]))
