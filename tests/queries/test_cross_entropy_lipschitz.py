"""Cross-entropy's constant √2/τ, attacked by gradient ascent on logits."""

from __future__ import annotations

import math

import pytest
import torch

from tacit.losses import CrossEntropy

torch.set_num_threads(1)


def gradient_norms(loss, logits_BK, targets_B, create_graph=False):
    """‖∇_h ℓ(h, y)‖ of each row on its own."""
    rows = zip(logits_BK, targets_B, strict=True)
    total = sum(loss(h.unsqueeze(0), y.unsqueeze(0)) for h, y in rows)
    (grads_BK,) = torch.autograd.grad(total, logits_BK, create_graph=create_graph)
    return grads_BK.norm(dim=1)


def largest_by_ascent(loss, num_classes, starts=8, steps=150):
    torch.manual_seed(0)
    logits = torch.randn(starts, num_classes, dtype=torch.float64) * loss.temperature
    logits.requires_grad_(True)
    targets = torch.arange(starts) % num_classes
    optimizer = torch.optim.Adam([logits], lr=0.3 * loss.temperature, maximize=True)
    largest = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        norms = gradient_norms(loss, logits, targets, create_graph=True)
        largest = max(largest, float(norms.max()))
        norms.sum().backward(inputs=[logits])
        optimizer.step()
    return largest


@pytest.mark.parametrize("temperature", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("num_classes", [2, 10])
def test_ascent_reaches_the_constant_and_never_passes_it(temperature, num_classes):
    loss = CrossEntropy(temperature=temperature)
    assert loss.lipschitz == math.sqrt(2) / temperature
    largest = largest_by_ascent(loss, num_classes)
    assert largest <= loss.lipschitz * (1 + 1e-12)
    assert largest >= 0.999 * loss.lipschitz


def test_huge_logits_do_not_pass_it():
    loss = CrossEntropy(temperature=0.1)
    logits = (1e8 * torch.randn(50, 10, dtype=torch.float64)).requires_grad_(True)
    norms = gradient_norms(loss, logits, torch.arange(50) % 10)
    assert (norms <= loss.lipschitz * (1 + 1e-12)).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_without_a_constant_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        CrossEntropy(temperature=temperature)
