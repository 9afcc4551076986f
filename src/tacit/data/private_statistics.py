"""A mean and a variance per feature, released with noise that is charged."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.budget import Relation
from tacit.data.noisy_sum import SEEDED, check_release, claimed, noisy_sum
from tacit.data.scaling import Constants, PublicScaler, align, as_constants

if TYPE_CHECKING:
    from tacit.accounting.ledger import Ledger
    from tacit.accounting.release import Release

_CHUNK = 1 << 22  # values converted to float64 at once
_WHAT = "statistics"


def release_statistics(
    inputs: Tensor,
    lower: Constants,
    upper: Constants,
    *,
    noise_multiplier: float,
    public_size: int,
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
    seed: int | None = None,
    ledger: Ledger | None = None,
) -> tuple[PublicScaler, Release]:
    """A scaler with differentially private mean and std, and the event to charge for it.

    Each of the d features is clipped to its declared [lower, upper] and mapped to u in [-1, 1];
    a value that is not finite becomes u = 0. One record adds t(u) = (u_j, u_j² - 1)_j to a sum.

    Sensitivity, feature by feature. With s = u² in [0, 1],
        u² + (u² - 1)² = 1 - s + s² ≤ 1,                         so ||t(u)|| ≤ √d,
    with equality at u_j ∈ {-1, 0, 1}: add-or-remove-one has Δ = √d. (The square about 1 is what
    makes the second moment free: about 0 the bound would be √(2d).) For a replacement of u by
    v, with p = |u - v| and q = |u + v| ≤ 2 - p,
        (u - v)² + (u² - v²)² = p²(1 + q²) ≤ p²(1 + (2 - p)²),
    which grows with p (its derivative is 2p(2p² - 6p + 5) > 0), so it is at most 4, reached at
    u = 1, v = -1: replace-one has Δ = 2√d, and no smaller bound holds.

    Released: T = Σ t(u) + N(0, (z Δ)² I), one Gaussian mechanism of noise multiplier z. Then,
    by post-processing with the *declared* number of records N (`public_size`, never the count),
        mean = T_1 / N,   variance = max(1 + T_2 / N - mean², z Δ / N),
    clipped to what [-1, 1] allows and mapped back to the units of the inputs. The floor is the
    noise in the variance itself; below it the estimate says nothing.

    The noise multiplier of the event is that standard deviation over the sensitivity *under
    `relation`*; charge it under the same relation. With a `ledger`, whose current run planned for
    it, it is claimed there before a record is read. Noise comes from the operating system unless
    `seed` is given; then it is not private against whoever knows the seed.
    """
    relation = Relation(relation)
    check_release(noise_multiplier, public_size)
    middle, half = _range(inputs, lower, upper)
    claim = claimed(noise_multiplier, relation, _WHAT, ledger)
    total = sum_of_moments(inputs, middle, half)
    std = noise_multiplier * sensitivity(middle.numel(), relation)
    released = noisy_sum(total, std, seed, claim.words)
    first, second = released / public_size

    mean = first.clamp(-1, 1)
    variance = (1 + second - mean**2).clamp(max=1.0).clamp(min=min(1.0, std / public_size))
    shape = tuple(inputs.shape[1:])
    scaler = PublicScaler(
        (middle + half * mean).reshape(shape),
        (half * variance.sqrt()).reshape(shape),
        origin=(
            f"released with Gaussian noise of multiplier {noise_multiplier:g} ({relation}): "
            "its event must be charged to the budget" + (SEEDED if seed is not None else "")
        ),
    )
    return scaler, claim.release(released)


def sensitivity(num_features: int, relation: Relation) -> float:
    """The L2 sensitivity of `sum_of_moments`: √d, and 2√d under replace-one."""
    bound = math.sqrt(num_features)
    return bound if relation is Relation.ADD_OR_REMOVE_ONE else 2 * bound


def sum_of_moments(inputs: Tensor, middle: Tensor, half: Tensor) -> Tensor:
    """(Σ u, Σ (u² - 1)) as a (2, d) tensor, *without* noise: private, never to be shown."""
    total = torch.zeros(2, middle.numel(), dtype=torch.float64)
    rows = max(1, _CHUNK // max(1, middle.numel()))
    for chunk in inputs.flatten(1).split(rows) if len(inputs) else ():
        # Clipped before it is centred: a huge finite value must not become infinite on the way.
        values = chunk.to("cpu", torch.float64)
        finite = values.isfinite()
        unit = ((values.clamp(middle - half, middle + half) - middle) / half).clamp_(-1, 1)
        unit = torch.where(finite, unit, 0.0)
        total += torch.stack((unit.sum(0), (unit**2 - 1).sum(0)))
    return total


def _range(inputs: Tensor, lower: Constants, upper: Constants) -> tuple[Tensor, Tensor]:
    """Middle and half width of each feature's declared range, as (d,) tensors."""
    shape = inputs.shape[1:]
    like = torch.empty((0, *shape), dtype=torch.float64)
    low = align(as_constants(lower, "lower"), like, "lower").expand(shape).flatten()
    high = align(as_constants(upper, "upper"), like, "upper").expand(shape).flatten()
    if not (low < high).all():
        raise ValueError(f"lower is {lower}, upper is {upper}; each lower must be below its upper")
    return (low + high) / 2, (high - low) / 2
