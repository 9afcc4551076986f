"""The papers' networks: their shapes, their sizes, and one private step of each."""

from __future__ import annotations

import pytest
import torch
from model_checks import assert_exact, batch_for, sums_of
from torch import nn

from tacit import by_layer
from tacit.errors import MixesRecords
from tacit.lipschitz import audit_layer, project
from tacit.models import (
    WeightStandardisedConv2d,
    cifar_cnn,
    convnet,
    group_norm,
    lenet,
    lenet5,
    lipschitz_linear,
    make_trainable,
    mlp_mixer,
    mnist_cnn,
    resnet,
    resnet18,
    vgg,
    wide_resnet,
)

# name: (network, shape of one record)
NETWORKS = {
    "mnist_cnn": (mnist_cnn, (1, 28, 28)),
    "cifar_cnn": (cifar_cnn, (3, 32, 32)),
    "convnet": (convnet, (3, 32, 32)),
    "convnet without norm": (lambda: convnet(norm=None), (3, 9, 11)),
    "lenet5": (lenet5, (1, 28, 28)),
    "lenet5 on 32×32": (lambda: lenet5(channels=3, side=32), (3, 32, 32)),
    "lenet5 without norm": (lambda: lenet5(norm=None), (1, 28, 28)),
    "lenet": (lambda: lenet((1, 28, 28), 10), (1, 28, 28)),
    "lenet, odd sides": (lambda: lenet((2, 5, 7), 10), (2, 5, 7)),
    "vgg": (lambda: vgg((3, 32, 32), 10), (3, 32, 32)),
    "vgg, deep": (lambda: vgg((1, 12, 13), 10, width=4, depth=2), (1, 12, 13)),
    "mlp_mixer": (lambda: mlp_mixer((3, 32, 32), 10), (3, 32, 32)),
    "mlp_mixer, deep": (lambda: mlp_mixer((1, 6, 4), 10, patch=2, depth=3), (1, 6, 4)),
    "resnet": (resnet, (3, 8, 8)),
    "resnet18": (resnet18, (3, 8, 8)),
    "resnet without norm": (lambda: resnet(norm=None), (3, 8, 8)),
    "resnet with GroupNorm": (lambda: resnet(norm=group_norm(4)), (3, 9, 9)),
    "wide_resnet": (wide_resnet, (3, 8, 8)),
    "wide_resnet, standardised": (
        lambda: wide_resnet(10, 1, conv=WeightStandardisedConv2d),
        (3, 8, 8),
    ),
    "wide_resnet without norm": (lambda: wide_resnet(10, 1, channels=1, norm=None), (1, 8, 8)),
}


def mixes(model: nn.Module) -> bool:
    return any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def size_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS.keys())
@pytest.mark.filterwarnings("ignore:WeightStandardisedConv2d has no rule")
def test_one_private_step_is_that_of_records_alone(make, shape):
    torch.manual_seed(0)
    model = make().double()
    inputs = torch.randn(3, *shape, dtype=torch.float64)
    if mixes(model):
        with pytest.raises(MixesRecords):
            sums_of(model, batch_for(inputs), nn.CrossEntropyLoss())
        model = make_trainable(model).model
    assert model(inputs).shape == (3, 10)
    assert_exact(model, inputs)


def test_resnet18_has_the_layers_that_the_paper_counts():
    assert len(list(resnet18().parameters())) == 62  # its L
    assert size_of(resnet18()) == 11_173_962
    assert not mixes(resnet18(norm=None))


def test_lenet5_has_the_layers_that_the_paper_counts():
    assert len(by_layer(lenet5())) == 8  # its L
    assert size_of(lenet5(norm=None)) == 61_706  # LeNet-5
    filters = [m.out_channels for m in lenet5() if isinstance(m, nn.Conv2d)]
    assert filters == [6, 16, 120]


def test_convnet_has_the_filters_of_table_1():
    convolutions = [m for m in convnet() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [32, 64, 64, 128]
    assert all(m.kernel_size == (3, 3) and m.padding == (1, 1) for m in convolutions)
    assert sum(isinstance(m, nn.AvgPool2d) for m in convnet()) == 3


@pytest.mark.parametrize(("width", "thousands"), [(32, 130), (128, 2000)])
def test_vgg_spans_the_papers_range(width, thousands):
    assert size_of(vgg((3, 32, 32), 10, width)) == pytest.approx(1000 * thousands, rel=0.02)


@pytest.mark.parametrize(("depth", "width", "millions"), [(16, 8, 11.0), (28, 10, 36.5)])
def test_wide_resnet_has_the_published_sizes(depth, width, millions):
    with torch.device("meta"):
        assert size_of(wide_resnet(depth, width)) == pytest.approx(1e6 * millions, rel=0.01)


def test_mixer_matrices_are_square():
    model = mlp_mixer((3, 32, 32), 10, width=128)
    shapes = {tuple(m.weight.shape) for m in model.blocks.modules() if isinstance(m, nn.Linear)}
    assert shapes == {(64, 64), (128, 128)}


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: vgg((1, 8, 8), 10), "at least 12×12"),
        (lambda: lenet((1, 3, 8), 10), "at least 4×4"),
        (lambda: lenet((64,), 10), "use mlp"),
        (lambda: mlp_mixer((1, 28, 30), 10), "patches of 4×4"),
        (lambda: lenet5(side=30), "28×28 or 32×32"),
        (lambda: wide_resnet(depth=17), "6·n \\+ 4"),
        (lambda: group_norm(0), "at least 1"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_in_words(build, says):
    with pytest.raises(ValueError, match=says):
        build()


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 16), (16, 8), (6, 3), (7, 1), (1, 1), (2, 1), (120, 15)]
)
def test_groups_divide_the_channels_and_hold_two_of_them(channels, groups):
    assert group_norm(16)(channels).num_groups == groups


def test_a_lipschitz_linear_layer_begins_at_zero_and_stays_in_the_ball() -> None:
    torch.manual_seed(0)
    model = lipschitz_linear((3, 4, 5), 7)
    assert not model(torch.randn(2, 3, 4, 5)).any()
    with torch.no_grad():
        model[-1].weight.normal_()
    project(model)
    norm = torch.linalg.matrix_norm(model[-1].weight.double(), 2).item()
    assert 0.9 < norm <= 1.0
    report = audit_layer(model, (3, 4, 5), steps=20)
    assert report.passed
    assert report.tightness("gradient of 2.weight") > 0.99
