"""What an engine is asked, and the arithmetic of clipping.

The arithmetic of clipping: rules, scales, counts and sums that keep to the bound once rounded.

A rule proposes a scale from a record's norm, and `clip_scale` cuts it to C/‖g‖. So ‖s·g‖ ≤ C under
every rule, as long as a record's scale depends on its own norm and on public constants alone.

What an engine is asked: whose gradients, of which loss, clipped to what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tacit.precision import wide_dtype
from tacit.sampling.batch import Batch

# One record's share of a count, at most; and how wide the slope of the count is, as a share of C.
COUNT_BOUND = 0.5
_BAND = 0.1
_LEAST_NORM = 1e-12


class ClipRule(Protocol):
    """Norms and the constant C to scales of at least 0, record by record.

    Rules are frozen and compared by value: what was recorded under one is not replayed under
    another.
    """

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Clip:
    """min(1, C/‖g‖): what is longer than C is cut, the rest is left alone.  [Abadi 2016, Alg. 1]"""

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor:
        return torch.ones_like(norms_B)


@dataclass(frozen=True)
class Normalise:
    """C/(‖g‖ + γ): every gradient gets a norm of nearly C, long or short.  [Bu 2022, AUTO-S]

    ‖s·g‖ = C·‖g‖/(‖g‖ + γ) ≤ C. Gradients far shorter than γ are all scaled by C/γ, so the
    shorter stays the shorter; γ = 0 is AUTO-V, which forgets sizes. Zero stays zero under both:
    norms come in as at least 1e-12 (see `clip_scale`), so nothing is divided by zero.
    """

    stability: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.stability < math.inf:
            raise ValueError(f"stability is {self.stability}; give 0 or a positive number")

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor:
        scale = max_norm / (norms_B + self.stability)
        return scale.clamp(max=torch.finfo(scale.dtype).max)  # infinity times a zero is not zero


CLIP = Clip()


def as_norms(max_norm: float | Sequence[float]) -> float | tuple[float, ...]:
    """One constant, or one a block, as floats that clipping can keep to.

    Squares of float32 numbers below 4e-23 vanish, so a gradient of a billion entries may have a
    norm of 1e-18 that nobody sees; the least constant is far above that.
    """
    one = isinstance(max_norm, int | float) or getattr(max_norm, "ndim", None) == 0
    norms = (float(max_norm),) if one else tuple(float(norm) for norm in max_norm)  # type: ignore[arg-type, union-attr]
    if not norms or not all(_LEAST_NORM <= norm < float("inf") for norm in norms):
        raise ValueError(f"max_norm is {max_norm}; give finite numbers of at least {_LEAST_NORM}")
    return norms[0] if one else norms


def clip_scale(
    norms_B: Tensor,
    max_norm: float | Tensor,
    dtypes: Sequence[torch.dtype],
    rule: ClipRule = CLIP,
) -> Tensor:
    """min(rule, C/‖g_i‖) for each of B records; of the plain rule, min(1, C/‖g_i‖).

    Scaling in floating point can overshoot C by a few roundings, so C is first lowered by as
    much: the bound holds for the numbers that are really added. Norms may be upper bounds of the
    norms: C/n ≤ C/‖g‖, so what is added is only shorter. A norm below 1e-12 is taken for 1e-12,
    since of a gradient so short most may be hidden (see `as_norms`), and zero has no inverse.
    """
    if not isinstance(max_norm, Tensor):  # so that a recorded step, which has tensors, rounds alike
        max_norm = norms_B.new_full((), max_norm, dtype=sum_dtype(norms_B.device))
    lowered = max_norm * (1 - 16 * torch.finfo(coarsest(dtypes)).eps)
    trusted_B = norms_B.clamp_min(_LEAST_NORM)
    return torch.minimum(rule(trusted_B, lowered), lowered / trusted_B)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The type, of those that records of these types are scaled and added up in, with most eps."""
    return max(map(wide_dtype, dtypes), key=lambda d: torch.finfo(d).eps)


def accumulator(parameters: Iterable[Tensor]) -> Tensor:
    """Zeros to sum all gradients into, in float64: roundings of a long float32 sum add up."""
    every = list(parameters)
    device = every[0].device if every else torch.device("cpu")
    return torch.zeros(sum(p.numel() for p in every), dtype=sum_dtype(device), device=device)


def sum_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def flattened(sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    """All sums as one vector, in the parameters' order; zeros for a parameter that has none.

    One long vector instead of many small ones: a GPU is given few things to do, not hundreds. Its
    type is the widest of the sums', and at least float32.
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


def centred_count(norms_B: Tensor, max_norm: float | Tensor, counted_B: Tensor) -> Tensor:
    """Σ_i v_i, with v = clamp((1 − ‖g_i‖/C)/w, −½, ½) and w = 0.1, over the records to count.

    v is ½ below C and −½ above it, so a record added or removed moves the sum by at most ½, and
    one replaced by at most 1: exactly twice the bound on one record, as everywhere.

    Within 5% of C it is a slope: v + ½ is the mean of 1[‖g‖ ≤ c] over all c in that band. A step
    there would be unsafe. Norms that tie with C (equal records, gradients of unit norm) are told
    apart by their last bits, which depend on how many others are in the batch: one record more
    could flip them all. On a slope, a rounding moves the count by roundings.
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
    """The norms that are compared with the constants, and the scale of each block of each record.

    Layer by layer, block h is scaled by its own norm to its own C_h. With factors m_h all blocks
    get one scale, from n = (Σ_h m_h²·‖g_h‖²)^(1/2): then ‖(m_1·s·g_1 | … | m_L·s·g_L)‖ ≤ C. n comes
    with a few roundings of its own and so does the multiplication after it, hence the 1 + 8u.
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


Blocks = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ClipTask:
    """Clip each record's gradient of `loss` to `norms[h]` in `blocks[h]`, for all blocks h.

    A norm is a number, or a scalar on the device that engines read and never ask for. With
    `views` of K, rows iK … iK + K − 1 of a batch are views of record i, whose gradient is their
    mean. `counted` asks for the centred count of norms below each block's constant.

    With `factors` m_h, one per block, there is one norm C for all of them: every block of a record
    is scaled by the same min(1, C/‖(m_1·g_1 | … | m_L·g_L)‖). `active` masks entries that count:
    elsewhere a gradient is taken for zero, before its norm is.
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

    def flat(self) -> ClipTask:
        """The same gradients, all clipped together by the plain rule."""
        return replace(
            self, blocks=(tuple(self.parameters),), rule=CLIP, counted=False, factors=None
        )


@dataclass(frozen=True)
class Clipped:
    """Σ_i clip(g_i) of each parameter, and each block's centred count where it was asked for.

    A parameter that no record moves may be left out, and so may the counts of an empty batch.
    `flat` is all sums as one vector in the parameters' order, where they lie in memory like that.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: tuple[Tensor, ...] = ()
    flat: Tensor | None = None


class Engine(Protocol):
    """Sums and counts over the records of one physical batch."""

    def clipped_sums(self, task: ClipTask, piece: Batch) -> Clipped: ...

    def block_norms(self, task: ClipTask, piece: Batch) -> list[Tensor]:
        """‖g_i‖ in each block, for each record of a *public* batch: nothing here is private."""
        ...
