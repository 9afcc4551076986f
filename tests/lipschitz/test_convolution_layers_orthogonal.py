"""Orthogonal convolutions keep the norm, and what they are made of moves numbers and no more."""

from __future__ import annotations

import copy

import pytest
import torch
from convolution_cases import dense, true_norm
from torch import nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz import (
    BoundedInput,
    OrthogonalConv1d,
    OrthogonalConv2d,
    Shift,
    SpaceToDepth,
    SpectralLinear,
    audit_layer,
    input_lipschitz,
    project,
    propagate,
)
from tacit.lipschitz.sets import SLACK


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize(("channels", "stride"), [((4, 4), 1), ((3, 16), 1), ((2, 9), 2)])
def test_the_norm_is_kept_under_circular_padding(kernel, channels, stride):
    torch.manual_seed(0)
    layer = OrthogonalConv2d(*channels, kernel, stride)
    x = torch.randn(5, channels[0], 6, 8)
    norms = layer(x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_operator_is_orthogonal(stride):
    torch.manual_seed(0)
    layer = OrthogonalConv2d(3, 3 * stride**2, 3, stride).double()
    operator = dense(layer, 3, (4, 4))
    eye = torch.eye(48, dtype=torch.float64)
    torch.testing.assert_close(operator.T @ operator, eye, rtol=0, atol=1e-5)
    torch.testing.assert_close(operator @ operator.T, eye, rtol=0, atol=1e-5)


def test_it_is_a_convolution_over_the_whole_window():
    torch.manual_seed(0)
    layer = OrthogonalConv2d(2, 18, 3)
    x = torch.zeros(1, 2, 7, 7)
    x[0, 0, 3, 3] = 1.0
    y = layer(x).detach().abs().sum(dim=1)[0]
    assert bool((y[2:5, 2:5] > 1e-3).all())
    y[2:5, 2:5] = 0
    assert float(y.max()) == 0
    z = torch.randn(1, 2, 7, 7)
    torch.testing.assert_close(layer(z.roll((2, 1), (2, 3))), layer(z).roll((2, 1), (2, 3)))


@pytest.mark.parametrize("padding_mode", ["zeros", "circular"])
@pytest.mark.parametrize("channels", [(4, 4), (4, 2), (2, 5)])
def test_noisy_steps_leave_it_non_expansive(padding_mode, channels):
    torch.manual_seed(0)
    layer = OrthogonalConv2d(*channels, 3, padding_mode=padding_mode)
    for _ in range(20):
        with torch.no_grad():
            for p in layer.parameters():
                p.add_(0.3 * torch.randn_like(p))
        project(layer)
    singular = torch.linalg.svdvals(dense(copy.deepcopy(layer).double(), channels[0], (4, 4)))
    assert float(singular.max()) <= (1 + SLACK) ** 2
    if padding_mode == "circular" and channels[1] >= channels[0]:
        assert float(singular.min()) >= 1 - 1e-4


def test_two_offsets_make_the_block_of_bcop():
    """1 − P + P·z with a projection P, by hand and by the layer."""
    torch.manual_seed(0)
    layer = OrthogonalConv1d(6, 6, 2).double()
    into, _, out = layer.layers
    with torch.no_grad():
        out.weight[:, :, 0] = into.weight[:, :, 0].T
    basis = into.weight[:, :, 0].detach()
    projection = basis[3:].T @ basis[3:]
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    by_hand = x - torch.einsum("ij,bjt->bit", projection, x - x.roll(1, 2))
    torch.testing.assert_close(layer(x), by_hand, rtol=0, atol=1e-5)


def test_every_factor_has_the_gradient_bound_of_a_linear_layer():
    model = nn.Sequential(BoundedInput(2.0), OrthogonalConv2d(3, 16, 3, stride=2))
    found = propagate(model, 0.5, (3, 8, 8))
    assert len(found.by_parameter) == 2
    for bound in found.by_parameter.values():
        assert bound == pytest.approx(2.0 * 0.5, rel=1e-3)
    assert found.output.norm == pytest.approx(2.0, rel=1e-3)
    assert input_lipschitz(model, (3, 8, 8)) == pytest.approx(1.0, rel=1e-3)


def test_the_audit_finds_nothing():
    audit_layer(OrthogonalConv2d(3, 4, 3, stride=2, max_norm=2.0), (3, 4, 4)).require()
    audit_layer(OrthogonalConv1d(3, 4, 3, padding_mode="zeros"), (3, 5)).require()


def test_sequences():
    torch.manual_seed(0)
    layer = OrthogonalConv1d(4, 8, 5, stride=2).double()
    operator = dense(layer, 4, (8,))
    eye = torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(operator.T @ operator, eye, rtol=0, atol=1e-5)


def test_space_to_depth_is_the_permutation_of_pytorch_s():
    x = torch.randn(2, 3, 6, 9)
    assert torch.equal(SpaceToDepth(3)(x), nn.PixelUnshuffle(3)(x))
    y = SpaceToDepth((2, 3))(x)
    assert y.shape == (2, 18, 3, 3)
    assert torch.equal(y.flatten(1).sort(dim=1)[0], x.flatten(1).sort(dim=1)[0])
    line, block = SpaceToDepth(2, dims=1), SpaceToDepth(2, dims=3)
    assert line(torch.zeros(1, 2, 4)).shape == (1, 4, 2)
    assert block(torch.zeros(1, 1, 4, 2, 6)).shape == (1, 8, 2, 1, 3)


def test_a_size_that_the_block_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="multiple of the block"):
        SpaceToDepth(2)(torch.zeros(1, 1, 5, 4))
    with pytest.raises(UnboundedLayer, match="multiple of the block"):
        propagate(nn.Sequential(BoundedInput(), OrthogonalConv2d(1, 4, 3, 2)), 1.0, (1, 5, 4))


def test_shifts_move_runs_of_channels():
    x = torch.randn(1, 9, 4, 5)
    moved, cut = Shift((3, 3))(x), Shift((3, 3), "zeros")(x)
    for channel, (down, right) in enumerate(Shift((3, 3)).offsets):
        by_hand = x[:, channel].roll((down, right), (1, 2))
        assert torch.equal(moved[:, channel], by_hand)
        kept = cut[:, channel] != 0
        assert torch.equal(cut[:, channel][kept], by_hand[kept])
        assert int(kept.sum()) == (4 - abs(down)) * (5 - abs(right))
    assert torch.equal(Shift((3, 3))(x[:, :1]), x[:, :1])


def test_a_shift_beyond_the_image_leaves_nothing():
    x = torch.ones(1, 5, 1)
    assert Shift((5,), "zeros")(x).flatten().tolist() == [0, 0, 1, 0, 0]
    assert torch.equal(Shift((5,))(x), x)


def test_zero_padding_loses_what_leaves_and_no_more():
    torch.manual_seed(0)
    layer = OrthogonalConv2d(9, 9, 3, padding_mode="zeros").double()
    assert true_norm(layer, 9, (4, 4)) == pytest.approx(1.0, abs=1e-5)


def test_deep_stacks_do_not_fade():
    """Twelve layers: an RKO stack would have lost four fifths of the gradient by then."""
    torch.manual_seed(0)
    model = nn.Sequential(*(OrthogonalConv2d(4, 4, 3) for _ in range(12)))
    x = torch.randn(1, 4, 8, 8, requires_grad=True)
    y = model(x)
    g = torch.randn_like(y)
    (gradient,) = torch.autograd.grad((y * g).sum(), x)
    assert float(gradient.norm() / g.norm()) == pytest.approx(1.0, abs=1e-4)


def test_other_padding_is_refused():
    with pytest.raises(ValueError, match="circular or zeros"):
        OrthogonalConv2d(2, 2, 3, padding_mode="reflect")


def test_a_network_of_them_trains():
    torch.manual_seed(0)
    model = nn.Sequential(
        BoundedInput(), OrthogonalConv2d(1, 8, 3), nn.ReLU(), OrthogonalConv2d(8, 16, 3, 2),
        nn.Flatten(), SpectralLinear(256, 2, max_norm=8.0),
    )  # fmt: skip
    x = torch.randn(32, 1, 8, 8)
    labels = (x[:, 0, :4].sum(dim=(1, 2)) > 0).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        project(model)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
