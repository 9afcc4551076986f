"""A dataset as tensors, with the constants about it that are public."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tacit.errors import UndeclaredConstant


@dataclass(frozen=True)
class Records:
    """Inputs and targets, one row a record, and what may be said of them in public.

    `record_ids` name the records independently of who else is in the dataset: a neighbour that
    lacks a record keeps the ids of all the others. `public_size` is a *declared* number of
    records, from which rates and divisors may be derived; `len(records)` is private and is
    never used for either. Ids are below `num_ids`, by default below `public_size`.
    """

    inputs: Tensor
    targets: Tensor
    num_classes: int | None = None
    public_size: int | None = None
    name: str = "records"
    record_ids: Tensor = field(default=None)  # type: ignore[assignment]
    num_ids: int | None = None
    notes: tuple[str, ...] = ()
    row_numbered: bool = False  # no ids were given, so they are the rows' numbers

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise ValueError(
                f"{len(self.inputs)} inputs and {len(self.targets)} targets; "
                "give one target a record"
            )
        if self.record_ids is None:
            ids = torch.arange(len(self.inputs), device=self.inputs.device)
            object.__setattr__(self, "record_ids", ids)
            object.__setattr__(self, "row_numbered", True)
        elif len(self.record_ids) != len(self.inputs):
            raise ValueError(
                f"{len(self.inputs)} inputs and {len(self.record_ids)} record ids; "
                "give one id a record"
            )
        if self.public_size is not None and self.public_size < 1:
            raise ValueError(f"public_size is {self.public_size}; declare a positive number")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record's input."""
        return tuple(self.inputs.shape[1:])

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def to(self, device: torch.device | str) -> Records:
        return replace(
            self,
            inputs=self.inputs.to(device),
            targets=self.targets.to(device),
            record_ids=self.record_ids.to(device),
        )

    def without(self, index: int) -> Records:
        """The neighbour that lacks the record at `index`; everyone else keeps their id."""
        keep = torch.ones(len(self), dtype=torch.bool, device=self.device)
        keep[index] = False
        return replace(
            self,
            inputs=self.inputs[keep],
            targets=self.targets[keep],
            record_ids=self.record_ids[keep],
        )

    def replaced(self, index: int, x: Tensor, y: Tensor | int | float) -> Records:
        """The neighbour whose record at `index` is (x, y) instead, under the same id."""
        inputs, targets = self.inputs.clone(), self.targets.clone()
        inputs[index] = x
        targets[index] = y
        return replace(self, inputs=inputs, targets=targets)

    def require_public_size(self, wanted_for: str) -> int:
        """The declared size, or an error that says how to declare it."""
        if self.public_size is None:
            raise UndeclaredConstant(
                f"{wanted_for} needs the number of records, which is private for {self.name!r}; "
                "declare it with Records(..., public_size=N), or give both sampling_rate and "
                "expected_batch_size"
            )
        return self.public_size


def as_records(data: object) -> Records:
    """`data` as `Records`: itself, a pair of tensors or arrays, or a map-style torch dataset.

    A map-style dataset is read into memory once, so that a step never loops over records.
    """
    if isinstance(data, Records):
        return data
    if isinstance(data, torch.utils.data.TensorDataset) and len(data.tensors) == 2:
        return Records(*data.tensors)
    if isinstance(data, Sequence) and len(data) == 2:
        inputs, targets = data
        return Records(_as_tensor(inputs), _as_tensor(targets))
    if isinstance(data, torch.utils.data.Dataset) and hasattr(data, "__len__"):
        rows = [data[i] for i in range(len(data))]
        inputs = torch.stack([torch.as_tensor(x) for x, _ in rows])
        targets = torch.stack([torch.as_tensor(y) for _, y in rows])
        return Records(inputs, targets)
    raise TypeError(
        f"cannot read records from {type(data).__name__}; give tacit.Records, a pair "
        "(inputs, targets) of tensors or arrays, or a map-style torch dataset"
    )


def _as_tensor(array: object) -> Tensor:
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(np.ascontiguousarray(array))
