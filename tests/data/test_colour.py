"""Colour maps against published formulas, and their Lipschitz constants against attacks."""

from __future__ import annotations

import colorsys
import math

import pytest
import torch

from tacit.data import Records
from tacit.data.scaling import HSV, LUMA, RGB, YIQ, YUV, Greyscale

torch.set_num_threads(1)
MAPS = [RGB(), YUV(), YIQ(), Greyscale(), HSV()]
LINEAR = MAPS[:4]


def images(count: int = 5, side: int = 6, dtype=torch.float64) -> torch.Tensor:
    x = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=dtype)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0])] * 3).to(dtype)
    x[0].reshape(3, -1)[:, : 27 if side * side >= 27 else 0] = corners.T
    return x


@pytest.mark.parametrize("colour", MAPS, ids=str)
def test_a_record_is_mapped_the_same_alone_and_in_company(colour):
    for dtype in (torch.float32, torch.float64):
        x = images(dtype=dtype)
        before = x.clone()
        together = colour(x)
        assert torch.equal(together, torch.cat([colour(x[i : i + 1]) for i in range(len(x))]))
        assert torch.equal(x, before)
        assert together.dtype == dtype
        assert colour(x[:0]).shape == together[:0].shape
    assert "RGB" in colour.describe()


def test_hsv_is_that_of_colorsys():
    x = images()
    pixels = x.movedim(1, -1).reshape(-1, 3).tolist()
    expected = torch.tensor([colorsys.rgb_to_hsv(*p) for p in pixels], dtype=torch.float64)
    found = HSV()(x).movedim(1, -1).reshape(-1, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert ((found >= 0) & (found <= 1)).all()


def test_luma_and_colour_differences_are_those_published():
    x = images()
    red, green, blue = x.unbind(dim=1)
    y = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    torch.testing.assert_close(Greyscale()(x), y[:, None])
    u, v = 0.492111 * (blue - y), 0.877283 * (red - y)
    torch.testing.assert_close(YUV()(x), torch.stack([y, u, v], dim=1), rtol=0, atol=2e-6)
    turn = math.radians(33)
    i = v * math.cos(turn) - u * math.sin(turn)
    q = v * math.sin(turn) + u * math.cos(turn)
    torch.testing.assert_close(YIQ()(x), torch.stack([y, i, q], dim=1), rtol=0, atol=2e-6)


def test_grey_has_no_colour_and_the_luma_of_its_level():
    grey = torch.full((1, 3, 2, 2), 0.4, dtype=torch.float64)
    for colour in (YUV(), YIQ()):
        y, *rest = colour(grey)[0]
        torch.testing.assert_close(y, torch.full((2, 2), 0.4, dtype=torch.float64))
        assert all(part.abs().max() < 1e-7 for part in rest)


@pytest.mark.parametrize("colour", LINEAR, ids=str)
def test_the_constant_of_a_linear_map_is_reached_and_never_passed(colour):
    x, moved = images(20), torch.randn(20, 3, 6, 6, dtype=torch.float64)
    far = (colour(x + moved) - colour(x)).flatten(1).norm(dim=1)
    assert (far <= colour.lipschitz * moved.flatten(1).norm(dim=1)).all()
    steepest = torch.linalg.svd(colour.matrix).Vh[0].reshape(1, 3, 1, 1).expand(1, 3, 6, 6)
    far = (colour(x[:1] + steepest) - colour(x[:1])).norm()
    assert far >= 0.999 * colour.lipschitz * steepest.norm()


def test_hsv_has_no_constant():
    assert not hasattr(HSV(), "lipschitz")
    red = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).reshape(1, 3, 1, 1)
    beside = red + torch.tensor([0.0, 0.0, 1e-9], dtype=torch.float64).reshape(1, 3, 1, 1)
    assert (HSV()(beside) - HSV()(red)).norm() > 0.99


def test_what_is_no_colour_image_is_refused():
    for shape in [(4, 1, 8, 8), (4, 3), (3, 8, 8)]:
        with pytest.raises(ValueError, match="red, green and blue"):
            YIQ()(torch.zeros(shape))


def test_colour_maps_are_scalers_of_records():
    from tacit.data.scaling import as_scalers

    colour, *_ = as_scalers([YIQ(), Greyscale()])
    records = Records(colour(images()), torch.zeros(5))
    assert records.shape == (3, 6, 6)
