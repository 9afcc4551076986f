"""A copied sampler does not repeat its draws: they would not be independent samples."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tacit

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda sampler: pickle.loads(pickle.dumps(sampler)),
}
DATA = (torch.arange(64.0)[:, None], torch.zeros(64, dtype=torch.long))
SAMPLERS = {
    "Poisson": lambda **more: tacit.PoissonSampler(
        DATA, sampling_rate=0.5, expected_batch_size=32, steps=9, **more
    ),
    "fixed size": lambda **more: tacit.FixedSizeSampler(DATA, batch_size=32, steps=9, **more),
    "shuffled": lambda **more: tacit.ShuffleSampler(DATA, batch_size=16, steps=9, **more),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_copy_draws_for_itself(name, copied):
    sampler = SAMPLERS[name]()
    first = sampler.next_batch()
    other = COPIES[copied](sampler)
    drawn = [(sampler.next_batch(), other.next_batch()) for _ in range(3)]
    assert any(not torch.equal(a.indices, b.indices) for a, b in drawn)
    if name == "shuffled":
        assert first.epoch == drawn[0][0].epoch != drawn[0][1].epoch


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_copy_of_a_seeded_sampler_is_refused(name, copied):
    with pytest.raises(TypeError, match="would repeat its batches"):
        COPIES[copied](SAMPLERS[name](seed=3))
