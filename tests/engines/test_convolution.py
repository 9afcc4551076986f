"""Per-record gradients of convolution kernels: exact in float64, never too small in float32."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from gradient_checks import TINY, UNIT, check_exact, check_left_out, check_traceable, share
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.engines import convolution_gradients as convolution
from tacit.engines.clipping import RowScale, Stacked
from tacit.engines.convolution_gradients import Kernel, kernel_gradients
from tacit.engines.products import Contracted, in_pieces

SEEDS = st.integers(0, 10**6)


def from_pixels(kernel):
    kernel.by_pixels = True
    return kernel.by_ghost_norms()


def from_windows(kernel):
    kernel.by_pixels = False
    return kernel.by_ghost_norms()


WAYS = [from_pixels, from_windows]


class Case:
    """One call of `aten.convolution`: the shape of a record's input, and all other arguments."""

    def __init__(
        self, c_in, c_out, kernel, size, stride=1, padding=0, dilation=1, groups=1, extra=None
    ):
        def each(value):
            return [value] * len(size) if isinstance(value, int) else list(value)

        self.transposed = extra is not None
        ends = (c_in, c_out // groups) if self.transposed else (c_out, c_in // groups)
        self.weight_shape = (*ends, *each(kernel))
        self.input_shape = (c_in, *size)
        self.arguments = (
            each(stride),
            each(padding),
            each(dilation),
            self.transposed,
            each(extra or 0),
            groups,
        )

    def sides(self, count=1, dtype=torch.float32):
        """A random input and cotangent, and a weight of the right shape."""
        x = torch.randn(count, *self.input_shape, dtype=dtype)
        w = torch.randn(self.weight_shape, dtype=dtype)
        y = torch.ops.aten.convolution(x, w, None, *self.arguments)
        return x, torch.randn_like(y), w

    def kernel(self, x, b) -> Kernel:
        """Of a record with one row, whatever the norms cost."""
        stride, padding, dilation, transposed, _, groups = self.arguments
        sides = (b, x) if transposed else (x, b)
        geometry = (tuple(v) for v in (stride, padding, dilation))
        return Kernel(*sides, self.weight_shape, *geometry, groups)

    def rows(self, x, b, w):
        """By autograd, record by record."""
        found = []
        for one, other in zip(x, b, strict=True):
            weight = w.clone().requires_grad_()
            y = torch.ops.aten.convolution(one[None], weight, None, *self.arguments)
            found.append(torch.autograd.grad((y * other).sum(), weight)[0])
        return torch.stack(found)


@st.composite
def cases(draw):
    dims, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    groups = draw(st.integers(1, 3))
    c_in, c_out = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 4))
    kernel, dilation, stride, padding = each(1, 3), each(1, 3), each(1, 3), each(0, 2)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    if not transposed:
        size = tuple(draw(st.integers(r, r + 5)) for r in reach)
        return Case(c_in, c_out, kernel, size, stride, padding, dilation, groups)
    padding = tuple(min(p, r - 1) for p, r in zip(padding, reach, strict=True))
    extra = tuple(
        draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
    )
    size = tuple(
        max(n, 1 + -(-(2 * p + 1 - r) // s))
        for n, p, r, s in zip(each(1, 4), padding, reach, stride, strict=True)
    )
    return Case(c_in, c_out, kernel, size, stride, padding, dilation, groups, extra)


@settings(max_examples=200, deadline=None)
@given(case=cases(), records=st.integers(1, 3), rows=st.integers(1, 3), seed=SEEDS)
def test_any_convolution_against_autograd(case, records, rows, seed):
    torch.manual_seed(seed)
    x, b, w = case.sides(records * rows, torch.float64)
    expected = case.rows(x, b, w).unflatten(0, (records, rows)).sum(dim=1)
    found = kernel_gradients(x, b, w, *case.arguments, rows_per_record=rows)
    check_exact(found, expected)


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=SEEDS)
def test_every_way_gives_the_norm(case, seed):
    torch.manual_seed(seed)
    stride, extra = case.arguments[0], case.arguments[4]
    if any(e >= s for e, s in zip(extra, stride, strict=True)):
        return  # padded by `kernel_gradients` first
    x, b, w = case.sides(2, torch.float64)
    expected = case.rows(x, b, w)
    for way in WAYS:
        check_exact(way(case.kernel(x, b)), expected)


CASES = {
    "1d": Case(40, 50, 3, (5,), padding=1),
    "1d, dilated": Case(30, 40, 5, (12,), dilation=2),
    "2d": Case(20, 40, 3, (4, 4), padding=1),
    "2d, wide": Case(300, 10, 3, (4, 3), padding=1),
    "2d, stride": Case(20, 40, 3, (6, 5), stride=2, padding=1),
    "2d, groups": Case(40, 48, 3, (4, 4), padding=1, groups=2),
    "2d, large window": Case(8, 40, 9, (6, 6), padding=4),
    "3d": Case(10, 14, 3, (3, 2, 3), padding=1),
    "transposed 1d": Case(40, 50, 3, (4,), stride=2, extra=0),
    "transposed 2d": Case(40, 30, 3, (4, 3), padding=1, extra=0),
    "transposed 2d, extra": Case(40, 30, 3, (3, 3), stride=2, padding=1, extra=1),
    "transposed 3d": Case(20, 16, 2, (2, 2, 2), extra=0),
}
EACH_CASE = pytest.mark.parametrize("name", CASES)
EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def balanced(b):
    """The same, with a sum of nothing in each channel."""
    return b - b.flatten(2).mean(dim=2).view(*b.shape[:2], *(1 for _ in b.shape[2:]))


@EACH_CASE
@EACH_WAY
def test_terms_that_cancel_keep_the_bound(name, way):
    """A constant input meets cotangents that sum to nothing, or to nearly nothing."""
    case = CASES[name]
    torch.manual_seed(0)
    noise, b, _ = case.sides()
    over = [1 for _ in b.shape[2:]]
    for size, rest in itertools.product([1e-3, 1.0, 1e3, 1e8], [0.0, 1e-6, 1e-3, 1.0]):
        x = size * torch.randn(1, noise.shape[1], *over).expand_as(noise) + rest * noise
        for cotangent in (balanced(b), balanced(b) + rest * b):
            found = way(case.kernel(x, cotangent))
            for max_norm in (1e-6, 1e-3):
                assert share(found, max_norm) <= 1


@EACH_CASE
@EACH_WAY
def test_the_norm_is_not_below_the_real_one(name, way):
    """Against float64, where all partial sums are rounded the same way or cancel."""
    case = CASES[name]
    torch.manual_seed(0)
    noise, random, w = case.sides()
    for value, b in itertools.product(
        [0.1, 1 / 3, 0.7, 1.1, 1e6], [torch.full_like(random, 0.7), balanced(random), random]
    ):
        x = torch.full_like(noise, value)
        found = way(case.kernel(x, b))
        real = float(case.rows(x.double(), b.double(), w.double()).norm())
        assert float(found.squares().sqrt()) >= real * (1 - 4 * UNIT)


@EACH_CASE
@EACH_WAY
def test_values_whose_products_vanish_or_overflow_keep_the_bound(name, way):
    """‖b‖² = 0 in float32 for b = 1e-23, but b·a is not nothing when a is 1e18."""
    case = CASES[name]
    torch.manual_seed(0)
    noise, random, _ = case.sides()
    for power_a, power_b in itertools.product(range(-44, 39, 6), repeat=2):
        x, b = torch.full_like(noise, 10.0**power_a), torch.full_like(random, 10.0**power_b)
        x[0, :, ..., 0] = 10.0**power_b  # another scale at the first pixels
        for sign_a, sign_b in ((1.0, 1.0), (noise.sign(), random.sign())):
            found = way(case.kernel(x * sign_a, b * sign_b))
            for max_norm in (1e-9, 1e-3):
                assert share(found, max_norm) <= 1


@EACH_CASE
@pytest.mark.parametrize("size", [1e-22, 1e-3, 1.0, 1e3])
def test_inner_products_of_windows_are_off_by_no_more_than_they_say(name, size):
    """|fl(a_t·a_u) − a_t·a_u| ≤ depth·u·‖a_t‖‖a_u‖ + width·τ, entry by entry."""
    case = CASES[name]
    torch.manual_seed(0)
    x, b, _ = case.sides(2)
    side = b if case.transposed else x
    for made in (
        side,
        torch.full_like(side, 0.7),
        side.sign() * 0.7,
        side * 10 ** (3 * torch.randn_like(side)),
    ):
        kernel = case.kernel(x, size * made) if case.transposed else case.kernel(size * made, b)
        everyone = slice(0, 2)
        gram = kernel.window_gram(everyone)
        windows = kernel.windows(everyone).double()
        exact = windows @ windows.transpose(2, 3)
        length = exact.diagonal(dim1=2, dim2=3).sqrt()
        bound = length[..., :, None] * length[..., None, :] * gram.depth * UNIT
        assert gram.width == kernel.window
        assert bool(((gram.inner_BTT - exact).abs() <= bound + gram.width * TINY).all())


@EACH_WAY
def test_norms_do_not_depend_on_the_pieces(way, monkeypatch):
    torch.manual_seed(0)
    case = Case(6, 8, 3, (5, 4), padding=1, groups=2)
    x, b, _ = case.sides(7)
    whole = way(case.kernel(x, b))
    monkeypatch.setattr(
        convolution,
        "in_pieces",
        lambda count, each, work, limit: in_pieces(count, each, work, 3 * each),
    )
    cut = way(case.kernel(x, b))
    torch.testing.assert_close(cut.squares(), whole.squares())
    torch.testing.assert_close(cut.rows(), whole.rows())


def test_products_of_pixels_where_windows_overlap():
    """A 3×3 window on 8×8: 10⁴ products of pixels of width C, or 64² of width 9·C."""

    def by_pixels(*given, **more):
        case = Case(4, 4, *given, **more)
        return case.kernel(*case.sides()[:2]).by_pixels

    assert by_pixels(3, (8, 8), padding=1)
    assert by_pixels(1, (8, 8))
    assert not by_pixels(1, (8, 8), stride=2)
    assert not by_pixels(4, (16, 16), stride=4)
    assert not by_pixels(3, (30,), dilation=10)
    assert not by_pixels(3, (1, 1), padding=1)


@EACH_CASE
def test_a_gpu_counts_on_the_whole_of_both_sides(name):
    """‖a‖·‖b‖, which a Fourier transform's roundings are a small part of."""
    torch.manual_seed(0)
    x, b, _ = CASES[name].sides(3)
    expected = x.flatten(1).norm(dim=1) * b.flatten(1).norm(dim=1)
    torch.testing.assert_close(CASES[name].kernel(x, b).whole_reach(), expected, rtol=1e-3, atol=0)


def reach_of(kernel):
    """Σ_t ‖a_t‖‖b_t‖, in all groups."""
    everyone = slice(0, len(kernel.plain))
    sides = kernel.windows(everyone), kernel.at_positions(everyone)
    return math.prod(side.norm(dim=3) for side in sides).sum(dim=(1, 2))


@settings(max_examples=100, deadline=None)
@given(case=cases(), seed=SEEDS)
def test_two_lengths_and_the_overlap_bound_the_reach(case, seed):
    """Σ_t ‖a_t‖‖b_t‖ ≤ √n·‖a‖·‖b‖ with n windows over a pixel, and nearly equal for constants."""
    torch.manual_seed(seed)
    x, b, _ = case.sides(2, torch.float64)
    for one, other in ((x, b), (torch.ones_like(x), torch.ones_like(b)), (x.exp(), b.exp())):
        kernel = case.kernel(one, other)
        assert bool((kernel.reach() >= reach_of(kernel) * (1 - 1e-13)).all())


def test_a_pixel_counted_once_would_be_caught():
    """The planted bug: n = 1 where windows overlap."""
    case = Case(2, 3, 3, (9, 9))
    kernel = case.kernel(torch.ones(1, 2, 9, 9), torch.ones(1, 3, 7, 7))
    assert float(kernel.reach()) >= float(reach_of(kernel))
    kernel.overlap = 1
    assert float(kernel.reach()) < float(reach_of(kernel))


def test_windows_over_a_pixel_are_counted():
    def most(count, kernel, stride, dilation):
        given = (stride,), (0,), (dilation,), 1
        return Kernel(
            torch.empty(1, 1, 99), torch.empty(1, 1, count), (1, 1, kernel), *given
        ).overlap

    assert most(9, 3, 1, 1) == 3
    assert most(9, 3, 2, 1) == 2
    assert most(9, 3, 3, 1) == 1
    assert most(9, 3, 5, 1) == 1
    assert most(9, 3, 2, 2) == 3  # all three places of a window are a stride apart
    assert most(1, 3, 1, 1) == 1


def gradients_of(case, w, rows=1):
    return lambda x, b: kernel_gradients(x, b, w, *case.arguments, rows_per_record=rows)


@EACH_CASE
def test_records_without_a_scale_are_left_out(name):
    torch.manual_seed(0)
    x, b, w = CASES[name].sides(4)
    check_left_out(gradients_of(CASES[name], w), x, b)


def test_rows_are_kept_where_they_are_small():
    few, many = Case(3, 2, 3, (9, 9), padding=1), Case(20, 90, 3, (4, 4), padding=1)
    for case, form in ((few, Stacked), (many, Contracted)):
        x, b, w = case.sides(4)
        assert isinstance(gradients_of(case, w)(x, b), form)
        check_left_out(gradients_of(case, w), x, b)


@EACH_CASE
@pytest.mark.parametrize("rows", [1, 2])
def test_a_trace_serves_other_data(name, rows):
    torch.manual_seed(0)
    case = CASES[name]
    x, b, w = case.sides(4 * rows)
    x2, b2, _ = case.sides(4 * rows)

    def make(x, b):
        return gradients_of(case, w, rows)(x.flatten(0, 1), b.flatten(0, 1))

    def split(t):
        return t.unflatten(0, (4, rows))

    check_traceable(make, [split(x), split(b)], [split(x2), split(b2)])


@EACH_WAY
def test_every_way_can_be_traced(way):
    torch.manual_seed(0)
    case = CASES["2d, stride"]
    (x, b, _), (x2, b2, _) = case.sides(3), case.sides(3)
    check_traceable(lambda x, b: way(case.kernel(x, b)), [x, b], [x2, b2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_widened_first(dtype):
    torch.manual_seed(0)
    case = CASES["2d"]
    x, b, w = (t.to(dtype) for t in case.sides(2))
    found = gradients_of(case, w)(x, b)
    same = gradients_of(case, w)(x.float(), b.float())
    assert found.squares().dtype == torch.float32
    assert torch.equal(found.squares(), same.squares())
    assert torch.equal(found.total(RowScale(torch.ones(2))), same.total(RowScale(torch.ones(2))))


def test_an_empty_batch_adds_nothing():
    for name in ("2d", "1d, dilated"):
        x, b, w = CASES[name].sides(1)
        found = gradients_of(CASES[name], w)(x[:0], b[:0])
        assert found.squares().shape == (0,)
        assert not found.total(RowScale(torch.empty(0))).any()


def test_channels_last_inputs():
    torch.manual_seed(0)
    case = CASES["2d, stride"]
    x, b, w = case.sides(3, torch.float64)
    last = [t.to(memory_format=torch.channels_last) for t in (x, b)]
    check_exact(gradients_of(case, w)(*last), case.rows(x, b, w))


@pytest.mark.parametrize("groups", [1, 600])
def test_maps_of_one_position_go_by_two_lengths(groups):
    torch.manual_seed(0)
    case = Case(2 * groups, 3 * groups, 3, (1, 1), padding=1, groups=groups)
    x, b, w = case.sides(3)
    for one, other in ((x, b), (torch.full_like(x, 0.7), torch.full_like(b, 0.7))):
        found = case.kernel(one, other).by_ghost_norms()
        real = case.rows(one.double(), other.double(), w.double()).flatten(1).norm(dim=1)
        assert bool((found.squares().sqrt() >= real).all())
        torch.testing.assert_close(found.squares().sqrt().double(), real, rtol=1e-3, atol=0)
    assert case.kernel(x[:0], b[:0]).by_ghost_norms().squares().shape == (0,)
