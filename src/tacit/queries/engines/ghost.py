"""Squared norms of Σ_t b_t a_tᵀ from Gram matrices, made safe against every rounding.

‖Σ_t b_t a_tᵀ‖² = Σ_{t,u} (a_t·a_u)(b_t·b_u)  [Li 2022]: 2T² numbers instead of P·D. The terms may
be huge and cancel, and a record may be built so that all roundings go one way. With u the unit
rounding, τ the least normal number and S = Σ_t ‖a_t‖‖b_t‖ the reach:

  a sum of products, each rounded at most n times on its way into it, is off by at most n·u times
  the sum of their sizes, and by Cauchy and Schwarz that is n·u·‖a_t‖‖a_u‖ for a_t·a_u;
  a product below τ may vanish, so a_t·a_u of width D also loses up to D·τ;
  over all t and u this makes (n_a + n_b)·u·S², D_a·τ·(Σ_t ‖b_t‖)² and D_b·τ·(Σ_t ‖a_t‖)²;
  adding up the T² terms makes n_Σ·u·S², and T²·τ where their products vanish;
  the share that is added is itself a sum over T positions, off by at most T·u·S.

`norms_from_grams` adds the vanished products and `safe_squares` the rest, so that what comes out is
never below the square of the real share. Terms of second order are below (n_a + n_b + n_Σ)²·u²·S²,
which for widths up to millions is less than the 16·u·S² that `Contracted` adds.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.queries.engines import ghost_triton
from tacit.tensor_float import all_digits, uses_tensor_float

# `Tensor.sum` adds in lanes and then in a tree: of some thousand numbers, none is rounded more
# than 64 times. T² terms are summed over one position and then over the other.
_CASCADE = 2 * 64


@dataclass(frozen=True)
class Gram:
    """x_t·x_u for all positions of each record, and what may have happened to them on the way.

    Each is a sum of `width` products, and each product was rounded at most `depth` times.
    """

    inner_BTT: Tensor
    width: int
    depth: int

    @staticmethod
    def of(x_BTD: Tensor) -> Gram:
        width = x_BTD.shape[-1]
        return Gram(gram(x_BTD), width, dot_depth(width))


def gram(x_BTD: Tensor) -> Tensor:
    """x_t·x_u for all positions of each record, summed in blocks of `_block(D)` to round less."""
    positions, width = x_BTD.shape[-2:]
    first, *rest = x_BTD.reshape(-1, positions, width).split(_block(width), dim=-1)
    # TensorFloat-32 keeps 10 bits, too few where terms cancel.
    with all_digits() if uses_tensor_float("matmul", x_BTD.device) else nullcontext():
        total = first @ first.transpose(1, 2)
        for block in rest:
            total.baddbmm_(block, block.transpose(1, 2))
    return total.reshape(*x_BTD.shape[:-2], positions, positions)


def lengths(gram_BTT: Tensor, width: int) -> Tensor:
    """‖x_t‖ from above, even where squares vanished."""
    squares = gram_BTT.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    return (squares + width * torch.finfo(squares.dtype).tiny).sqrt()


def product_squares(a_BD: Tensor, b_BP: Tensor) -> Tensor:
    """‖b aᵀ‖² = ‖a‖²·‖b‖² of one position, from above."""
    tiny = torch.finfo(a_BD.dtype).tiny
    squares = [x.square().sum(dim=-1) + x.shape[-1] * tiny for x in (a_BD, b_BP)]
    return squares[0] * squares[1]


def ghost_norms(a_BTD: Tensor, b_BTP: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norm from above, and the reach S, of each record.

    Dimensions between the first and the last two are groups, whose squares add up.
    """
    return norms_from_grams(Gram.of(a_BTD), Gram.of(b_BTP))


def norms_from_grams(a: Gram, b: Gram) -> tuple[Tensor, Tensor]:
    """The same, where the inner products are at hand."""
    roundings = a.depth + b.depth + _CASCADE
    if ghost_triton.fits(a.inner_BTT):
        widths = a.width, b.width
        safe, reach = ghost_triton.norms(a.inner_BTT, b.inner_BTT, widths, roundings)
    else:
        safe, reach = _norms(a, b, roundings)
    if safe.dim() > 1:
        return safe.flatten(1).sum(dim=1), reach.flatten(1).sum(dim=1)
    return safe, reach


def _norms(a: Gram, b: Gram, roundings: int) -> tuple[Tensor, Tensor]:
    length_a, length_b = lengths(a.inner_BTT, a.width), lengths(b.inner_BTT, b.width)
    reach = (length_a * length_b).sum(dim=-1)
    tiny = torch.finfo(reach.dtype).tiny
    positions = a.inner_BTT.shape[-1]
    vanished = tiny * (
        a.width * length_b.sum(dim=-1).square()
        + b.width * length_a.sum(dim=-1).square()
        + positions**2
    )
    squares = (a.inner_BTT * b.inner_BTT).sum(dim=-1).sum(dim=-1) + vanished
    return safe_squares(squares, reach, roundings, positions), reach


def safe_squares(squares: Tensor, reach: Tensor, depth: int, positions: int) -> Tensor:
    """(√(‖g‖² + depth·u·S²) + T·u·S)²: no less than the square of the share that is added."""
    unit = torch.finfo(squares.dtype).eps / 2
    upper = torch.addcmul(squares.clamp_min(0), reach, reach, value=depth * unit).sqrt()
    return torch.add(upper, reach, alpha=positions * unit).square()


def depth(*widths: int) -> int:
    """How many roundings a term of Σ_{t,u} meets, with Gram matrices over these widths."""
    return sum(dot_depth(w) for w in widths) + _CASCADE


def dot_depth(width: int) -> int:
    """How many roundings a product meets in an inner product that is summed in blocks."""
    block = _block(width)
    return min(width, block) + math.ceil(width / block)


def _block(width: int) -> int:
    """At least √D, so that there are no more roundings between blocks than within one."""
    return max(128, 32 * math.ceil(math.sqrt(width) / 32))
