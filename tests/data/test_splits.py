"""`split_public`: who is public depends on ids alone, and the declared sizes follow the records."""

from __future__ import annotations

import pytest
import torch

import tacit
from tacit import MiniSetSampler, Records, split_public
from tacit.errors import UndeclaredConstant


def records(ids: list[int], num_ids: int, declared: int) -> Records:
    return Records(
        torch.arange(len(ids)).float()[:, None],
        torch.zeros(len(ids)).long(),
        num_classes=2,
        record_ids=torch.tensor(ids),
        num_ids=num_ids,
        public_size=declared,
    )


def test_without_gaps_the_sizes_are_exact() -> None:
    public, private = split_public(records(list(range(200)), 200, 200), 0.1)
    assert (len(public), public.public_size, public.num_ids) == (20, 20, 20)
    assert (len(private), private.public_size, private.num_ids) == (180, 180, 180)
    assert sorted(private.record_ids.tolist()) == list(range(180))
    assert private.notes[-1].startswith("20 of 200 records")


def test_with_gaps_the_declared_size_is_of_records_and_not_of_ids() -> None:
    """Every second id: a rate or a mean by the number of ids would be half of what it should."""
    public, private = split_public(records(list(range(0, 2000, 2)), 2000, 1000), 0.1)
    assert (public.public_size, private.public_size) == (100, 900)
    assert (public.num_ids, private.num_ids) == (200, 1800)
    assert abs(len(private) - 900) < 30
    assert private.notes[-1].startswith("about 100 of 1000 records")


@pytest.mark.parametrize("gone", [0, 7, 99])
def test_a_missing_record_moves_nobody_and_changes_no_constant(gone: int) -> None:
    whole = records(list(range(100)), 100, 100)
    for before, after in zip(
        split_public(whole, 0.3), split_public(whole.without(gone), 0.3), strict=True
    ):
        assert (before.public_size, before.num_ids) == (after.public_size, after.num_ids)
        held = dict(zip(before.inputs.flatten().tolist(), before.record_ids.tolist(), strict=True))
        for x, number in zip(after.inputs.flatten().tolist(), after.record_ids, strict=True):
            assert held[x] == number


def test_an_official_split_has_ids_without_gaps(real_data) -> None:
    """Mini-sets of 64 of nine tenths of MNIST are 844, as in the paper; not 985, not full."""
    train, test = tacit.load("mnist", scale=None)
    assert train.num_ids == 60_000
    _, private = split_public(train, 0.1)
    assert (len(private), private.public_size) == (54_000, 54_000)
    assert MiniSetSampler(private, 64, chosen=1).scheme.num_sets == 844
    assert test.num_ids == 70_000
    assert int(test.record_ids.max()) < 70_000


def test_digits_keep_their_gaps() -> None:
    train, _ = tacit.load("digits")
    assert train.num_ids == 1797
    public, private = split_public(train, 0.1)
    assert abs(len(private) - (private.public_size or 0)) < 20
    assert len(public) + len(private) == len(train)


def test_ids_past_what_was_declared_are_named() -> None:
    with pytest.raises(UndeclaredConstant, match=r"reach 9, .* below 5"):
        split_public(records([0, 9], 5, 5), 0.5)
