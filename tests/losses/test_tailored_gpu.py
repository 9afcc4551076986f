"""The tailored loss in a recorded step: the same sums, and an epoch that moves on."""

from __future__ import annotations

import pytest
import torch

import tacit
from tacit.losses import TailoredLoss
from tacit.models import mnist_cnn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_replayed_step_follows_the_epoch():
    torch.manual_seed(0)
    model = mnist_cnn().cuda()
    loss = TailoredLoss(2.0, beta=1.0, gamma=5.0)
    replayed = tacit.PerSampleClip(0.1, engine=tacit.engines.Automatic())
    plain = tacit.PerSampleClip(0.1, engine=tacit.engines.BookKeeping())
    for epoch in (0.0, 0.5, 2.0, 4.0, 5.0, 6.0):
        x = torch.randn(16, 1, 28, 28, device="cuda")
        y = torch.randint(10, (16,), device="cuda")
        batch = tacit.sampling.batch_of(x, y, divisor=16, scheme=tacit.sampling.Poisson(0.1))
        loss.at(epoch)
        fresh = loss.fresh()
        fresh.at(epoch)
        (found,) = replayed(model, loss, batch).blocks
        (expected,) = plain(model, fresh, batch).blocks
        for a, b in zip(found.sums, expected.sums, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
