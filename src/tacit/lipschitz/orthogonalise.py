"""Towards the nearest orthogonal matrix, by a polynomial that cannot overshoot 1."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonalise(w_LMN: Tensor, steps: int = 6) -> Tensor:
    """Moves all singular values in [0, 1] towards 1 and none above it.

    s ↦ (15s − 10s³ + 3s⁵)/8 has derivative 15(1 − s²)²/8 ≥ 0 and value 1 at 1, so it maps [0, 1]
    into [0, 1]; its error at 1 is cubic, 1 − p(s) ≈ (5/2)(1 − s)³  [the quintic of Björck 1971].
    On matrices, with A = WᵀW: W·P(A), P(A) = (15 − 10A + 3A²)/8. Give it ‖W‖ ≤ 1; what comes out
    is certified afterwards all the same.

    All steps are polynomials of the first A, so a tall W is multiplied once by their product,
    and A ← P(A)·A·P(A) is iterated in its stead; one last step on W itself mends roundings.
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
    """Floating-point operations of it for one matrix, about: n²m for a product, n ≤ m."""
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
