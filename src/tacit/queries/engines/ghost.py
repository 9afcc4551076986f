"""Squared norms of Σ_t b_t a_tᵀ from Gram matrices, made safe against every rounding.

‖Σ_t b_t a_tᵀ‖² = Σ_{t,u} (a_t·a_u)(b_t·b_u)  [Li 2022]: 2T² numbers instead of P·D. The terms may
be huge and cancel, and a record may be built so that all roundings go one way. With u the unit
rounding, τ the least normal number and S = Σ_t ‖a_t‖‖b_t‖ the reach:

  a sum of n products, in any order, is off by at most n·u times the sum of their sizes;
  a product below τ may vanish, so a_t·a_u of width D also loses up to D·τ;
  the share that is added is itself a sum over T positions, off by at most T·u·S.

`safe_squares` adds all three, so that what comes out is never below the square of the real share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_CASCADE = 32  # the roundings of `Tensor.sum`, which adds in a tree


def gram(x_BTD: Tensor) -> Tensor:
    """x_t·x_u for all positions of each record, summed in blocks of `_block(D)` to round less."""
    positions, width = x_BTD.shape[-2:]
    first, *rest = x_BTD.reshape(-1, positions, width).split(_block(width), dim=-1)
    with _no_tensor_float(x_BTD):
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
    gram_a, gram_b = gram(a_BTD), gram(b_BTP)
    widths = a_BTD.shape[-1], b_BTP.shape[-1]
    length_a, length_b = lengths(gram_a, widths[0]), lengths(gram_b, widths[1])
    reach = (length_a * length_b).sum(dim=-1)
    tiny = torch.finfo(reach.dtype).tiny
    positions = a_BTD.shape[-2]
    vanished = tiny * (
        widths[0] * length_b.sum(dim=-1).square()
        + widths[1] * length_a.sum(dim=-1).square()
        + positions**2
    )
    squares = (gram_a * gram_b).sum(dim=(-1, -2)) + vanished
    safe = safe_squares(squares, reach, depth(*widths), positions)
    if safe.dim() > 1:
        return safe.flatten(1).sum(dim=1), reach.flatten(1).sum(dim=1)
    return safe, reach


def safe_squares(squares: Tensor, reach: Tensor, depth: int, positions: int) -> Tensor:
    """(√(‖g‖² + depth·u·S²) + T·u·S)²: no less than the square of the share that is added."""
    unit = torch.finfo(squares.dtype).eps / 2
    upper = (squares.clamp_min(0) + depth * unit * reach.square()).sqrt()
    return (upper + positions * unit * reach).square()


def depth(*widths: int) -> int:
    """How many roundings a term of Σ_{t,u} meets, with Gram matrices over these widths."""
    return sum(_block(w) + math.ceil(w / _block(w)) for w in widths) + _CASCADE


def _block(width: int) -> int:
    """At least √D, so that there are no more roundings between blocks than within one."""
    return max(128, 32 * math.ceil(math.sqrt(width) / 32))


@contextmanager
def _no_tensor_float(like: Tensor) -> Iterator[None]:
    """TensorFloat-32 keeps 10 bits, too few where terms cancel."""
    active = like.is_cuda and torch.backends.cuda.matmul.allow_tf32
    if active:
        torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        if active:
            torch.backends.cuda.matmul.allow_tf32 = True
