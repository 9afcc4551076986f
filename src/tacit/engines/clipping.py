"""Clipping: what an engine is given and returns, clip rules, and the sums of clipped gradients.

A clip rule proposes a scale from a record's norm, and `clip_scale` cuts it to C/‖g‖. So ‖s·g‖ ≤ C
holds under every rule, also after rounding, as long as a record's scale depends on its own norm and
on public constants alone.

An engine hands each parameter's per-record gradients to `clip_and_sum` as `RecordGradients`, in the
form that is cheapest to keep: `Stacked` and `Moved` here, `Contracted` in `products`. Everything
can be traced by `make_fx`: no value is read back, and no branch depends on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from tacit.precision import full_precision, wide, wide_dtype

if TYPE_CHECKING:
    from tacit.sampling.sampler import Batch

COUNT_BOUND = 0.5  # what one record adds to a count, at most
_BAND = 0.1  # the width of the count's slope, as a share of C
LEAST_NORM = 1e-12  # of clipping constants and of norms that are trusted
_SHORT_ROW = 1 << 12  # numbers of a row that is cheaper to copy than to process alone
_SHORT_SUM = 64  # squares that one sum adds in their own type
_FEW = 1 << 17  # numbers of a batch that a CPU adds in float64 at once


# --- rules and scales -------------------------------------------------------------------------


class ClipRule(Protocol):
    """A function from norms and the constant C to scales of at least 0, record by record.

    Rules are frozen and compared by value, so that a recorded step is not replayed under another.
    """

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Clip:
    """Scale by min(1, C/‖g‖): gradients longer than C are cut.  [Abadi 2016, Alg. 1]

    A rule only proposes a scale; whatever it proposes is cut to C/‖g‖. Clipping proposes 1.
    """

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor:
        return torch.ones_like(norms_B)


@dataclass(frozen=True)
class Normalise:
    """Scale by C/(‖g‖ + γ): every gradient gets a norm of nearly C.  [Bu 2022, AUTO-S]

    ‖s·g‖ = C·‖g‖/(‖g‖ + γ) ≤ C. Gradients far shorter than γ are all scaled by C/γ, which keeps
    their order; γ = 0 is AUTO-V, which gives all the same norm. Zero stays zero: norms are at
    least 1e-12 (see `clip_scale`), so nothing is divided by zero.

        PerSampleClip(1.0, rule=Normalise(stability=0.01))
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.stability < math.inf:
            raise ValueError(f"stability is {self.stability}; give 0 or a positive number")

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor:
        scale = max_norm / (norms_B + self.stability)
        return scale.clamp(max=torch.finfo(scale.dtype).max)  # infinity times a zero is not zero


CLIP = Clip()


def clip_scale(
    norms_B: Tensor,
    max_norm: float | Tensor,
    dtypes: Sequence[torch.dtype],
    rule: ClipRule = CLIP,
) -> Tensor:
    """min(rule, C/‖g_i‖) for each of B records.

    Scaling in floating point can overshoot C by a few roundings, so C is first lowered by as
    much: the bound holds for the numbers that are really added. `norms_B` may be upper bounds,
    which only makes gradients shorter. A norm below 1e-12 counts as 1e-12, since most of a gradient
    so short may be hidden (its squares vanish), and zero has no inverse.
    """
    if not isinstance(max_norm, Tensor):  # a recorded step has tensors, and must round alike
        max_norm = norms_B.new_full((), max_norm, dtype=sum_dtype(norms_B.device))
    lowered = max_norm * (1 - 16 * torch.finfo(coarsest(dtypes)).eps)
    trusted_B = norms_B.clamp_min(LEAST_NORM)
    return torch.minimum(rule(trusted_B, lowered), lowered / trusted_B)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The coarsest of the types in which records of these types are scaled and summed."""
    return max(map(wide_dtype, dtypes), key=lambda d: torch.finfo(d).eps)


def centred_count(norms_B: Tensor, max_norm: float | Tensor, counted_B: Tensor) -> Tensor:
    """Σ_i v_i over the counted records, with v = clamp((1 − ‖g_i‖/C)/w, −½, ½) and w = 0.1.

    v is ½ below C and −½ above it, so adding or removing a record moves the sum by at most ½, and
    replacing one by at most 1.

    Within 5% of C, v is a slope: v + ½ is the mean of 1[‖g‖ ≤ c] over all c in that band. A step
    would be unsafe there. Norms that tie with C (equal records, gradients of unit norm) differ in
    their last bits, which depend on the size of the batch, so one more record could flip them all.
    On a slope, a rounding moves the count by roundings.
    """
    ratio_B = norms_B.to(sum_dtype(norms_B.device)) / max_norm
    v_B = ((1 - ratio_B) / _BAND).clamp(-COUNT_BOUND, COUNT_BOUND)
    return torch.where(counted_B, v_B, 0.0).sum()


def block_scales(
    norms: Sequence[Tensor],
    max_norms: Sequence[float | Tensor],
    factors: Sequence[float | Tensor] | None,
    rule: ClipRule,
) -> tuple[list[Tensor], list[Tensor]]:
    """The norms to compare with the constants, and the scale of each block of each record.

    Without factors, block h is scaled by its own norm to its own C_h. With factors m_h all blocks
    get one scale, from n = (Σ_h m_h²·‖g_h‖²)^(1/2): then ‖(m_1·s·g_1 | … | m_L·s·g_L)‖ ≤ C. The
    slack of 1 + 8u covers the roundings of n and of the multiplication after it.
    """
    compared = list(norms)
    if factors is not None:
        weighted = [norm * m for norm, m in zip(norms, factors, strict=True)]
        slack = 1 + 8 * torch.finfo(weighted[0].dtype).eps
        compared = [torch.stack(weighted).square().sum(dim=0).sqrt() * slack]
    dtypes = [norm.dtype for norm in norms]
    pairs = zip(compared, max_norms, strict=True)
    scales = [clip_scale(norms_B, max_norm, dtypes, rule) for norms_B, max_norm in pairs]
    return compared, scales * len(norms) if factors is not None else scales


# --- what an engine is given and returns -----------------------------------------------------


Blocks = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ClipTask:
    """Clip each record's gradient of `loss` to `norms[h]` in `blocks[h]`, for all blocks h.

    Args:
        norms: the constants C_h, each a number or a scalar tensor on the device.
        rule: the scale of a record, from its norm.
        views: K. Rows iK … iK + K − 1 of a batch are views of record i, whose gradient is their
            mean.
        counted: whether to compute each block's centred count of norms below its constant.
        factors: m_h, one per block. Then `norms` is one C, and every block of a record is scaled by
            the same min(1, C/‖(m_1·g_1 | … | m_L·g_L)‖).
        active: masks of entries. Elsewhere a gradient is zero, before its norm is taken.
    """

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    parameters: dict[str, nn.Parameter]
    blocks: Blocks
    norms: tuple[float | Tensor, ...]
    rule: ClipRule = CLIP
    views: int = 1
    counted: bool = False
    factors: tuple[float | Tensor, ...] | None = None
    active: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)  # it holds private sums
class Clipped:
    """Σ_i clip(g_i) of each parameter, and each block's centred count if the task asks for it.

    A parameter without gradients may be missing, and so may the counts of an empty batch. `flat`,
    if set, is the memory of all sums as one vector in the parameters' order.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[Tensor, ...] = ()
    flat: Tensor | None = None


class Engine(Protocol):
    """Clipped sums and counts over the records of one physical batch."""

    def clipped_sums(self, task: ClipTask, piece: Batch) -> Clipped: ...

    def block_norms(self, task: ClipTask, piece: Batch) -> list[Tensor]:
        """‖g_i‖ in each block, for each record of a *public* batch: nothing here is private."""
        ...


def sum_of_flat(pieces: Iterable[Tensor], parameters: Iterable[Tensor]) -> Tensor:
    """The sum of flat gradients in float64, since roundings of a long float32 sum add up.

    It is memory of its own: a recording writes to the same memory in every step. Zeros if there
    are no pieces.
    """
    every = list(parameters)
    device = every[0].device if every else torch.device("cpu")
    total: Tensor | None = None
    for flat in pieces:
        total = flat.to(sum_dtype(device), copy=True) if total is None else total.add_(flat)
    if total is None:
        size = sum(p.numel() for p in every)
        total = torch.zeros(size, dtype=sum_dtype(device), device=device)
    return total


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def flattened(sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """All sums as one vector, in the parameters' order; zeros for a parameter without a sum.

    One long vector needs few GPU kernels. Its type is the widest of the sums' types, and at least
    float32.
    """
    dtypes = [wide_dtype(t.dtype) for t in (*sums.values(), *parameters.values())]
    widest = max(dtypes, key=lambda d: torch.finfo(d).bits)
    parts = [
        sums[name].detach().reshape(-1).to(widest)
        if name in sums
        else torch.zeros(p.numel(), dtype=widest, device=p.device)
        for name, p in parameters.items()
    ]
    return torch.cat(parts)


# --- per-record gradients of one parameter ----------------------------------------------------


class RecordGradients(Protocol):
    """What every form offers. B is the number of records and g_i the gradient of record i."""

    def squares(self) -> Tensor:
        """An *upper* bound of ‖g_i‖² for each record, for the numbers that `total` really adds."""
        ...

    def total(self, scale: RowScale) -> Tensor:
        """Σ_i s_i·g_i. Records with s_i = 0 are left out, even where g_i is NaN or infinite."""
        ...

    def rows(self) -> Tensor:
        """All g_i, stacked as (B, *shape of the parameter)."""
        ...


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


# --- norms and sums --------------------------------------------------------------------------


_for_compiler: ContextVar[bool] = ContextVar("_for_compiler", default=False)


@contextmanager
def left_to_the_compiler() -> Iterator[None]:
    """Trace a step for a compiler, with operators that it can fuse better than eager ones."""
    token = _for_compiler.set(True)
    try:
        yield
    finally:
        _for_compiler.reset(token)


#: Whether the step is being traced for a compiler.
for_compiler: Callable[[], bool] = _for_compiler.get


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
        slack += (_SHORT_SUM + 6) * finfo.eps / 2
        whole, rest = divmod(size, _SHORT_SUM)
        parts = flat.split([size - rest, rest], dim=1) if whole and rest else [flat]
        if whole:
            blocks = parts[0].unflatten(1, (whole, _SHORT_SUM))
            each = torch.linalg.vector_norm(blocks, dim=2)
        if rest:
            last = torch.linalg.vector_norm(parts[-1], dim=1, keepdim=True)
            each = torch.cat([each, last], dim=1) if whole else last
        flat = each
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    return (norms.square() * (1 + slack) + size * finfo.tiny).to(x_B.dtype)


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
        blocks = [_members(names, gradients) for names in task.blocks]
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
    blocks = [_members(names, gradients) for names in task.blocks]
    return _norms(blocks, num_records, device)


# Parameters of one block, and their gradients end to end.
_Member = tuple[tuple[str, ...], RecordGradients]


def _members(names: Sequence[str], gradients: dict[str, RecordGradients]) -> list[_Member]:
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
