"""Scattering features: of each record alone, kept under a checksum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tacit import Records
from tacit.data.scattering import ScatteringMap, scattering_features
from tacit.errors import DataError


def records(n: int = 5) -> Records:
    torch.manual_seed(0)
    return Records(torch.rand(n, 1, 16, 16), torch.arange(n) % 2, num_classes=2, public_size=n)


def test_shapes_are_those_of_the_literature() -> None:
    for shape, features in (((1, 28, 28), (81, 7, 7)), ((3, 32, 32), (243, 8, 8))):
        assert ScatteringMap(shape)(torch.rand(2, *shape)).shape == (2, *features)
        assert ScatteringMap(shape)(torch.rand(0, *shape)).shape == (0, *features)


@pytest.mark.parametrize("mirror", [False, True])
def test_a_record_is_transformed_by_itself(mirror: bool) -> None:
    data = records()
    whole = scattering_features(data, mirror=mirror).inputs
    alone = scattering_features(data.replaced(1, torch.rand(1, 16, 16), 0), mirror=mirror).inputs
    keep = [0, 2, 3, 4]
    torch.testing.assert_close(whole[keep], alone[keep], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(whole[1], alone[1])


def test_shifts_move_features_little() -> None:
    """The zeroth order is an average over 4×4 squares: it keeps the mean of a smooth image."""
    image = torch.full((1, 1, 16, 16), 0.7)
    features = ScatteringMap((1, 16, 16)).coefficients(image)
    torch.testing.assert_close(features[0, 0], torch.full((4, 4), 0.7), rtol=1e-3, atol=1e-3)
    assert features[0, 1:].abs().max() < 1e-3


def test_normalised_groups_have_mean_zero_and_variance_one() -> None:
    found = ScatteringMap((1, 16, 16)).normalised(torch.rand(3, 81, 4, 4)).reshape(3, 27, -1)
    assert found.mean(dim=2).abs().max() < 1e-5
    assert (found.var(dim=2, unbiased=False) - 1).abs().max() < 1e-2


def test_the_cache_is_used_and_checked(tmp_path) -> None:
    data = records()
    first = scattering_features(data, cache=tmp_path)
    (file,) = tmp_path.glob("*.npz")
    stamp = file.stat().st_mtime_ns
    again = scattering_features(data, cache=tmp_path)
    assert torch.equal(first.inputs, again.inputs)
    assert file.stat().st_mtime_ns == stamp
    scattering_features(data.replaced(0, torch.rand(1, 16, 16), 1), cache=tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 2
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(DataError, match="damaged"):
        scattering_features(data, cache=tmp_path)


def test_the_first_order_is_the_beginning_of_both() -> None:
    data = records()
    both = scattering_features(data, groups=None).inputs
    first = scattering_features(data, groups=None, order=1).inputs
    colour = ScatteringMap((3, 32, 32), order=1).coefficients(torch.rand(1, 3, 32, 32))
    assert colour.shape == (1, 51, 8, 8)
    torch.testing.assert_close(first, both[:, :17])
    with pytest.raises(ValueError, match="give 1 or 2"):
        scattering_features(data, order=3)


def test_orders_do_not_share_a_file(tmp_path) -> None:
    for order in (1, 2):
        found = scattering_features(records(), cache=tmp_path, order=order)
        assert found.shape[0] == (17, 81)[order - 1]
    assert len(list(tmp_path.glob("*.npz"))) == 2


def test_mirror_images_have_the_same_features(tmp_path) -> None:
    data = records()
    mirrored = replace(data, inputs=data.inputs.flip(-1))
    both = [scattering_features(r, groups=None, mirror=True) for r in (data, mirrored)]
    torch.testing.assert_close(both[0].inputs, both[1].inputs, rtol=1e-5, atol=1e-5)
    alone = [scattering_features(r, groups=None).inputs for r in (data, mirrored)]
    torch.testing.assert_close(both[0].inputs, (alone[0] + alone[1]) / 2)
    assert (alone[0] - alone[1]).abs().max() > 0.01
    for mirror in (False, True):
        scattering_features(data, mirror=mirror, cache=tmp_path)
    assert len(list(tmp_path.glob("*.npz"))) == 2


def test_only_images() -> None:
    flat = Records(torch.rand(3, 9), torch.zeros(3))
    with pytest.raises(ValueError, match="images"):
        scattering_features(flat)
