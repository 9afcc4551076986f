"""The Lipschitz twin of an ordinary network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tacit
from tacit.lipschitz import Absolute, BoundedInput, LayerCentering, MaxMin, SpectralConv2d
from tacit.lipschitz.convolution_sets import ReshapedKernel


def ordinary() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2),
        nn.Dropout(), nn.Conv2d(6, 5, 3), nn.GELU(), nn.Flatten(), nn.Linear(20, 3),
    )  # fmt: skip


def test_it_is_bounded_and_says_what_it_changed() -> None:
    model = ordinary()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    twin, changes = tacit.lipschitz_twin(model)
    found = tacit.propagate(twin, 1.0, (1, 8, 8))
    assert set(found.by_parameter) == {n for n, _ in twin.named_parameters()}
    assert len(changes) == 1 + 8
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    kinds = [type(m) for m in twin[1]]
    assert isinstance(twin[0], BoundedInput)
    assert kinds[:3] == [SpectralConv2d, LayerCentering, MaxMin]
    assert kinds[6] is Absolute  # five channels


def test_a_record_stays_within_its_bounds() -> None:
    torch.manual_seed(1)
    twin = tacit.lipschitz_twin(ordinary(), sphere=True).model.double().eval()
    loss = tacit.losses.CrossEntropy(0.1)
    report = tacit.lipschitz.audit_model(twin, loss, (1, 8, 8), torch.arange(3))
    assert report.passed, report.violations


def test_shared_layers_stay_shared() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    twin = tacit.lipschitz_twin(model).model
    assert twin[1][0] is twin[1][2]
    assert len(list(twin.parameters())) == 1
    once = tacit.propagate(tacit.lipschitz_twin(nn.Sequential(layer)).model, 1.0, (4,))
    twice = tacit.propagate(twin, 1.0, (4,))
    assert twice.by_parameter["1.0.weight"] == pytest.approx(
        2 * once.by_parameter["1.0.weight"], rel=1e-2
    )


def test_options() -> None:
    twin = tacit.lipschitz_twin(
        ordinary(), input_norm=3.0, reshaped=True, activation=lambda channels: Absolute()
    ).model
    assert twin[0].max_norm == 3.0
    assert isinstance(twin[1][2], Absolute)
    assert isinstance(twin[1][0].within, ReshapedKernel)


def test_what_has_no_twin_is_named() -> None:
    twin = tacit.lipschitz_twin(nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.Flatten())).model
    with pytest.raises(tacit.errors.UnboundedLayer, match="ConvTranspose2d"):
        tacit.propagate(twin, 1.0, (1, 8, 8))
