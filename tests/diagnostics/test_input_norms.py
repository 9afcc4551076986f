"""Input norms in several spaces, marked as what they are."""

from __future__ import annotations

import pytest
import torch

import tacit
from tacit.data import UnitNorm
from tacit.data.scaling import YIQ, YUV
from tacit.diagnostics import input_norms

torch.set_num_threads(1)


@pytest.fixture
def records():
    x = torch.rand(50, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return tacit.Records(x, torch.zeros(50))


def test_norms_are_of_the_images_in_each_space(records):
    found = input_norms(records)
    assert list(found.norms) == ["RGB", "HSV", "YIQ", "YUV", "Greyscale"]
    torch.testing.assert_close(found.norms["RGB"], records.inputs.flatten(1).norm(dim=1).double())
    # I and Q are U and V turned.
    torch.testing.assert_close(found.norms["YIQ"], found.norms["YUV"], rtol=1e-5, atol=0)
    assert found.norms["Greyscale"].lt(found.norms["YUV"]).all()


def test_any_scaler_will_do(records):
    found = input_norms(records, [YIQ(), YUV(), UnitNorm()], max_records=9)
    assert len(found.norms["UnitNorm"]) == 9
    assert found.spread()["UnitNorm"] < 1e-6


def test_it_says_that_it_is_not_private(records, tmp_path):
    found = input_norms(records)
    assert found.text().startswith("input norms; not private: reads raw inputs")
    assert "ot private: reads raw inputs" in input_norms.__doc__
    found.plot(tmp_path / "norms.png")
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_look_at_is_refused(records):
    with pytest.raises(ValueError, match="give at least one"):
        input_norms(tacit.Records(records.inputs[:0], records.targets[:0]))
