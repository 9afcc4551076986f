"""Projection and enforcement: norms are certified from above, and nobody can forget to project."""

from __future__ import annotations

import copy

import pytest
import torch
from convolution_cases import operator_norm_exact
from torch import nn

import tacit
from tacit.lipschitz import (
    Orthogonal,
    SpectralBall,
    SpectralConv1d,
    SpectralConv2d,
    SpectralLinear,
    enforce,
)
from tacit.lipschitz.operator_norm import operator_norm_upper, orthogonalise, rough_norm_upper
from tacit.lipschitz.sets import SLACK

LIMIT = 1 + SLACK + 1e-9


def true_norm(weight: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().double().flatten(1), 2))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        SpectralLinear(12, 20), nn.ReLU(), SpectralLinear(20, 20, bias=True), SpectralLinear(20, 3)
    )


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (5, 5), (3, 40), (64, 64), (200, 30)])
def test_the_upper_bound_is_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for scale in (1e-8, 1.0, 1e6):
        for rank in (1, min(shape)):
            left, right = torch.randn(3, shape[0], rank), torch.randn(3, rank, shape[1])
            w = scale * left.double() @ right.double()
            true = torch.linalg.matrix_norm(w, 2)
            for upper in (operator_norm_upper(w), operator_norm_exact(w), rough_norm_upper(w)):
                assert (upper >= true).all()
                assert (upper <= 1.05 * true).all()


def test_power_iteration_would_be_caught() -> None:
    """A spike that ten steps of power iteration do not see: certified by it, the norm is 1.5."""
    torch.manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(256, 256).double())
    spectrum = torch.full((256,), 0.99).double()
    spectrum[0] = 1.5
    w = u @ torch.diag(spectrum) @ u.T
    v = torch.randn(256).double()
    v -= (v @ u[:, 0]) * u[:, 0] * (1 - 1e-6)
    for _ in range(10):
        v = w.T @ (w @ v)
        v /= v.norm()
    power = float((w @ v).norm())
    assert power < 1.0
    assert float(operator_norm_upper(w[None])) >= 1.5
    layer = SpectralLinear(256, 256).double()
    with torch.no_grad():
        layer.weight.copy_(w)
    enforce(layer)
    assert true_norm(layer.weight) <= LIMIT


@pytest.mark.parametrize("shape", [(6, 6), (30, 4), (4, 30), (100, 40)])
def test_orthogonalisation_never_overshoots(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    for smallest in (1e-6, 0.1, 0.9):
        u, _, v = torch.linalg.svd(torch.randn(*shape).double(), full_matrices=False)
        s = torch.linspace(smallest, 1.0, min(shape)).double()
        for steps in (1, 3, 6, 12):
            found = torch.linalg.svdvals(orthogonalise((u * s) @ v, steps))
            assert found.max() <= 1 + 1e-12
            assert found.min() >= smallest * (1 - 1e-12)


def test_thousands_of_noisy_steps_stay_inside() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(1500):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        tacit.project(model)
        if step % 50 == 0:
            assert all(true_norm(p) <= LIMIT for p in model.parameters() if p.dim() == 2)
            assert float(model[2].bias.detach().norm()) <= LIMIT
    spectra = [torch.linalg.svdvals(model[i].weight.detach()) for i in (0, 3)]
    assert min(float(spectrum.min()) for spectrum in spectra) > 0.999


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("projected", [False, True])
def test_enforcing_mends_whatever_was_written(through_data: bool, projected: bool) -> None:
    """Writes through `.data` are not counted by PyTorch; the proof must not rely on counts."""
    model = network()
    if projected:
        tacit.project(model)
    enforce(model)
    with torch.no_grad():
        for p in model.parameters():
            (p.data if through_data else p).add_(3.0 * torch.randn_like(p))
    enforce(model)
    assert all(true_norm(p) <= LIMIT for p in model.parameters() if p.dim() == 2)
    assert float(model[2].bias.detach().norm()) <= LIMIT


def test_loaded_weights_that_are_feasible_are_kept() -> None:
    """Certified anew, and not shrunk for lying far from what was certified before."""
    trained, fresh = network(), network()
    with torch.no_grad():
        for p in trained.parameters():
            p.add_(torch.randn_like(p))
    tacit.project(trained)
    tacit.project(fresh)
    fresh.load_state_dict(trained.state_dict())
    enforce(fresh)
    pairs = zip(trained.parameters(), fresh.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_copies_and_shared_weights() -> None:
    model = network()
    model.append(model[3])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.mul_(5)
    enforce(twin)
    assert true_norm(twin[0].weight) <= LIMIT
    assert torch.equal(model[0].weight, network()[0].weight)


def test_the_ball_keeps_what_is_inside_and_shrinks_what_is_not() -> None:
    layer = SpectralLinear(8, 8, within=SpectralBall)
    with torch.no_grad():
        layer.weight.mul_(0.3)
    tacit.project(layer)
    assert true_norm(layer.weight) == pytest.approx(0.3, rel=1e-5)
    with torch.no_grad():
        layer.weight.mul_(100)
    tacit.project(layer)
    assert 0.99 <= true_norm(layer.weight) <= LIMIT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rounded_weights_are_inside_too(dtype: torch.dtype) -> None:
    layer = SpectralLinear(40, 40).to(dtype)
    with torch.no_grad():
        layer.weight.mul_(7)
    enforce(layer)
    assert true_norm(layer.weight) <= LIMIT


def test_sets_are_scale_free() -> None:
    for max_norm in (1e-3, 1.0, 50.0):
        layer = SpectralLinear(10, 10, max_norm=max_norm)
        tacit.project(layer)
        assert true_norm(layer.weight) <= max_norm * LIMIT
        assert true_norm(layer.weight) >= 0.999 * max_norm
        kept = layer.weight.clone()
        enforce(layer)
        assert torch.equal(kept, layer.weight)
    assert Orthogonal(1.0) == Orthogonal(1.0)


def test_a_convolution_moved_through_data_is_mended() -> None:
    conv = SpectralConv2d(3, 6, 3, padding=1, input_size=6)
    tacit.project(conv)
    enforce(conv)
    conv.weight.data.mul_(4)
    enforce(conv)
    basis = torch.eye(3 * 36).reshape(-1, 3, 6, 6)
    operator = conv(basis).flatten(1)
    assert float(torch.linalg.matrix_norm(operator.detach().double(), 2)) <= LIMIT


def test_a_weight_that_is_computed_is_refused() -> None:
    layer = nn.utils.parametrizations.weight_norm(SpectralLinear(4, 4))
    with pytest.raises(tacit.errors.UnboundedLayer, match="parametrization"):
        enforce(layer)


@pytest.mark.parametrize("norms", [(0.5, 4.0), (4.0, 0.5)])
def test_a_weight_in_two_sets_is_left_in_both(norms: tuple[float, float]) -> None:
    first, second = (SpectralLinear(6, 6, max_norm=norm) for norm in norms)
    second.weight = first.weight
    model = nn.Sequential(first, SpectralLinear(6, 6), second)
    tacit.project(model)
    assert 0.499 <= true_norm(first.weight) <= 0.5 * LIMIT
    kept = first.weight.clone()
    enforce(model)
    assert torch.equal(kept, first.weight)  # it was certified as it is, for both
    first.weight.data.mul_(3)
    enforce(model)
    assert true_norm(first.weight) <= 0.5 * LIMIT


def test_weights_that_lie_partly_over_each_other_are_refused() -> None:
    """Writing one of them, shrunk, would write a part of the other that is not."""
    memory = 3 * torch.eye(4, 6)
    first, second = (SpectralLinear(4, 4, within=SpectralBall) for _ in range(2))
    first.weight, second.weight = nn.Parameter(memory[:, :4]), nn.Parameter(memory[:, 2:])
    model = nn.Sequential(first, second)
    for keep in (tacit.project, enforce):
        with pytest.raises(tacit.errors.UnboundedLayer, match="partly over each other"):
            keep(model)
    second.weight = nn.Parameter(second.weight.detach().clone())
    enforce(model)
    assert all(true_norm(layer.weight) <= LIMIT for layer in model)


def test_a_kernel_in_two_convolutions_is_left_in_both_sets() -> None:
    dense = SpectralConv1d(2, 2, 3, padding=1, padding_mode="circular")
    strided = SpectralConv1d(2, 2, 3, stride=3)
    strided.weight = dense.weight
    tacit.project(nn.Sequential(dense, strided))
    operator = dense(torch.eye(18).reshape(18, 2, 9)).flatten(1).detach()
    assert float(torch.linalg.matrix_norm(operator.double(), 2)) <= LIMIT


def test_a_parameter_in_the_place_of_another_is_projected():
    """Memory is used again: an address alone does not name a parameter."""
    model = nn.Sequential(tacit.lipschitz.SpectralLinear(3, 3))
    tacit.project(model)
    old = model[0].weight
    new = nn.Parameter(old.detach())  # another parameter that lies where the first one does
    model[0].weight = new
    with torch.no_grad():
        new.mul_(100)
    enforce(model)
    assert float(torch.linalg.matrix_norm(new, 2)) < 1.01
