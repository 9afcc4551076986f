"""Records and batches: the plain values that flow through the pipe."""

from __future__ import annotations

import pytest
import torch

from tacit import Batch, Records
from tacit.errors import UndeclaredConstant
from tacit.sampling import Poisson, batch_of


def some_records(n=6) -> Records:
    return Records(torch.arange(2.0 * n).view(n, 2), torch.arange(n), public_size=n)


@pytest.mark.parametrize("index", [0, 3, 5])
def test_without_a_record_the_others_keep_everything(index):
    records = some_records()
    fewer = records.without(index)
    others = [i for i in range(6) if i != index]
    assert fewer.record_ids.tolist() == others
    assert torch.equal(fewer.inputs, records.inputs[others])
    assert torch.equal(fewer.targets, records.targets[others])
    assert fewer.public_size == records.public_size
    assert len(records) == 6


def test_ids_outlive_a_second_removal():
    assert some_records().without(1).without(1).record_ids.tolist() == [0, 3, 4, 5]


def test_a_replaced_record_has_the_same_id_and_leaves_the_original_alone():
    records = some_records()
    other = records.replaced(2, torch.tensor([9.0, 9.0]), 7)
    assert other.record_ids.tolist() == records.record_ids.tolist()
    assert other.inputs[2].tolist() == [9.0, 9.0]
    assert other.targets[2] == 7
    assert records.inputs[2].tolist() == [4.0, 5.0]
    changed = [i for i in range(6) if not torch.equal(other.inputs[i], records.inputs[i])]
    assert changed == [2]


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one target per record"):
        Records(torch.zeros(3, 1), torch.zeros(2))
    with pytest.raises(ValueError, match="one id per record"):
        Records(torch.zeros(3, 1), torch.zeros(3), record_ids=torch.arange(2))


def test_an_undeclared_size_says_how_to_declare_it():
    with pytest.raises(UndeclaredConstant, match="public_size=N"):
        Records(torch.zeros(3, 1), torch.zeros(3)).require_public_size("a rate")


@pytest.mark.parametrize("max_physical", [1, 2, 3, 4, 100, None])
def test_pieces_are_the_batch_in_order(max_physical):
    indices = torch.tensor([5, 0, 3, 1, 4])
    batch = Batch(
        some_records(),
        indices,
        divisor=2.5,
        scheme=Poisson(0.5),
        mask=torch.tensor([True, False, True, True, False]),
        groups=torch.tensor([2, 0, 1, 0, 2]),
        max_physical=max_physical,
    )
    pieces = list(batch.physical())
    assert all(len(piece) <= (max_physical or 5) for piece in pieces)
    assert all(piece.divisor == 2.5 for piece in pieces)
    for column in ("indices", "inputs", "targets", "record_ids", "mask", "groups"):
        joined = torch.cat([getattr(piece, column) for piece in pieces])
        assert torch.equal(joined, getattr(batch, column))


def test_a_batch_of_nobody_has_no_pieces():
    assert not list(
        batch_of(torch.zeros(0, 2), torch.zeros(0), divisor=1, scheme=Poisson(1)).physical()
    )


def test_a_batch_of_tensors_keeps_its_declared_divisor():
    batch = batch_of(torch.zeros(4, 2), torch.zeros(4), divisor=64.0, scheme=Poisson(0.1))
    assert batch.divisor == 64.0
    assert len(batch) == 4
