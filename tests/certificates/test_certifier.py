"""No attack within a certified radius changes a decision, and hardly more than it does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from perturbation import decide, flipped
from torch import nn

from tacit.certificates import certified_radius
from tacit.certificates.certifier import certifier_for
from tacit.data import PublicScaler, RangeScaler, UnitNorm
from tacit.data.scaling import HSV, YIQ, Greyscale
from tacit.errors import UnboundedLayer
from tacit.lipschitz import BoundedInput, ClipGradient, SpectralBall, SpectralLinear, propagate
from tacit.lipschitz.layers.activations import MaxMin
from tacit.lipschitz.layers.branches import AverageResidual, Residual
from tacit.lipschitz.layers.convolution_layers import SpectralConv2d
from tacit.lipschitz.layers.limits import LayerCentering, Scale

ALMOST = 1 - 1e-9
FRONTS = {
    "nothing": [],
    "clip": [BoundedInput(1.5)],
    "sphere": [BoundedInput(2.0, sphere=True)],
    "centred sphere": [LayerCentering(), BoundedInput(0.7, sphere=True)],
    "sphere, centred": [BoundedInput(0.7, sphere=True), LayerCentering()],
    "scaled, centred sphere": [Scale(3.0), LayerCentering(), BoundedInput(1.0, sphere=True)],
}


def network(seed, front="nothing", outputs=4, head=True, depth=1, size=12):
    """A random Lipschitz network on inputs (3, 2, 2), in float64."""
    torch.manual_seed(seed)
    layers = [*FRONTS[front], nn.Flatten(), SpectralLinear(12, size, within=SpectralBall)]
    for _ in range(depth):
        layers += [MaxMin(), SpectralLinear(size, size, bias=True, max_norm=1.3)]
    layers += [MaxMin(), SpectralLinear(size, outputs, bias=True)]
    model = nn.Sequential(*layers) if head else nn.Sequential(*layers, Scale(1.0))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.02)
    return model.double()


def images(seed, count=6, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(count, 3, 2, 2, generator=generator, dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    front=st.sampled_from(list(FRONTS)),
    outputs=st.sampled_from([1, 2, 4]),
    head=st.booleans(),
    depth=st.integers(0, 2),
    size=st.sampled_from([0.05, 1.0, 5.0]),
)
def test_no_attack_within_the_radius_changes_a_decision(seed, front, outputs, head, depth, size):
    model = network(seed, front, outputs, head, depth)
    x = images(seed + 1, size=size)
    radii = certified_radius(model, x)
    assert radii.shape == (6,)
    assert radii.isfinite().all()
    assert (radii >= 0).all()
    assert not flipped(model, x, ALMOST * radii, steps=12).any()


@pytest.mark.parametrize("head", [True, False])
def test_a_linear_network_s_radius_is_its_distance_to_the_boundary(head):
    """So √2 left out, or half of L, would be found out by the test above."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), SpectralLinear(12, 5, max_norm=2.0)]
    model = nn.Sequential(*layers, *([] if head else [Scale(1.0)])).double()
    x = images(1, count=20)
    radii = certified_radius(model, x)
    assert not flipped(model, x, ALMOST * radii).any()
    assert flipped(model, x, 1.001 * radii).all()
    for planted in (math.sqrt(2), 2.0):
        assert flipped(model, x, planted * radii).all()


def test_a_linear_head_counts_each_pair_of_classes_by_itself():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6)).double()
    x = images(2, count=20)
    radii = certified_radius(model, x)
    z = model(x)
    w = model[1].weight
    for i, y in enumerate(decide(z).tolist()):
        others = [k for k in range(6) if k != y]
        exact = min((z[i, y] - z[i, k]) / (w[y] - w[k]).norm() for k in others)
        assert radii[i].item() == pytest.approx(exact.item(), rel=1e-8)
    general = (z.max(dim=1).values - z.topk(2).values[:, 1]) / (
        math.sqrt(2) * torch.linalg.matrix_norm(w, 2)
    )
    assert (radii >= general * (1 - 1e-9)).all()
    assert (radii > 1.2 * general).any()


def test_one_output_has_the_radius_of_its_own_size():
    model = nn.Sequential(nn.Flatten(), SpectralLinear(12, 1, max_norm=3.0), Scale(1.0)).double()
    x = images(3, count=12)
    radii = certified_radius(model, x)
    torch.testing.assert_close(radii, model(x).detach().abs().flatten() / 3, rtol=1e-3, atol=0)
    assert not flipped(model, x, ALMOST * radii).any()
    assert flipped(model, x, 1.001 * radii).all()
    squeezed = nn.Sequential(*model, nn.Flatten(0))
    with pytest.raises(UnboundedLayer):
        certified_radius(squeezed, x)


def test_a_sphere_is_allowed_for_by_its_angle():
    """Two classes in the plane: the true radius is ‖u‖·sin φ, φ the angle to the diagonal."""
    model = nn.Sequential(BoundedInput(5.0, sphere=True), SpectralLinear(2, 2)).double()
    model[1].weight.data = torch.eye(2, dtype=torch.float64)
    angles = torch.tensor([0.01, 0.05, 0.2, 0.5], dtype=torch.float64)
    for length in (0.1, 1.0, 100.0):
        turned = math.pi / 4 - angles
        x = length * torch.stack([turned.cos(), turned.sin()], dim=1)
        true = length * angles.sin()
        radii = certified_radius(model, x)
        assert (radii <= true).all()
        assert (radii >= 0.97 * true).all()
        assert not flipped(model, x, ALMOST * radii).any()
        assert flipped(model, x, 1.04 * radii).all()


def test_centring_before_a_sphere_counts_the_centred_norm():
    """A bright image has a large norm, and a small one once it is centred."""
    torch.manual_seed(0)
    front = [LayerCentering(), BoundedInput(1.0, sphere=True), nn.Flatten()]
    model = nn.Sequential(*front, SpectralLinear(12, 3)).double()
    dim = images(4, count=10, size=0.1)
    bright = dim + 50
    radii = certified_radius(model, bright)
    torch.testing.assert_close(radii, certified_radius(model, dim), rtol=1e-9, atol=1e-12)
    assert not flipped(model, bright, ALMOST * radii).any()
    uncentred = radii * bright.flatten(1).norm(dim=1) / (dim - dim.mean()).flatten(1).norm(dim=1)
    assert flipped(model, bright, uncentred).all()


def test_the_smallest_channel_deviation_decides():
    """The published certificate used the largest."""
    torch.manual_seed(0)
    std = (0.1, 0.5, 2.0)
    scaler = PublicScaler((0.4, 0.5, 0.6), std)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double()
    model[1].weight.data[:, 4:] = 0  # it looks at the first channel only
    pixels = images(5, count=10).sigmoid()
    radii = certified_radius(model, pixels, before=scaler)
    inside = certified_radius(model, scaler(pixels))
    torch.testing.assert_close(radii, 0.1 * inside, rtol=1e-9, atol=0)

    def f(x):
        return model(scaler(x))

    assert not flipped(f, pixels, ALMOST * radii).any()
    assert flipped(f, pixels, 1.001 * radii).all()
    assert flipped(f, pixels, inside * max(std)).all()


BEFORE = {
    "range": [RangeScaler(0, 1)],
    "range by feature": [RangeScaler(torch.zeros(3, 2, 2), torch.rand(3, 2, 2) + 0.5)],
    "colour": [YIQ(), PublicScaler((0.4, 0.0, 0.0), (0.2, 0.1, 0.05))],
    "grey": [Greyscale(), PublicScaler(0.5, 0.25)],
    "unit": [UnitNorm()],
    "deviation, unit": [PublicScaler(0.4, (0.1, 0.2, 0.3)), UnitNorm()],
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_scalers_before_the_network_are_attacked_through(before):
    torch.manual_seed(1)
    pixels = images(6).sigmoid()
    scaled = pixels
    for scaler in before:
        scaled = scaler(scaled)
    layers = [nn.Flatten(), SpectralLinear(scaled[0].numel(), 8), MaxMin(), SpectralLinear(8, 3)]
    model = nn.Sequential(*layers).double()

    def f(x):
        for scaler in before:
            x = scaler(x)
        return model(x)

    radii = certified_radius(model, pixels, before=before)
    assert (radii > 0).all()
    assert not flipped(f, pixels, ALMOST * radii).any()


def test_weights_count_as_they_are_and_not_as_they_should_be():
    torch.manual_seed(2)
    model = network(2, "clip", depth=1)
    x = images(7)
    before = certified_radius(model, x)
    with torch.no_grad():
        model[2].weight *= 5  # nobody projected
    radii = certified_radius(model, x)
    assert not flipped(model, x, ALMOST * radii).any()
    with torch.no_grad():
        model[2].weight *= 1e-3
    assert (certified_radius(model, x).mean() > 0).item()
    assert not torch.equal(before, radii)


def test_weights_inside_their_set_have_a_larger_radius_than_the_set_allows():
    torch.manual_seed(3)
    body, head = SpectralLinear(12, 12, within=SpectralBall), SpectralLinear(12, 3)
    model = nn.Sequential(nn.Flatten(), body, nn.ReLU(), head).double()
    x = images(8)
    with torch.no_grad():
        body.weight *= 0.25
    radii = certified_radius(model, x)
    z = model(x).detach().sort(dim=1).values
    assert (radii > 3.9 * (z[:, -1] - z[:, -2]) / math.sqrt(2)).all()
    assert not flipped(model, x, ALMOST * radii).any()


def test_a_bias_outside_its_set_is_no_secret():
    model = nn.Sequential(nn.Flatten(), SpectralLinear(12, 3, bias=True), nn.ReLU()).double()
    with torch.no_grad():
        model[1].bias += 100
    with pytest.raises(ValueError, match=r"a SpectralLinear has norm .*project\(model\)"):
        certified_radius(model, images(0))


def test_clipped_gradients_do_not_make_a_network_smoother():
    torch.manual_seed(4)
    layers = [nn.Flatten(), SpectralLinear(12, 12), MaxMin(), SpectralLinear(12, 3)]
    plain = nn.Sequential(*layers).double()
    x = images(9)
    expected = certified_radius(plain, x)
    for at in range(5):
        clipped = nn.Sequential(*layers[:at], ClipGradient(1e-3), *layers[at:])
        torch.testing.assert_close(certified_radius(clipped, x), expected)
    ended = nn.Sequential(*layers, ClipGradient(1e-3), Scale(1.0))
    radii = certified_radius(ended, x)
    assert (radii <= expected * (1 + 1e-6)).all()


def test_a_layer_used_twice_counts_twice():
    torch.manual_seed(5)
    shared = SpectralLinear(12, 12, max_norm=4.0)
    model = nn.Sequential(nn.Flatten(), shared, MaxMin(), shared, nn.Linear(12, 3)).double()
    x = images(10)
    radii = certified_radius(model, x)
    assert not flipped(model, x, ALMOST * radii).any()
    w = model[4].weight.detach()
    steepest = max((a - b).norm() for a in w for b in w)
    gaps = model(x).detach().topk(2).values
    assert (radii >= (gaps[:, 0] - gaps[:, 1]) / (16 * steepest) * (1 - 1e-3)).all()


@pytest.mark.parametrize("kind", [BoundedInput, MaxMin, SpectralLinear])
def test_code_that_was_replaced_since_the_network_was_split_is_refused(kind, monkeypatch):
    certify = certifier_for(network(2, "sphere"), (3, 2, 2))
    certify(images(7))
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 50 * forward(self, x))
    with pytest.raises(UnboundedLayer, match="forward was replaced"):
        certify(images(7))


def test_wrong_decisions_have_no_radius():
    model = network(6)
    x = images(11, count=8)
    decided = decide(model(x))
    targets = decided.clone()
    targets[::2] = (targets[::2] + 1) % 4
    radii = certified_radius(model, x, targets)
    assert (radii[::2] == 0).all()
    assert torch.equal(radii[1::2], certified_radius(model, x)[1::2])
    one = network(6, outputs=1)
    signs = 2 * decide(one(x)) - 1
    assert (certified_radius(one, x, signs) > 0).all()
    assert (certified_radius(one, x, -signs) == 0).all()


def test_records_that_are_not_finite_have_no_radius():
    x = images(12)
    x[0, 0, 0, 0], x[1, 0, 0, 0], x[2] = math.nan, math.inf, 0.0
    radii = certified_radius(network(7, "sphere"), x)
    assert (radii[:3] == 0).all()
    assert (radii[3:] > 0).all()


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)),
        nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), SpectralLinear(12, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 3), Scale(2.0)),
        nn.Sequential(Residual(BoundedInput(sphere=True)), nn.Flatten(), SpectralLinear(12, 3)),
        nn.Sequential(*[BoundedInput(sphere=True)] * 2, nn.Flatten(), SpectralLinear(12, 3)),
    ],
    ids=["linear inside", "batch norm", "linear then scale", "sphere in a branch", "two spheres"],
)
def test_a_network_without_a_constant_is_refused(model):
    with pytest.raises(UnboundedLayer, match="no certificate"):
        certified_radius(model, images(0))


def test_what_has_no_constant_before_the_network_is_refused():
    model = network(8)
    with pytest.raises(ValueError, match="HSV has no known Lipschitz constant"):
        certified_radius(model, images(0).sigmoid(), before=[HSV()])


def test_outputs_that_are_no_scores_are_refused():
    with pytest.raises(ValueError, match="one row of class scores"):
        certified_radius(nn.Sequential(Scale(1.0)), images(0))


def test_the_model_is_left_as_it_was():
    model = network(9, "centred sphere").float().train()
    before = {n: p.clone() for n, p in model.named_parameters()}
    sets = [m.within for m in model.modules() if isinstance(m, SpectralLinear)]
    radii = certified_radius(model, images(0).float())
    assert radii.dtype == torch.float64
    assert model.training
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert sets == [m.within for m in model.modules() if isinstance(m, SpectralLinear)]


@pytest.mark.parametrize("front", ["clip", "centred sphere"])
def test_convolutions_and_residuals_are_attacked_too(front):
    torch.manual_seed(10)
    block = AverageResidual(nn.Sequential(MaxMin(), SpectralConv2d(6, 6, 3, padding=1)))
    layers = [*FRONTS[front], SpectralConv2d(3, 6, 3, padding=1), block, MaxMin(), nn.Flatten()]
    model = nn.Sequential(*layers, SpectralLinear(24, 5)).double()
    x = images(13)
    radii = certified_radius(model, x)
    assert (radii > 0).all()
    assert not flipped(model, x, ALMOST * radii).any()


@pytest.mark.parametrize("softplus", [nn.Softplus(threshold=0), nn.Softplus(beta=1e-9)], ids=str)
def test_a_softplus_that_jumps_is_refused(softplus):
    """It falls by log(1 + e^-t)/β at its threshold, which no derivative shows."""
    model = nn.Sequential(SpectralLinear(2, 2), softplus, SpectralLinear(2, 2)).double()
    with pytest.raises(UnboundedLayer, match="jumps by"):
        certified_radius(model, torch.zeros(1, 2))
    propagate(model, 1.0, (2,), input_norm=1.0)  # gradients do not see it
    model[1] = nn.Softplus()
    certified_radius(model, torch.zeros(1, 2))


def test_a_large_record_before_a_sphere_has_a_finite_radius():
    torch.manual_seed(0)
    model = nn.Sequential(BoundedInput(1.0, sphere=True), SpectralLinear(3, 3)).double()
    x = torch.tensor([[1.0, 0.2, 0.3]], dtype=torch.float64)
    expected = certified_radius(model, x)
    for size in (1e-200, 1e160, 1e200):
        torch.testing.assert_close(certified_radius(model, x * size) / size, expected)
    beyond = torch.full((1, 3), 1.7e308, dtype=torch.float64)
    assert certified_radius(model, beyond).tolist() == [0.0]


def test_a_record_that_overflows_has_no_radius():
    model = nn.Sequential(SpectralLinear(2, 2, max_norm=10.0), Scale(1.0)).double()
    with torch.no_grad():
        model[0].weight.copy_(10 * torch.eye(2))
    assert certified_radius(model, torch.tensor([[1e308, 1.0]], dtype=torch.float64)).tolist() == [
        0.0
    ]
