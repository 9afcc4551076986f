"""Several kinds of features of one record side by side, each with its share of the norm.

    mixed:scattering=0.5,log=0.3,pixels=0.2

x ↦ (√w₁·u₁ | … | √w_K·u_K), u_k the k-th features on the unit sphere and Σ w_k = 1, so that the
whole has norm 1: one release of its mean has the sensitivity of any other on the sphere. The mean's
parts are then subtracted from each kind on its own, and each is put back on its sphere, since what
is left of one kind may be a tenth of it (logarithms have a mean of norm 0.996) and of another
nearly all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import Records
from tacit.data.private_scaling import Centre
from tacit.data.scaling import unit_rows

Make = Callable[[Records, str], Records]


def shares_of(features: str) -> dict[str, float]:
    """{"log": 0.3, …} of "mixed:log=0.3,…"."""
    pairs = (part.split("=") for part in features.removeprefix("mixed:").split(","))
    shares = {kind: float(share) for kind, share in pairs}
    total = sum(shares.values())
    if min(shares.values()) <= 0 or not math.isclose(total, 1.0):
        raise ValueError(f"shares are {shares}; give positive ones with a sum of 1")
    return shares


def mixed(records: Records, features: str, make: Make) -> Records:
    """The records' kinds of features side by side, flat; `make` gives one kind."""
    found = []
    for kind, share in shares_of(features).items():
        part = make(records, kind).inputs.flatten(1)
        found.append(torch.cat([math.sqrt(share) * unit_rows(p) for p in part.split(4096)]))
    whole = torch.cat(found, dim=1)
    return replace(records.to(whole.device), inputs=whole)


def widths_of(features: str, shape: Sequence[int], make: Make) -> list[int]:
    """How many numbers each kind has for images of this shape."""
    blank = Records(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))
    return [make(blank, kind).inputs[0].numel() for kind in shares_of(features)]


@dataclass(frozen=True)
class CentreOfEach:
    """A released centre, applied to each kind of features on its own."""

    centre: Centre
    features: str
    widths: Sequence[int]

    def __call__(self, inputs: Tensor) -> Tensor:
        roots = [math.sqrt(share) for share in shares_of(self.features).values()]
        centres = self.centre.centre.flatten().split(list(self.widths))
        parts = inputs.flatten(1).split(list(self.widths), dim=1)
        moved = [
            root * Centre(centre / root, self.centre.origin)(part)
            for root, centre, part in zip(roots, centres, parts, strict=True)
        ]
        return torch.cat(moved, dim=1)
