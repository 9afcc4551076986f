"""How far floating point can carry a layer, and a sum over records, beyond its bound.

One record. A dot product of n terms is off by at most n·u times the product of the norms, u the
unit rounding, in any order of summation [Higham 2002, §3.1]; TensorFloat-32 first cuts each factor
to 11 bits. Every layer's answers are enlarged by the slack of the arithmetic that it uses.

The batch. What is released is a computed sum, Ŝ = Σ_i ĝ_i + e: ĝ_i are the records' computed
gradients, each within its bound Δ, and e is what rounding made of adding them up. Another record
changes e as well, so between neighbours

  ‖Ŝ − Ŝ'‖ ≤ Δ + ‖e‖ + ‖e'‖.

A kernel in which no term is rounded more than d times on its way into the sum has
‖e‖ ≤ d·u·Σ_i R_i [Higham 2002, §4.2], R_i = Σ_t ‖a_it‖·‖b_it‖ over the positions t of record i. R_i
is at most Δ: every layer's bound is derived through R_i, by Cauchy and Schwarz. With N records the
sum therefore moves by at most

  Δ·(1 + 2·d·u·N).

  bfloat16, float16   u = 2⁻⁸ and 2⁻¹¹. At 8,192 records one rounding of the sum, d = 1, makes it
                      move by up to 64 times Δ in bfloat16: no such sum may be formed. Nor may a
                      record's own numbers be computed so: a kernel that is chosen by the number of
                      rows rounds them in another way when one row is added, N·2⁻⁸ in all. The
                      clipless query computes in float32 whatever the model's type, and without
                      autocast; weights and records are widened without a rounding.
  float64             d ≤ N·T for any order of summation. With N·T ≤ 2²⁷ terms in one pass, and
                      N ≤ 2¹³, 2·d·u·N ≤ 2⁻¹². A proof.
  float32             No order is known for all kernels, and for N·T sequential additions nothing
                      useful would follow. d stands here for the roundings that add up in one
                      direction, `_DEPTH`. It is measured and not derived: one record more among
                      4,096 to 8,192 identical ones, whose numbers lie where roundings agree, has
                      moved sums by at most 2.2·u·N·Δ (linear, bias and convolution kernels of MKL
                      and oneDNN), where 4·u·N·Δ is allowed for. Pieces are added in float64, so
                      that a long sum never meets float32.

N is private. In its place stands the public size of `public_rows`; a pass takes at most
`ROWS_AT_ONCE` rows.

Clipping. The terms are clipped gradients, and where rows are added up R_i is their norm, at most C.
A block's bound is C·(1 + 2·d·u·N) (`slack_of_sum`): sums are those of the formula, and the noise is
0.2% larger in float32. The model's own passes stay in the precision that the user chose; norms and
sums are float32 or wider.

What is not proved:
  d in float32 is measured, on CPU kernels (above).
  A contraction of inputs and cotangents (`Contracted`) adds up the positions of all records at
  once. Its R_i may be far above C where the positions of one record cancel. The larger bound
  covers the rounding of its own share only, not what it does to the rounding of the others'.
  A record's gradient that is *clipped* may depend on the number of rows, if a kernel that is chosen
  by that number rounds in another way: by N·u in all, which in bfloat16 is no small number. On a
  CPU, bfloat16 and float16 gave the same rows at all sizes tried: linear layers from 1 to 8,193
  rows, convolutions from 1 to 1,001. Elsewhere, fix the shape: `PoissonSampler(..., padded=True)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tacit.precision import uses_tensor_float

# The most rows that one pass adds up. Longer batches are cut, and the pieces added in float64.
ROWS_AT_ONCE = 8192
_DEPTH = 2


@dataclass(frozen=True)
class Rounding:
    """The relative slack of each layer's answers, and that of a sum for each of its rows."""

    name: str
    slack: float
    slack_per_row: float = 0.0

    def slack_of_sum(self, rows: int) -> float:
        """2·d·u·N: how much further than its bound one record moves a sum over `rows` rows."""
        return rows * self.slack_per_row


EXACT = Rounding("exact", 0.0)
FLOAT64 = Rounding("float64", 2.0**-38, 2.0**-25)  # 16,384 terms; 2·2²⁷·2⁻⁵³
FLOAT32 = Rounding("float32", 2.0**-10, _DEPTH * 2.0**-23)  # 16,384 terms
TENSOR_FLOAT = Rounding("TensorFloat-32", 2.0**-9 + 2.0**-10, _DEPTH * 2.0**-23)


def rounding_of(dtype: torch.dtype, device: torch.device) -> Rounding:
    """The rounding of a clipless pass in this type: float32 or wider, or TensorFloat-32 on CUDA."""
    if dtype is torch.float64:
        return FLOAT64
    coarse = uses_tensor_float("matmul", device) or uses_tensor_float("convolution", device)
    return TENSOR_FLOAT if coarse else FLOAT32


def slack_of_sum(dtype: torch.dtype, rows: int) -> float:
    """2·d·u·N of a sum over `rows` rows in this type, with the d that is measured."""
    return _DEPTH * torch.finfo(dtype).eps * rows


def public_rows(expected: float) -> int:
    """A public upper bound on the size of a batch: the expected size plus eight deviations.

    A Poisson sample has at most B deviations of variance, so it passes this with a probability
    below 10⁻¹⁴; a batch of fixed size never does. At least `ROWS_AT_ONCE`.
    """
    return max(ROWS_AT_ONCE, math.ceil(expected + 8 * math.sqrt(expected)))
