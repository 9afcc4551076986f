"""Operator norms of matrices from above. Power iteration comes from below and is nowhere here.

Everything is float64 on batches of matrices (L, M, N). Rounding: a Gram matrix of n-term products
is off by at most n·2⁻⁵³·‖W‖_F² [Higham 2002, §3.5], and ‖W‖_F² ≤ r·‖W‖² for r rows or columns:
below 2⁻²⁹ of ‖W‖² for n·r ≤ 2²⁴. `MARGIN` is larger than what that makes of a norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

MARGIN = 2.0**-26
_EXACT = 2.0**-13


def operator_norm_upper(w_LMN: Tensor, squarings: int = 5) -> Tensor:
    """An upper bound of the largest singular value of each matrix, the better of two.

    Near a multiple of an orthogonal matrix, with A = WᵀW and μ = tr(A)/n the mean eigenvalue:
    ‖W‖² = λ_max(A) ≤ μ + ‖A − μI‖_F, exact to six digits there.
    Any matrix: λ_max(A) ≤ ‖A^(2^t)‖_F^(1/2^t), which is loose by at most n^(1/2^(t+1)), so that
    ‖W‖ is by half as many powers: 1.05 for n = 512 at t = 5  [Gram iteration, Delattre 2023].
    """
    gram = gram_matrix(w_LMN)
    near = near_orthogonal_upper(gram)
    # Off a GPU nobody waits for an answer: where the first bound is exact, the second is not asked.
    if near.device.type == "cpu" and bool((near <= mean_norm(gram) * (1 + _EXACT)).all()):
        return near
    return torch.minimum(near, gram_iteration_upper(gram, near, squarings))


def rough_norm_upper(w_LMN: Tensor) -> Tensor:
    """An upper bound by Gram iteration alone, from u = ‖W‖_F: fewer launches, 5% loose for n = 512.

    For a start, where what comes of it is certified afterwards. u² = tr(A) ≤ n·λ_max(A), so that
    the largest power is at least n^(−2^t), above 10⁻¹²⁸ for n ≤ 10⁴ and t = 5.
    """
    gram = gram_matrix(w_LMN)
    frobenius = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1).sqrt() * (1 + MARGIN)
    return gram_iteration_upper(gram, frobenius)


def gram_matrix(w_LMN: Tensor) -> Tensor:
    """WᵀW or WWᵀ, whichever is smaller: they share their non-zero eigenvalues."""
    w = w_LMN.detach().to(torch.float64)
    return w.mT @ w if w.shape[-1] <= w.shape[-2] else w @ w.mT


def near_orthogonal_upper(gram_LNN: Tensor) -> Tensor:
    """√(μ + ‖A − μI‖_F), μ = tr(A)/n: λ_max(A) = μ + λ_max(A − μI) ≤ μ + ‖A − μI‖_F."""
    mean = mean_norm(gram_LNN).square()
    eye = torch.eye(gram_LNN.shape[-1], dtype=gram_LNN.dtype, device=gram_LNN.device)
    excess = torch.linalg.matrix_norm(gram_LNN - mean[..., None, None] * eye)
    return (mean + excess).sqrt() * (1 + MARGIN)


def mean_norm(gram_LNN: Tensor) -> Tensor:
    """√(tr(A)/n), the root of the mean squared singular value; no norm is below it."""
    return gram_LNN.diagonal(dim1=-2, dim2=-1).mean(dim=-1).sqrt()


def gram_iteration_upper(gram_LNN: Tensor, norm_L: Tensor, squarings: int = 5) -> Tensor:
    """u·‖(A/u²)^(2^t)‖_F^(1/2^(t+1)), with u an upper bound of the norm that is known already.

    λ_max(A)^(2^t) = λ_max(A^(2^t)) ≤ ‖A^(2^t)‖_F for a symmetric A with no negative eigenvalue.
    Divided by u², no eigenvalue is above 1, so powers cannot overflow. Nor can the largest vanish:
    u² ≤ μ + ‖A − μI‖_F ≤ (1 + √n)·λ_max, and (1 + √n)^(−2^t) is above 10⁻⁷⁰ for n ≤ 10⁴ and
    t ≤ 5, so `squarings` is at most 5.
    """
    assert squarings <= 5
    tiny = torch.finfo(gram_LNN.dtype).tiny
    power = gram_LNN / norm_L.square().clamp_min(tiny)[..., None, None]
    for _ in range(squarings):
        power = power @ power
    size = torch.linalg.matrix_norm(power)
    return norm_L * size ** (1 / 2 ** (squarings + 1)) * (1 + MARGIN)


def operator_norm_exact(w_LMN: Tensor) -> Tensor:
    """√λ_max by a symmetric eigensolver, backward stable in float64, plus the margin."""
    eigenvalues = torch.linalg.eigvalsh(gram_matrix(w_LMN))
    return eigenvalues[..., -1].clamp_min(0).sqrt() * (1 + MARGIN)
