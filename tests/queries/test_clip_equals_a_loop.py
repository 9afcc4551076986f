"""Per-sample clipping is what a loop over records does: gradient, clip, add. Float64, to 1e-12."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tacit
from tacit import PerSampleClip
from tacit.engines import BookKeeping, PerRecord
from tacit.sampling import Poisson, batch_of

torch.set_num_threads(1)

ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU]
# A large eps: dividing by the deviation of two nearly equal numbers would magnify roundings.
NORMS = [
    nn.Identity,
    lambda width: nn.LayerNorm(width, eps=0.1),
    lambda width: nn.GroupNorm(1, width, eps=0.1),
]
GROUPINGS = [None, tacit.by_layer, tacit.by_parameter]


def one_by_one(model, loss, inputs, targets, blocks, max_norms) -> dict[str, torch.Tensor]:
    """Σ_i Π_h(g_i), with nothing but autograd and a Python loop."""
    parameters = dict(model.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for x, y in zip(inputs, targets, strict=True):
        value = loss(model(x.unsqueeze(0)), y.unsqueeze(0)).sum()
        grads = dict(zip(parameters, torch.autograd.grad(value, parameters.values()), strict=True))
        for names, max_norm in zip(blocks, max_norms, strict=True):
            norm = torch.cat([grads[n].reshape(-1) for n in names]).norm()
            scale = min(1.0, max_norm / float(norm)) if norm > 0 else 1.0
            for name in names:
                sums[name] += scale * grads[name]
    return sums


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(2, 7), min_size=2, max_size=4),
    activation=st.sampled_from(ACTIVATIONS),
    norm=st.sampled_from(NORMS),
    bias=st.booleans(),
    grouping=st.sampled_from(GROUPINGS),
    num_records=st.integers(1, 9),
    max_physical=st.sampled_from([None, 2, 5]),
    alone=st.booleans(),
    max_norm=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**31),
)
def test_random_models(
    widths,
    activation,
    norm,
    bias,
    grouping,
    num_records,
    max_physical,
    alone,
    max_norm,
    seed,
):
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after, bias=bias), norm(after), activation()]
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 3)).double()
    inputs = 3 * torch.randn(num_records, widths[0], dtype=torch.float64)
    targets = torch.randint(0, 3, (num_records,))
    batch = batch_of(inputs, targets, divisor=2.0, scheme=Poisson(0.5), max_physical=max_physical)
    engine = PerRecord() if alone else BookKeeping()
    query = PerSampleClip(max_norm, blocks=grouping, engine=engine)

    bounded = query(model, nn.CrossEntropyLoss(), batch)

    blocks = query.blocks_of(model)
    expected = one_by_one(
        model, nn.CrossEntropyLoss(), inputs, targets, blocks, [max_norm] * len(blocks)
    )
    for block in bounded.blocks:
        for name, total in zip(block.names, block.sums, strict=True):
            torch.testing.assert_close(total, expected[name], rtol=1e-12, atol=1e-12)
