"""Operator norms of matrices from above, and the nearest orthogonal matrix.

Power iteration bounds a norm from below and is not used. Everything is float64 on batches of
matrices (L, M, N). Rounding: a Gram matrix of n-term products is off by at most n·2⁻⁵³·‖W‖_F²
[Higham 2002, §3.5], and ‖W‖_F² ≤ r·‖W‖² for r rows or columns: below 2⁻²⁹ of ‖W‖² for n·r ≤ 2²⁴.
`MARGIN` is larger than the effect of that on a norm.
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
    # Skip the second bound where the first is exact; on a GPU, finding that out would mean waiting.
    if near.device.type == "cpu" and bool((near <= mean_norm(gram) * (1 + _EXACT)).all()):
        return near
    return torch.minimum(near, gram_iteration_upper(gram, near, squarings))


def rough_norm_upper(w_LMN: Tensor) -> Tensor:
    """An upper bound by Gram iteration alone, from u = ‖W‖_F: fewer launches, 5% loose for n = 512.

    For an initial scaling, where the result is certified afterwards. u² = tr(A) ≤ n·λ_max(A), so
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
    """√(tr(A)/n), the root mean square of the singular values; the norm is at least this."""
    return gram_LNN.diagonal(dim1=-2, dim2=-1).mean(dim=-1).sqrt()


def gram_iteration_upper(gram_LNN: Tensor, norm_L: Tensor, squarings: int = 5) -> Tensor:
    """u·‖(A/u²)^(2^t)‖_F^(1/2^(t+1)), with u a known upper bound of the norm.

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


def orthogonalise(w_LMN: Tensor, steps: int = 6) -> Tensor:
    """Moves all singular values in [0, 1] towards 1 and none above it.

    s ↦ (15s − 10s³ + 3s⁵)/8 has derivative 15(1 − s²)²/8 ≥ 0 and value 1 at 1, so it maps [0, 1]
    into [0, 1]; its error at 1 is cubic, 1 − p(s) ≈ (5/2)(1 − s)³  [the quintic of Björck 1971].
    On matrices, with A = WᵀW: W·P(A), P(A) = (15 − 10A + 3A²)/8. It needs ‖W‖ ≤ 1; the result is
    certified afterwards all the same.

    All steps are polynomials of the first A, so a tall W is multiplied once by their product, and
    A ← P(A)·A·P(A) is iterated instead; one last step on W itself corrects roundings.
    """
    wide = w_LMN.shape[-1] > w_LMN.shape[-2]
    w = w_LMN.mT if wide else w_LMN
    shape = w.shape
    w = w.reshape(-1, *shape[-2:])
    direct = steps
    if w.shape[-2] >= 2 * w.shape[-1] and steps > 1:
        w, direct = w @ _product(w.mT @ w, steps - 1), 1
    for _ in range(direct):
        w = w @ _polynomial(w.mT @ w)
    w = w.reshape(shape)
    return w.mT if wide else w


def orthogonalise_cost(rows: int, columns: int, steps: int = 6) -> float:
    """Floating-point operations of `orthogonalise` for one matrix: about n²m per product, n ≤ m."""
    n, m = sorted((rows, columns))
    if m >= 2 * n:
        return 2.0 * n * n * (4 * m + 4 * steps * n)
    return 2.0 * steps * n * n * (2 * m + n)


def _product(gram: Tensor, steps: int) -> Tensor:
    total = last = _polynomial(gram)
    for _ in range(steps - 1):
        gram = last @ gram @ last
        last = _polynomial(gram)
        total = total @ last
    return total


def _polynomial(gram: Tensor) -> Tensor:
    """(15 − 10A + 3A²)/8 in two launches: on a GPU these matrices are smaller than a launch."""
    found = torch.baddbmm(gram, gram, gram, beta=-1.25, alpha=0.375)
    found.diagonal(dim1=-2, dim2=-1).add_(1.875)
    return found
