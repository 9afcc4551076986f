"""Low precision, compiled models and deterministic mode: the sums stay float32 and bounded."""

from __future__ import annotations

import pytest
import torch
from engine_checks import batch_for, check_exact, sums_of
from torch import nn

from tacit import PerSampleClip


class Everything(nn.Module):
    """One of each kind of rule, on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.scale = Scale()
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.conv(self.embed(x).transpose(1, 2)).transpose(1, 2)
        h = self.recurrent(self.block(h))[0]
        return self.head(self.norm(self.scale(h)).mean(dim=1))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x):
        return x * self.scale


def tokens(n):
    return torch.randint(0, 9, (n, 6))


def whole(sums):
    return torch.cat([s.flatten().double() for s in sums.values()])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Everything()


@pytest.fixture
def plain_kernels():
    """oneDNN's bfloat16 kernels stop the process on virtual machines that hide AMX."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.usefixtures("plain_kernels")
def test_bfloat16_autocast_keeps_the_bound_and_the_direction(model):
    inputs = tokens(4)
    exact = whole(sums_of(PerSampleClip(0.1), model, batch_for(inputs)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = whole(sums_of(PerSampleClip(0.1), model, batch_for(inputs)))
        for i in range(4):
            one = whole(sums_of(PerSampleClip(0.1), model, batch_for(inputs[i : i + 1])))
            assert one.norm() <= 0.1
            assert one.norm() >= 0.1 * (1 - 1e-4), "norms are taken in float32"
    assert (found - exact).norm() <= 0.1 * exact.norm()


@pytest.mark.usefixtures("plain_kernels")
def test_autocast_products_of_rules_run_in_float32():
    """A bfloat16 product of a and b would be off by about 1e-3."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48)
    inputs = torch.randn(3, 4, 64).bfloat16().float()  # what autocast makes of it anyway
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sums_of(PerSampleClip(1e6), model, batch_for(inputs, torch.zeros(3)))
        outputs = model(inputs)
    expected = outputs.detach().double().flatten(0, 1).T @ inputs.double().flatten(0, 1)
    assert (found["weight"] - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_low_precision_has_wide_sums(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), Scale(), nn.Linear(8, 8), nn.LayerNorm(8)).to(dtype)
    inputs = tokens(3)
    for i in range(3):
        one = whole(sums_of(PerSampleClip(0.1), model, batch_for(inputs[i : i + 1])))
        assert 0.1 * (1 - 1e-4) <= one.norm() <= 0.1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_gives_the_same_sums(model, backend):
    inputs = tokens(3)
    expected = whole(sums_of(PerSampleClip(0.5), model, batch_for(inputs)))
    compiled = torch.compile(model, backend=backend)
    compiled(inputs)  # compiled before there are hooks
    for _ in range(2):
        found = whole(sums_of(PerSampleClip(0.5), compiled, batch_for(inputs)))
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_a_model_with_a_compiled_part_gives_the_same_sums(model):
    inputs = tokens(3)
    expected = whole(sums_of(PerSampleClip(0.5), model, batch_for(inputs)))
    model.block.compile(backend="eager")
    model(inputs)
    found = whole(sums_of(PerSampleClip(0.5), model, batch_for(inputs)))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_deterministic_mode_gives_the_same_sums_twice(model):
    inputs = tokens(5)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (
            whole(sums_of(PerSampleClip(0.5), model, batch_for(inputs))) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(first, second)


def test_every_kind_of_rule_together_in_float64(model):
    check_exact(model.double(), tokens(4), 0.5)
