"""The one place that reads private names of dp-accounting, checked against its public answers."""

from __future__ import annotations

from importlib.metadata import version

import dp_accounting as dpa
import numpy as np
import pytest
from tiny_run import ADD

from tacit.accounting.pld import masses, privacy_loss


def test_the_masses_give_the_same_delta():
    """A version that is not listed here may keep its masses elsewhere: run this test with it."""
    assert version("dp-accounting") in {"0.6.0"}
    event = dpa.PoissonSampledDpEvent(0.2, dpa.GaussianDpEvent(1.0))
    loss = privacy_loss(dpa.SelfComposedDpEvent(event, 5), ADD)
    assert len(masses(loss)) == 2
    for epsilon in (0.1, 0.5, 1.0):
        deltas = []
        for step, lowest, probs, infinity in masses(loss):
            losses = step * np.arange(lowest, lowest + len(probs))
            above = losses > epsilon
            deltas.append(infinity + np.sum(probs[above] * -np.expm1(epsilon - losses[above])))
        assert max(deltas) == pytest.approx(float(loss.get_delta_for_epsilon(epsilon)), rel=1e-9)
