"""Recurrent layers as linear maps and scans: PyTorch's own numbers, and what they show."""

from __future__ import annotations

import itertools

import pytest
import torch
from engine_checks import assert_same, batch_for, check_exact, one_by_one, sums_of
from torch import nn

from tacit import PerSampleClip
from tacit.engines import Automatic, PerRecord, Recorder
from tacit.engines.plain_programs import plain_program
from tacit.torch_internals import Graph

KINDS = [nn.RNN, nn.GRU, nn.LSTM]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def results_of(layer, x, states):
    """Outputs, last states, and the gradients of a sum of their squares."""
    outputs, last = layer(x, states)
    every = [outputs, *(last if isinstance(last, tuple) else (last,))]
    starts = list(states) if isinstance(states, tuple) else [states]
    inputs = [x, *starts, *layer.parameters()]
    loss = sum((t * t.detach().cos()).sum() for t in every)
    return every, torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_pytorchs(kind, device):
    for layers, bias, first, both in itertools.product((1, 3), *[(True, False)] * 3):
        torch.manual_seed(0)
        layer = kind(3, 4, layers, bias=bias, batch_first=first, bidirectional=both)
        layer.double().to(device)
        x = torch.randn(5, 6, 3, dtype=torch.float64, device=device, requires_grad=True)
        size = (layers * (1 + both), 5 if first else 6, 4)
        states = torch.randn(2, *size, dtype=torch.float64, device=device).requires_grad_().unbind()
        states = states if kind is nn.LSTM else states[0]
        expected = results_of(layer, x, states)
        with plain_program():
            found = results_of(layer, x, states)
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_has_as_many_operators_for_a_long_sequence_as_for_a_short_one(kind):
    layer = kind(3, 4, batch_first=True)
    counts = []
    for length in (2, 50):
        with plain_program():
            nodes = Graph(layer(torch.randn(4, length, 3))[0].sum((1, 2))).nodes
        counts.append(len(nodes))
        leaves = {id(p) for p in layer.parameters()}
        assert leaves == {id(n.variable) for n in nodes if hasattr(n, "variable")}
    assert counts[0] == counts[1]


class Classifier(nn.Module):
    """Starts from a state that is learned, and reads outputs and the last state."""

    def __init__(self, kind, layers=2) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.start = nn.Parameter(torch.randn(2, 2 * layers, 1, 4) / 2)
        self.layer = kind(5, 4, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8 + 4, 3)

    def forward(self, x):
        h, c = self.start.expand(-1, -1, len(x), -1).unbind()
        states = (h.contiguous(), c.contiguous())
        outputs, last = self.layer(
            self.embed(x), states if isinstance(self.layer, nn.LSTM) else h.contiguous()
        )
        last = last[1] if isinstance(last, tuple) else last
        return self.head(torch.cat([outputs.mean(1), last[-1]], 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_learned_first_state_has_a_gradient_for_each_record(kind):
    torch.manual_seed(0)
    check_exact(Classifier(kind).double(), torch.randint(9, (4, 6)), 0.3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_have_the_sums_of_a_loop(kind, device):
    torch.manual_seed(0)
    model = Classifier(kind, layers=1).double().to(device)
    batch = batch_for(torch.randint(9, (6, 8), device=device))
    engine = Automatic(Recorder(after=1))
    engine.expect(10**9)
    query = PerSampleClip(0.3, engine=engine)
    expected = one_by_one(model, batch, 0.3)
    for _ in range(4):
        assert_same(sums_of(query, model, batch), expected)
    assert engine.recorder.num_recorded == 1


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_the_scan_is_in_float32(kind):
    torch.manual_seed(0)
    model = Classifier(kind)
    batch = batch_for(torch.randint(9, (4, 6)), torch.linspace(-1, 1, 4))
    expected = one_by_one(model, batch, 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        found = sums_of(PerSampleClip(0.3), model, batch)
    assert_same(found, expected, 0.05, 0.05)
    assert float(torch.cat([s.flatten() for s in found.values()]).norm()) <= 4 * 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_penalty_through_a_recurrent_layer_is_exact(kind):
    """Its second derivatives depend on the recurrent weights, which are constants of the scan."""

    def penalised(outputs, targets):
        (grad,) = torch.autograd.grad(outputs.sum(), model.features, create_graph=True)
        return outputs.square().sum(1) + grad.square().flatten(1).sum(1)

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(3, 4, batch_first=True)

        def forward(self, x):
            self.features = x.detach().requires_grad_()
            return self.layer(self.features)[0].mean(1)

    torch.manual_seed(0)
    model = Penalised().double()
    batch = batch_for(torch.randn(3, 4, 3, dtype=torch.float64))
    expected = one_by_one(model, batch, 0.3, loss=penalised)
    for engine in (None, PerRecord()):
        query = PerSampleClip(0.3, engine=engine)
        assert_same(sums_of(query, model, batch, penalised), expected)


class Adapted(nn.Module):
    """Takes a gradient step on public sequences first, and is differentiated through it."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.layer = kind(3, 4, batch_first=True)
        self.register_buffer("public", torch.randn(2, 5, 3))

    def forward(self, x):
        weights = dict(self.layer.named_parameters())
        loss = self.layer(self.public)[0].square().sum()
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        moved = {n: w - g / 2 for (n, w), g in zip(weights.items(), grads, strict=True)}
        return torch.func.functional_call(self.layer, moved, (x,))[0].mean(1)


@pytest.mark.filterwarnings("ignore:records of Adapted run one by one")
@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_of_the_recurrent_weights_are_exact(kind):
    """The states that multiply them depend on the weights too. One record does not run alone."""
    torch.manual_seed(0)
    model = Adapted(kind).double()
    for count in (1, 3):
        check_exact(model, torch.randn(count, 4, 3, dtype=torch.float64), 0.3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_over_records_runs_in_one_pass(kind):
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(3, 4)

        def forward(self, x):
            return torch.stack([self.layer(of_record)[0].mean(0) for of_record in x])

    torch.manual_seed(0)
    for count in (1, 2, 5):
        check_exact(Loop().double(), torch.randn(count, 4, 3, dtype=torch.float64), 0.3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_inside_a_transform_of_torch_func(kind):
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(3, 4, batch_first=True)

        def forward(self, x):
            return torch.func.grad(lambda x: self.layer(x)[0].square().sum())(x)

    torch.manual_seed(0)
    check_exact(Slopes().double(), torch.randn(3, 4, 3, dtype=torch.float64), 0.3)
