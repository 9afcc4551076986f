"""A recurrent model in evaluation mode: cuDNN's own has no backward pass, and none is asked for."""

from __future__ import annotations

import pytest
import torch
from engine_checks import assert_same, batch_for, one_by_one, sums_of
from torch import nn

from tacit import PerSampleClip


class Reader(nn.Module):
    def __init__(self, recurrent) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.recurrent = recurrent
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.recurrent(self.embed(x))[0].mean(dim=1))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_evaluation_mode_never_needs_a_fused_backward_pass(kind, monkeypatch):
    torch.manual_seed(0)
    model = Reader(kind(5, 4, num_layers=2, dropout=0.5, batch_first=True)).double().eval()
    batch = batch_for(torch.randint(0, 9, (4, 6)))
    expected = one_by_one(model, batch, 0.5)
    name = {nn.RNN: "rnn_tanh", nn.GRU: "gru", nn.LSTM: "lstm"}[kind]
    fused = getattr(torch._VF, name)

    def as_on_a_gpu(x, states, weights, bias, layers, dropout, train, *rest):
        wants_gradient = torch.is_grad_enabled() and any(w.requires_grad for w in weights)
        assert train or not wants_gradient, "cudnn RNN backward can only be called in training mode"
        return fused(x, states, weights, bias, layers, dropout, train, *rest)

    monkeypatch.setattr(torch._VF, name, as_on_a_gpu, raising=False)
    assert_same(sums_of(PerSampleClip(0.5), model, batch), expected)
    assert not model.recurrent.training
    assert model.recurrent.dropout == 0.5


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
