"""Squared norms that are never too small, whatever was rounded, and in whatever order.

**Sums.** With u the unit rounding, a sum of n terms rounds each term at most n − 1 times *in any
order*, so it is off by at most n·u times the sum of the terms' sizes. No bound here relies on the
order that a backend chooses within one sum, so a compiler that re-associates it (Inductor does)
changes nothing. Fusing a product and an addition only removes a rounding. Long sums are written
as sums of sums (blocks of about √n), which keeps n small; a compiler keeps those apart, because
each is a reduction of its own.

**Ghost norms.** ‖Σ_t b_t a_tᵀ‖² = Σ_{t,u} (a_t·a_u)(b_t·b_u)  [Li 2022]: 2T² numbers instead of
P·D. The terms may be huge and cancel, and a record may be built so that all roundings go one way.
With τ the least normal number and S = Σ_t ‖a_t‖‖b_t‖ the reach:

  a sum of products, each rounded at most n times on its way into it, is off by at most n·u times
  the sum of their sizes, and by Cauchy and Schwarz that is n·u·‖a_t‖‖a_u‖ for a_t·a_u;
  a product below τ may vanish, so a_t·a_u of width D also loses up to D·τ;
  over all t and u this makes (n_a + n_b)·u·S², D_a·τ·(Σ_t ‖b_t‖)² and D_b·τ·(Σ_t ‖a_t‖)²;
  adding up the T² terms makes n_Σ·u·S², and T²·τ where their products vanish;
  the share that is added is itself a sum over T positions, off by at most T·u·S.

`norms_from_grams` adds the vanished products and `safe_squares` the rest, so the result is never
below the square of the real share. Terms of second order are below (n_a + n_b + n_Σ)²·u²·S², which
for widths up to millions is less than the 16·u·S² that `Contracted` adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.engines import ghost_kernels as ghost
from tacit.precision import matmul_uses_tf32

_SHORT = 64  # squares that one sum adds in their own type
_FEW = 1 << 17  # numbers of a batch that a CPU adds in float64 at once
_for_compiler: ContextVar[bool] = ContextVar("_for_compiler", default=False)


@contextmanager
def left_to_the_compiler() -> Iterator[None]:
    """Trace a step for a compiler, which does better with other operators than eager PyTorch."""
    token = _for_compiler.set(True)
    try:
        yield
    finally:
        _for_compiler.reset(token)


def for_compiler() -> bool:
    """Whether the step is being traced for a compiler."""
    return _for_compiler.get()


@dataclass(frozen=True)
class Gram:
    """x_t·x_u for all positions t, u of each record.

    Each is a sum of `width` products, and each product was rounded at most `depth` times.
    """

    inner_BTT: Tensor
    width: int
    depth: int

    @staticmethod
    def of(x_BTD: Tensor) -> Gram:
        width = x_BTD.shape[-1]
        return Gram(inner_products(x_BTD, x_BTD), width, dot_depth(width))


def inner_products(x_BTD: Tensor, y_BSD: Tensor) -> Tensor:
    """x_t·y_s of each record, (B, …, T, S), summed in blocks of `_block(D)` to round less."""
    lead, width = x_BTD.shape[:-2], x_BTD.shape[-1]
    block = _block(width)
    flat_x, flat_y = (x.reshape(math.prod(lead), *x.shape[-2:]) for x in (x_BTD, y_BSD))
    single = x_BTD.is_cuda and x_BTD.dtype == torch.float32
    if single and (matmul_uses_tf32(x_BTD) or not for_compiler()):
        # TensorFloat-32 keeps 10 bits, too few where terms cancel. This operator never uses it.
        total = ghost.inner_products(flat_x, flat_y, block)
    else:
        (x, *xs), (y, *ys) = flat_x.split(block, dim=-1), flat_y.split(block, dim=-1)
        total = torch.bmm(x, y.transpose(1, 2))
        for x, y in zip(xs, ys, strict=True):
            total = torch.baddbmm(total, x, y.transpose(1, 2))
    return total.reshape(*lead, x_BTD.shape[-2], y_BSD.shape[-2])


def lengths(gram_BTT: Tensor, width: int) -> Tensor:
    """‖x_t‖ from above, even where squares vanished."""
    squares = gram_BTT.diagonal(dim1=-2, dim2=-1).clamp_min(0)
    return (squares + width * torch.finfo(squares.dtype).tiny).sqrt()


def ghost_norms(a_BTD: Tensor, b_BTP: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norm from above, and the reach S, of each record.

    Dimensions between the first and the last two are groups, whose squares add up.
    """
    if a_BTD.shape[-2] == 1:  # ‖b aᵀ‖ = ‖a‖·‖b‖
        groups = a_BTD.shape[:-2]
        sides = (x.reshape(math.prod(groups), x.shape[-1]) for x in (a_BTD, b_BTP))
        a, b = (sum_of_squares(side).reshape(groups) for side in sides)
        return _over_groups(a * b), _over_groups((a * b).sqrt())
    if ghost.fits(a_BTD) and a_BTD.dim() == 3:
        return ghost.ghost_norms(a_BTD, b_BTP)
    return norms_from_grams(Gram.of(a_BTD), Gram.of(b_BTP))


def norms_from_grams(a: Gram, b: Gram) -> tuple[Tensor, Tensor]:
    """The same, from inner products."""
    depth = a.depth + b.depth + sum_depth(a.inner_BTT.shape[-1])
    length_a, length_b = lengths(a.inner_BTT, a.width), lengths(b.inner_BTT, b.width)
    reach = (length_a * length_b).sum(dim=-1)
    tiny = torch.finfo(reach.dtype).tiny
    positions = a.inner_BTT.shape[-1]
    vanished = tiny * (
        a.width * length_b.sum(dim=-1).square()
        + b.width * length_a.sum(dim=-1).square()
        + positions**2
    )
    squares = sum_over_pairs(a.inner_BTT * b.inner_BTT) + vanished
    return _over_groups(safe_squares(squares, reach, depth, positions)), _over_groups(reach)


def _over_groups(x: Tensor) -> Tensor:
    """In float64: a layer may have hundreds of groups, whose sum must not round away a norm."""
    return x if x.dim() == 1 else x.flatten(1).sum(dim=1, dtype=torch.float64).to(x.dtype)


def safe_squares(squares: Tensor, reach: Tensor, depth: int, positions: int) -> Tensor:
    """(√(‖g‖² + depth·u·S²) + T·u·S)²: no less than the square of the share that is added."""
    unit = torch.finfo(squares.dtype).eps / 2
    upper = torch.addcmul(squares.clamp_min(0), reach, reach, value=depth * unit).sqrt()
    return torch.add(upper, reach, alpha=positions * unit).square()


def sum_of_squares(x_B: Tensor) -> Tensor:
    """‖x_i‖² of each record from above: the sum's own roundings and vanished squares are added.

    A CPU adds blocks of 64 numbers in their own type and the blocks in float64, so no square is
    rounded more than 64 + 6 times in any order of the sums: 2e-6 of a float32 norm. `vector_norm`
    reads each number once, which is ten times as fast as writing squares first. On a GPU, in
    compiled code and for few numbers one operator adds everything in float64.
    """
    flat = x_B.unsqueeze(1) if x_B.dim() == 1 else x_B.flatten(1)
    size, finfo = flat.shape[1], torch.finfo(x_B.dtype)
    slack = (size + 6) * 2.0**-53 + finfo.eps  # and the result is rounded to x's type
    if x_B.numel() > _FEW and not x_B.is_cuda and not for_compiler():
        slack += (_SHORT + 6) * finfo.eps / 2
        whole, rest = divmod(size, _SHORT)
        parts = flat.split([size - rest, rest], dim=1) if whole and rest else [flat]
        if whole:
            blocks = parts[0].unflatten(1, (whole, _SHORT))
            each = torch.linalg.vector_norm(blocks, dim=2)
        if rest:
            last = torch.linalg.vector_norm(parts[-1], dim=1, keepdim=True)
            each = torch.cat([each, last], dim=1) if whole else last
        flat = each
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    return (norms.square() * (1 + slack) + size * finfo.tiny).to(x_B.dtype)


def sum_over_pairs(terms_BTT: Tensor) -> Tensor:
    """Σ_{t,u}, first over one position and then over the other, each in blocks."""
    return _sum_in_blocks(_sum_in_blocks(terms_BTT))


def _sum_in_blocks(x: Tensor) -> Tensor:
    block = _summands(x.shape[-1])
    if x.shape[-1] <= block:
        return x.sum(dim=-1)
    return torch.stack([part.sum(dim=-1) for part in x.split(block, dim=-1)], dim=-1).sum(dim=-1)


def sum_depth(*positions: int) -> int:
    """The most roundings that a term of `sum_over_pairs` meets, in any order of each sum."""
    first, second = positions if len(positions) == 2 else positions * 2
    return sum(_summands(count) + math.ceil(count / _summands(count)) for count in (first, second))


def dot_depth(width: int) -> int:
    """The most roundings that a product meets in an inner product that is summed in blocks."""
    block = _block(width)
    return min(width, block) + math.ceil(width / block)


def _block(width: int) -> int:
    """At least √D, so that blocks meet no more roundings than the numbers within one."""
    return max(512 if for_compiler() else 128, 32 * math.ceil(math.sqrt(width) / 32))


def _summands(positions: int) -> int:
    """The block for sums over positions."""
    return max(64, 32 * math.ceil(math.sqrt(positions) / 32))
