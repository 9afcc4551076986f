"""What an engine is given (`ClipTask`) and returns (`Clipped`), and the arithmetic of clipping.

A clip rule proposes a scale from a record's norm, and `clip_scale` cuts it to C/‖g‖. So ‖s·g‖ ≤ C
holds under every rule, also after rounding, as long as a record's scale depends on its own norm and
on public constants alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tacit.precision import wide_dtype
from tacit.sampling.sampler import Batch

COUNT_BOUND = 0.5  # what one record adds to a count, at most
_BAND = 0.1  # the width of the count's slope, as a share of C
_LEAST_NORM = 1e-12


class ClipRule(Protocol):
    """A function from norms and the constant C to scales of at least 0, record by record.

    Rules are frozen and compared by value, so that a recorded step is not replayed under another.
    """

    def __call__(self, norms_B: Tensor, max_norm: float | Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Clip:
    """Scale by min(1, C/‖g‖): gradients longer than C are cut.  [Abadi 2016, Alg. 1]"""

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


def as_norms(max_norm: float | Sequence[float]) -> float | tuple[float, ...]:
    """One constant, or one per block, as floats; raises ValueError for a constant below 1e-12.

    Squares of float32 numbers below 4e-23 vanish, so a gradient of a billion entries may hide a
    norm of 1e-18. The least constant is far above that.
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
    """min(rule, C/‖g_i‖) for each of B records.

    Scaling in floating point can overshoot C by a few roundings, so C is first lowered by as
    much: the bound holds for the numbers that are really added. `norms_B` may be upper bounds:
    then gradients become only shorter. A norm below 1e-12 counts as 1e-12, since most of a gradient
    so short may be hidden (see `as_norms`), and zero has no inverse.
    """
    if not isinstance(max_norm, Tensor):  # a recorded step has tensors, and must round alike
        max_norm = norms_B.new_full((), max_norm, dtype=sum_dtype(norms_B.device))
    lowered = max_norm * (1 - 16 * torch.finfo(coarsest(dtypes)).eps)
    trusted_B = norms_B.clamp_min(_LEAST_NORM)
    return torch.minimum(rule(trusted_B, lowered), lowered / trusted_B)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The coarsest of the types in which records of these types are scaled and summed."""
    return max(map(wide_dtype, dtypes), key=lambda d: torch.finfo(d).eps)


def accumulator(parameters: Iterable[Tensor]) -> Tensor:
    """Zeros for the sum of all gradients, in float64: roundings of a long float32 sum add up."""
    every = list(parameters)
    device = every[0].device if every else torch.device("cpu")
    return torch.zeros(sum(p.numel() for p in every), dtype=sum_dtype(device), device=device)


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

    def flat(self) -> ClipTask:
        """The same gradients, all clipped together by the plain rule."""
        return replace(
            self, blocks=(tuple(self.parameters),), rule=CLIP, counted=False, factors=None
        )


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
