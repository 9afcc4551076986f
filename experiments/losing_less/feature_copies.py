"""Features of several shifted and mirrored copies of each image, as views of one record.

Scattering features cannot be shifted by single pixels once they are made, and making them in every
step is slow. So each training image has V copies, whose features are made once and kept as a table;
a record is its row's number, and a view of it one of its copies, drawn in each step. A row of the
table holds one record alone, and its gradient is the mean over its views before it is clipped, so
copies cost no privacy.  [De 2022 for pixels]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit import RandomCropFlip, Records

BY_A_PIXEL = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
SHIFT = {"mnist": 2, "fashion-mnist": 2, "cifar10": 4}
MIRRORED = {"mnist": False, "fashion-mnist": True, "cifar10": True}


@dataclass(frozen=True)
class DrawnCopy:
    """Numbers of records, (B, 1), to features of one of the copies of each, (B, …)."""

    table_NV: Tensor

    def __call__(self, numbers: Tensor) -> Tensor:
        rows = numbers[:, 0]
        copies = torch.randint(self.table_NV.shape[1], rows.shape, device=rows.device)
        return self.table_NV[rows, copies].float()


@dataclass(frozen=True)
class EveryCopy:
    """The same with as many views as copies: each copy once, in the order of the table.

    Rows iV … iV + V − 1 are the views of one record (`tacit.data.Augmentation`), so a row's place
    modulo V is its copy whichever records are in the batch.
    """

    table_NV: Tensor

    def __call__(self, numbers: Tensor) -> Tensor:
        rows = numbers[:, 0]
        copies = torch.arange(len(rows), device=rows.device) % self.table_NV.shape[1]
        return self.table_NV[rows, copies].float()


def table_of(
    records: Records, name: str, copies: int, featured: Callable[[Records], Records]
) -> Tensor:
    """(N, V, …) in half precision. The first copy is the image as it is; the others are drawn.

    Two copies are the image and its mirror image, where that is natural; five of an image that has
    none are itself and four that are moved by a pixel.
    """
    known: list[Tensor] = []
    if copies == 2 and MIRRORED[name]:
        known = [records.inputs, records.inputs.flip(-1)]
    elif copies == len(BY_A_PIXEL) and not MIRRORED[name]:
        known = [moved_by(records.inputs, down, right) for down, right in BY_A_PIXEL]
    if known:
        sides = [featured(replace(records, inputs=side)).inputs.half() for side in known]
        return torch.stack(sides, dim=1)
    crop = RandomCropFlip(SHIFT[name], flip=MIRRORED[name])
    found = [featured(records).inputs.half()]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        for _ in range(copies - 1):
            moved = torch.cat([crop(part) for part in records.inputs.split(4096)])
            found.append(featured(replace(records, inputs=moved)).inputs.half())
    return torch.stack(found, dim=1)


def moved_by(images: Tensor, down: int, right: int) -> Tensor:
    """Images moved; what leaves on one side comes in on the other.

    For digits that is background: one of 74 in MNIST has ink in its outermost rows and columns.
    """
    return images.roll((down, right), dims=(-2, -1))


def numbered(records: Records) -> Records:
    """The same records, each given by its number."""
    numbers = torch.arange(len(records), device=records.device)[:, None]
    return replace(records, inputs=numbers)
