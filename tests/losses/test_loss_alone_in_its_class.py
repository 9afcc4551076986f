"""One record alone in its class: where losses that count classes lose their constant."""

from __future__ import annotations

import pytest
import torch
from loss_cases import CASES, IDS, outputs_for, targets_for

from tacit.losses import HingeKantorovichRubinstein, KantorovichRubinstein

torch.set_num_threads(1)
B, K = 64, 10


def share_of_the_first(loss, outputs, targets):
    """The first record's row of ∇ of the loss summed over records."""
    leaf = outputs.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(len(outputs) * loss(leaf, targets), leaf)
    return found[0]


def counted(outputs, targets):
    """The published loss, its priors counted in the batch."""
    one_hot = torch.nn.functional.one_hot(targets, K).to(outputs.dtype)
    ones = one_hot / one_hot.sum(dim=0).clamp_min(1)
    rest = (1 - one_hot) / (1 - one_hot).sum(dim=0).clamp_min(1)
    return -((ones - rest) * outputs).sum(dim=0).mean()


@pytest.mark.parametrize(
    "loss", [KantorovichRubinstein(), HingeKantorovichRubinstein(2.0, 1.0)], ids=str
)
def test_its_gradient_does_not_know_the_others(loss):
    outputs = outputs_for(K, B)
    alone = torch.zeros(B, dtype=torch.long)
    alone[1:] = 1 + torch.arange(B - 1) % (K - 1)
    crowded = torch.zeros(B, dtype=torch.long)
    for targets in (alone, crowded):
        found = share_of_the_first(loss, outputs, targets)
        expected = share_of_the_first(loss, outputs[:1], targets[:1])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert found.norm() <= loss.lipschitz_for(K) * (1 + 1e-12)


def test_the_published_loss_breaks_its_bound_there():
    """Why ours has fixed priors."""
    alone = torch.zeros(B, dtype=torch.long)
    alone[1:] = 1 + torch.arange(B - 1) % (K - 1)
    found = share_of_the_first(counted, outputs_for(K, B), alone)
    assert found.norm() > 6


@pytest.mark.parametrize(("loss", "num_outputs"), CASES, ids=IDS)
def test_no_loss_lets_one_record_move_another_s_gradient(loss, num_outputs):
    outputs, targets = outputs_for(num_outputs, 12), targets_for(loss, num_outputs, 12)
    before = share_of_the_first(loss, outputs, targets)
    outputs[1:] = 1e3 * outputs_for(num_outputs, 11, seed=7)
    targets[1:] = targets_for(loss, num_outputs, 11, seed=8)
    torch.testing.assert_close(share_of_the_first(loss, outputs, targets), before)
