"""Features on a sphere about their mean, which is released with noise that is charged.

Scattering features of all images have much in common: on the unit sphere the mean of MNIST's has a
norm of 0.7. What is common moves every class alike, and it takes up norm that clipping then cuts
from what tells classes apart. Tramèr & Boneh 2021 release a mean and a variance a channel; here it
is the mean of whole records, whose sensitivity is 1 whatever the number of features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.budget import Relation
from tacit.data.noisy_sum import SEEDED, check_release, claimed, noisy_sum

if TYPE_CHECKING:
    from tacit.accounting.ledger import Ledger
    from tacit.accounting.release import Release

_CHUNK = 4096  # records at once
_WHAT = "centre"


@dataclass(frozen=True)
class Centre:
    """x ↦ (u − c)/‖u − c‖ with u = x/‖x‖: of each record alone, once c is released."""

    centre: Tensor
    origin: str

    def __call__(self, inputs: Tensor) -> Tensor:
        found = torch.empty_like(inputs)
        centre = self.centre.to(inputs).flatten()
        for start in range(0, len(inputs), _CHUNK):
            rows = slice(start, start + _CHUNK)
            moved = on_sphere(inputs[rows].flatten(1)) - centre
            found[rows] = on_sphere(moved).view_as(inputs[rows])
        return found

    def describe(self) -> str:
        return f"centred, {self.origin}"


def on_sphere(rows_BD: Tensor) -> Tensor:
    """Each row scaled to norm 1; a row that is zero or not finite becomes 0."""
    # By its largest entry first: the squares of huge or tiny numbers are not finite, or 0.
    largest_B1 = rows_BD.abs().amax(dim=1, keepdim=True)
    usable_B1 = largest_B1.isfinite() & (largest_B1 > 0)
    scaled = torch.where(usable_B1, rows_BD / largest_B1, 0.0)
    norms_B1 = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / norms_B1.clamp_min(1.0)


def release_centre(
    inputs: Tensor,
    *,
    noise_multiplier: float,
    public_size: int,
    relation: Relation | str = Relation.ADD_OR_REMOVE_ONE,
    seed: int | None = None,
    ledger: Ledger | None = None,
) -> tuple[Centre, Release]:
    """c = (Σ_i x_i/‖x_i‖ + N(0, (z·Δ)²·I)) / N, and the event to charge for it.

    A record adds a vector of norm 1, or 0 where it is zero or not finite. So one that is added or
    removed moves the sum by at most Δ = 1, and one that is replaced by at most Δ = 2, reached by
    opposite vectors. N is the *declared* number of records, never their count. It is one Gaussian
    mechanism of multiplier z under `relation`; charge it under the same one, before training:
    `Trainer(prelude=(event,))`. With a `ledger`, whose current run planned for it, it is claimed
    there before a record is read. Noise comes from the operating system unless `seed`
    is given; then it is not private against whoever knows the seed.
    """
    relation = Relation(relation)
    check_release(noise_multiplier, public_size)
    claim = claimed(noise_multiplier, relation, _WHAT, ledger)
    total = sum_on_sphere(inputs)
    std = noise_multiplier * sensitivity(relation)
    centre = noisy_sum(total, std, seed, claim.words).div_(public_size)
    origin = f"released with Gaussian noise of multiplier {noise_multiplier:g} ({relation})"
    if seed is not None:
        origin += SEEDED
    return (
        Centre(centre.reshape(inputs.shape[1:]).float(), origin),
        claim.release(centre),
    )


def sensitivity(relation: Relation) -> float:
    """The L2 sensitivity of `sum_on_sphere`."""
    return 1.0 if relation is Relation.ADD_OR_REMOVE_ONE else 2.0


def sum_on_sphere(inputs: Tensor) -> Tensor:
    """Σ_i x_i/‖x_i‖ in float64, *without* noise: private, never to be shown."""
    total = torch.zeros(math.prod(inputs.shape[1:]), dtype=torch.float64)
    for chunk in inputs.flatten(1).split(_CHUNK) if len(inputs) else ():
        total += on_sphere(chunk.double()).sum(dim=0).cpu()
    return total
