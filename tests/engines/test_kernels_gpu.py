"""The GPU kernels give the plain formulas, keep the bound, and can be traced and captured."""

from __future__ import annotations

import pytest
import torch
from gradient_checks import check_traceable, outer_products, share
from test_convolution import CASES, EACH_WAY, WAYS, Case, balanced
from test_products import cancelling

from tacit.engines import clipping, products
from tacit.engines import convolution_kernels as convolution
from tacit.engines import ghost_kernels as ghost
from tacit.engines.clipping import RowScale, Stacked
from tacit.engines.convolution_gradients import Kernel, kernel_gradients
from tacit.engines.convolution_kernels import Tiles
from tacit.engines.products import Dense, Lookup, matrix_gradients
from tacit.engines.rules import group_norm_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EACH_SETTING = pytest.mark.parametrize("tensor_float", [False, True])


@pytest.fixture
def use_tensor_float():
    """Sets whether products and convolutions run in TensorFloat-32, for one test."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32

    def set_both(value: bool) -> None:
        matmul.allow_tf32 = cudnn.allow_tf32 = value

    yield set_both
    matmul.allow_tf32, cudnn.allow_tf32 = before


def on_gpu(*tensors):
    return [t.cuda() for t in tensors]


# Ghost norms.


def check_ghost_norms(found, a_BTD, b_BTP) -> None:
    """Never below the norm, above it by no more than the reach allows, and the reach is right."""
    squares, reach = (x.double().cpu() for x in found)
    a, b = a_BTD.double().cpu(), b_BTP.double().cpu()
    exact = torch.einsum("btd,btp->bdp", a, b).flatten(1).square().sum(1)
    true_reach = (a.norm(dim=2) * b.norm(dim=2)).sum(1)
    assert bool((squares >= exact).all())
    assert bool((squares <= exact + 2e-3 * true_reach**2 + 1e-30).all())
    assert bool((reach >= true_reach * (1 - 1e-6)).all())
    assert bool((reach <= true_reach * 1.001 + 1e-12).all())


@pytest.mark.parametrize("positions", [1, 2, 16, 33, 65, 130, 300])
@pytest.mark.parametrize("size", [1e-15, 1e-3, 1.0, 1e9])
def test_ghost_norms(positions, size):
    torch.manual_seed(0)
    a = size * torch.randn(3, positions, 70, device="cuda")
    b = torch.randn(3, positions, 5000 if positions == 33 else 90, device="cuda")
    assert ghost.fits(a)
    check_ghost_norms(ghost.ghost_norms(a, b), a, b)
    other = a.transpose(1, 2).contiguous().transpose(1, 2)
    check_ghost_norms(ghost.ghost_norms(other, b), a, b)


@pytest.mark.parametrize("positions", [7, 64, 130])
@pytest.mark.parametrize("width", [64, 1000])
def test_sums_of_one_sign_are_not_cut_below_the_norm(positions, width):
    """Units that cut instead of rounding lose most where all terms have one sign."""
    torch.manual_seed(0)
    for digits in (0.0, 2.0**-12, 2.0**-22):
        a = 1 + digits * torch.rand(2, positions, width, device="cuda")
        b = 1 + digits * torch.rand(2, positions, 80, device="cuda")
        check_ghost_norms(ghost.ghost_norms(a, b), a, b)


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (1, 2, 2), (1, 0, 1)])
def test_norms_from_pixels_in_a_step_that_is_compiled(stride, padding, dilation):
    torch.manual_seed(0)
    x, w = torch.randn(3, 64, 6, 7), torch.randn(96, 64, 3, 3)
    geometry = (stride,) * 2, (padding,) * 2, (dilation,) * 2
    b = torch.randn_like(torch.nn.functional.conv2d(x, w, None, *geometry))
    plain = kernel_gradients(x.double(), b.double(), w, *geometry, False, (0, 0), 1)
    exact = plain.rows().flatten(1).square().sum(1)
    with clipping.left_to_the_compiler():
        found = kernel_gradients(*on_gpu(x, b, w), *geometry, False, (0, 0), 1)
        squares = torch.compile(lambda: found.squares())()
    # TensorFloat-32 may cut the share that is added, which the bound allows for.
    assert bool((squares.cpu() >= exact).all())
    assert bool((squares.cpu() <= 1.2 * exact).all())


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 1, 1), (2, 1, 1), (2, 2, 2)])
def test_rows_of_one_channel_per_group(stride, padding, dilation):
    torch.manual_seed(0)
    x, w = torch.randn(3, 6, 9, 10), torch.randn(12, 1, 3, 3)
    geometry = (stride,) * 2, (padding,) * 2, (dilation,) * 2, 6
    b = torch.randn_like(torch.nn.functional.conv2d(x, w, None, *geometry))
    exact = kernel_gradients(x.double(), b.double(), w, *geometry[:3], False, (0, 0), 6).rows()
    found = kernel_gradients(*on_gpu(x, b, w), *geometry[:3], False, (0, 0), 6).rows()
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_noticed(value):
    a, b = torch.randn(2, 3, 4, device="cuda"), torch.randn(2, 3, 5, device="cuda")
    a[0, 1, 2] = value
    squares, _ = products.ghost_norms(a, b)
    assert squares.isfinite().tolist() == [False, True]


@EACH_SETTING
@pytest.mark.parametrize("positions", [2, 7, 64, 100])
def test_products_that_cancel_keep_the_bound(positions, tensor_float, use_tensor_float):
    use_tensor_float(tensor_float)
    torch.manual_seed(0)
    for size in (1e-3, 1.0, 1e3, 1e8):
        for rest in (0.0, 1e-6, 1e-3, 1.0):
            a, b = cancelling(positions, 900, 900, size, rest)
            assert share(outer_products(a.cuda(), b.cuda()), 1e-3) <= 1


@EACH_SETTING
def test_a_head_that_cancels_its_embedding_keeps_the_bound(tensor_float, use_tensor_float):
    use_tensor_float(tensor_float)
    torch.manual_seed(0)
    tokens = torch.randint(0, 200, (1, 4), device="cuda")
    one_hot = torch.nn.functional.one_hot(tokens, 200).float()
    for size in (1e-3, 1.0, 1e6):
        g = size * torch.randn(1, 4, 150, device="cuda")
        found = matrix_gradients([Dense(-g, one_hot), Lookup(200, tokens, g)])
        assert share(found, 1e-3) <= 1


def test_inner_products_have_all_digits(use_tensor_float):
    use_tensor_float(True)
    torch.manual_seed(0)
    x, y = torch.randn(2, 5, 300, device="cuda"), torch.randn(2, 4, 300, device="cuda")
    exact = x.double() @ y.double().transpose(1, 2)
    error = (products.inner_products(x, y) - exact).abs().max()
    assert float(error) <= 1e-4
    assert torch.backends.cuda.matmul.allow_tf32


# Scaling.


@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 7), (3000,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaling_leaves_out_what_has_no_scale(shape, dtype):
    torch.manual_seed(0)
    scale = torch.tensor([0.5, 0.0, 2.0, 0.0])
    x = torch.randn(4, *shape, dtype=dtype)
    column = scale.to(dtype).view(4, *(1 for _ in shape))
    for given in (x, x.transpose(0, -1).contiguous().transpose(0, -1)):
        bad = given.clone()
        bad[1], bad[3] = torch.nan, torch.inf
        bad, on = on_gpu(bad, scale)
        assert torch.equal(RowScale(on).of(bad).cpu(), x * column)
        assert torch.equal(RowScale(on).present(bad).cpu(), x * (column != 0))
        assert bad[1].isnan().all()  # what was given is as it was


# Normalisation.


@pytest.mark.parametrize(
    ("groups", "shape"),
    [
        (4, (12, 5, 7)),
        (16, (16, 32, 32)),
        (16, (64, 32, 32)),
        (2, (8,)),
        (1, (5, 3)),
        (3, (3, 2, 3, 4)),
    ],
)
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_group_norm_by_the_plain_rule(groups, shape, mean):
    torch.manual_seed(0)
    x, b = mean + torch.randn(6, *shape), torch.randn(6, *shape)
    x[1] = mean  # nothing but ε under the root

    def rows(x, b):
        size = x[0, 0].numel()
        _, mu, rstd = torch.ops.aten.native_group_norm(
            x, None, None, 6, shape[0], size, groups, 1e-3
        )
        return group_norm_rows(x, mu, rstd, b, groups)

    found, exact = rows(*on_gpu(x, b)).cpu().double(), rows(x.double(), b.double())
    assert float((found - exact).norm()) <= 1e-5 * (1 + mean) * float(exact.norm())


# Convolutions.


@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_norm_of_a_convolution(name):
    torch.manual_seed(0)
    case = CASES[name]
    x, b, w = case.sides(3, torch.float64)
    expected = case.rows(x, b, w).flatten(1).square().sum(dim=1)
    for way in WAYS:
        squares = way(case.kernel(*on_gpu(x, b))).squares().cpu()
        assert bool((squares >= expected * (1 - 1e-13)).all())
        torch.testing.assert_close(squares, expected)


@EACH_SETTING
@EACH_WAY
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_keeps_the_bound(name, way, tensor_float, use_tensor_float):
    """Where terms cancel, and where all are rounded alike."""
    use_tensor_float(tensor_float)
    torch.manual_seed(0)
    case = CASES[name]
    noise, b, _ = case.sides()
    for size in (1e-3, 1.0, 1e4, 1e8):
        constant = torch.full_like(noise, size)
        for one, other in (
            (constant, balanced(b)),
            (constant + 1e-4 * noise, balanced(b)),
            (0.7 * constant, torch.full_like(b, 0.7)),
            (noise, b),
        ):
            kernel = case.kernel(*on_gpu(one, other))
            ways = [way]
            if convolution.fits(kernel.windowed, kernel.groups):
                ways.append(Kernel.by_fused_norms)
            for found in (each(kernel) for each in ways):
                for max_norm in (1e-6, 1e-2):
                    assert share(found, max_norm) <= 1


@pytest.mark.parametrize("tries_engines", [False, True])
@EACH_WAY
def test_sides_that_never_meet_add_nothing(way, tries_engines, monkeypatch):
    """A Fourier transform leaves roundings of ‖a‖·‖b‖ where the gradient is zero."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", tries_engines)
    torch.manual_seed(0)
    for side in (8, 16):
        case = Case(128, 256, 3, (side, side), padding=1)
        x, b, _ = case.sides()
        x[:, :, 2:], b[:, :, :4] = 0, 0
        for size in (1e2, 1e4, 1e6):
            found = way(case.kernel(*on_gpu(size * x, size * b)))
            assert share(found, 1e-3) <= 1


TILED = [
    Case(40, 70, 3, (9, 7), padding=1),
    Case(3, 16, 3, (8, 8), padding=1),
    Case(33, 20, (2, 3), (8, 9), stride=2, padding=(0, 2)),
    Case(64, 32, 3, (7, 8), dilation=2),
    Case(16, 130, 1, (5, 6), stride=2),
    Case(35, 5, 3, (9,), padding=2),
]


@pytest.mark.parametrize("case", TILED, ids=lambda case: str(case.weight_shape))
@pytest.mark.parametrize("over_places", [False, True])
def test_every_tiling_of_the_kernels_gives_the_rows(case, over_places):
    """Tiles that end outside of filters, channels and positions, and the choice for the shape."""
    torch.manual_seed(0)
    x, b, w = case.sides(3, torch.float64)
    expected = case.rows(x, b, w)
    x, b = on_gpu(x.float(), b.float())
    stride, padding, dilation = case.arguments[:3]
    given = (x, b, case.weight_shape[2:], stride, padding, dilation)
    for tiles in (None, Tiles(32, 32, 64 if over_places else 32, 4, 2, over_places)):
        last, squares = convolution.launch(*given, tensor_float=False, store=True, tiles=tiles)
        _, alone = convolution.launch(*given, tensor_float=False, store=False, tiles=tiles)
        assert last is not None
        found = last.movedim(-1, 2)
        torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(squares, found.flatten(1).square().sum(dim=1))
        torch.testing.assert_close(alone, squares)
        kept, scale = Stacked(found, squares), torch.rand(3, device="cuda")
        total = torch.einsum("b,b...->...", scale, found)
        torch.testing.assert_close(kept.total(RowScale(scale)), total)


@pytest.mark.parametrize("name", [name for name, case in CASES.items()])
@pytest.mark.parametrize("rows", [1, 2])
def test_convolutions_against_autograd(name, rows):
    torch.manual_seed(0)
    case = CASES[name]
    x, b, w = case.sides(3 * rows)
    expected = case.rows(x.double(), b.double(), w.double()).unflatten(0, (3, rows)).sum(dim=1)
    found = kernel_gradients(*on_gpu(x, b, w), *case.arguments, rows_per_record=rows)
    scale = torch.tensor([1.0, 0.5, 0.25])
    total = torch.einsum("b,b...->...", scale.double(), expected)
    error = (found.total(RowScale(scale.cuda())).cpu().double() - total).norm()
    assert float(error) <= 5e-3 * float(total.norm())
    squares = found.squares().cpu().double()
    torch.testing.assert_close(squares, expected.flatten(1).square().sum(dim=1), rtol=0.1, atol=0)


# Operators.


def test_operators_are_well_defined():
    """Schema, fake implementation and aliasing, by PyTorch's own check."""
    ops, gpu = torch.ops.tacit, torch.device("cuda")
    x, b = torch.randn(2, 4, 5, 5, device=gpu), torch.randn(2, 6, 5, 5, device=gpu)
    geometry = [3, 3], [1, 1], [1, 1], [1, 1]
    gram = torch.randn(2, 7, 7, device=gpu)
    calls = [
        (ops.ghost_norms, (gram, gram.clone())),
        (ops.inner_products, (gram, gram.clone(), 128)),
        (ops.convolution_rows, (x, b, *geometry, False)),
        (ops.convolution_squares, (x, b, *geometry, False)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator.default, arguments)


def test_a_trace_serves_other_data():
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    try:
        for case in (TILED[0], CASES["2d"], CASES["2d, groups"], CASES["transposed 2d"]):
            batches = [[t.cuda() for t in case.sides(4)] for _ in range(2)]
            check_traceable(
                lambda x, b, w, case=case: kernel_gradients(x, b, w, *case.arguments), *batches
            )
        shapes = (4, 3, 90), (4, 3, 80)
        check_traceable(
            outer_products, [torch.randn(s) for s in shapes], [torch.randn(s) for s in shapes]
        )
    finally:
        torch.set_default_device(None)


def test_a_captured_graph_serves_other_data():
    torch.manual_seed(0)
    case = Case(40, 60, 3, (12, 12), padding=1)
    x, b, w = on_gpu(*case.sides(4))
    scale = torch.ones(4, device="cuda")

    def step():
        found = kernel_gradients(x, b, w, *case.arguments)
        return found.squares(), found.total(RowScale(scale))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.copy_(torch.randn_like(x))
    scale.copy_(torch.tensor([1.0, 0.0, 0.5, 2.0]))
    graph.replay()
    for mine, eager in zip(captured, step(), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-3, atol=1e-3)
