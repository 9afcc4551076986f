"""The operator norm of a convolution, from above, by the symbol of its kernel.

Output i reads padded cell i·s + j·d through tap j < k (kernel k, stride s, dilation d). The padding
says which pixel, if any, a cell holds. Axes are independent: over several of them counts multiply.

Kernels come as (L, groups, out/groups, in/groups, k₁, …, k_r), L layers of one shape, and give
(L, groups); the norm of a grouped convolution is the largest over its groups, which share no
channel. Everything is float64, and nothing waits for the device.

On a torus a convolution is diagonal in frequency: its norm is the maximum over the torus's
frequencies θ of ‖K̂(θ)‖, K̂(θ) = Σ_b K_b·e^(i⟨b, θ⟩) an out × in matrix  [Sedghi 2019]. With a
stride, space is folded into depth first: K̂ is out × (in·folding). `Usage` says which torus bounds
which padding, and by what factor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.lipschitz.operator_norm import MARGIN, operator_norm_upper


@dataclass(frozen=True)
class Usage:
    """What bounds a convolution along one axis; each field is a count.

    reads    of the most-read pixel, by all taps of all outputs together
    copies   of a pixel, at most, on the torus
    torus    its length, a multiple of the stride; None: no length is known, so all are allowed for

    Unfolding. The convolution is K_flat·U, where U copies every window into a column. Each row of
    U holds a single 1, or none, so UᵀU is diagonal with the reads of the pixels, whatever the
    padding: ‖U‖² = `reads`, exactly. Zero padding: tap j reads pixel q for i = (q + p − jd)/s,
    a whole number only if jd ≡ q + p mod s; with g = gcd(s, d) that is one j in s/g, so
      reads ≤ ⌈k·g/s⌉, which is ⌈k/s⌉ without dilation and k if the dilation is the stride.

    Torus. The convolution is R·C·E, with C the convolution on a torus of N cells, R a choice of
    some of its outputs, each once, and E the placing of the pixels on it: ‖E‖² = `copies`.
    `size` = n pixels, padded by p before and p' after:
      circular   N = n, E = 1, R = 1 if outputs·s = n. It needs that s divides n, or the
                 grid of outputs does not close, and outputs·s ≤ n, or R takes one twice.
      zeros      N ≥ n + min(max(p, p'), (k − 1)d): what lies before the first pixel and after the
                 last then falls on cells that hold no pixel, and E = 1. No output that reads a
                 pixel is met twice, since those begin within n + p + p' − (k − 1)d ≤ N cells
                 of each other, p and p' cut at (k − 1)d. N = n is enough only without padding.
      otherwise  N ≥ n + p + p' and E is the padding itself: its windows never leave the cells.
    """

    reads: int
    copies: int
    torus: int | None


@dataclass(frozen=True)
class Axis:
    """Kernel, stride, dilation and padding of `torch.nn.Conv1d`; the size where it is known."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    padding_mode: str = "zeros"
    size: int | None = None

    @property
    def folding(self) -> int:
        """s/g, g = gcd(s, d): taps this far apart meet the same pixels.

        Space folded into depth by s makes the stride 1; there, tap j reads channel jd mod s, which
        depends on j mod s/g, at a distance that grows by d/g from one such tap to the next.
        """
        return self.stride // math.gcd(self.stride, self.dilation)

    @property
    def taps(self) -> int:
        """⌈k·g/s⌉: taps of the folded kernel."""
        return -(-self.kernel // self.folding)

    def outputs(self, size: int) -> int:
        """How many windows fit."""
        room = size + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        return room // self.stride + 1

    def usage(self) -> Usage:
        """At its size; without one, on any image that is large enough for `covers`."""
        return _usage_unsized(self) if self.size is None else _usage(self, self.size)

    def covers(self, size: int) -> bool:
        """Whether what `usage` says holds on an image of this size."""
        if self.size is not None:
            return size == self.size
        here, said = _usage(self, size), self.usage()
        return here.reads <= said.reads and here.copies <= said.copies

    def reads(self, size: int) -> int:
        """Of the most-read pixel of an image of this size."""
        return _usage(self, size).reads


@lru_cache(maxsize=4096)
def _usage(axis: Axis, size: int) -> Usage:
    pixels = _pixels(axis, size)
    reads = Counter(
        pixels[i * axis.stride + j * axis.dilation]
        for i in range(axis.outputs(size))
        for j in range(axis.kernel)
    )
    del reads[-1]
    most = max(reads.values(), default=1)
    if axis.padding_mode == "zeros":
        margin = min(max(axis.before, axis.after), (axis.kernel - 1) * axis.dilation)
        return Usage(most, 1, _multiple(size + margin, axis.stride))
    closes = size % axis.stride == 0 and axis.outputs(size) * axis.stride <= size
    if axis.padding_mode == "circular" and closes:
        return Usage(most, 1, size)
    return Usage(most, max(Counter(pixels).values()), _multiple(len(pixels), axis.stride))


@lru_cache(maxsize=4096)
def _usage_unsized(axis: Axis) -> Usage:
    """The most over all large sizes: both ends apart, so that only size mod s matters.

    Circular padding is taken to close; an image on which it does not is not covered.
    """
    if axis.padding_mode == "zeros":
        return Usage(axis.taps, 1, None)
    span = axis.kernel * axis.dilation + axis.before + axis.after
    large = _multiple(4 * (span + axis.stride), axis.stride)
    sizes = range(large, large + (1 if axis.padding_mode == "circular" else axis.stride))
    found = [_usage(axis, size) for size in sizes]
    return Usage(max(u.reads for u in found), max(u.copies for u in found), None)


def _pixels(axis: Axis, size: int) -> list[int]:
    """The pixel that each padded cell holds, −1 for none."""
    cells = range(-axis.before, size + axis.after)
    match axis.padding_mode:
        case "zeros":
            return [q if 0 <= q < size else -1 for q in cells]
        case "circular":
            return [q % size for q in cells]
        case "replicate":
            return [min(max(q, 0), size - 1) for q in cells]
        case "reflect":
            return [size - 1 - abs(size - 1 - abs(q)) for q in cells]
    raise ValueError(
        f"padding_mode is {axis.padding_mode!r}; use zeros, circular, replicate or reflect"
    )


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


# Angles for each degree of the symbol where a torus has many more: loose by 1/cos(π/16) = 1.02.
DENSITY = 8
# Complex numbers held at once: 256 MiB on a GPU; elsewhere 16 MiB, which a cache holds in part.
_CHUNK = {"cuda": 2**24}
_CHUNK_ELSEWHERE = 2**20


def convolution_norm_upper(
    kernels: Tensor, axes: Sequence[Axis], density: float = DENSITY
) -> Tensor:
    """The better of both bounds. Where windows are disjoint the reshaped kernel's is exact."""
    reshaped = reshaped_norm_upper(kernels, axes)
    if all(axis.taps == 1 for axis in axes) and most_copies(axes) == 1:
        return reshaped
    return torch.minimum(reshaped, torus_norm_upper(kernels, axes, density=density))


def reshaped_norm_upper(kernels: Tensor, axes: Sequence[Axis]) -> Tensor:
    """‖K_flat·U‖ ≤ ‖K_flat‖·√reads, K_flat the kernel as an out × (in·k₁⋯k_r) matrix.

    √∏⌈kᵢgᵢ/sᵢ⌉·‖K_flat‖ under zero padding, g = gcd(s, d): the RKO bound [Li 2019, Serrurier 2021]
    with dilation. The reads are counted, so reflected pixels count as often as they are read.
    """
    flat = kernels.detach().to(torch.float64).flatten(3)
    # The root mean square of the singular values: at that scale orthogonal kernels are certified
    # exactly, and the bound of a multiple is the multiple of the bound.
    scale = torch.linalg.matrix_norm(flat) / math.sqrt(min(flat.shape[-2:]))
    scale = scale.clamp_min(torch.finfo(flat.dtype).tiny)
    return operator_norm_upper(flat / scale[..., None, None]) * scale * math.sqrt(most_reads(axes))


def torus_norm_upper(
    kernels: Tensor, axes: Sequence[Axis], *, squarings: int = 5, density: float = DENSITY
) -> Tensor:
    """√copies·max_θ ‖K̂(θ)‖·∏ᵢ looseᵢ over a grid of angles (`_angles`), K̂ bounded by `_norms`.

    K is real, so K̂(−θ) is the conjugate of K̂(θ) and half of the last axis's angles will do.
    """
    folded = _folded(kernels.detach().to(torch.float64), axes)
    grids = [_angles(axis, density) for axis in axes]
    counts = [count for count, _ in grids]
    cosines, sines = _waves(axes, counts, folded.device)
    layers, groups, _, outs, ins = folded.shape
    flat = folded.flatten(3)
    found = torch.zeros(layers, groups, dtype=flat.dtype, device=flat.device)
    chunk = _CHUNK.get(flat.device.type, _CHUNK_ELSEWHERE)
    step = max(1, chunk // max(1, layers * groups * outs * ins))
    for cosine, sine in zip(cosines.split(step), sines.split(step), strict=True):
        symbol = torch.complex(cosine @ flat, sine @ flat).unflatten(-1, (outs, ins))
        found = torch.maximum(found, _norms(symbol, squarings).amax(dim=-1))
    # A symbol is rounded by less than this, which shows where a whole kernel cancels.
    rounding = 2.0**-40 * torch.linalg.vector_norm(flat, dim=(2, 3))
    loose = math.prod(factor for _, factor in grids) * math.sqrt(most_copies(axes))
    return (found + rounding) * loose


def torus_cost(
    shape: Sequence[int], axes: Sequence[Axis], *, squarings: int = 5, density: float = DENSITY
) -> float:
    """Floating-point operations of `torus_norm_upper` for one kernel (groups, out, in, k₁, …).

    n × m symbols, n ≤ m, at F frequencies: a Gram matrix and its squarings, 8F·(n²m + 5n³).
    """
    groups, outs, ins = shape[:3]
    ins *= math.prod(axis.folding for axis in axes)
    n, m = sorted((outs, ins))
    counts = [_angles(axis, density)[0] for axis in axes]
    frequencies = math.prod(counts[:-1]) * (counts[-1] // 2 + 1)
    return 8.0 * groups * frequencies * (n * n * m + squarings * n**3)


def most_reads(axes: Sequence[Axis]) -> int:
    return math.prod(axis.usage().reads for axis in axes)


def most_copies(axes: Sequence[Axis]) -> int:
    return math.prod(axis.usage().copies for axis in axes)


def _folded(kernels: Tensor, axes: Sequence[Axis]) -> Tensor:
    """(L, G, O, I, k₁, …) as (L, G, b₁⋯b_r, O, I·f₁⋯f_r): tap j is tap j // f of channel j mod f.

    The channels that one folded tap reads lie at other distances than j // f says, by a shift
    that depends on the channel only: a unitary change of the input, without effect on the norm.
    """
    room = [r for axis in reversed(axes) for r in (0, axis.taps * axis.folding - axis.kernel)]
    split = [n for axis in axes for n in (axis.taps, axis.folding)]
    parts = F.pad(kernels, room).reshape(*kernels.shape[:4], *split)
    taps = range(4, 4 + 2 * len(axes), 2)
    order = (0, 1, *taps, 2, 3, *(t + 1 for t in taps))
    shape = (math.prod(a.taps for a in axes), kernels.shape[2], -1)
    return parts.permute(order).reshape(*kernels.shape[:2], *shape)


def _angles(axis: Axis, density: float) -> tuple[int, float]:
    """How many equally spaced angles, from 0, and by how much the maximum over them is enlarged.

    Those of the torus are exact: 2πf/T, T = N/s, at steps of d/g, which are the multiples of
    2π·gcd(d/g, T)/T. For a torus of unknown or large T any number M of angles serves: for
    unit u and v and D = (taps − 1)/2, p(θ) = Re(u*·K̂(θ)·v·e^(−iDθ)) is a trigonometric polynomial
    of degree D (in θ/2 of degree 2D if D is no whole number, at 2M angles). Where it is largest,
    at θ₀, it falls no faster than a cosine: p(θ) ≥ p(θ₀)·cos(D(θ − θ₀)) for |θ − θ₀| ≤ π/D
    [M. Riesz 1914], and some angle is within π/M. So
      max_θ ‖K̂(θ)‖ ≤ max_grid ‖K̂‖ / cos(πD/M),  axis by axis.
    """
    degree = axis.taps - 1
    if degree == 0:
        return 1, 1.0
    enough = math.ceil(density * degree) if math.isfinite(density) else math.inf
    torus = axis.usage().torus
    if torus is not None:
        around = torus // axis.stride
        around //= math.gcd(axis.dilation // math.gcd(axis.stride, axis.dilation), around)
        if around <= 2 * enough:
            return around, 1.0
    assert isinstance(enough, int)
    return enough, 1 / math.cos(math.pi * degree / (2 * enough))


def _waves(
    axes: Sequence[Axis], counts: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of ⟨b, θ⟩, one row for each frequency and one column for each folded tap."""
    total = torch.zeros(1, 1, dtype=torch.float64, device=device)
    for last, (axis, count) in enumerate(zip(axes, counts, strict=True), start=1):
        angles = count // 2 + 1 if last == len(counts) else count
        frequency = torch.arange(angles, device=device)
        tap = torch.arange(axis.taps, device=device)
        # Whole turns are taken off before the division, so that no angle is rounded by its size.
        turns = (frequency[:, None] * tap % count).double() / count
        total = (total[:, None, :, None] + turns[:, None, :]).flatten(2).flatten(0, 1)
    return (2 * math.pi * total).cos(), (2 * math.pi * total).sin()


def _norms(symbol: Tensor, squarings: int) -> Tensor:
    """Each complex matrix's norm from above: the better of two bounds on λ_max of A = SS*.

    Spread eigenvalues: λ_max ≤ tr(A^(2^(t+1)))^(1/2^(t+1)) = ‖A^(2^t)‖_F^(1/2^t), with A divided
    by its trace before each squaring; loose by n^(1/2^(t+2)) in the norm at most, 1.039 for n = 128
    and t = 5, and 1.001 for a random kernel  [Gram iteration, Delattre 2023].
    Equal eigenvalues: λ_max ≤ μ + ‖A − μ‖_F with μ their mean.
    A product of n × n matrices is rounded by at most about n·2⁻⁵²·‖A‖_F², and ‖A‖_F² ≤ n·λ_max²,
    so by n²·2⁻⁵² of what it stands for: below the margin for n ≤ 4,096.
    """
    if min(symbol.shape[-2:]) == 1:
        return torch.linalg.vector_norm(symbol, dim=(-2, -1)) * (1 + MARGIN)
    s = symbol if symbol.shape[-2] <= symbol.shape[-1] else symbol.mT
    gram = s @ s.mH.resolve_conj()
    mean = _trace(gram) / gram.shape[-1]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    near = (mean + _frobenius(gram - mean[..., None, None] * eye)).sqrt()
    power, log_scale = gram, torch.zeros_like(mean)
    tiny = torch.finfo(mean.dtype).tiny
    for _ in range(squarings):
        size = _trace(power).clamp_min(tiny)
        power = power / size[..., None, None]
        log_scale = 2 * (log_scale + size.log())
        power = power @ power
    last = _frobenius(power).clamp_min(tiny).log() + log_scale
    return torch.minimum(near, (last / 2 ** (squarings + 1)).exp()) * (1 + MARGIN)


def _trace(a: Tensor) -> Tensor:
    return a.diagonal(dim1=-2, dim2=-1).real.sum(dim=-1)


def _frobenius(a: Tensor) -> Tensor:
    """Of complex matrices as real numbers: no root is taken of every entry."""
    return torch.linalg.vector_norm(torch.view_as_real(a), dim=(-3, -2, -1))
