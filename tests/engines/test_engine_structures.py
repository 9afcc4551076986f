"""Ways to put layers together that a hook could get wrong. Float64, against a loop."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from engine_checks import (
    GROUPINGS,
    NORMS,
    SEEDS,
    assert_same,
    batch_for,
    check_exact,
    one_by_one,
    quadratic,
    sums_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tacit import PerSampleClip
from tacit.engines import BookKeeping, PerRecord
from tacit.errors import UnsupportedModule

D = 5


class Tied(nn.Module):
    """An embedding whose table is also the output layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, D)
        self.middle = nn.Linear(D, D)
        self.out = nn.Linear(D, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.middle(self.embed(x))))


class TiedToRaw(nn.Module):
    """A parameter used by hand, and by a layer inside as its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(D, D))
        self.inside = nn.Linear(D, D)
        self.inside.weight = self.table

    def forward(self, x):
        return torch.tanh(self.inside(torch.tanh(x @ self.table)))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x))) + self.layer(x.square())


class Raw(nn.Module):
    """Parameters of its own, beside layers: a class token, positions, a scale and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.positions = nn.Parameter(torch.randn(1, 4, D))
        self.scale = nn.Parameter(torch.randn(D))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return torch.tanh(self.layer(x) * self.scale) * self.temperature.exp()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return x * self.scale


class InPlace(nn.Module):
    """Every way to overwrite an activation that autograd allows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(D, D) for _ in range(3))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.act(self.first(x))
        y = F.leaky_relu(self.second(h), 0.1, inplace=True)
        z = self.third(x)
        z += y
        z.mul_(2)
        z[:, 0] = 1.0
        return z


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Sequential(nn.Linear(8, D)))
        self.gate = nn.Linear(D, D)

    def forward(self, x):
        x = x + self.mlp(self.norm(x))
        return x + torch.sigmoid(self.gate(x)) * self.norm(x)


class Checkpointed(nn.Module):
    """Blocks that run again in the backward pass; the first has nothing trainable before it."""

    def __init__(self, reentrant=False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.Tanh(), Scale(), nn.Linear(D, D)) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class SomeUnused(nn.Module):
    """One layer is not called, another's output is thrown away, a third runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.thrown, self.fixed = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        self.thrown(x)
        with torch.no_grad():
            x = self.fixed(x)
        return self.used(x)


class Borrowed(nn.Module):
    """Uses a layer's weight without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return self.layer(x) @ self.layer.weight


class Positions(nn.Module):
    """An embedding of positions that has no rows for records."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(9, D)

    def forward(self, x):
        return (x + self.positions(torch.arange(x.shape[1]))).tanh()


class Offsets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, D)

    def forward(self, x):
        return self.bag(x.flatten(), torch.arange(len(x)) * x.shape[1]).tanh()


class TwoOutputs(nn.Module):
    """Its second output is made from its first, and both are read."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(D, D))

        def forward(self, x):
            y = torch.tanh(x @ self.w)
            return {"y": y, "z": (y.square(), 3)}

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(D, D)
        self.pair = self.Pair()

    def forward(self, x):
        made = self.pair(self.front(x))
        return made["y"].sin() * made["z"][0]


def reals(n):
    return torch.randn(n, D, dtype=torch.float64)


def sequences(n):
    return torch.randn(n, 3, D, dtype=torch.float64)


def tokens(n):
    return torch.randint(0, 7, (n, 4))


STRUCTURES = {
    "tied": (Tied, tokens),
    "tied to a raw parameter": (TiedToRaw, reals),
    "used twice": (Twice, reals),
    "raw parameters": (Raw, sequences),
    "in-place": (InPlace, sequences),
    "residual": (Residual, sequences),
    "checkpointed": (Checkpointed, reals),
    "unused": (SomeUnused, reals),
    "two outputs": (TwoOutputs, sequences),
    "a borrowed weight": (Borrowed, reals),
    "positions": (Positions, sequences),
    "a bag with offsets": (Offsets, tokens),
    "conv-bn-in-place": (
        lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3, bias=False), nn.BatchNorm1d(4), nn.ReLU(inplace=True)
        ).eval(),
        sequences,
    ),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(D, 1, 8, dropout=0.0, batch_first=True),
        sequences,
    ),
    "transformer layer, evaluation": (
        lambda: nn.TransformerEncoderLayer(D, 1, 8, batch_first=True).eval(),
        sequences,
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
@settings(max_examples=8, deadline=None)
@given(n=st.sampled_from([0, 1, 2, 4]), max_norm=NORMS, grouping=GROUPINGS, seed=SEEDS)
def test_structures(name, n, max_norm, grouping, seed):
    make, draw = STRUCTURES[name]
    torch.manual_seed(seed)
    model = make().double()
    check_exact(model, draw(n), max_norm, grouping)


@pytest.mark.parametrize("name", STRUCTURES)
def test_some_parameters_frozen(name):
    make, draw = STRUCTURES[name]
    torch.manual_seed(0)
    model = make().double()
    parameters = list(model.parameters())
    for parameter in parameters[::2]:
        parameter.requires_grad_(False)
    if len(parameters) > 1:
        check_exact(model, draw(3), 0.5)
    flags = [p.requires_grad for p in parameters]
    assert flags == [i % 2 == 1 for i in range(len(parameters))]


def test_padding_rows_and_records_that_are_not_finite_count_for_nothing():
    torch.manual_seed(0)
    model = Residual().double()
    inputs = sequences(6)
    inputs[1, 0, 0] = float("nan")
    inputs[4, 2, 1] = float("inf")
    batch = batch_for(inputs)
    mask = torch.tensor([True, True, False, True, True, True])
    masked = type(batch)(batch.records, batch.indices, 1.0, batch.scheme, mask=mask)
    kept = batch.only(torch.tensor([True, False, False, True, False, True]))
    for engine in (BookKeeping(), PerRecord()):
        found = sums_of(PerSampleClip(0.5, engine=engine), model, masked)
        assert_same(found, one_by_one(model, kept, 0.5))


def test_a_batch_of_nothing_but_bad_records_is_zero():
    model = Residual().double()
    found = sums_of(PerSampleClip(0.5), model, batch_for(sequences(3) * float("nan")))
    assert all(not s.any() for s in found.values())


def test_dropout_keeps_the_bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 50), nn.Dropout(0.5), nn.ReLU(), nn.Linear(50, 3)).double()
    for _ in range(20):
        found = sums_of(PerSampleClip(0.3), model, batch_for(reals(1)))
        assert torch.cat([s.flatten() for s in found.values()]).norm() <= 0.3


def test_attention_that_mixes_two_inputs_and_masks():
    class Cross(nn.Module):
        def __init__(self, batch_first) -> None:
            super().__init__()
            self.front = nn.Linear(D, 4)
            self.attention = nn.MultiheadAttention(4, 2, kdim=D, vdim=3, batch_first=batch_first)

        def forward(self, x):
            key, value = x, x[..., :3]
            query, padding = self.front(x), x[..., 0] > 0.5
            if not self.attention.batch_first:
                query, key, value = (t.transpose(0, 1) for t in (query, key, value))
            out, weights = self.attention(query, key, value, key_padding_mask=padding)
            out = out if self.attention.batch_first else out.transpose(0, 1)
            return torch.cat([out, weights], dim=-1)

    torch.manual_seed(0)
    inputs = sequences(4).clamp(max=0.4)
    inputs[:, 1, 0] = 1.0
    for batch_first in (True, False):
        check_exact(Cross(batch_first).double(), inputs, 0.5)


class Doubled(torch.autograd.Function):
    """y = 2·x·w, whose gradients no rule of ours knows."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 2 * x * w

    @staticmethod
    def backward(ctx, b):
        x, w = ctx.saved_tensors
        return 2 * b * w, (2 * b * x).sum(0)


class Unruled(Scale):
    def forward(self, x):
        return Doubled.apply(x, self.scale)


def test_what_no_rule_covers_runs_record_by_record_and_says_so_once():
    model = nn.Sequential(Unruled(), nn.Linear(D, 2)).double()
    query = PerSampleClip(0.5)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for count in (3, 3, 5):
            batch = batch_for(reals(count))
            assert_same(sums_of(query, model, batch), one_by_one(model, batch, 0.5))
    assert len(seen) == 1
    assert "Doubled" in str(seen[0].message)
    assert "gradient_rule" in str(seen[0].message)


def test_reentrant_checkpoints_are_refused_with_the_way_out():
    model = nn.Sequential(nn.Linear(D, D), Checkpointed(reentrant=True)).double()
    for count in (1, 4):
        with pytest.raises(UnsupportedModule, match="use_reentrant=False"):
            PerSampleClip(1.0)(model, quadratic, batch_for(reals(count)))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("option", ["sparse", "scale_grad_by_freq"])
def test_options_of_embeddings_change_nothing_for_a_record_with_different_tokens(kind, option):
    """Sparse gradients are the same numbers; by frequency, of tokens in the record alone."""
    torch.manual_seed(0)
    plain, special = kind(9, D).double(), kind(9, D, **{option: True}).double()
    special.load_state_dict(plain.state_dict())
    batch = batch_for(torch.stack([torch.randperm(9)[:4] for _ in range(3)]))
    assert_same(
        sums_of(PerSampleClip(0.5), special, batch), sums_of(PerSampleClip(0.5), plain, batch)
    )
