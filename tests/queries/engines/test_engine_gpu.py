"""The engine on a GPU: fused recurrences, autocast, TensorFloat-32 and deterministic mode."""

from __future__ import annotations

import pytest
import torch
from engine_checks import assert_same, batch_for, one_by_one, sums_of
from test_engine_bound import cancelling, share
from test_engine_precision import Everything, tokens, whole

from tacit import PerSampleClip
from tacit.queries.engines.linear import outer_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Everything().cuda()


@pytest.mark.parametrize("training", [True, False])
def test_every_kind_of_rule_together_in_float64(model, training):
    batch = batch_for(tokens(4).cuda())
    model = model.double().train(training)
    with torch.backends.cudnn.flags(enabled=training):  # cuDNN has no backward in evaluation mode
        expected = one_by_one(model, batch, 0.5)
    assert_same(sums_of(PerSampleClip(0.5), model, batch), expected)


def test_bfloat16_autocast_keeps_the_bound(model):
    inputs = tokens(4).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        sums_of(PerSampleClip(0.1), model, batch_for(inputs))
        for i in range(4):
            one = whole(sums_of(PerSampleClip(0.1), model, batch_for(inputs[i : i + 1])))
            assert 0.1 * (1 - 1e-3) <= one.norm() <= 0.1


@pytest.mark.parametrize("tensor_float", [False, True])
def test_terms_that_cancel_keep_the_bound(tensor_float):
    torch.manual_seed(0)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tensor_float
    try:
        for size in (1.0, 1e3, 1e6):
            for rest in (0.0, 1e-3, 1.0):
                a, b = cancelling(5, 300, 400, size, rest)
                assert share(outer_products(a.cuda(), b.cuda()), 1e-3) <= 1
                one, two = torch.full((1, 3, 5000), 0.7), torch.full((1, 3, 700), size)
                assert share(outer_products(one.cuda(), two.cuda()), 1e-3) <= 1
        assert torch.backends.cuda.matmul.allow_tf32 == tensor_float
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
