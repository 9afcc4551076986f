"""PyTorch's own modules: every constant attacked, every refusal in words."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz import Bound, BoundedInput, Residual, SpectralLinear, audit_layer, propagate
from tacit.lipschitz.bounds import Parameterless
from tacit.lipschitz.torch_modules import ACTIVATIONS, KNOWN, REASONS
from tacit.losses import CrossEntropy

VARIANTS = [
    *(kind() for kind in ACTIVATIONS),
    nn.LeakyReLU(0.3),
    nn.LeakyReLU(-2.0),
    nn.ELU(2.5),
    nn.CELU(0.3),
    nn.GELU(approximate="tanh"),
    nn.Softplus(beta=3.0),
    nn.Softplus(threshold=0.5),
    nn.Hardtanh(-0.5, 3.0),
    nn.Hardtanh(0.5, 3.0),
    nn.Softshrink(0.1),
]


@pytest.mark.parametrize("activation", VARIANTS, ids=str)
def test_an_activation_on_a_fine_grid(activation):
    """Slope, and size at any radius; f(0) counts on every number."""
    x = (torch.arange(-240_000, 240_001, dtype=torch.float64) * 5e-5).requires_grad_(True)
    y = activation(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    answers = KNOWN[type(activation)](activation)
    steepest = float(slope.abs().max())
    assert steepest <= answers.slope
    if not isinstance(activation, nn.Tanhshrink):
        assert steepest >= answers.slope * (1 - 1e-4)
    x, y = x.detach(), y.detach()
    for n in (1, 49):
        root = math.sqrt(n)
        for radius in (0.0, 0.1, 1.0, 5.0, 12.0):
            near = x.abs() <= radius / root
            found = root * float(y[near].abs().max())
            assert found <= answers.output_norm(Bound(radius, (n,))) * (1 + 1e-12)


@pytest.mark.parametrize(
    "activation", [nn.Sigmoid(), nn.Softplus(), nn.LogSigmoid(), nn.Hardsigmoid()]
)
def test_what_is_not_zero_at_zero_grows_with_the_root_of_the_count(activation):
    answers = KNOWN[type(activation)](activation)
    at_zero = float(activation(torch.zeros(1, 100, dtype=torch.float64)).norm())
    assert at_zero > 1
    assert answers.output_norm(Bound(0.0, (100,))) == pytest.approx(at_zero)


@pytest.mark.parametrize(
    ("module", "shape", "norm"),
    [
        (nn.Softmax(1), (4,), 40.0),
        (nn.Softmin(-1), (2, 3), 40.0),
        (nn.Softmax2d(), (3, 2, 2), 40.0),
        (nn.LogSoftmax(1), (3, 2), 60.0),
    ],
)
def test_softmax(module, shape, norm):
    report = audit_layer(module, shape, input_norm=norm, rows=12, steps=80)
    assert report.passed, str(report)
    # From one end of the ball to another; small steps are as steep as half of it.
    if not isinstance(module, nn.LogSoftmax):
        assert report.tightness("output norm") > 0.9


def test_softmax_is_half_as_steep_as_its_input():
    x = torch.tensor([[0.0, 0.0, -50.0, -50.0]], dtype=torch.float64)
    found = torch.autograd.functional.jacobian(nn.Softmax(1), x).reshape(4, 4)
    assert float(torch.linalg.matrix_norm(found, 2)) == pytest.approx(0.5)
    log = torch.autograd.functional.jacobian(nn.LogSoftmax(1), torch.eye(4)[:1].double() * 90)
    assert float(torch.linalg.matrix_norm(log.reshape(4, 4), 2)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Dropout(0.3), (12,)),
        (nn.Dropout2d(0.5), (4, 2, 2)),
        (nn.Dropout(0.3).eval(), (12,)),
        (nn.Dropout(1.0), (4,)),
        (nn.Identity(), (3,)),
        (nn.Flatten(), (2, 3)),
        (nn.Flatten(-2), (2, 3, 2)),
        (nn.Unflatten(1, (2, 2)), (4, 3)),
        (nn.PixelShuffle(2), (4, 2, 2)),
        (nn.PixelUnshuffle(2), (1, 4, 4)),
        (nn.ChannelShuffle(2), (4, 2, 2)),
        (nn.ConstantPad2d(1, -0.7), (1, 2, 2)),
        (nn.ConstantPad1d((-1, 2), 3.0), (1, 4)),
        (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 3, 3)),
        (nn.UpsamplingNearest2d(scale_factor=2), (1, 3, 3)),
        (nn.AdaptiveAvgPool2d((2, 3)), (1, 5, 7)),
        (nn.AdaptiveMaxPool2d((2, 3)), (1, 5, 7)),
    ],
    ids=str,
)
def test_other_modules_keep_to_their_answers_and_reach_them(module, shape):
    report = audit_layer(module, shape, input_norm=2.0, steps=30)
    assert report.passed, str(report)
    assert min(f.tightness for f in report.findings) > 0.9, str(report)


def test_dropout_asks_for_the_mode_it_is_in():
    drop = nn.Dropout(0.75)
    x = Bound(2.0, (5,))
    assert KNOWN[type(drop)](drop).output_norm(x) == 8.0
    assert KNOWN[type(drop)](drop.eval()).output_norm(x) == 2.0
    assert KNOWN[nn.Dropout](nn.Dropout(1.0)).output_norm(Bound(math.inf, (5,))) == 0.0


def test_a_subclass_may_do_anything():
    """So it is not its parent's answer that counts, but what its forward does."""

    class Loud(nn.ReLU):
        def forward(self, x):
            return 9 * super().forward(x)

    class Swaps(nn.ReLU):
        def forward(self, x):
            return super().forward(x).flip(0)

    assert Loud not in KNOWN
    assert propagate(Loud(), 1.0, (3,), input_norm=1.0).output.norm == 9.0
    with pytest.raises(UnboundedLayer, match="flip"):
        propagate(Swaps(), 1.0, (3,), input_norm=1.0)


@pytest.mark.parametrize(
    ("module", "shape", "words"),
    [
        (nn.Flatten(0), (4,), "mix records"),
        (nn.Flatten(-2), (4,), "mix records"),
        (nn.Unflatten(0, (1, 2)), (4,), "mix records"),
        (nn.Softmax(0), (4,), "mix records"),
        (nn.Softmax(-2), (4,), "mix records"),
        (nn.Softmax(), (4,), "dim"),
        (nn.Softmax2d(), (2, 2), "mix records"),
        (nn.PixelShuffle(1), (2, 2), "three axes"),
        (nn.CELU(-1.0), (4,), "alpha"),
        (nn.Softplus(beta=-1.0), (4,), "beta"),
        (nn.SELU(inplace=True), (4,), "inplace"),
        (nn.Hardswish(inplace=True), (4,), "inplace"),
        (nn.Hardtanh(0.5, 1.0, inplace=True), (4,), "inplace"),
        (nn.Dropout(0.5, inplace=True), (4,), "inplace"),
        (nn.MaxPool1d(2, return_indices=True), (1, 4), "indices"),
        (nn.MaxPool1d(2, stride=1, padding=1, dilation=4), (2, 3), "without a pixel"),
        (nn.ZeroPad2d((0, 0, 1, -1)), (3,), "reach the batch"),
        (nn.ConstantPad3d((0, 0, 0, 0, -1, 1), 0.0), (3, 4), "reach the batch"),
        (nn.CircularPad1d((2, -2)), (1, 2), "unwritten"),
        (nn.Upsample(scale_factor=2, mode="bicubic"), (1, 4, 4), "overshoots"),
        (nn.Linear(4, 4), (4,), "SpectralLinear"),
        (nn.Linear(4, 4).requires_grad_(False), (4,), "frozen"),
        (nn.Conv2d(1, 1, 3), (1, 4, 4), "convolution"),
        (nn.LayerNorm(4), (4,), "LayerCentering"),
        (nn.GroupNorm(1, 4), (4,), "LayerCentering"),
        (nn.BatchNorm1d(4), (4,), "LayerCentering"),
        (nn.LPPool2d(2, 2), (1, 4, 4), "ScaledL2NormPool2d"),
        (nn.Hardshrink(), (4,), "jumps"),
        (nn.Threshold(0.1, 20), (4,), "jumps"),
        (nn.RReLU(), (4,), "LeakyReLU"),
        (nn.PReLU(), (4,), "LeakyReLU"),
        (nn.GLU(), (4,), "multiplies"),
        (nn.LSTM(4, 4), (3, 4), "PerSampleClip"),
    ],
    ids=str,
)
def test_refusals_name_the_layer_the_reason_and_the_way_out(module, shape, words):
    model = nn.Sequential(nn.Identity(), Residual(nn.Sequential(module)))
    with pytest.raises(UnboundedLayer, match=words) as caught:
        propagate(model, 1.0, shape, input_norm=1.0)
    assert f"layer '1.f.0' ({type(module).__name__})" in str(caught.value)


def test_every_reason_says_what_to_do():
    assert all("use " in r or "train this model" in r for r in REASONS.values())
    assert set(REASONS) <= set(KNOWN)


class Rotated(nn.Module, Parameterless):
    """A fixed rotation, kept as a buffer: it has no parameter to say where it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        rotation = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q
        self.register_buffer("rotation", rotation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.rotation


def test_a_layer_is_probed_where_its_buffers_are() -> None:
    """In float64, or on a GPU, where a probe of plain zeros would not fit."""
    model = nn.Sequential(Rotated(6), SpectralLinear(6, 3).double())
    found = propagate(model, CrossEntropy(), (6,), input_norm=1.0)
    assert found.by_parameter["1.weight"] == pytest.approx(2**0.5, rel=1e-3)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"))]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sphere", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bounded_input_is_bounded_whatever_comes(sphere, dtype, device) -> None:
    """NaN and ∞ anywhere in a record make it 0, of any size and in any company."""
    # A norm that is itself beyond the largest number makes a record 0, which is bounded too.
    largest, least = torch.finfo(dtype).max / 70, torch.finfo(dtype).tiny
    rows = torch.ones(8, 70, dtype=dtype, device=device)
    rows[1, 33], rows[2, 0], rows[3, 69] = math.nan, math.inf, -math.inf
    rows[4, 5], rows[4, 6] = math.nan, math.inf
    rows[5], rows[6], rows[7] = largest, least, 0.0
    found = BoundedInput(2.0, sphere=sphere)(rows).double().cpu()
    norms = torch.linalg.vector_norm(found, dim=1)
    assert norms.isfinite().all()
    assert (norms <= 2.0).all()
    assert not found[[1, 2, 3, 4, 7]].any()
    assert (norms[[0, 5]] > 1.999).all()
    assert bool(norms[6] > 1.999) == sphere
