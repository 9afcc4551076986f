"""Features that the linear models of `beyond` use: several kinds side by side, several copies.

**Mixed**, as in `mixed:scattering=0.5,log=0.3,pixels=0.2`: x ↦ (√w₁·u₁ | … | √w_K·u_K), u_k the
k-th kind on the unit sphere and Σ w_k = 1. The whole has norm 1, so one release of its mean has the
sensitivity of any other on the sphere. The mean's parts are then subtracted from each kind on its
own and each is put back on its sphere: what is left of one kind may be a tenth of it (logarithms
have a mean of norm 0.996) and of another nearly all.

**Copies.** Scattering features cannot be shifted by single pixels once they are made, and making
them in every step is slow. So each training image has V shifted and mirrored copies, whose features
are made once and kept as a table; a record is the number of its row, and a view of it one of its
copies. A row of the table holds one record alone, and its gradient is the mean over its views
before it is clipped, so copies cost no privacy.  [De 2022 for pixels]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.images import featured
from tacit import RandomCropFlip, Records
from tacit.data.private_scaling import Centre
from tacit.data.scaling import unit_rows

BY_A_PIXEL = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
SHIFT = {"mnist": 2, "fashion-mnist": 2, "cifar10": 4}
MIRRORED = {"mnist": False, "fashion-mnist": True, "cifar10": True}


def features_of(records: Records, features: str, device: str) -> Records:
    """One kind of features, or several kinds side by side, flat."""
    if not features.startswith("mixed:"):
        return featured(records, features, device)
    kinds = []
    for kind, share in shares_of(features).items():
        part = featured(records, kind, device).inputs.flatten(1)
        kinds.append(torch.cat([math.sqrt(share) * unit_rows(p) for p in part.split(4096)]))
    whole = torch.cat(kinds, dim=1)
    return replace(records.to(whole.device), inputs=whole)


def shares_of(features: str) -> dict[str, float]:
    """{"log": 0.3, …} of "mixed:log=0.3,…"."""
    pairs = (part.split("=") for part in features.removeprefix("mixed:").split(","))
    shares = {kind: float(share) for kind, share in pairs}
    if min(shares.values()) <= 0 or not math.isclose(sum(shares.values()), 1.0):
        raise ValueError(f"shares are {shares}; give positive ones with a sum of 1")
    return shares


def widths_of(features: str, shape: Sequence[int]) -> list[int]:
    """How many numbers each kind has for images of this shape."""
    blank = Records(torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long))
    return [featured(blank, kind, "cpu").inputs[0].numel() for kind in shares_of(features)]


@dataclass(frozen=True)
class CentreOfEach:
    """A released centre, applied to each kind of mixed features on its own."""

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


@dataclass(frozen=True)
class CopyViews:
    """Numbers of records, (B, 1), to features of a copy of each, (B, …).

    The copy is drawn. With `every_copy`, there are as many views as copies, and each copy is used
    once: rows iV … iV + V − 1 are the views of one record (`tacit.data.Augmentation`), so a
    row's place modulo V is its copy, whichever records are in the batch.
    """

    table_NV: Tensor
    every_copy: bool = False

    def __call__(self, numbers: Tensor) -> Tensor:
        rows, V = numbers[:, 0], self.table_NV.shape[1]
        if self.every_copy:
            copies = torch.arange(len(rows), device=rows.device) % V
        else:
            copies = torch.randint(V, rows.shape, device=rows.device)
        return self.table_NV[rows, copies].float()


def table_of(
    records: Records, name: str, copies: int, make: Callable[[Records], Records]
) -> Tensor:
    """(N, V, …) in half precision. The first copy is the image itself; the others are drawn.

    Two copies are the image and its mirror image where that is natural. Five copies of an image
    that has no natural mirror image are itself and four that are shifted by a pixel; what leaves on
    one side enters on the other. For digits that is background: one of 74 in MNIST has ink in
    its outermost rows and columns.
    """
    images = records.inputs
    if copies == 2 and MIRRORED[name]:
        versions = [images, images.flip(-1)]
    elif copies == len(BY_A_PIXEL) and not MIRRORED[name]:
        versions = [images.roll(moves, dims=(-2, -1)) for moves in BY_A_PIXEL]
    else:
        crop = RandomCropFlip(SHIFT[name], flip=MIRRORED[name])
        versions = [images]
        with torch.random.fork_rng():
            torch.manual_seed(11)
            for _ in range(copies - 1):
                versions.append(torch.cat([crop(part) for part in images.split(4096)]))
    return torch.stack([make(replace(records, inputs=v)).inputs.half() for v in versions], dim=1)


def numbered(records: Records) -> Records:
    """The same records, each given by its number."""
    numbers = torch.arange(len(records), device=records.device)[:, None]
    return replace(records, inputs=numbers)
