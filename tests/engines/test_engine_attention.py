"""Multi-head attention with every option: the sums of a loop over single records. Float64."""

from __future__ import annotations

import pytest
import torch
from engine_checks import (
    COUNTS,
    GROUPINGS,
    NORMS,
    SEEDS,
    batch_for,
    check_exact,
    quadratic,
    run_engine,
    sums_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tacit import PerSampleClip
from tacit.errors import MixesRecords

BOOL = st.booleans()


class Attends(nn.Module):
    """Queries from a layer; keys and values from the input or from that layer too."""

    def __init__(self, width, attention, source, masks, weights, average) -> None:
        super().__init__()
        self.front = nn.Linear(width, attention.embed_dim)
        self.attention = attention
        self.source, self.masks, self.weights, self.average = source, masks, weights, average

    def forward(self, x):
        query = self.front(x)
        key = query if self.source == "self" else x[..., : self.attention.kdim]
        value = key if self.source != "three" else x[..., : self.attention.vdim].square()
        if not self.attention.batch_first:
            same = key is query, value is key
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
            key = query if same[0] else key
            value = key if same[1] else value
        out, weights = self.attention(
            query, key, value, need_weights=self.weights, average_attn_weights=self.average,
            **self.chosen_masks(x),
        )  # fmt: skip
        out = out if self.attention.batch_first else out.transpose(0, 1)
        return torch.cat([out.flatten(1), weights.flatten(1)], dim=1) if self.weights else out

    def chosen_masks(self, x):
        """A record's masks depend on the record alone; its first key is never masked."""
        batch, length = x.shape[:2]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        if self.masks == "causal":
            return {"attn_mask": later}
        if self.masks == "added":
            return {"attn_mask": later.to(x.dtype) * -2, "key_padding_mask": x[..., 0] * 0.1}
        padding = (x[..., 0] > 0.3) & (torch.arange(length) > 0)
        if self.masks == "padding":
            return {"key_padding_mask": padding}
        if self.masks == "a record's own":
            own = padding[:, None, None, :].expand(batch, self.attention.num_heads, length, length)
            return {"attn_mask": own.flatten(0, 1)}
        return {}


@settings(max_examples=120, deadline=None)
@given(
    n=COUNTS, length=st.integers(1, 4), heads=st.integers(1, 3), size=st.integers(1, 3),
    source=st.sampled_from(["self", "two", "three"]), own_widths=BOOL, batch_first=BOOL, bias=BOOL,
    bias_kv=BOOL, zero=BOOL, weights=BOOL, average=BOOL, training=BOOL,
    masks=st.sampled_from(["none", "causal", "added", "padding", "a record's own"]),
    max_norm=NORMS, grouping=GROUPINGS, seed=SEEDS,
)  # fmt: skip
def test_attention(
    n, length, heads, size, source, own_widths, batch_first, bias, bias_kv, zero, weights, average,
    training, masks, max_norm, grouping, seed,
):  # fmt: skip
    torch.manual_seed(seed)
    width = heads * size + 1
    widths = {"kdim": width, "vdim": width - (source == "three")}
    if source == "self":
        widths = {}
    elif not own_widths:
        widths = {"kdim": width - 1, "vdim": width - 1}
    attention = nn.MultiheadAttention(
        heads * size, heads, bias=bias, add_bias_kv=bias_kv, add_zero_attn=zero,
        batch_first=batch_first, **widths,
    )  # fmt: skip
    for parameter in attention.parameters():
        parameter.data.normal_(std=0.4)
    model = Attends(width, attention, source, masks, weights, average).double().train(training)
    inputs = torch.randn(n, length, width, dtype=torch.float64)
    # Where a query sees one key its gradient is nothing, and what is computed is roundings.
    check_exact(model, inputs, max_norm, grouping, floor=1e-2)


def test_dropout_keeps_the_bound():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True).double()
    for count in (3, 1, 1, 1):
        batch = batch_for(torch.randn(count, 3, 4, dtype=torch.float64))
        found = sums_of(PerSampleClip(0.3), model, batch)
    assert torch.cat([s.flatten() for s in found.values()]).norm() <= 0.3
    assert model.self_attn.dropout == 0.5


def test_records_in_the_place_of_positions_are_refused():
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=False)
    with pytest.raises(MixesRecords, match=r"records meet .* at activation\.py") as raised:
        PerSampleClip(1.0)(model, quadratic, batch_for(torch.randn(5, 3, 4)))
    assert "another dimension" in str(raised.value)


class Overwritten(nn.Module):
    """Adds to the attention's output in place, as many models do."""

    def __init__(self, batch_first, front) -> None:
        super().__init__()
        self.front = nn.Linear(4, 4) if front else nn.Identity()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)

    def forward(self, x):
        x = self.front(x)
        x = x if self.attention.batch_first else x.transpose(0, 1)
        out = self.attention(x, x, x, need_weights=False)[0]
        out += x.square()
        out.mul_(out.detach().cos())
        return out if self.attention.batch_first else out.transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("front", [True, False])
def test_an_output_that_is_overwritten(batch_first, front):
    torch.manual_seed(0)
    model = Overwritten(batch_first, front).double()
    for count in (1, 4):
        inputs = torch.randn(count, 3, 4, dtype=torch.float64)
        check_exact(model, inputs, 0.5)


def test_an_input_that_is_overwritten_is_refused():
    class OverwritesInput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            x = x.clone()
            out = self.attention(x, x, x)[0]
            x.zero_()
            return out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_engine(OverwritesInput(), batch_for(torch.randn(1, 3, 4)))
