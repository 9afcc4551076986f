"""Branches and residuals around what clips cotangents, and networks of everything in everything."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tacit.lipschitz import (
    AddBias,
    AverageResidual,
    ClipGradient,
    Concatenate,
    ConvexResidual,
    FrobeniusBall,
    FrobeniusLinear,
    GroupSort,
    Householder,
    LayerCentering,
    MaxMin,
    Permute,
    Residual,
    Scale,
    SpectralBall,
    SpectralLinear,
    Sum,
    audit_layer,
    enforce,
    project,
    propagate,
)


def attacked_gradient(model, cotangent, shape, steps=60):
    """The largest norm of the first parameter's gradient, for cotangents of that norm."""
    torch.manual_seed(0)
    model = model.double()
    (weight, *_) = model.parameters()
    best = 0.0
    for _ in range(steps):
        x = torch.nn.functional.normalize(torch.randn(1, shape, dtype=torch.float64))
        y = model(x)
        g = torch.nn.functional.normalize(torch.randn(y.shape, dtype=torch.float64).sign())
        (gradient,) = torch.autograd.grad((cotangent * g * y).sum(), weight)
        best = max(best, float(gradient.norm()))
    return best


def test_clipping_branches_add_up():
    """Two branches that clip at 1 each send back 1 for a share of the cotangent: 2, not √2."""
    head = SpectralLinear(1, 1)
    branches = [ClipGradient(1.0), nn.Sequential(ClipGradient(1.0), nn.Identity())]
    model = nn.Sequential(head, Concatenate(branches))
    found = attacked_gradient(model, 10.0, 1)
    bound = propagate(model, 10.0, (1,), input_norm=1.0).by_parameter["0.weight"]
    assert 1.9 < found <= bound


def test_a_clip_inside_a_convex_residual():
    """a·G + B((1 − a)·G) can pass max(G, B(G)) where B is not linear."""
    residual = ConvexResidual(nn.Sequential(Scale(10.0), ClipGradient(1.0)))
    with torch.no_grad():
        residual.mixture.lean.fill_(0.4)
    model = nn.Sequential(SpectralLinear(1, 1), residual)
    found = attacked_gradient(model, 10.0, 1)
    bound = propagate(model, 10.0, (1,), input_norm=1.0).by_parameter["0.weight"]
    assert 18 < found <= bound


def test_the_lean_is_kept_between_its_ends():
    residual = ConvexResidual(MaxMin())
    for keep in (project, enforce):
        with torch.no_grad():
            residual.mixture.lean.fill_(-7.0)
        keep(residual)
        assert residual.mixture.lean.item() == pytest.approx(-0.5, rel=1e-3)


def test_a_bias_and_a_frobenius_weight_are_kept_in_their_balls():
    model = nn.Sequential(AddBias(4, 0.3), FrobeniusLinear(4, 3, max_norm=2.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(10.0)
    enforce(model)
    assert model[0].bias.norm().item() <= 0.3 * (1 + 2**-12)
    assert model[1].weight.norm().item() <= 2.0 * (1 + 2**-12)


def test_a_module_used_twice_counts_twice():
    shared = SpectralLinear(4, 4)
    once = propagate(nn.Sequential(shared), 1.0, (4,), input_norm=1.0)
    twice = propagate(nn.Sequential(shared, MaxMin(), shared), 1.0, (4,), input_norm=1.0)
    assert twice.by_parameter["0.weight"] >= 2 * once.by_parameter["0.weight"]
    report = audit_layer(nn.Sequential(shared, nn.Identity(), shared), (4,))
    assert report.passed
    assert report.tightness("gradient of 0.weight") > 0.9


def test_steps_in_place_inside_a_branch_do_not_pass_the_bound():
    """x + f(x) is then f₁(x) + f(x): harmless, as f₁ lengthens nothing."""
    report = audit_layer(Residual(nn.Sequential(nn.ReLU(inplace=True), Scale(-1.0))), (4,))
    assert report.passed, str(report)


class _Own(nn.Module):
    """A forward of its own, to be traced."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        y = torch.relu(self.first(x))
        return 0.5 * (y - self.second(x)) + x / 4


def random_part(draw, depth):
    """A module from 4 numbers to 4, of any kind."""
    leaves = [
        lambda: SpectralLinear(4, 4, bias=draw.random() < 0.5),
        lambda: SpectralLinear(4, 4, within=SpectralBall, max_norm=1.5),
        lambda: SpectralLinear(4, 4, within=FrobeniusBall),
        lambda: AddBias(4, 0.5),
        lambda: Householder(4),
        lambda: GroupSort(2),
        MaxMin,
        LayerCentering,
        lambda: Scale(-1.5),
        nn.ReLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.GELU,
        nn.Softplus,
        lambda: nn.Softmax(1),
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2)), Permute(2, 1), SpectralLinear(2, 2), nn.Flatten()
        ),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.ReplicationPad2d(1), nn.MaxPool2d(2),
                              nn.Flatten()),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.AvgPool1d(3, 1, 1), nn.Flatten()),
    ]  # fmt: skip
    if depth == 0:
        return draw.choice(leaves)()

    def part():
        return random_part(draw, depth - 1)

    nodes = [
        lambda: nn.Sequential(part(), part(), part()),
        lambda: nn.Sequential(part(), part()),
        lambda: Residual(part()),
        lambda: AverageResidual(part()),
        lambda: ConvexResidual(part()),
        lambda: Sum([part(), part()]),
        lambda: nn.Sequential(Concatenate([part(), part()]), SpectralLinear(8, 4)),
        lambda: _Own(part(), part()),
    ]
    return draw.choice(nodes)()


@pytest.mark.parametrize("seed", range(8))
def test_random_networks_keep_to_their_bounds(seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = nn.Sequential(SpectralLinear(5, 4), random_part(draw, 2), SpectralLinear(4, 3))
    report = audit_layer(model, (5,), input_norm=1.0 + seed, steps=10, rows=4)
    assert report.passed, f"{model}\n{report}"


@pytest.mark.parametrize("seed", range(40))
def test_random_networks_at_random_points(seed):
    """Many more of them, without ascent: every parameter's gradient, for any cotangent."""
    torch.manual_seed(seed)
    draw = random.Random(1000 + seed)
    model = nn.Sequential(SpectralLinear(5, 4), random_part(draw, 3)).double()
    for module in model.modules():
        if isinstance(module, AddBias):
            nn.init.uniform_(module.bias, -9, 9)
    project(model)
    bounds = propagate(model, 2.0, (5,), input_norm=3.0)
    for _ in range(8):
        x = 3 * torch.nn.functional.normalize(torch.randn(1, 5, dtype=torch.float64))
        y = model(x)
        g = 2 * torch.nn.functional.normalize(torch.randn_like(y))
        assert float(y.detach().norm()) <= bounds.output.norm * (1 + 1e-9)
        named = dict(model.named_parameters())
        found = torch.autograd.grad((g * y).sum(), list(named.values()), allow_unused=True)
        for name, gradient in zip(named, found, strict=True):
            if gradient is not None:
                assert float(gradient.norm()) <= bounds.by_parameter[name] * (1 + 1e-9), name
