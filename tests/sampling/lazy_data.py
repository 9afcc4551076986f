"""The same records in memory and read when they are needed, in every form."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import Dataset

from tacit import Records

N = 40
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(4 * N).view(N, 4)
Y = torch.arange(N) % 3


class Items(Dataset):
    """A map-style dataset of whatever `item` makes of a row."""

    def __init__(self, item: Callable[[int], object], size: int = N) -> None:
        self.item, self.size = item, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> object:
        return self.item(row)


def pair(row: int) -> tuple:
    return X[row], int(Y[row])


def as_dict(row: int) -> dict:
    return {"input_ids": IDS[row].tolist(), "x": X[row].numpy(), "labels": int(Y[row])}


def triple(row: int) -> tuple:
    return X[row], IDS[row], Y[row]


def encoding(row: int):
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": IDS[row], "x": X[row], "labels": Y[row]})


def alone(row: int) -> torch.Tensor:
    return X[row]


class Rows:
    """A source of a user's own, of arrays."""

    def __len__(self) -> int:
        return N

    def read_rows(self, rows: torch.Tensor) -> dict:
        return {"input_ids": IDS[rows].numpy(), "x": X[rows].numpy(), "label": Y[rows].numpy()}


TREE = {"input_ids": IDS, "x": X}
DATASETS = {
    "pair": (pair, (X, Y)),
    "dict": (as_dict, (TREE, Y)),
    "triple": (triple, ((X, IDS), Y)),
    "encoding": (encoding, (TREE, Y)),
    "alone": (alone, (X, ())),
}


def mapped(folder) -> Records:
    np.save(folder / "x.npy", X.numpy())
    np.save(folder / "ids.npy", IDS.numpy())
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "ids")}
    return Records({"input_ids": arrays["ids"], "x": arrays["x"]}, Y, public_size=N)


def lazy_and_in_memory(form: str, folder) -> tuple[Records, Records]:
    declared = {"public_size": N, "num_classes": 3}
    if form in DATASETS:
        item, (inputs, targets) = DATASETS[form]
        return Records.lazy(Items(item), **declared), Records(inputs, targets, **declared)
    whole = Records(TREE, Y, **declared)
    if form == "mapped":
        return mapped(folder), whole
    if form == "source":
        return Records.lazy(Rows(), **declared), whole
    return Records.lazy((TREE, Y), **declared), whole  # tensors


FORMS = [*DATASETS, "mapped", "source", "tensors"]
