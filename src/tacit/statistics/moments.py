"""One record's first and second moments at a BatchNorm, clipped: the sum that is released."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tacit.budget import Relation
from tacit.engines.clipping import clip_scale, sum_dtype


def moments_bound(channels: int, max_norm: float) -> float:
    """R = κ·√C: the most that one record adds to the sum, κ = `max_norm`, C = `channels`."""
    return max_norm * math.sqrt(channels)


def moments_sensitivity(channels: int, max_norm: float, relation: Relation) -> float:
    """Δ = R where a record is added or removed, 2R where it is replaced."""
    bound = moments_bound(channels, max_norm)
    return bound if relation is Relation.ADD_OR_REMOVE_ONE else 2 * bound


def clipped_moments(x_BCP: Tensor, scale: float, max_norm: float) -> Tensor:
    """t_i = clip_R(u_i), u_i = (m_i, q_i − 1) in 2C numbers, for each of B records.

    With x/s in units of the public `scale` s, m_i is the mean over P positions of x_i/s and q_i
    that of (x_i/s)², channel by channel. clip_R(u) = u·min(1, R/‖u‖), R = κ√C, so ‖t_i‖ ≤ R.

    Where s is near the inputs' root mean square, q is near 1 and m² ≤ q: both halves are of one
    order, and typical records are within κ = 1. The square about 1, and not about 0, makes 2R
    the least bound for a replacement when κ ≤ 1: all inputs 0 give −R·1/√C in the second half,
    and inputs of alternating sign and any large size give +R·1/√C.

    A record whose moments are not finite adds exactly nothing.
    """
    u_BCP = x_BCP.to(sum_dtype(x_BCP.device)) / scale
    moments_BK = torch.cat((u_BCP.mean(2), u_BCP.square().mean(2) - 1), dim=1)
    norms_B = torch.linalg.vector_norm(moments_BK, dim=1)
    finite_B = norms_B.isfinite()
    # NaN · 0 is NaN, so what is not finite is put out before it is scaled.
    moments_BK = torch.where(finite_B[:, None], moments_BK, 0.0)
    bound = moments_bound(x_BCP.shape[1], max_norm)
    scale_B = clip_scale(torch.where(finite_B, norms_B, 0.0), bound, [moments_BK.dtype])
    return moments_BK * scale_B[:, None]
