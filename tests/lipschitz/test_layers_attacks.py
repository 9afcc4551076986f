"""Every layer's three answers, attacked; those that claim to be tight are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tacit.lipschitz import (
    AddBias,
    AverageResidual,
    Concatenate,
    ConvexResidual,
    FrobeniusLinear,
    FullSort,
    GroupSort,
    Householder,
    LayerCentering,
    MaxMin,
    Permute,
    Reshape,
    Residual,
    Scale,
    ScaledL2NormPool2d,
    SpectralLinear,
    Sum,
    Tokens,
    audit_layer,
)

LAYERS = {
    "group-sort": (lambda: GroupSort(3), (6, 2, 2)),
    "group-sort-pairs": (lambda: GroupSort(2), (6,)),
    "max-min": (MaxMin, (4, 3)),
    "max-min-tokens": (lambda: MaxMin(axis=-1), (3, 4)),
    "full-sort": (FullSort, (5,)),
    "householder": (lambda: Householder(4), (4, 2, 2)),
    "householder-tokens": (lambda: Householder(4, axis=-1), (3, 4)),
    "bias": (lambda: AddBias(3, 0.5), (3, 4, 4)),
    "bias-tokens": (lambda: AddBias(4, 2.0, axis=-1), (5, 4)),
    "frobenius": (lambda: FrobeniusLinear(5, 3, bias=True, max_norm=2.0), (2, 5)),
    "centring": (LayerCentering, (2, 3)),
    "centring-one-axis": (lambda: LayerCentering(-1), (2, 3)),
    "scale": (lambda: Scale(-2.5), (4,)),
    "permute": (lambda: Permute(2, 1), (2, 3)),
    "reshape": (lambda: Reshape(3, 2), (6,)),
    "tokens": (Tokens, (2, 2, 3)),
    "norm-pool": (lambda: ScaledL2NormPool2d(2), (2, 4, 4)),
    "norm-pool-overlapping": (lambda: ScaledL2NormPool2d(3, 1), (1, 7, 7)),
    "norm-pool-strided": (lambda: ScaledL2NormPool2d((3, 2), (2, 1)), (1, 7, 5)),
    "residual": (lambda: Residual(SpectralLinear(4, 4)), (4,)),
    "average-residual": (lambda: AverageResidual(SpectralLinear(4, 4)), (4,)),
    "convex-residual": (lambda: ConvexResidual(SpectralLinear(4, 4)), (4,)),
    "sum": (lambda: Sum([SpectralLinear(4, 4), MaxMin()]), (4,)),
    "concatenate": (lambda: Concatenate([SpectralLinear(4, 3), MaxMin()]), (4,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_answer_is_passed_and_each_is_reached(name):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    report = audit_layer(make(), shape, input_norm=2.0, steps=30)
    assert report.passed, str(report)
    for finding in report.findings:
        assert finding.tightness >= 0.99, str(report)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_at_zero_are_finite_and_within_the_bound(name):
    make, shape = LAYERS[name]
    layer = make().double()
    x = torch.zeros(2, *shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    wanted = [x, *layer.parameters()]
    for gradient in torch.autograd.grad(y.sum(), wanted, allow_unused=True):
        assert gradient is None or gradient.isfinite().all()


@pytest.mark.parametrize("name", ["group-sort", "max-min", "full-sort", "householder", "norm-pool"])
def test_norms_are_kept(name):
    make, shape = LAYERS[name]
    x = torch.randn(5, *shape, dtype=torch.float64)
    norms = make().double()(x).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, x.flatten(1).norm(dim=1))


@pytest.mark.parametrize(
    "layer", [GroupSort(2), GroupSort(4), MaxMin(), FullSort(), Householder(4)]
)
def test_gradients_keep_their_norm(layer):
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 4, 2, dtype=torch.float64)
    (pulled,) = torch.autograd.grad((layer.double()(x) * g).sum(), x)
    torch.testing.assert_close(pulled.flatten(1).norm(dim=1), g.flatten(1).norm(dim=1))


def test_layoutholder_begins_as_max_min():
    x = torch.randn(4, 6, 3)
    torch.testing.assert_close(Householder(6)(x), MaxMin()(x))


@pytest.mark.parametrize("layer", [GroupSort(2), MaxMin()])
def test_ties_pass_gradients_on_whole(layer):
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    g = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    (pulled,) = torch.autograd.grad((layer(x) * g).sum(), x)
    assert sorted(pulled[0].tolist()) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("layer", [GroupSort(2), MaxMin()])
def test_pairs_can_be_mapped_over_and_differentiated_twice(layer):
    x = torch.randn(3, 4, dtype=torch.float64)
    each = torch.func.vmap(lambda row: layer(row[None])[0])(x)
    assert torch.equal(each, layer(x))
    assert torch.autograd.gradgradcheck(lambda v: layer(v).square(), x.requires_grad_(True))


def test_group_sort_of_pairs_is_the_sort_of_pairs():
    x = torch.randn(4, 6, 3)
    expected = x.unflatten(1, (3, 2)).sort(dim=2).values.flatten(1, 2)
    assert torch.equal(GroupSort(2)(x), expected)


@pytest.mark.parametrize(
    ("make", "shape", "words"),
    [
        (lambda: GroupSort(3), (4,), "must divide"),
        (MaxMin, (3,), "must divide"),
        (lambda: GroupSort(2, axis=0), (4,), "mix records"),
        (lambda: FullSort(axis=-2), (4,), "mix records"),
        (lambda: LayerCentering((-1, -2)), (4,), "mix records"),
        (lambda: LayerCentering((1, -1)), (4,), "twice"),
        (lambda: AddBias(3), (4,), "features"),
        (lambda: AddBias(1), (4,), "features"),
        (lambda: Householder(4), (6,), "channels"),
        (lambda: Permute(2, 1), (3,), "axes"),
        (lambda: Reshape(4), (6,), "record of shape"),
        (lambda: Concatenate([nn.ReLU(), nn.ReLU()], axis=0), (4,), "mix records"),
        (lambda: ScaledL2NormPool2d(3), (1, 2, 5), "windows"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(make, shape, words):
    with pytest.raises(ValueError, match=words):
        make()(torch.zeros(2, *shape))
    with pytest.raises(ValueError, match=words):
        audit_layer(make(), shape)


@pytest.mark.parametrize(
    "make",
    [lambda: Residual(SpectralLinear(4, 1)), lambda: Sum([nn.ReLU(), SpectralLinear(4, 1)])],
)
def test_branches_of_two_shapes_are_not_broadcast(make):
    with pytest.raises(ValueError, match="same shape"):
        audit_layer(make(), (4,))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LayerCentering(0), "mix records"),
        (lambda: GroupSort(0), "at least 1"),
        (lambda: Householder(3), "even"),
        (lambda: AddBias(3, 0.0), "max_bias"),
        (lambda: Scale(0.0), "factor"),
        (lambda: Scale(float("nan")), "factor"),
        (lambda: Permute(0, 1), "batch"),
        (lambda: Reshape(2, -1), "inferred"),
        (lambda: Sum([]), "no branches"),
    ],
)
def test_what_cannot_be_built_says_why(make, words):
    with pytest.raises(ValueError, match=words):
        make()
