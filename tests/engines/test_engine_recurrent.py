"""RNN, GRU, LSTM and their cells: the sums of a loop over single records. Float64."""

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
    sums_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tacit import PerSampleClip
from tacit.errors import MixesRecords

BOOL = st.booleans()
ENDS = ["outputs", "states", "both"]


class Sequences(nn.Module):
    """A recurrent module on (records, positions, width), read at its outputs, states, or both."""

    def __init__(self, recurrent, width, ends, start) -> None:
        super().__init__()
        self.front = nn.Linear(width, width)
        self.recurrent = recurrent
        self.ends = ends
        self.start = start

    def forward(self, x):
        x = self.front(x)
        if not self.recurrent.batch_first:
            x = x.transpose(0, 1)
        outputs, states = (
            self.recurrent(x, self.first_states(x)) if self.start else self.recurrent(x)
        )
        states = states if isinstance(states, tuple) else (states,)
        if not self.recurrent.batch_first:
            outputs = outputs.transpose(0, 1)
        read = [] if self.ends == "states" else [outputs.flatten(1)]
        if self.ends != "outputs":
            read += [s.transpose(0, 1).flatten(1) for s in states]
        return torch.cat(read, dim=1)

    def first_states(self, x):
        """Depend on the record, so that their gradient matters to the layer before."""
        r = self.recurrent
        first = x[:, 0] if r.batch_first else x[0]
        size = r.num_layers * (2 if r.bidirectional else 1)
        hidden = first.mean(dim=1)[None, :, None].expand(size, -1, r.proj_size or r.hidden_size)
        if not isinstance(r, nn.LSTM):
            return hidden.contiguous()
        cell = first.mean(dim=1)[None, :, None].expand(size, -1, r.hidden_size)
        return hidden.contiguous(), cell.contiguous()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@settings(max_examples=50, deadline=None)
@given(
    n=COUNTS,
    length=st.integers(1, 5),
    width=st.integers(1, 6),
    hidden=st.integers(2, 6),
    layers=st.integers(1, 3),
    bias=BOOL,
    batch_first=BOOL,
    bidirectional=BOOL,
    relu=BOOL,
    project=BOOL,
    ends=st.sampled_from(ENDS),
    start=BOOL,
    max_norm=NORMS,
    grouping=GROUPINGS,
    seed=SEEDS,
)
def test_recurrent_modules(
    kind,
    n,
    length,
    width,
    hidden,
    layers,
    bias,
    batch_first,
    bidirectional,
    relu,
    project,
    ends,
    start,
    max_norm,
    grouping,
    seed,
):
    torch.manual_seed(seed)
    options = {"nonlinearity": "relu" if relu else "tanh"} if kind is nn.RNN else {}
    if kind is nn.LSTM and project:
        options["proj_size"] = 1
    module = kind(
        width,
        hidden,
        layers,
        bias=bias,
        batch_first=batch_first,
        bidirectional=bidirectional,
        **options,
    )
    model = Sequences(module, width, ends, start).double()
    inputs = torch.randn(n, length, width, dtype=torch.float64)
    check_exact(model, inputs, max_norm, grouping)


class Steps(nn.Module):
    """A cell called once a position: one module used many times."""

    def __init__(self, cell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state) if state is not None else self.cell(x[:, t])
        return torch.cat(state, dim=1) if isinstance(state, tuple) else state


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
@settings(max_examples=25, deadline=None)
@given(
    n=COUNTS,
    length=st.integers(1, 4),
    width=st.integers(1, 6),
    hidden=st.integers(1, 6),
    bias=BOOL,
    max_norm=NORMS,
    seed=SEEDS,
)
def test_cells(kind, n, length, width, hidden, bias, max_norm, seed):
    torch.manual_seed(seed)
    model = Steps(kind(width, hidden, bias=bias)).double()
    inputs = torch.randn(n, length, width, dtype=torch.float64)
    check_exact(model, inputs, max_norm)


def test_frozen_and_tied_recurrent_weights():
    torch.manual_seed(0)
    module = nn.GRU(4, 4, num_layers=2, batch_first=True)
    module.weight_hh_l1 = module.weight_hh_l0
    module.bias_ih_l0.requires_grad_(False)
    model = Sequences(module, 4, "both", start=True).double()
    check_exact(model, torch.randn(4, 3, 4, dtype=torch.float64), 0.5)


def refused(model, inputs):
    with pytest.raises(MixesRecords) as raised:
        PerSampleClip(1.0)(model, quadratic, batch_for(inputs))
    return str(raised.value)


def test_dropout_between_layers_keeps_the_bound():
    torch.manual_seed(0)
    module = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)
    model = Sequences(module, 4, "outputs", start=False).double()
    for count in (2, 1, 1, 1):
        batch = batch_for(torch.randn(count, 3, 4, dtype=torch.float64))
        found = sums_of(PerSampleClip(0.3), model, batch)
    assert torch.cat([s.flatten() for s in found.values()]).norm() <= 0.3
    assert module.dropout == 0.5


class Packed(nn.Module):
    """Packs its sequences, by lengths that are public or those of the records."""

    def __init__(self, private) -> None:
        super().__init__()
        self.recurrent, self.private = nn.GRU(4, 4, batch_first=True), private

    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        if self.private:
            lengths = (x[:, :, 0] < 9).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return self.recurrent(packed)[1][0]


@pytest.mark.filterwarnings("ignore:records of Packed run one by one")
def test_sequences_packed_by_public_lengths_are_those_of_a_loop():
    check_exact(Packed(private=False).double(), torch.randn(3, 3, 4, dtype=torch.float64), 0.5)


def test_sequences_packed_by_lengths_of_records_are_refused_with_the_way_out():
    message = refused(Packed(private=True), torch.randn(3, 3, 4))
    assert "pack_padded_sequence" in message
    assert "PerRecord" in message


def test_records_in_the_place_of_positions_are_refused():
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.RNN(4, 4)  # batch_first=False, and the model does not transpose

        def forward(self, x):
            return self.recurrent(x)[0]

    assert "records meet" in refused(Wrong(), torch.randn(5, 3, 4))
