"""The arithmetic of clipping: constants, scales and sums that keep to the bound once rounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tacit.queries.clip_rules import CLIP, ClipRule

_LEAST_NORM = 1e-12


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


def flattened(
    sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """All sums as one vector, in the parameters' order; zeros for a parameter that has none.

    One long vector instead of many small ones: a GPU is given few things to do, not hundreds.
    """
    parts = [
        sums[name].reshape(-1) if name in sums else torch.zeros_like(p).reshape(-1)
        for name, p in parameters.items()
    ]
    widest = max((part.dtype for part in parts), key=lambda d: torch.finfo(d).bits)
    return torch.cat([part.detach().to(widest) for part in parts]).to(dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms are taken, and records scaled, in at least float32."""
    return torch.promote_types(dtype, torch.float32)
