"""Certified accuracy counts what is right and certified, and says so in a table and a picture."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import tacit
from tacit.certificates import certified_accuracy, certified_radius
from tacit.certificates.accuracy import plot_certified
from tacit.data import PublicScaler
from tacit.lipschitz import BoundedInput, SpectralLinear
from tacit.losses import CrossEntropy
from tacit.report.folder_files import to_json


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    front = [BoundedInput(1.0, sphere=True), nn.Flatten()]
    return nn.Sequential(*front, SpectralLinear(12, 4))


@pytest.fixture(scope="module")
def records(model):
    torch.manual_seed(1)
    x = torch.rand(300, 3, 2, 2)
    y = model(x).argmax(dim=1)
    y[::7] = (y[::7] + 1) % 4
    return tacit.Records(x, y, num_classes=4)


def test_at_radius_0_it_is_the_accuracy(model, records):
    found = certified_accuracy(model, records, batch_size=64)
    assert found.shares[0] == tacit.evaluate(model, records, CrossEntropy()).accuracy
    assert found.radii == (0, 1, 2, 4, 8, 16)
    assert found.num_records == 300
    assert list(found.shares) == sorted(found.shares, reverse=True)
    assert found.shares[-1] < found.shares[0]


def test_it_counts_records_whose_radius_is_larger(model, records):
    found = certified_accuracy(model, records, [5, 0, 5, 0.5], unit=0.01)
    radii = certified_radius(model, records.inputs, records.targets)
    assert found.radii == (0, 0.5, 5)
    for r, share in zip(found.radii[1:], found.shares[1:], strict=True):
        assert share == (radii > 0.01 * r).double().mean().item()
        assert share == found.at(r)
    right = radii[radii > 0]
    assert found.median_radius() == pytest.approx(right.median().item() / 0.01)


def test_radii_are_those_of_inputs_before_scaling(records):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    scaler = PublicScaler(0.5, (0.2, 0.3, 0.4))
    raw = certified_accuracy(model, records, [0.0, 4.0], before=scaler)
    scaled = tacit.Records(scaler(records.inputs), records.targets)
    inside = certified_accuracy(model, scaled, [0.0, 20.0])
    assert raw.shares == pytest.approx(inside.shares)


def test_the_table_the_facts_and_the_picture(model, records, tmp_path):
    found = certified_accuracy(model, records)
    text = found.text()
    assert "16/255" in text
    assert f"{found.shares[0]:.2%}" in text
    assert "300 held-out records" in text
    facts = json.loads(to_json(found.facts()))
    assert facts["certified_accuracy"][1] == {"radius": 1, "share": found.shares[1]}
    found.plot(tmp_path / "one.png")
    plot_certified({"a": found, "b": found}, tmp_path / "two.png")
    for name in ("one.png", "two.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_no_records_is_no_error(model, records):
    none = tacit.Records(records.inputs[:0], records.targets[:0])
    found = certified_accuracy(model, none)
    assert found.shares == (0,) * 6
    assert found.median_radius() is None


@pytest.mark.parametrize("radii", [[], [-1.0], [float("nan")], [float("inf")]])
def test_radii_that_are_none_are_refused(model, records, radii):
    with pytest.raises(ValueError, match="radii are"):
        certified_accuracy(model, records, radii)
    with pytest.raises(ValueError, match="unit is 0"):
        certified_accuracy(model, records, unit=0)
