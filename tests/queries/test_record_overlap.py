"""Which sets are private records: by memory, by ids within one origin, and by contents."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tacit
from tacit.errors import NotPublic
from tacit.queries import record_overlap
from tacit.queries.record_overlap import require_held_out, require_public, share_among


def made(count=200, seed=0, **more):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return tacit.Records(inputs, (inputs[:, 0] > 0).long(), **more)


PRIVATE = made()


def refused(public, private=PRIVATE):
    with pytest.raises(NotPublic):
        require_public(public, private)


def test_sets_that_were_made_apart_are_told_apart():
    """Both are called "records" and have rows 0, 1, 2, …"""
    public = made(seed=1)
    assert public.name == PRIVATE.name
    assert torch.equal(public.record_ids, PRIVATE.record_ids)
    require_public(public, PRIVATE)
    require_held_out(public, PRIVATE)


def test_row_numbers_name_records_of_one_origin():
    for same in (
        PRIVATE,
        PRIVATE.take(slice(5)),
        copy.deepcopy(PRIVATE).take(torch.arange(7)),
        pickle.loads(pickle.dumps(PRIVATE)),
        PRIVATE.replaced(3, torch.zeros(4), 0),
        tacit.Records(PRIVATE.inputs * 2 + 1, PRIVATE.targets, origin=PRIVATE.origin),
    ):
        refused(same)
    require_public(PRIVATE.take(slice(50)), PRIVATE.take(slice(50, None)))


def test_ids_that_were_given_name_records_under_one_name():
    ids = torch.arange(200)
    private, public = made(record_ids=ids), made(seed=1, record_ids=ids)
    refused(public, private)
    require_public(made(seed=1, record_ids=ids, name="elsewhere"), private)
    require_public(made(seed=1, record_ids=ids + 1000), private)


@pytest.mark.parametrize(
    "change",
    [
        torch.clone,
        torch.Tensor.double,
        lambda x: x.double().numpy(),
        lambda x: x[torch.randperm(len(x))],
        lambda x: x[60:].clone(),
        lambda x: torch.cat([x[:60], torch.randn(30, 4)]),
    ],
)
def test_copies_are_refused_in_any_type_and_order(change):
    inputs = change(PRIVATE.inputs)
    refused(tacit.Records(inputs, torch.zeros(len(inputs))))


def test_equal_rows_of_two_sets_pass_while_they_are_few():
    some = torch.cat([made(seed=1).inputs, PRIVATE.inputs[:40]])
    public = tacit.Records(some, torch.zeros(len(some)))
    require_public(public, PRIVATE)
    assert 0 < share_among(public, PRIVATE) < 0.5


def test_nan_zero_and_minus_zero_are_equal_to_themselves():
    inputs = PRIVATE.inputs.clone()
    inputs[:, 1], inputs[:, 2] = torch.nan, 0.0
    inputs[::3, 3] = torch.inf
    private = tacit.Records(inputs, PRIVATE.targets)
    changed = inputs.clone()
    changed[:, 2] = -0.0
    assert share_among(tacit.Records(changed), private) == 1.0
    assert share_among(tacit.Records(-changed.nan_to_num(5.0)), private) == 0.0


def test_one_input_may_be_of_two_classes():
    other = tacit.Records(PRIVATE.inputs.clone(), 1 - PRIVATE.targets)
    require_held_out(other, PRIVATE)
    with pytest.raises(NotPublic):
        require_held_out(tacit.Records(PRIVATE.inputs.clone(), PRIVATE.targets), PRIVATE)


def test_trees_and_whole_numbers_are_compared():
    ids = torch.randint(0, 30_000, (100, 12), generator=torch.Generator().manual_seed(0))
    private = tacit.Records({"ids": ids, "mask": ids > 9}, ids)
    same = tacit.Records({"ids": ids.int(), "mask": (ids > 9).long()}, ids)
    assert share_among(same, private) == 1.0
    other = tacit.Records({"ids": ids + 1, "mask": ids > 9}, ids)
    assert share_among(other, private) == 0.0


class Counted:
    """A large source that counts how many rows are read."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.read = x, y, 0

    def __len__(self) -> int:
        return len(self.x)

    def read_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += len(rows)
        return self.x[rows], self.y[rows]


@pytest.fixture
def large(monkeypatch) -> tuple[tacit.Records, Counted]:
    """Private records on disk that are too large to be read for a comparison."""
    monkeypatch.setattr(record_overlap, "_MOST_BYTES_READ", 1000)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, 4, generator=generator)
    source = Counted(x, torch.arange(5000) % 3)
    records = tacit.Records.lazy(source, public_size=5000, num_classes=3, prefetch=0)
    source.read = 0
    return records, source


COPIES = {
    "a copy": slice(None),
    "in another order": torch.randperm(5000, generator=torch.Generator().manual_seed(1)),
    "the first": slice(0, 700),
    "the last": slice(4600, None),
    "two thirds of them": torch.randperm(5000, generator=torch.Generator().manual_seed(2))[:3500],
}


# Of rows that are read lazily only those in the same places, and at the ends, are compared.
FOUND = [(which, False) for which in COPIES]
FOUND += [(which, True) for which in ("a copy", "the first", "the last")]


@pytest.mark.parametrize(("which", "lazily"), FOUND)
def test_copies_of_records_that_are_too_large_to_be_read(which, lazily, large) -> None:
    private, source = large
    x, y = source.x[COPIES[which]].clone(), source.y[COPIES[which]].clone()
    copied = tacit.Records(x, y, 3, name="held out")
    if lazily:
        copied = tacit.Records.lazy(Counted(x, y), num_classes=3, name="held out")
    with pytest.raises(NotPublic, match="are among the training records"):
        record_overlap.require_held_out(copied, private)
    with pytest.raises(NotPublic, match="are among the private ones"):
        record_overlap.require_public(copied, private)
    assert source.read <= 2 * 256  # 256 rows of each check


@pytest.mark.parametrize("lazily", [False, True])
def test_others_pass_beside_records_that_are_too_large(lazily, large) -> None:
    private, source = large
    x = torch.randn(3000, 4)
    x[:900] = source.x[1000:1900]  # some duplicates
    y = torch.arange(3000) % 3
    for inputs, targets in ((x, y), (source.x.clone(), (source.y + 1) % 3)):
        held_out = tacit.Records(inputs, targets, 3, name="held out")
        if lazily:
            held_out = tacit.Records.lazy(Counted(inputs, targets), num_classes=3, name="held out")
        record_overlap.require_held_out(held_out, private)
    assert source.read <= 2 * 256
