"""Opacus gives the same clipped sums, in float32, for the layers that it knows."""

from __future__ import annotations

import pytest
import torch
from engine_checks import SEEDS, batch_for, quadratic, sums_of
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus import GradSampleModule
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import nn

from tacit import PerSampleClip
from tacit.engines import BookKeeping


class FirstOutput(nn.Module):
    """The first output of a recurrent layer."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class SelfAttention(nn.Module):
    """Records first; inside, second if the layer wants them there, as Opacus' own does."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        if self.layer.batch_first:
            return self.layer(x, x, x)[0]
        x = x.transpose(0, 1)
        return self.layer(x, x, x)[0].transpose(0, 1)


def their_names(name) -> list[str]:
    """Where Opacus keeps one of PyTorch's parameters: its parts, one after the other."""
    if "in_proj_" not in name:
        return [name]
    return [name.replace("in_proj_", f"{part}linear.") for part in "qkv"]


def reals(*shape):
    return lambda n: torch.randn(n, *shape)


def tokens(n):
    return torch.randint(0, 9, (n, 5))


def different_tokens(n):
    """Opacus 1.6 counts a token that occurs twice in a bag once."""
    return torch.stack([torch.randperm(9)[:5] for _ in range(n)])


def same(make, draw):
    return make, make, draw


def chain(*layers):
    return lambda: nn.Sequential(*(make() for make in layers))


LAYERS = {
    "linear": same(lambda: nn.Linear(30, 40), reals(30)),
    "linear, positions": same(lambda: nn.Linear(30, 40), reals(3, 2, 30)),
    "conv1d": same(lambda: nn.Conv1d(4, 6, 3, 2, 1, 2, groups=2), reals(4, 11)),
    "conv2d": same(lambda: nn.Conv2d(4, 6, 3, 2, 1, groups=2), reals(4, 7, 6)),
    "conv2d, wide": same(lambda: nn.Conv2d(24, 32, 3), reals(24, 4, 5)),
    "conv2d, same": same(lambda: nn.Conv2d(3, 4, (3, 2), padding="same"), reals(3, 5, 6)),
    "conv3d": same(lambda: nn.Conv3d(2, 3, 2), reals(2, 4, 5, 3)),
    "embedding": same(lambda: nn.Embedding(9, 20), tokens),
    "embedding bag": same(lambda: nn.EmbeddingBag(9, 20, mode="mean"), different_tokens),
    "layer norm": same(chain(lambda: nn.Linear(6, 6), lambda: nn.LayerNorm(6)), reals(3, 6)),
    "rms norm": same(chain(lambda: nn.Linear(6, 6), lambda: nn.RMSNorm(6)), reals(3, 6)),
    "group norm": same(chain(lambda: nn.Conv1d(4, 6, 3), lambda: nn.GroupNorm(3, 6)), reals(4, 9)),
    "instance norm": same(
        chain(lambda: nn.Conv2d(3, 4, 3), lambda: nn.InstanceNorm2d(4, affine=True)),
        reals(3, 7, 6),
    ),
    "mlp": same(chain(lambda: nn.Linear(8, 9), nn.Tanh, lambda: nn.Linear(9, 3)), reals(8)),
    "rnn": (
        lambda: FirstOutput(nn.RNN(5, 6, 2, batch_first=True)),
        lambda: FirstOutput(DPRNN(5, 6, 2, batch_first=True)),
        reals(4, 5),
    ),
    "gru": (
        lambda: FirstOutput(nn.GRU(5, 6, batch_first=True)),
        lambda: FirstOutput(DPGRU(5, 6, batch_first=True)),
        reals(4, 5),
    ),
    "lstm": (
        lambda: FirstOutput(nn.LSTM(5, 6, batch_first=True, bidirectional=True)),
        lambda: FirstOutput(DPLSTM(5, 6, batch_first=True, bidirectional=True)),
        reals(4, 5),
    ),
    "attention": (
        lambda: SelfAttention(nn.MultiheadAttention(6, 2, batch_first=True)),
        lambda: SelfAttention(DPMultiheadAttention(6, 2)),
        reals(4, 6),
    ),
}


def opacus_sums(model, inputs, targets, max_norm) -> dict[str, torch.Tensor]:
    records_first = not isinstance(model, SelfAttention)
    wrapped = GradSampleModule(model, loss_reduction="sum", batch_first=records_first)
    if isinstance(model, nn.EmbeddingBag):
        outputs = wrapped(inputs.flatten(), torch.arange(len(inputs)) * inputs.shape[1])
    else:
        outputs = wrapped(inputs)
    quadratic(outputs, targets).sum().backward()
    rows = {n: p.grad_sample.detach() for n, p in model.named_parameters()}
    wrapped.remove_hooks()
    norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values()]).norm(dim=0)
    scale = (max_norm / norms).clamp(max=1.0)
    return {n: torch.einsum("b,b...->...", scale, r) for n, r in rows.items()}


def copy_weights(ours, theirs) -> None:
    parts = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            names = their_names(name)
            for part, value in zip(names, parameter.chunk(len(names)), strict=True):
                parts[part].copy_(value)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=6, deadline=None)
@given(n=st.integers(1, 6), max_norm=st.sampled_from([1e-3, 1.0, 1e6]), seed=SEEDS)
def test_the_clipped_sum(name, n, max_norm, seed):
    make, make_theirs, draw = LAYERS[name]
    torch.manual_seed(seed)
    ours, theirs = make(), make_theirs()
    copy_weights(ours, theirs)
    inputs = draw(n)
    batch = batch_for(inputs, torch.linspace(-1, 1, n))
    found = sums_of(PerSampleClip(max_norm, engine=BookKeeping()), ours, batch)
    expected = opacus_sums(theirs, batch.inputs, batch.targets, max_norm)
    whole = torch.cat([e.flatten() for e in expected.values()]).norm()
    for key, total in found.items():
        reference = torch.cat([expected[part] for part in their_names(key)])
        error = (total.float() - reference).norm()
        assert error <= 1e-4 * max(reference.norm(), 0.1 * whole, 1e-2 * min(max_norm, 1)), key
