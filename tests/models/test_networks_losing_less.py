"""The networks of Losing Less against its Tables 1 to 4, and one private step of each."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from model_checks import assert_exact
from torch import nn

from tacit.engines.recorder import model_state
from tacit.losses import TailoredLoss
from tacit.models import (
    TemperedSigmoid,
    cifar_cnn,
    default_model,
    mnist_cnn,
    scattering_cifar_cnn,
    scattering_linear,
    scattering_mnist_cnn,
)

# What the tables say, layer by layer: (filters, kernel, stride, padding), pooling, or units.
MNIST = [(16, 8, 2, 2), ("pool", 2, 1), (32, 4, 2, 0), ("pool", 2, 1), 32, 10]
CIFAR = [
    *[(32, 3, 1, 1)] * 2, ("pool", 2, 2),
    *[(64, 3, 1, 1)] * 2, ("pool", 2, 2),
    *[(128, 3, 1, 1)] * 2, ("pool", 2, 2),
    128, 10,
]  # fmt: skip
SCATTERED_MNIST = [(16, 3, 2, 1), ("pool", 2, 1), (32, 3, 1, 1), ("pool", 2, 1), 32, 10]
SCATTERED_CIFAR = [
    *[(64, 3, 1, 1)] * 2, ("pool", 2, 2), *[(64, 3, 1, 1)] * 2, ("pool", 2, 2), 10
]  # fmt: skip
TABLES = {
    "Table 1": (mnist_cnn, (1, 28, 28), MNIST, 26_010),
    "Table 2": (cifar_cnn, (3, 32, 32), CIFAR, 550_570),
    "Table 3": (scattering_mnist_cnn, (81, 7, 7), SCATTERED_MNIST, 20_778),
    "Table 4": (scattering_cifar_cnn, (243, 8, 8), SCATTERED_CIFAR, 253_386),
    "Table 4, two convolutions": (
        partial(scattering_cifar_cnn, deep=False),
        (243, 8, 8),
        [(64, 3, 1, 1), ("pool", 2, 2), (64, 3, 1, 1), 10],
        187_210,
    ),
}


def described(model: nn.Sequential) -> list:
    found: list = []
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            sizes = (layer.kernel_size[0], layer.stride[0], layer.padding[0])
            found.append((layer.out_channels, *sizes))
        elif isinstance(layer, nn.MaxPool2d):
            found.append(("pool", layer.kernel_size, layer.stride))
        elif isinstance(layer, nn.Linear):
            found.append(layer.out_features)
    return found


@pytest.mark.parametrize(("make", "shape", "table", "size"), TABLES.values(), ids=TABLES.keys())
def test_the_layers_are_the_table_s(make, shape, table, size):
    torch.manual_seed(0)
    model = make()
    assert described(model) == table
    assert sum(p.numel() for p in model.parameters()) == size
    assert model(torch.zeros(2, *shape)).shape == (2, 10)
    layers = [m for m in model if not isinstance(m, nn.MaxPool2d | nn.Flatten)]
    assert all(isinstance(m, nn.Tanh) for m in layers[1::2])
    assert isinstance(layers[-1], nn.Linear)


@pytest.mark.parametrize(("make", "shape", "table", "size"), TABLES.values(), ids=TABLES.keys())
def test_one_step_of_the_tailored_loss(make, shape, table, size):
    torch.manual_seed(0)
    model = make(activation=lambda: TemperedSigmoid(1.5, 2.5, 0.75)).double()
    inputs = torch.randn(2, *shape, dtype=torch.float64)
    assert_exact(model, inputs, loss=TailoredLoss(2, beta=1, gamma=2))


def test_a_linear_model_on_scattering_features():
    model = scattering_linear((243, 8, 8), 10)
    assert model(torch.zeros(2, 243, 8, 8)).shape == (2, 10)
    assert_exact(model.double(), torch.randn(2, 243, 8, 8).double(), loss=TailoredLoss(2, 1, 2))


@pytest.mark.parametrize("shape", [(10, 5, 6), (10, 7, 9), (10, 8, 8)])
def test_other_feature_shapes_fit(shape):
    for make in (scattering_mnist_cnn, scattering_cifar_cnn, scattering_linear):
        assert make(shape, 3)(torch.zeros(2, *shape)).shape == (2, 3)
    with pytest.raises(ValueError, match="at least 5×5"):
        scattering_mnist_cnn((81, 4, 7))


def test_the_default_on_features_of_32_by_32_images_has_two_convolutions():
    model = default_model((243, 8, 8), 10)
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 2


def test_a_tempered_sigmoid_is_tanh_by_default_and_bounded():
    x = torch.linspace(-50, 50, 1001, dtype=torch.float64)
    torch.testing.assert_close(TemperedSigmoid()(x), torch.tanh(x))
    found = TemperedSigmoid(1.5, 3.0, 0.5)(x)
    assert found.min() >= -0.5
    assert found.max() <= 1.0
    assert float(TemperedSigmoid(1.5, 3.0, 0.5)(torch.zeros(()))) == pytest.approx(0.25)
    assert "1.5, 3.0, 0.5" in repr(TemperedSigmoid(1.5, 3.0, 0.5))
    with pytest.raises(ValueError, match="scale is 0"):
        TemperedSigmoid(scale=0)


def test_settings_of_an_activation_are_part_of_a_recording():
    """A recorded step knows which sigmoid it was."""
    layer = TemperedSigmoid()
    model = nn.Sequential(nn.Linear(2, 2), layer)
    cpu = torch.device("cpu")
    before = model_state(model, cpu)
    layer.scale = 1.0
    assert model_state(model, cpu) != before
