"""The answers of PyTorch's own modules, by exact type: a subclass may do something else.

`KNOWN` maps a class to a function from a module to its answers. For the modules without a bound the
function raises `Refused` with the reason in `REASONS` and what to use instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Bounded, Parameterless, own_axis, per_axis


def _family(*names: str) -> list[type[nn.Module]]:
    """The classes of these names for one, two and three spatial axes."""
    return [getattr(nn, f"{name}{dims}d") for name in names for dims in (1, 2, 3)]


_ATTENTION = (
    "has no Lipschitz constant: products of activations grow with their squares; train this model "
    "with PerSampleClip"
)
_LINEAR = (
    "has weights that nothing keeps bounded; use tacit.lipschitz.SpectralLinear (frozen too: give "
    "it the norm of the weight as max_norm), or tacit.lipschitz_twin(model)"
)
_JUMPS = "jumps, so it has no Lipschitz constant; use nn.Softshrink, nn.ReLU or MaxMin"

REASONS: dict[type[nn.Module], str] = {
    nn.Linear: _LINEAR,
    nn.Bilinear: "multiplies its inputs by each other, so it has no Lipschitz constant; train this "
    "model with PerSampleClip",
    **dict.fromkeys(
        _family("Conv"),
        "has weights that nothing keeps bounded; use a convolution of tacit.lipschitz, or "
        "tacit.lipschitz_twin(model)",
    ),
    **dict.fromkeys(
        _family("ConvTranspose"),
        "has weights that nothing keeps bounded, and no counterpart in tacit.lipschitz; use "
        "nn.Upsample and a convolution, or train this model with PerSampleClip",
    ),
    **dict.fromkeys(
        [nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, *_family("InstanceNorm"), nn.LocalResponseNorm],
        "divides by a deviation that can be near 0, so it has no Lipschitz constant; use "
        "tacit.lipschitz.LayerCentering, or train with PerSampleClip",
    ),
    **dict.fromkeys(
        [*_family("BatchNorm"), nn.SyncBatchNorm],
        "normalises by the batch, so one record moves everyone's gradient; use "
        "tacit.lipschitz.LayerCentering",
    ),
    nn.Hardshrink: _JUMPS,
    nn.Threshold: _JUMPS,
    nn.PReLU: "has slopes of its own that nothing keeps bounded; use nn.LeakyReLU or MaxMin",
    nn.RReLU: "draws its slopes anew for each number; use nn.LeakyReLU",
    nn.GLU: "multiplies one half of its input by the other; use MaxMin",
    **dict.fromkeys(
        _family("LPPool"),
        "has no gradient at 0 (PyTorch gives NaN); use tacit.lipschitz.ScaledL2NormPool2d, which "
        "is defined there",
    ),
    nn.AlphaDropout: "shifts what it drops; use nn.Dropout",
    nn.FeatureAlphaDropout: "shifts what it drops; use nn.Dropout",
    nn.MultiheadAttention: _ATTENTION,
    nn.Transformer: _ATTENTION,
    nn.TransformerEncoder: _ATTENTION,
    nn.TransformerEncoderLayer: _ATTENTION,
    **dict.fromkeys(
        [nn.RNN, nn.LSTM, nn.GRU],
        "multiplies its own outputs by weights that nothing keeps bounded; train this model with "
        "PerSampleClip",
    ),
}


def _refuse(module: nn.Module) -> NoReturn:
    raise Refused(f"{type(module).__name__} {REASONS[type(module)]}")


class Rearrangement(Parameterless):
    """An exact isometry: it only moves a record's numbers about. Its axis is not the batch's."""

    exact = True

    def __init__(self, module: nn.Module, axis: int | None = None) -> None:
        self.kind, self.axis = type(module).__name__, axis

    def output_norm(self, x: Bound) -> float:
        if self.axis is not None:
            own_axis(self.axis, len(x.shape) + 1, self.kind)
        return x.norm


def _unflatten(module: nn.Unflatten) -> Rearrangement:
    if not isinstance(module.dim, int):
        raise Refused("names its axis; give it a number")
    return Rearrangement(module, module.dim)


class PixelShuffleAnswers(Rearrangement):
    """Its channels are the third axis from the end, which in a record of two axes is the batch."""

    def output_norm(self, x: Bound) -> float:
        if len(x.shape) < 3:
            raise Refused(f"takes records of three axes (C, H, W); this one is {x.shape}")
        return x.norm


class NonNegativeLinear(Parameterless):
    """Linear modules without negative weights: averages, copies, interpolation.

    For A ≥ 0 and any p > 0, ‖A‖₂² = λ_max(AᵀA) ≤ max_i (AᵀAp)_i/p_i [Collatz 1942, Wielandt 1950]:
    with D = diag(p), D⁻¹AᵀAD has the same eigenvalues, and none is larger than the largest row sum.
    p = 1 gives at most Schur's row sums times column sums; p ← AᵀAp is power iteration, and this is
    the one side from which it bounds the norm *above*. AᵀAp is one forward and one backward pass of
    the module itself, whatever its padding, divisors and rounding of sizes.

    Windows of k numbers, a number in at most M of them: row sums 1 and column sums M/k, so at most
    √(M/k): 1/√k where they do not overlap, near 1 at stride 1. Copies (padding, nearest-neighbour
    upsampling): AᵀA counts the copies of each number, and the root of the largest count is exact.
    """

    def __init__(self, module: nn.Module, passes: int = 16) -> None:
        self.module, self.passes = module, passes

    def lipschitz(self, x: Bound) -> float:
        p = torch.ones(1, *x.shape, dtype=torch.float64)
        least = math.inf
        for _ in range(self.passes):
            p = p.detach().requires_grad_(True)
            with torch.enable_grad():
                half_square = self.module.forward(p).square().sum() / 2
                (image,) = torch.autograd.grad(half_square, p)
            least = min(least, float((image / p.detach()).max()))
            # Any p above 0 is valid; an entry that no window reads must not become 0.
            p = (image / image.max()).clamp_min(1e-6)
        return math.sqrt(least) * (1 + 2.0**-40)


def _average_pool(module: nn.Module) -> NonNegativeLinear:
    divisor = getattr(module, "divisor_override", None)
    if divisor is not None and divisor <= 0:
        raise Refused(f"divides by {divisor}; give a divisor_override above 0, or none")
    return NonNegativeLinear(module)


def _circular_pad(module: Any) -> NonNegativeLinear:
    """Copies; with a negative amount, PyTorch may return memory that it never wrote."""
    if any(amount < 0 for amount in module.padding):
        raise Refused(
            f"pads by {tuple(module.padding)}, and PyTorch leaves memory unwritten where circular "
            "padding is negative; give amounts from 0, and cut with nn.ConstantPad1d and its like"
        )
    return NonNegativeLinear(module)


# The other modes have negative weights.
_AVERAGING = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "area")


def _upsample(module: nn.Upsample) -> NonNegativeLinear:
    if module.mode not in _AVERAGING:
        raise Refused(f"mode {module.mode!r} overshoots; use one of {', '.join(_AVERAGING)}")
    return NonNegativeLinear(module)


class ConstantPadAnswers(Parameterless):
    """x and m numbers of value v beside it: ‖y‖² ≤ ‖x‖² + m·v², Lipschitz 1.

    m·v² is the squared norm of the output for a record of zeros. Negative padding only cuts. On a
    record of fewer axes than are padded, the first of them would be the batch's.
    """

    exact = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def output_norm(self, x: Bound) -> float:
        padded = len(self.module.padding) // 2  # type: ignore[arg-type]
        if padded > len(x.shape):
            raise Refused(
                f"pads {padded} axes of a record of shape {x.shape}, and would reach the batch's; "
                "use one that pads no more axes than a record has"
            )
        at_zero = self.module.forward(torch.zeros(1, *x.shape, dtype=torch.float64))
        return math.hypot(x.norm, float(torch.linalg.vector_norm(at_zero)))


def largest_overlap(windows: Iterable[range], size: int) -> int:
    """The most windows that one of the positions 0, …, size − 1 of an axis is in."""
    counts = Counter(i for window in windows for i in window if 0 <= i < size)
    return max(counts.values(), default=0)


class MaxPoolAnswers(Parameterless):
    """y_w = max over window w, in each channel; a position is in at most M windows.

    In each window |max a − max b| ≤ max|a − b| ≤ ‖a − b‖, so Σ_w (y_w − y'_w)² ≤ M·‖x − x'‖²: the
    constant is √M, and 1 where windows do not overlap. It is reached: one number, the maximum of
    all M windows that it is in, is copied M times. Padding is with −∞ and never wins, unless a
    window holds nothing else, which is refused.
    """

    exact = True

    def __init__(self, module: Any) -> None:
        if module.return_indices:
            raise Refused("returns indices too; build it without return_indices")
        self.module, self.dims = module, int(type(module).__name__[-2])  # MaxPool2d: 2

    def lipschitz(self, x: Bound) -> float:
        after = self.module.forward(torch.zeros(1, *x.shape))
        if not after.isfinite().all():
            raise Refused(
                f"has a window without a pixel on a record of shape {x.shape}, whose maximum is "
                "−∞; change its padding, dilation or kernel_size"
            )
        axes = enumerate(zip(x.shape[-self.dims :], after.shape[-self.dims :], strict=True))
        overlaps = [largest_overlap(self._windows(i, n, outputs), n) for i, (n, outputs) in axes]
        return math.sqrt(math.prod(overlaps))

    def _windows(self, axis: int, size: int, outputs: int) -> list[range]:
        """What each output along an axis reads; positions outside 0, …, size − 1 are padding."""
        if "Adaptive" in type(self.module).__name__:
            ends = [(i * size // outputs, -(-(i + 1) * size // outputs)) for i in range(outputs)]
            return [range(*end) for end in ends]
        m = self.module
        # PyTorch reads an empty stride, too, as the kernel size.
        settings = (m.kernel_size, m.stride or m.kernel_size, m.padding, m.dilation)
        kernel, stride, padding, dilation = (per_axis(s, self.dims)[axis] for s in settings)
        starts = [i * stride - padding for i in range(outputs)]
        return [range(start, start + kernel * dilation, dilation) for start in starts]


class SoftmaxAnswers(Parameterless):
    """p = softmax(±x) over K numbers of a record's own axis, m times side by side.

    Lipschitz   J = diag(p) − ppᵀ is symmetric; the absolute row sums are 2p_i(1 − p_i) ≤ ½, and
                no eigenvalue is larger than the largest row sum
    output      ‖p‖ ≤ Σp_i = 1, so √m; and from the uniform p at 0, √(m/K) + X/2
    """

    def __init__(self, module: nn.Module) -> None:
        axis = -3 if isinstance(module, nn.Softmax2d) else module.dim
        if not isinstance(axis, int):
            raise Refused(
                "chooses its axis by the number of axes, which can be the batch's; give it a dim"
            )
        self.axis = axis

    def output_norm(self, x: Bound) -> float:
        length = self.length(x)
        groups = math.prod(x.shape) / length
        return min(math.sqrt(groups), math.sqrt(groups / length) + x.norm / 2)

    def lipschitz(self, x: Bound) -> float:
        return 0.5

    def length(self, x: Bound) -> int:
        return x.shape[own_axis(self.axis, len(x.shape) + 1, "softmax") - 1]


class LogSoftmaxAnswers(SoftmaxAnswers):
    """x − log Σ eˣ over K numbers.

    Lipschitz   J = I − 1pᵀ is its own square, and I − P has the norm of P for any such P that is
                neither 0 nor I [Ipsen 1995]: ‖1‖·‖p‖ ≤ √K. For K = 1 it is 0
    output      at 0 every number is −log K: √n·log K + √K·X
    """

    def output_norm(self, x: Bound) -> float:
        length = self.length(x)
        at_zero = math.sqrt(math.prod(x.shape)) * math.log(length)
        return at_zero + math.sqrt(length) * x.norm

    def lipschitz(self, x: Bound) -> float:
        return math.sqrt(self.length(x))


# The rounding of float32 next to 1: a jump below this is no more than a network rounds by.
NEGLIGIBLE = 2.0**-24


@dataclass(frozen=True)
class Pointwise(Parameterless):
    """A function of one number: |f(x)| ≤ offset + gain·|x|, |f(x)| ≤ ceiling and |f'(x)| ≤ slope.

    On n numbers of norm X:
      output      ‖f(x)‖ ≤ min(offset·√n + gain·X, ceiling·√n)      (triangle inequality)
      Lipschitz   the Jacobian is diagonal: slope
    A function that is not 0 at 0 turns a zero record into one of norm |f(0)|·√n, whatever X is.
    `jump` is the most that f changes by at one point, 0 where it is continuous.
    """

    slope: float = 1.0
    gain: float = 1.0
    offset: float = 0.0
    ceiling: float = math.inf
    exact: bool = False
    jump: float = 0.0

    def output_norm(self, x: Bound) -> float:
        root = math.sqrt(math.prod(x.shape))
        return min(self.offset * root + self.gain * x.norm, self.ceiling * root)

    def lipschitz(self, x: Bound) -> float:
        return self.slope


# Slopes without a short form are rounded up in the seventh digit.


def _leaky_relu(m: nn.LeakyReLU) -> Pointwise:
    """x above 0, a·x below."""
    slope = max(1.0, abs(m.negative_slope))
    return Pointwise(slope, slope, exact=slope == 1)


def _elu(m: nn.ELU) -> Pointwise:
    """α(eˣ − 1) below 0, of slope |α|eˣ."""
    slope = max(1.0, abs(m.alpha))
    return Pointwise(slope, slope)


def _celu(m: nn.CELU) -> Pointwise:
    """α(e^(x/α) − 1) below 0, of slope e^(x/α) ≤ 1 for α > 0."""
    if not m.alpha > 0:
        raise Refused(f"CELU(alpha={m.alpha}) is unbounded in slope; give an alpha above 0")
    return Pointwise()


def _gelu(m: nn.GELU) -> Pointwise:
    """x·Φ(x), so |f(x)| ≤ |x|: steeper than 1 and yet no longer than its input.

    f' = Φ + xφ and f'' = φ·(2 − x²), so the largest slope is Φ(√2) + √2·φ(√2) and the smallest 1
    minus that. With tanh(√(2/π)(x + 0.044715x³)) for Φ, f'' = 0 at x = 1.418504.
    """
    return Pointwise(1.1289931 if m.approximate == "tanh" else 1.1289042)


def _softplus(m: nn.Softplus) -> Pointwise:
    """log(1 + e^(βx))/β, of slope σ(βx) < 1 and (log 2)/β at 0.

    Above βx = t, the threshold, PyTorch returns x, which is in (0, f(x)) for a t above 0. There it
    falls by (log(1 + eᵗ) − t)/β = log(1 + e⁻ᵗ)/β, at once: no gradient shows it, and a certificate
    has to. 2·10⁻⁹ for t = 20 and β = 1.
    """
    if not (m.beta > 0 and m.threshold >= 0):
        raise Refused(
            f"Softplus(beta={m.beta}, threshold={m.threshold}); give a beta above 0 and a "
            "threshold of at least 0"
        )
    jump = math.log1p(math.exp(-m.threshold)) / m.beta
    return Pointwise(offset=math.log(2) / m.beta, jump=jump)


def _hardtanh(m: nn.Hardtanh) -> Pointwise:
    """x cut to [low, high]: |f(x)| ≤ |f(0)| + |x|."""
    low, high = m.min_val, m.max_val
    at_zero = abs(min(max(0.0, low), high))
    return Pointwise(offset=at_zero, ceiling=max(abs(low), abs(high)), exact=at_zero == 0)


ACTIVATIONS: dict[type[nn.Module], Pointwise | Callable[[Any], Pointwise]] = {
    nn.ReLU: Pointwise(exact=True),
    nn.ReLU6: Pointwise(ceiling=6.0, exact=True),
    nn.LeakyReLU: _leaky_relu,
    nn.ELU: _elu,
    nn.CELU: _celu,
    # λx above 0 and λα(eˣ − 1) below: λα, just below 0.
    nn.SELU: Pointwise(1.7580994, 1.7580994),
    nn.GELU: _gelu,
    # x·σ(x), no longer than x: f'' = 0 where t·tanh t = 1, t = x/2 = 1.199679; f' = (1 + t)/2.
    nn.SiLU: Pointwise(1.0998394),
    # x·tanh(log(1 + eˣ)), no longer than x: f'' = 0 at x = 1.490571.
    nn.Mish: Pointwise(1.0884982),
    # x(x + 3)/6 between −3 and 3: slope (2x + 3)/6, up to 3/2 at 3.
    nn.Hardswish: Pointwise(slope=1.5),
    nn.Softplus: _softplus,
    # −log(1 + e⁻ˣ): slope σ(−x), −log 2 at 0.
    nn.LogSigmoid: Pointwise(offset=math.log(2)),
    # σ' = σ(1 − σ) ≤ 1/4, and ½ at 0.
    nn.Sigmoid: Pointwise(0.25, 0.25, offset=0.5, ceiling=1.0),
    # PyTorch's sixth is one of single precision, above 1/6.
    nn.Hardsigmoid: Pointwise(0.1666667, 0.1666667, offset=0.5, ceiling=1.0),
    nn.Tanh: Pointwise(ceiling=1.0),
    nn.Hardtanh: _hardtanh,
    # x/(1 + |x|): slope 1/(1 + |x|)².
    nn.Softsign: Pointwise(ceiling=1.0),
    # x − tanh x: slope tanh² x.
    nn.Tanhshrink: Pointwise(),
    # x moved towards 0 by λ, and 0 within it.
    nn.Softshrink: Pointwise(exact=True),
}


def _activation(module: nn.Module) -> Pointwise:
    entry = ACTIVATIONS[type(module)]
    return _safe_in_place(module, entry if isinstance(entry, Pointwise) else entry(module))


def _dropout(module: Any) -> Pointwise:
    """Training: y = m·x/(1 − p) with a mask m of zeros and ones, drawn independently of x.

    For every mask, 1/(1 − p)-Lipschitz and 0 at 0; p = 1 leaves nothing. The masks of the other
    records have the same distribution with or without a record, so what holds for every mask holds
    for the mixture (joint convexity). Evaluation: the identity.
    """
    share = float(module.p) if module.training else 0.0
    if share == 1:
        return Pointwise(slope=0.0, ceiling=0.0, exact=True)
    return _safe_in_place(module, Pointwise(1 / (1 - share), 1 / (1 - share), exact=share == 0))


def _safe_in_place(module: nn.Module, answers: Pointwise) -> Pointwise:
    """Refuse to write f(x) over the input unless ‖f(x)‖ ≤ ‖x‖ and f is 1-Lipschitz.

    Others that read the input then read f(x), which does them no harm.
    """
    harmless = answers.slope <= 1 and answers.gain <= 1 and answers.offset == 0
    if getattr(module, "inplace", False) and not harmless:
        raise Refused("writes into its input, which others may read; build it with inplace=False")
    return answers


KNOWN: dict[type[nn.Module], Callable[[Any], Bounded]] = {
    nn.Identity: Rearrangement,
    nn.Flatten: lambda module: Rearrangement(module, module.start_dim),
    nn.Unflatten: _unflatten,
    nn.PixelShuffle: PixelShuffleAnswers,
    nn.PixelUnshuffle: PixelShuffleAnswers,
    nn.ChannelShuffle: Rearrangement,
    **dict.fromkeys(ACTIVATIONS, _activation),
    **dict.fromkeys([nn.Softmax, nn.Softmin, nn.Softmax2d], SoftmaxAnswers),
    nn.LogSoftmax: LogSoftmaxAnswers,
    **dict.fromkeys([nn.Dropout, *_family("Dropout")], _dropout),
    **dict.fromkeys(_family("AvgPool", "AdaptiveAvgPool"), _average_pool),
    **dict.fromkeys(_family("MaxPool", "AdaptiveMaxPool"), MaxPoolAnswers),
    **dict.fromkeys(_family("ZeroPad", "ConstantPad"), ConstantPadAnswers),
    **dict.fromkeys(_family("CircularPad"), _circular_pad),
    **dict.fromkeys(_family("ReflectionPad", "ReplicationPad"), NonNegativeLinear),
    **dict.fromkeys([nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d], _upsample),
    **dict.fromkeys(REASONS, _refuse),
}
