"""A recurrent model in evaluation mode: cuDNN's own has no backward pass, and is not asked."""

from __future__ import annotations

import pytest
import torch
from engine_checks import assert_same, batch_for, one_by_one, sums_of
from torch import nn

from tacit import PerSampleClip
from tacit.precision import ieee_float32


class Reader(nn.Module):
    def __init__(self, recurrent) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.recurrent = recurrent
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.recurrent(self.embed(x))[0].mean(dim=1))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_evaluation_mode_gives_the_sums_of_a_loop(kind):
    torch.manual_seed(0)
    model = Reader(kind(5, 4, num_layers=2, dropout=0.5, batch_first=True)).double().eval()
    batch = batch_for(torch.randint(0, 9, (4, 6)))
    assert_same(sums_of(PerSampleClip(0.5), model, batch), one_by_one(model, batch, 0.5))
    assert not model.recurrent.training
    assert model.recurrent.dropout == 0.5


def test_settings_of_pytorchs_newer_way_stop_no_recurrence():
    """PyTorch's own context manager for cuDNN raises after such a setting."""
    torch.manual_seed(0)
    model = Reader(nn.GRU(5, 4, batch_first=True)).double()
    batch = batch_for(torch.randint(0, 9, (4, 6)))
    expected = one_by_one(model, batch, 0.5)
    with ieee_float32():
        assert_same(sums_of(PerSampleClip(0.5), model, batch), expected)
    assert torch.backends.cudnn.enabled


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_fused_recurrence_in_evaluation_mode(kind):
    torch.manual_seed(0)
    model = Reader(kind(5, 4, num_layers=2, dropout=0.5, batch_first=True)).double().eval()
    inputs = torch.randint(0, 9, (4, 6))
    expected = one_by_one(model, batch_for(inputs), 0.5)
    found = sums_of(PerSampleClip(0.5), model.cuda(), batch_for(inputs.cuda()))
    assert_same({name: total.cpu() for name, total in found.items()}, expected)
