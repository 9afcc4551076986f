"""Shuffled epochs: every record exactly once an epoch, in an order that is new each time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from participation import SIGMAS, deviations, participation

from tacit import Records, ShuffleSampler


def sampler(num, size, **kw) -> ShuffleSampler:
    return ShuffleSampler(Records(torch.zeros(num, 1), torch.zeros(num)), size, **kw)


@pytest.mark.parametrize(("num", "size"), [(12, 4), (13, 4), (13, 13), (13, 1)])
def test_everyone_once_an_epoch(num, size):
    steps = -(-num // size)
    epochs, took_part = 5, participation(sampler(num, size, seed=0), 5 * steps)
    assert (took_part.reshape(epochs, steps, num).sum(axis=1) == 1).all()


def test_all_batches_but_the_last_of_an_epoch_are_full():
    sizes = participation(sampler(13, 4, seed=0), 8).sum(axis=1)
    assert sizes.tolist() == [4, 4, 4, 1] * 2


def test_a_record_is_equally_likely_in_every_place():
    num, size, epochs = 10, 2, 8000
    took_part = participation(sampler(num, size, seed=0), epochs * 5).reshape(epochs, 5, num)
    rate = size / num
    std = np.sqrt(rate * (1 - rate) / epochs)
    assert max(deviations(m, rate, std) for m in took_part.mean(axis=0).reshape(-1)) < SIGMAS


def test_epochs_are_shuffled_anew():
    took_part = participation(sampler(40, 10, seed=0), 8)
    assert not np.array_equal(took_part[:4], took_part[4:])


@pytest.mark.parametrize("size", [0, 11])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match="sample"):
        sampler(10, size)
