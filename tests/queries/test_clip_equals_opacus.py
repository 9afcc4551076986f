"""The reference for per-sample gradients agrees, on a convolutional network."""

from __future__ import annotations

import pytest
import torch
from opacus import GradSampleModule
from torch import nn

from tacit import PerSampleClip
from tacit.sampling import Poisson, batch_of

torch.set_num_threads(1)


@pytest.fixture
def setting():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, 5),
    )
    return model, torch.randn(9, 1, 10, 10), torch.randint(0, 5, (9,))


def opacus_gradients(model, inputs, targets) -> list[torch.Tensor]:
    """Each parameter's per-sample gradients, a row a record."""
    wrapped = GradSampleModule(model, loss_reduction="mean")
    nn.CrossEntropyLoss()(wrapped(inputs), targets).backward()
    grads = [p.grad_sample.detach().clone() for p in model.parameters()]
    wrapped.remove_hooks()
    return grads


def test_each_records_gradient(setting):
    model, inputs, targets = setting
    reference = opacus_gradients(model, inputs, targets)
    for i in range(len(inputs)):
        one = batch_of(inputs[i : i + 1], targets[i : i + 1], divisor=1.0, scheme=Poisson(0.5))
        (block,) = PerSampleClip(1e9)(model, nn.CrossEntropyLoss(), one).blocks
        for ours, theirs in zip(block.sums, reference, strict=True):
            torch.testing.assert_close(ours.float(), theirs[i], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_norm", [0.1, 2.0])
def test_the_clipped_sum(setting, max_norm):
    model, inputs, targets = setting
    reference = opacus_gradients(model, inputs, targets)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in reference]).norm(dim=0)
    assert (norms > 0.1).all(), "0.1 must clip"
    scale = (max_norm / norms).clamp(max=1.0)
    batch = batch_of(inputs, targets, divisor=1.0, scheme=Poisson(0.5))
    (block,) = PerSampleClip(max_norm)(model, nn.CrossEntropyLoss(), batch).blocks
    for ours, theirs in zip(block.sums, reference, strict=True):
        expected = torch.einsum("b,b...->...", scale, theirs)
        torch.testing.assert_close(ours.float(), expected, rtol=1e-4, atol=1e-6)
