"""A mean and a std a channel, of channels of very different sizes, released with noise.

The channels of scattering features differ a hundredfold: local means of pixels are about 1,
second-order coefficients about 0.01. Noise that the large ones ask for would drown the small ones
[Tramèr & Boneh 2021 add one noise to all]. So sizes are released first, and moments then in their
units, where every channel is about 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.budget import Relation
from tacit.data.noisy_sum import SEEDED, check_release, claimed, noisy_sum
from tacit.data.scaling import PublicScaler

if TYPE_CHECKING:
    from tacit.accounting.ledger import Ledger
    from tacit.accounting.release import Release

_CHUNK = 2048  # records at once
_WHAT = "channel statistics"
_SLACK = 1 - 1e-12  # for roundings of a norm in float64


def release_channel_scaler(
    inputs: Tensor,
    *,
    size_bound: float,
    noise_multiplier: float,
    public_size: int,
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
    seed: int | None = None,
    ledger: Ledger | None = None,
) -> tuple[PublicScaler, Release]:
    """A scaler that standardises each of C channels, and the event to charge for it.

    Record x has channels x_c with P positions. Two sums over records, the second once the first is
    out, z' = √2·z:
        sizes    a_c = (Σ_i [(1/P)·Σ_p |x_icp|]_R + N(0, (z'·kR)²)) / N,  at least z'·kR/N,
        moments  (Σ_i [((1/P)·Σ_p v_icp, (1/P)·Σ_p v_icp²)_c]_T + N(0, (z'·kT)²)) / N,  v = x/a,
    where [·]_R scales a vector of C (2C) numbers down to norm R = `size_bound` (T = 3·√C); a record
    that is not finite adds 0. So one that is added or removed moves them by at most R and T, k = 1,
    and one that is replaced by twice that, k = 2: two Gaussian mechanisms of multiplier √2·z each,
    which compose, the second chosen in view of the first, to one of multiplier z
    [Dong et al. 2019, Cor. 3.3: √(2·(1/√2z)²) = 1/z]. Charge it under `relation`, before training:
    `Trainer(prelude=(event,))`.

    R and T are no assumptions: what is longer is cut, which biases the scaler and not the
    guarantee. Scattering features of images whose pixels have variance 1 have sizes of norm about
    √3 for three colours, 1 for one. N is the *declared* number of records, never their count.
    With a `ledger`, whose current run planned for it, it is claimed there before a record is read.
    Noise comes from the operating system unless `seed` is given; then it is not private against
    whoever knows the seed.
    """
    relation = Relation(relation)
    check_release(noise_multiplier, public_size)
    if not (math.isfinite(size_bound) and size_bound > 0):
        raise ValueError(f"size_bound is {size_bound!r}; give a finite number above 0")
    if inputs.ndim < 2:
        raise ValueError(f"inputs of shape {tuple(inputs.shape)}; give records with channels")
    claim = claimed(noise_multiplier, relation, _WHAT, ledger)
    channels = inputs.shape[1]
    times = math.sqrt(2) * noise_multiplier * (1 if relation is Relation.ADD_OR_REMOVE_ONE else 2)
    std = times * size_bound
    found = noisy_sum(sum_of_sizes(inputs, size_bound), std, seed, f"{claim.words}, sizes")
    sizes_C = (found / public_size).clamp_(min=std / public_size)

    bound = moments_bound(channels)
    std = times * bound
    total = noisy_sum(sum_of_moments(inputs, sizes_C, bound), std, seed, f"{claim.words}, moments")
    first_C, second_C = total / public_size
    variance_C = (second_C - first_C**2).clamp_(min=std / public_size)
    origin = f"of each channel released with Gaussian noise of multiplier {noise_multiplier:g}"
    origin += f" ({relation}): its event must be charged to the budget"
    if seed is not None:
        origin += SEEDED
    scaler = PublicScaler(
        (sizes_C * first_C).float(), (sizes_C * variance_C.sqrt()).float(), origin
    )
    released = torch.cat([found, total.flatten()])
    return scaler, claim.release(released)


def moments_bound(channels: int) -> float:
    """T: channels in units of their sizes have means about 1 and squares about 2."""
    return 3 * math.sqrt(channels)


def sum_of_sizes(inputs: Tensor, bound: float) -> Tensor:
    """Σ_i [(1/P)·Σ_p |x_icp|]_R in float64, *without* noise: private, never to be shown."""
    total = torch.zeros(inputs.shape[1], dtype=torch.float64)
    for chunk_BCP in _chunks(inputs):
        total += _cut(chunk_BCP.abs().mean(dim=2), bound).sum(dim=0).cpu()
    return total


def sum_of_moments(inputs: Tensor, sizes_C: Tensor, bound: float) -> Tensor:
    """Σ_i [(mean, mean square)_c of x_i/a]_T as (2, C), *without* noise: never to be shown."""
    total = torch.zeros(2, inputs.shape[1], dtype=torch.float64)
    for chunk_BCP in _chunks(inputs):
        units = chunk_BCP / sizes_C.to(chunk_BCP.device)[:, None]
        both = torch.cat([units.mean(dim=2), units.square().mean(dim=2)], dim=1)
        total += _cut(both, bound).sum(dim=0).view(2, -1).cpu()
    return total


def _chunks(inputs: Tensor) -> Iterator[Tensor]:
    """Records as (B, C, P) in float64, some at a time."""
    shaped = inputs.unsqueeze(2) if inputs.ndim == 2 else inputs
    for start in range(0, len(inputs), _CHUNK):
        yield shaped[start : start + _CHUNK].double().flatten(2)


def _cut(rows: Tensor, bound: float) -> Tensor:
    """Each row scaled down to norm `bound`; one that is not finite, or whose norm is not, is 0."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    cut = rows * (_SLACK * bound / norms.clamp_min(1e-300)).clamp(max=1.0)
    return torch.where(norms.isfinite(), cut, 0.0)
