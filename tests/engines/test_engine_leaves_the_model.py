"""After a call the model is exactly what it was, also when its forward pass fails."""

from __future__ import annotations

import pytest
import torch
from engine_checks import batch_for, quadratic
from torch import nn

from tacit import PerSampleClip
from tacit.engines import BookKeeping, PerRecord


class Breaks(nn.Module):
    """Fails after its layers have run."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.recurrent = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.breaks = False

    def forward(self, x):
        x = self.recurrent(self.inside(x))[0]
        x = self.frozen(self.attention(x, x, x)[0])
        if self.breaks:
            raise RuntimeError("no such luck")
        return x


def state(model):
    """Everything of a model that an engine might touch."""
    return [
        (
            module.training,
            getattr(module, "inplace", None),
            getattr(module, "dropout", None),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._backward_hooks),
            sorted(vars(module)),
        )
        for module in model.modules()
    ] + [
        (p.requires_grad, p.grad is None, p.data_ptr(), p.detach().clone().tolist())
        for p in model.parameters()
    ]


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_the_model_is_left_as_it_was(breaks, count):
    torch.manual_seed(0)
    model = Breaks()
    model.recurrent.eval()
    model.breaks = breaks
    before, fused = state(model), torch.backends.mha.get_fastpath_enabled()
    query = PerSampleClip(1.0, engine=BookKeeping())
    if breaks:
        with pytest.raises(RuntimeError, match="no such luck"):
            query(model, quadratic, batch_for(torch.randn(count, 3, 4)))
    else:
        query(model, quadratic, batch_for(torch.randn(count, 3, 4)))
    assert state(model) == before
    assert torch.backends.mha.get_fastpath_enabled() == fused


class UnderTwoNames(nn.Module):
    """One layer registered twice, and another that borrows its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.again(self.tied(self.first(x).tanh()).tanh())


@pytest.mark.parametrize("engine", [BookKeeping, PerRecord])
def test_a_module_under_two_names_keeps_its_weights(engine):
    model = UnderTwoNames().double()
    held = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    batch = batch_for(torch.randn(5, 4, dtype=torch.float64))
    found = PerSampleClip(1e6, engine=engine())(model, quadratic, batch)
    assert [id(p) for _, p in model.named_parameters(remove_duplicate=False)] == held
    outputs = quadratic(model(batch.inputs), batch.targets)
    expected = torch.autograd.grad(outputs.sum(), list(model.parameters()))
    for got, wanted in zip(found.blocks[0].sums, expected, strict=True):
        torch.testing.assert_close(got.reshape(wanted.shape), wanted)
