"""Per-record gradients of normalisations: y = x̂·γ + β, where x̂ comes from one record alone.

∂/∂γ = Σ x̂·b and ∂/∂β = Σ b, over all positions that share γ. Each function takes the arguments
and saved results of the operator, with N = B·R rows of a batch and the R rows of a record one
after another, and returns (rows of γ, rows of β), one for each record, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.engines.kernels import normalisation as kernel
from tacit.engines.precision import wide


def layer_norm_rows(
    inputs: Tensor,
    mean: Tensor,
    rstd: Tensor,
    cotangent: Tensor,
    normalized_shape: Sequence[int],
    rows_per_record: int = 1,
) -> tuple[Tensor, Tensor]:
    """`native_layer_norm`: x̂ = (x − mean)·rstd, with mean and rstd of shape (N, …, 1, …)."""
    x, b, mean, rstd = wide(inputs), wide(cotangent), wide(mean), wide(rstd)
    dims = len(normalized_shape)
    return _over_positions((x - mean) * rstd * b, dims, rows_per_record), _over_positions(
        b, dims, rows_per_record
    )


def rms_norm_rows(
    inputs: Tensor,
    rstd: Tensor,
    cotangent: Tensor,
    normalized_shape: Sequence[int],
    rows_per_record: int = 1,
) -> Tensor:
    """`_fused_rms_norm`: x̂ = x·rstd, with rstd of shape (N, …, 1, …). There is no β."""
    product = wide(inputs) * wide(rstd) * wide(cotangent)
    return _over_positions(product, len(normalized_shape), rows_per_record)


def group_norm_rows(
    inputs: Tensor,
    mean: Tensor,
    rstd: Tensor,
    cotangent: Tensor,
    num_groups: int,
    rows_per_record: int = 1,
) -> tuple[Tensor, Tensor]:
    """`native_group_norm`: x̂ = (x − mean)·rstd in each group, with mean and rstd of (N, groups)."""
    x, b, mean, rstd = wide(inputs), wide(cotangent), wide(mean), wide(rstd)
    mean, rstd = mean.reshape(len(x), num_groups), rstd.reshape(len(x), num_groups)
    if kernel.fits(x, num_groups):
        weight_rows, bias_rows = kernel.group_norm_rows(x, mean, rstd, b, num_groups)
    else:
        grouped = (len(x), num_groups, x.shape[1] // num_groups, *x.shape[2:])
        column = (len(x), num_groups, *(1 for _ in grouped[2:]))
        centred = x.reshape(grouped) - mean.view(column)
        # rstd is the same for all positions of a channel, and is multiplied in at the end.
        product = (centred.reshape(x.shape) * b).reshape(*x.shape[:2], -1).sum(dim=2)
        weight_rows = product * rstd.repeat_interleave(grouped[2], dim=1)
        bias_rows = b.reshape(*b.shape[:2], -1).sum(dim=2)
    return _of_records(weight_rows, rows_per_record), _of_records(bias_rows, rows_per_record)


def batch_norm_rows(
    inputs: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    epsilon: float,
    cotangent: Tensor,
    rows_per_record: int = 1,
) -> tuple[Tensor, Tensor]:
    """Batch normalisation in evaluation mode: x̂ = (x − μ)/√(σ² + ε) with constants μ and σ²."""
    x, b = wide(inputs), wide(cotangent)
    column = (1, x.shape[1], *(1 for _ in x.shape[2:]))
    centred = x - wide(running_mean).to(x.dtype).view(column)
    rate = torch.rsqrt(wide(running_var).to(x.dtype) + epsilon)
    product = (centred * b).reshape(*x.shape[:2], -1).sum(dim=2) * rate
    bias_rows = b.reshape(*b.shape[:2], -1).sum(dim=2)
    return _of_records(product, rows_per_record), _of_records(bias_rows, rows_per_record)


def _over_positions(x: Tensor, dims: int, rows_per_record: int) -> Tensor:
    """(N, …, *normalized) to (B, *normalized)."""
    over = tuple(range(1, x.dim() - dims))
    return _of_records(x.sum(dim=over) if over else x, rows_per_record)


def _of_records(rows: Tensor, rows_per_record: int) -> Tensor:
    """The sum of a record's rows: (B·R, …) to (B, …)."""
    if rows_per_record == 1:
        return rows
    return rows.unflatten(0, (len(rows) // rows_per_record, rows_per_record)).sum(dim=1)
