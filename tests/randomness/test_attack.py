"""A generator is recovered from one released gradient, and later gradients are read: or not.

An embedding's rows of tokens that no record has are known to have no gradient, so what is released
there is noise alone. Of a Mersenne Twister that tells the whole state. Of ours nothing follows.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from mersenne_attack import MersenneRandomness
from torch import nn

import tacit
from tacit.auditing.mersenne_twister import FORMATS, Inconsistent, predicted

UNUSED, WIDTH = 64, 16
KNOWN = UNUSED * WIDTH
USED = 4 * WIDTH


def released(mechanism_randomness=None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Two steps: what is released, in units of the noise, and the true gradient."""
    model = nn.Sequential(nn.Embedding(4 + UNUSED, WIDTH), nn.Flatten(), nn.Linear(WIDTH, 2))
    model = model.double()
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    tokens = torch.arange(32)[:, None] % 4
    data = tacit.Records(tokens, torch.arange(32) % 2, num_classes=2, public_size=32)
    sampler = tacit.PoissonSampler(data, 1.0, steps=2)
    query = tacit.PerSampleClip(1.0)
    mechanism = tacit.Mechanism(query, sampler, 4.0)
    if mechanism_randomness is not None:
        mechanism._randomness = mechanism_randomness
    ledger = tacit.Ledger(None, tacit.Budget(50.0, 1e-5))
    found = []
    for batch in sampler:
        loss = tacit.losses.CrossEntropy()
        true = query(model, loss, batch).blocks[0].sums[0].flatten().numpy()
        private = mechanism.privatise(model, loss, batch)
        ledger.release(private, into=model)
        gradient = model[0].weight.grad.flatten().numpy()
        found.append((gradient * sampler.expected_batch_size / private.stds[0], true))
    return found


def test_a_mersenne_twister_is_recovered_and_the_next_gradient_read():
    (first, _), (second, true) = released(MersenneRandomness(12345))
    noise = predicted(first[USED:], FORMATS[0], USED)  # the second step's, of the used tokens
    assert np.abs(true[:USED]).max() > 0.1
    assert np.abs((second[:USED] - noise) * 4.0 - true[:USED]).max() < 1e-6


def test_ours_is_not():
    (first, _), _ = released()
    with pytest.raises(Inconsistent):
        predicted(first[USED:], FORMATS[0], USED)
