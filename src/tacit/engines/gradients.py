"""Per-record gradients of one parameter, in the form that is cheapest to keep, and clipped sums.

Every form keeps three promises. B is the number of records and g_i the gradient of record i:

  squares()   an *upper* bound of ‖g_i‖² for each record, for the numbers that `total` really adds;
  total(s)    Σ_i s_i·g_i over the records that are present; the others are left out, even where
              g_i is NaN or infinite (`RowScale`);
  rows()      all g_i, stacked as (B, *shape of the parameter).

`clip_and_sum` turns the gradients of all parameters into clipped sums, block by block. Everything
here can be traced by `make_fx`: no value is read back, and no branch depends on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from tacit.engines.clipping import Clipped, ClipTask, block_scales, centred_count
from tacit.engines.norms import for_compiler, sum_of_squares
from tacit.precision import full_precision, wide


@dataclass(frozen=True)
class RowScale:
    """One factor per record. A record with s_i = 0 is left out, whatever it holds.

    With `all_present`, no factor is zero and nothing needs to be masked.
    """

    values_B: Tensor
    all_present: bool = False

    def of(self, x_B: Tensor) -> Tensor:
        """s_i·x_i, and zeros where s_i is zero: 0·NaN would be NaN."""
        return self.present(x_B) * _column(self.values_B.to(x_B.dtype), x_B)

    def present(self, x_B: Tensor) -> Tensor:
        """x_i, and zeros where s_i is zero."""
        if self.all_present:
            return x_B
        bits = _BITS.get(x_B.dtype)
        if x_B.device.type == "cpu" and bits is not None and not for_compiler():
            # Keep all bits or none: four times as fast as `torch.where`, which is not vectorised.
            mask_B = (self.values_B == 0).to(bits) - 1
            return (x_B.view(bits) & _column(mask_B, x_B)).view(x_B.dtype)
        return torch.where(_column(self.values_B != 0, x_B), x_B, 0.0)


_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _column(values_B: Tensor, like: Tensor) -> Tensor:
    return values_B.view(-1, *(1 for _ in like.shape[1:]))


class RecordGradients(Protocol):
    """What every form offers; the module's docstring states the promises."""

    def squares(self) -> Tensor: ...

    def total(self, scale: RowScale) -> Tensor: ...

    def rows(self) -> Tensor: ...


@dataclass
class Stacked:
    """All rows: nothing is computed twice, and the norm is of the very numbers that are added.

    `squares_B`, if given, are upper bounds that were computed together with the rows.
    """

    rows_BP: Tensor
    squares_B: Tensor | None = None

    def squares(self) -> Tensor:
        return sum_of_squares(self.rows_BP) if self.squares_B is None else self.squares_B

    def total(self, scale: RowScale) -> Tensor:
        scale_B, shape = scale.values_B.to(self.rows_BP.dtype), self.rows_BP.shape[1:]
        if len(shape) <= 1:
            return scale_B @ scale.present(self.rows_BP)
        return (scale_B @ scale.present(self.rows_BP.flatten(1))).view(shape)

    def rows(self) -> Tensor:
        return self.rows_BP


@dataclass
class Moved:
    """Gradients of parts of one parameter that share no element, so that squares add up.

    Each part comes with a function that moves it to its place in the parameter.
    """

    parts: Sequence[tuple[RecordGradients, Callable[[Tensor], Tensor]]]

    def squares(self) -> Tensor:
        return added([gradients.squares() for gradients, _ in self.parts])

    def total(self, scale: RowScale) -> Tensor:
        return added([move(gradients.total(scale)) for gradients, move in self.parts])

    def rows(self) -> Tensor:
        return added([torch.stack([move(row) for row in g.rows()]) for g, move in self.parts])


def added(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)


@dataclass
class Contracted:
    """Norms alone; the total comes from one contraction of inputs and cotangents.

    A record's share of that contraction is not the vector whose norm was taken, as both were
    rounded. With S = Σ_t ‖a_t‖·‖b_t‖ over the record's positions t (the *reach*), the squared norm
    is off by at most γ·S² and the share by at most τ·S, so ‖share‖ ≤ √(norm² + γ·S²) + τ·S, which
    is what `squares` returns. `norm_squares_B` already allows for roundings that depend on sizes
    (see `norms`); γ and τ cover what is left, a few roundings and terms of second order.

    TensorFloat-32 cuts each factor of a product to 10 bits, which adds 2·2⁻¹⁰·S for each matrix
    product that runs in it (`coarse_products`): one for the share, and one more where the norm is
    of rows that were computed in the same way.

    Args:
        norm_squares_B: ‖g_i‖², allowing for the roundings of its own computation.
        reach_B: S of each record, or None where it equals the norm (one position per record).
        contract: from scales s to Σ s_i·g_i.
        make_rows: all g_i, stacked.
        coarse_products: how many matrix products between norm and share run in TensorFloat-32.
    """

    norm_squares_B: Tensor
    reach_B: Tensor | None
    contract: Callable[[RowScale], Tensor]
    make_rows: Callable[[], Tensor]
    coarse_products: int = 0

    def squares(self) -> Tensor:
        rounding = torch.finfo(self.norm_squares_B.dtype).eps
        gamma = 8 * rounding
        tau = 8 * rounding + self.coarse_products * 2.0**-9
        if self.reach_B is None:
            return self.norm_squares_B * (((1 + gamma) ** 0.5 + tau) ** 2)
        norms, reach = self.norm_squares_B.clamp_min(0), self.reach_B
        upper = torch.addcmul(norms, reach, reach, value=gamma).sqrt()
        return torch.add(upper, reach, alpha=tau).square()

    def total(self, scale: RowScale) -> Tensor:
        return self.contract(scale)

    def rows(self) -> Tensor:
        return self.make_rows()


def piece(x_B: Tensor, part: slice) -> Tensor:
    """The records of one slice; the tensor itself where that is all of them."""
    size = part.stop - part.start
    return x_B if size == len(x_B) else x_B.narrow(0, part.start, size)


def in_pieces(
    count: int, numbers_each: int, work: Callable[[slice], tuple[Tensor, ...]], limit: int = 1 << 27
) -> tuple[Tensor, ...]:
    """`work` on slices of `count` records that need at most `limit` numbers of workspace each."""
    size = max(1, limit // max(1, numbers_each))
    starts = range(0, count, size) or range(1)
    found = [work(slice(start, min(start + size, count))) for start in starts]
    return found[0] if len(found) == 1 else tuple(map(torch.cat, zip(*found, strict=True)))


_SMALL_STACK = 1 << 20  # numbers of a stack that a CPU keeps
_SHORT_ROW = 1 << 12  # numbers of a row that is cheaper to copy than to process alone


def rows_are_kept(row: int, *factors: Tensor, times: int = 2) -> bool:
    """Whether to keep rows of `row` numbers, or norms alone: the one place that chooses.

    Rows that are not much larger than the factors they come from save a second contraction. On a
    CPU small stacks are kept too, as their norms need none of the slack of a ghost norm.
    """
    few = row <= times * sum(math.prod(x.shape[1:]) for x in factors)
    return few or (factors[0].device.type == "cpu" and len(factors[0]) * row <= _SMALL_STACK)


def clip_and_sum(
    task: ClipTask,
    gradients: dict[str, RecordGradients],
    num_records: int,
    device: torch.device,
    mask: Tensor | None,
) -> Clipped:
    """Σ_i s_i·g_i in each block, with scales and counts from upper bounds of the norms.

    A record adds nothing, whatever it holds, if its squared norm is not finite or `mask` is False.
    """
    with full_precision(device), torch.no_grad():
        blocks = [_joined(names, gradients) for names in task.blocks]
        norms = _norms(blocks, num_records, device)
        keep = (norms[0] if len(norms) == 1 else torch.stack(norms).sum(dim=0)).isfinite()
        counted = keep if mask is None else keep & mask
        # Reading a value makes a GPU wait, so only a CPU asks whether a record is left out.
        all_present = device.type == "cpu" and not for_compiler() and bool(counted.all())
        compared, scales = block_scales(norms, task.norms, task.factors, task.rule)
        sums: dict[str, Tensor] = {}
        for members, scale_B in zip(blocks, scales, strict=True):
            if not all_present:
                scale_B = torch.where(counted, scale_B, 0.0)
            scale = RowScale(scale_B, all_present)
            for names, each in members:
                shapes = [task.parameters[name].shape for name in names]
                total = each.total(scale).reshape(-1)
                parts = total.split([shape.numel() for shape in shapes])
                sums |= {n: t.view(s) for n, t, s in zip(names, parts, shapes, strict=True)}
        pairs = zip(compared, task.norms, strict=True) if task.counted else ()
        return Clipped(sums, tuple(centred_count(n, c, counted) for n, c in pairs))


def norms_of_blocks(
    task: ClipTask, gradients: dict[str, RecordGradients], num_records: int, device: torch.device
) -> list[Tensor]:
    """‖g_i‖ of each record in each block, from above."""
    return _norms([_joined(names, gradients) for names in task.blocks], num_records, device)


# Parameters of one block, and their gradients end to end.
_Member = tuple[tuple[str, ...], RecordGradients]


def _joined(names: Sequence[str], gradients: dict[str, RecordGradients]) -> list[_Member]:
    """The gradients of a block, with short rows (biases, scales, small tables) joined into one.

    Half of a network's parameters have short rows. One norm and one product for all of them
    replaces some five kernels of a few microseconds for each.
    """
    present = {name: gradients[name] for name in names if name in gradients}
    short = {
        name: g.rows_BP.reshape(len(g.rows_BP), -1)
        for name, g in present.items()
        if isinstance(g, Stacked) and g.squares_B is None
        if math.prod(g.rows_BP.shape[1:]) <= _SHORT_ROW
    }
    if len(short) < 2 or len({rows.dtype for rows in short.values()}) > 1:
        short = {}
    members: list[_Member] = [((name,), g) for name, g in present.items() if name not in short]
    if short:
        members.append((tuple(short), Stacked(torch.cat(list(short.values()), dim=1))))
    return members


def _norms(
    blocks: Sequence[Sequence[_Member]], num_records: int, device: torch.device
) -> list[Tensor]:
    squares = [[wide(each.squares()) for _, each in members] for members in blocks]
    first = next((s for of_block in squares for s in of_block), None)
    none = torch.zeros(num_records, device=device) if first is None else torch.zeros_like(first)
    return [torch.stack(s).sum(dim=0).sqrt() if s else none for s in squares]
