"""Samplers draw what their schemes say; those that do not are caught."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import dp_accounting
import numpy as np
import pytest
import torch
from setups import records

import tacit
from tacit import (
    FixedSizeSampler,
    MiniSetSampler,
    PoissonSampler,
    Records,
    ShuffleSampler,
    auditing,
)
from tacit.sampling import Poisson, Scheme, ShuffledEpochs, Unit

HONEST = {
    "poisson": partial(PoissonSampler, expected_batch_size=12),
    "padded": partial(PoissonSampler, expected_batch_size=12, padded=True),
    "everybody": partial(PoissonSampler, sampling_rate=1.0),
    "capped": partial(PoissonSampler, expected_batch_size=12, max_batch_size=16),
    "hardly capped": partial(PoissonSampler, expected_batch_size=6, max_batch_size=46),
    "fixed": partial(FixedSizeSampler, batch_size=12),
    "shuffled": partial(ShuffleSampler, batch_size=10),
    "sets": partial(MiniSetSampler, set_size=4, chosen=3),
    "sets by coins": partial(MiniSetSampler, set_size=4, rate=0.2),
}


@pytest.mark.parametrize("name", HONEST)
def test_every_sampler_draws_what_it_declares(name):
    assert auditing.check_sampler(HONEST[name], records()).require().largest < 1


class Planted(FixedSizeSampler):
    def __init__(self, data, steps=1, **options):
        super().__init__(data, 12, steps, **options)


class FixedAsPoisson(Planted):
    """As many as expected, always: the batch size gives it away."""

    def __init__(self, data, steps=1, **options):
        super().__init__(data, steps, **options)
        self.scheme = Poisson(12 / len(self.records))

    def draw(self, stream):
        return stream.subset(len(self.records), 12), None


class EveryOther(FixedAsPoisson):
    """Coins of pairs of records, not of records."""

    def draw(self, stream):
        return np.flatnonzero(stream.coins(24, self.scheme.rate).repeat(2)), None


class MoreOften(FixedAsPoisson):
    def draw(self, stream):
        return np.flatnonzero(stream.coins(48, 1.1 * self.scheme.rate)), None


class Favourite(FixedAsPoisson):
    def draw(self, stream):
        return np.union1d(np.flatnonzero(stream.coins(48, self.scheme.rate)), [7]), None


class SlidingWindow(Planted):
    """The next twelve rows, from a random place on."""

    def draw(self, stream):
        start = int(stream.words(1, np.uint64)[0] % 48)
        return (start + np.arange(12)) % 48, None

    def __init__(self, data, steps=1, **options):
        super().__init__(data, steps, **options)
        self.scheme = Poisson(12 / len(self.records))


class Twice(Planted):
    def draw(self, stream):
        rows = stream.subset(48, 12)
        return np.concatenate([rows, rows[:1]]), None


class Repeats(Planted):
    """A new pass draws the old batches."""

    def draw(self, stream):
        step = self._steps_drawn
        return tacit.randomness.Randomness(1).stream("x", step).subset(48, 12), None


class LongEpochs(ShuffleSampler):
    """Epochs of four steps that are charged as one event per eight."""

    def __init__(self, data, steps=1, **options):
        super().__init__(data, 12, steps, **options)
        self.scheme = ShuffledEpochs(8)

    def current_epoch(self):
        return self._shuffle, (self._epoch + 1) // 2


class ActualDivisor(PoissonSampler):
    def __init__(self, data, steps=1, **options):
        super().__init__(data, None, steps, expected_batch_size=12, **options)

    def next_batch(self):
        batch = super().next_batch()
        return replace(batch, divisor=float(max(1, len(batch))))


class ChangingSets(MiniSetSampler):
    def __init__(self, data, steps=1, **options):
        super().__init__(data, 4, steps, chosen=3, **options)

    def draw(self, stream):
        rows = stream.subset(48, 12)
        return rows, stream.derived("sets").subset(12, 3).repeat(4)


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        (FixedAsPoisson, "a batch has 12 ± 0 records"),
        (EveryOther, "a batch has"),
        (MoreOften, "records take part"),
        (Favourite, "a record takes part in 2048 times of 2048"),
        (SlidingWindow, "a batch has 12 ± 0 records"),
        (Twice, "draws one record twice"),
        (Repeats, "a second pass draws the batches of the first"),
        (LongEpochs, "a record takes part twice in a shuffled epoch"),
        (ActualDivisor, "the divisor is not one number"),
        (ChangingSets, "a record changes its mini-set"),
    ],
)
def test_planted_samplers_are_caught(planted, words):
    found = auditing.check_sampler(planted, records())
    assert words in "; ".join(found.faults)


def test_a_large_dataset_is_watched_in_part():
    many = Records(torch.zeros(20_000, 1), torch.zeros(20_000), public_size=20_000)
    sampler = partial(PoissonSampler, expected_batch_size=200)
    assert auditing.check_sampler(sampler, many, steps=300).holds
    shuffled = partial(ShuffleSampler, batch_size=200)
    assert auditing.check_sampler(shuffled, many, steps=300).holds


class OwnScheme(Scheme):
    """A distribution that the check does not know."""

    def step_event(self, noise_multiplier, unit=Unit.RECORD):
        return dp_accounting.GaussianDpEvent(noise_multiplier)

    def epochs(self, steps):
        return float(steps)

    def amplifies(self):
        return False

    def describe(self):
        return "anything"


class Own(Twice):
    def __init__(self, data, steps=1, **options):
        super().__init__(data, steps, **options)
        self.scheme = OwnScheme()


def test_of_an_unknown_scheme_only_what_holds_for_all_is_tested():
    class Once(Own):
        def draw(self, stream):
            return stream.subset(48, 12), None

    found = auditing.check_sampler(Once, records())
    assert found.holds
    assert "the distribution of OwnScheme is not known" in found.notes[0]
    assert not auditing.check_sampler(Own, records()).holds
