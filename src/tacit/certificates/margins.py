"""From the outputs of a record to how far its representation may move before the class changes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_ROUNDING = 1 + 1e-9


def slopes_of_outputs(num_outputs: int, lipschitz: float) -> Tensor:
    """s_yk = √2·L: how far z_y − z_k moves at most when the input of an L-Lipschitz f moves by 1.

    z_y − z_k = ⟨e_y − e_k, f(x)⟩, and ‖e_y − e_k‖ = √2. Of one output, z itself: s = L.
    """
    factor = math.sqrt(2) if num_outputs > 1 else 1.0
    return torch.full((num_outputs, num_outputs), factor * lipschitz, dtype=torch.float64)


def slopes_of_head(head: nn.Linear, lipschitz: float) -> Tensor:
    """s_yk = L·‖w_y − w_k‖ where a linear head Wf(x) + c ends an L-Lipschitz body f.

    z_y − z_k = ⟨w_y − w_k, f(x)⟩ + c_y − c_k. Never above √2·L·‖W‖, since w_y − w_k =
    Wᵀ(e_y − e_k), and far below it for classes that are alike. Of one output: s = L·‖w‖.
    """
    weight = head.weight.detach().to(torch.float64)
    if len(weight) == 1:
        return lipschitz * weight.norm().reshape(1, 1) * _ROUNDING
    # Row by row: |a|² + |b|² − 2ab, the fast way, loses its digits where rows are alike.
    distances = torch.stack([(row - weight).norm(dim=1) for row in weight])
    return lipschitz * distances * _ROUNDING


def decisions(outputs: Tensor) -> Tensor:
    """The class of the largest output; of one output, whether it is positive."""
    if outputs.shape[1] == 1:
        return (outputs.squeeze(1) > 0).long()
    return outputs.argmax(dim=1)


def allowed_moves(outputs_BK: Tensor, decided_B: Tensor, slopes_KK: Tensor) -> Tensor:
    """min_{k≠y} (z_y − z_k)/s_yk: below this no z_k catches up with z_y. Of one output, |z|/s."""
    if outputs_BK.shape[1] == 1:
        # A sign decides, and 0 counts as not positive.
        return _ratio(outputs_BK.abs(), slopes_KK).squeeze(1)
    gaps_BK = outputs_BK.gather(1, decided_B[:, None]) - outputs_BK
    moves_BK = _ratio(gaps_BK, slopes_KK[decided_B])
    classes_K = torch.arange(outputs_BK.shape[1], device=outputs_BK.device)
    return torch.where(decided_B[:, None] == classes_K, math.inf, moves_BK).amin(dim=1)


def _ratio(gaps: Tensor, slopes: Tensor) -> Tensor:
    """gap/slope, 0 where there is no gap (or it is not a number), ∞ where nothing can close it."""
    return torch.where(gaps > 0, gaps / slopes.to(gaps.device), 0.0)
