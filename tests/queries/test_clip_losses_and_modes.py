"""Per-sample clipping with any reduction of the loss, with dropout, and in low precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tacit
from tacit import PerSampleClip
from tacit.sampling import Poisson, batch_of

torch.set_num_threads(1)


def some_batch(n=8, dtype=torch.float64):
    torch.manual_seed(0)
    inputs = torch.randn(n, 4).to(dtype)  # torch 2.9 draws other numbers in half precision
    return batch_of(inputs, torch.randint(0, 3, (n,)), divisor=1.0, scheme=Poisson(0.5))


def flat(bounded):
    return torch.cat([s.reshape(-1) for block in bounded.blocks for s in block.sums])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        tacit.losses.CrossEntropy(),
    ],
    ids=["sum", "none", "tacit"],
)
def test_the_reduction_over_records_does_not_matter(loss):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    query = PerSampleClip(0.3)
    mean = query(model, nn.CrossEntropyLoss(), some_batch())
    torch.testing.assert_close(
        flat(query(model, loss, some_batch())), flat(mean), rtol=1e-12, atol=1e-14
    )


def test_dropout_is_drawn_for_each_record_on_its_own():
    """A thousand equal records: were the mask shared, a unit would be on for all or for none."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1, bias=False)).double()
    ones = torch.ones(1000, 4, dtype=torch.float64)
    batch = batch_of(ones, torch.zeros(1000), divisor=1.0, scheme=Poisson(0.5))
    total = flat(PerSampleClip(1e9)(model, lambda outputs, targets: outputs.sum(), batch))
    kept = total / 2  # a unit that is kept is scaled by 2
    assert ((kept > 400) & (kept < 600)).all()


def test_dropout_stays_within_the_bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    for _ in range(20):
        bounded = PerSampleClip(0.1)(model, nn.CrossEntropyLoss(), some_batch(n=1))
        assert flat(bounded).norm() <= 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_models_are_summed_in_float64_within_the_bound(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    exact = PerSampleClip(0.1)(model, nn.CrossEntropyLoss(), some_batch(dtype=torch.float32))
    batch = some_batch(dtype=dtype)
    low = model.to(dtype)
    bounded = PerSampleClip(0.1)(low, nn.CrossEntropyLoss(), batch)
    assert all(s.dtype == torch.float64 for block in bounded.blocks for s in block.sums)
    torch.testing.assert_close(flat(bounded), flat(exact), rtol=0.1, atol=0.02)
    for i in range(len(batch)):
        one = batch_of(
            batch.inputs[i : i + 1], batch.targets[i : i + 1], divisor=1.0, scheme=Poisson(0.5)
        )
        assert flat(PerSampleClip(0.1)(low, nn.CrossEntropyLoss(), one)).double().norm() <= 0.1


def test_a_parameter_that_the_model_does_not_use_adds_nothing_and_is_still_in_a_block():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3)).double()
    model.unused = nn.Parameter(torch.randn(7, dtype=torch.float64))
    model.forward = lambda x: model[0](x)
    (block,) = PerSampleClip(1.0)(model, nn.CrossEntropyLoss(), some_batch()).blocks
    sums = dict(zip(block.names, block.sums, strict=True))
    assert "unused" in sums
    assert not sums["unused"].any()
