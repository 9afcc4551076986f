"""Losses whose own code reads values of records: those values reach nothing else."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tacit
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import batch_of


def require_exact(model: nn.Module, loss, inputs: Tensor, targets) -> None:
    """The clipped sum is that of each record alone, and records do not run one by one."""
    rows = len(inputs)
    batch = batch_of(inputs, targets, divisor=1.0, scheme=Poisson(0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block = tacit.PerSampleClip(0.1)(model, loss, batch).blocks[0]
    found = torch.cat([total.flatten() for total in block.sums])
    expected = torch.zeros_like(found)
    for i in range(rows):
        one = {k: t[i : i + 1] for k, t in targets.items()}
        value = loss(model(inputs[i : i + 1]), one).sum()
        grad = torch.cat([g.flatten() for g in torch.autograd.grad(value, block.parameters)])
        expected += grad * min(1.0, 0.1 / float(grad.norm()))
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-6)


def test_connectionist_temporal_classification_with_lengths_of_records():
    torch.manual_seed(0)

    def loss(outputs, targets):
        log_probs = outputs.log_softmax(-1).transpose(0, 1)
        lengths = targets["inputs"], targets["targets"]
        return F.ctc_loss(log_probs, targets["labels"], *lengths, reduction="none")

    targets = {
        "labels": torch.randint(1, 6, (5, 3)),
        "inputs": torch.tensor([9, 8, 9, 7, 9]),
        "targets": torch.tensor([3, 2, 1, 3, 2]),
    }
    require_exact(nn.Linear(4, 6), loss, torch.randn(5, 9, 4), targets)


def test_gaussian_negative_log_likelihood():
    torch.manual_seed(0)

    def loss(outputs, targets):
        mean, log_variance = outputs.unbind(1)
        return F.gaussian_nll_loss(mean, targets["y"], log_variance.exp(), reduction="none")

    require_exact(nn.Linear(4, 2), loss, torch.randn(5, 4), {"y": torch.randn(5)})
