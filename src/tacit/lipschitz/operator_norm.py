"""Operator norms from above, of matrices and of convolutions, and the nearest orthogonal matrix.

Power iteration bounds a norm from below and is not used. Everything is float64 on batches of
matrices (…, M, N), real or complex, and nothing waits for a GPU. Rounding: a Gram matrix of n-term
products is off by at most n·2⁻⁵³·‖W‖_F² [Higham 2002, §3.5], and ‖W‖_F² ≤ r·‖W‖² for r rows or
columns: below 2⁻²⁹ of ‖W‖² for n·r ≤ 2²⁴. `_MARGIN` is larger than the effect of that on a norm.

Convolutions. Output i reads padded cell i·s + j·d through tap j < k (kernel k, stride s, dilation
d). The padding says which pixel, if any, a cell holds. Axes are independent: over several of them
counts multiply. Kernels come as (L, groups, out/groups, in/groups, k₁, …, k_r), L layers of one
shape, and give (L, groups); the norm of a grouped convolution is the largest over its groups, which
share no channel.

On a torus a convolution is diagonal in frequency: its norm is the maximum over the torus's
frequencies θ of ‖K̂(θ)‖, K̂(θ) = Σ_b K_b·e^(i⟨b, θ⟩) an out × in matrix  [Sedghi 2019]. With a
stride, space is folded into depth first: K̂ is out × (in·folding). `Usage` says which torus bounds
which padding, and by what factor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

_MARGIN = 2.0**-26
_EXACT = 2.0**-13
_SQUARINGS = 5


def operator_norm_upper(w_LMN: Tensor) -> Tensor:
    """An upper bound of the largest singular value of each matrix, the better of two.

    Near a multiple of an orthogonal matrix, with A = WᴴW and μ = tr(A)/n the mean eigenvalue:
    ‖W‖² = λ_max(A) = μ + λ_max(A − μI) ≤ μ + ‖A − μI‖_F, exact to six digits there.
    Any matrix: λ_max(A) ≤ ‖A^(2^t)‖_F^(1/2^t), which is loose by at most n^(1/2^(t+1)), so that
    ‖W‖ is by half as many powers: 1.05 for n = 512 at t = 5  [Gram iteration, Delattre 2023].
    """
    if 1 in w_LMN.shape[-2:]:
        return _frobenius(w_LMN.detach().to(_wide(w_LMN))) * (1 + _MARGIN)
    gram = gram_matrix(w_LMN)
    mean = _trace(gram) / gram.shape[-1]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    near = (mean + _frobenius(gram - mean[..., None, None] * eye)).sqrt() * (1 + _MARGIN)
    # Skip the second bound where the first is exact; on a GPU, finding that out would mean waiting.
    if near.device.type == "cpu" and bool((near <= mean.sqrt() * (1 + _EXACT)).all()):
        return near
    return torch.minimum(near, gram_iteration_upper(gram, near))


def rough_norm_upper(w_LMN: Tensor) -> Tensor:
    """An upper bound by Gram iteration alone, from u = ‖W‖_F: fewer launches, 5% loose for n = 512.

    For an initial scaling, where the result is certified afterwards. u² = tr(A) ≤ n·λ_max(A), so
    the largest power is at least n^(−2^t), above 10⁻¹²⁸ for n ≤ 10⁴ and t = 5.
    """
    gram = gram_matrix(w_LMN)
    return gram_iteration_upper(gram, _trace(gram).sqrt() * (1 + _MARGIN))


def gram_matrix(w_LMN: Tensor) -> Tensor:
    """WᴴW or WWᴴ, whichever is smaller: they share their non-zero eigenvalues."""
    w = w_LMN.detach().to(_wide(w_LMN))
    adjoint = w.mH.resolve_conj()
    return adjoint @ w if w.shape[-1] <= w.shape[-2] else w @ adjoint


def gram_iteration_upper(gram_LNN: Tensor, norm_L: Tensor) -> Tensor:
    """u·‖(A/u²)^(2^t)‖_F^(1/2^(t+1)), with u a known upper bound of the norm and t = 5.

    λ_max(A)^(2^t) = λ_max(A^(2^t)) ≤ ‖A^(2^t)‖_F for a Hermitian A with no negative eigenvalue.
    Divided by u², no eigenvalue is above 1, so powers cannot overflow. Nor can the largest vanish:
    u² ≤ μ + ‖A − μI‖_F ≤ (1 + √n)·λ_max, and (1 + √n)^(−2^t) is above 10⁻⁷⁰ for n ≤ 10⁴.
    """
    tiny = torch.finfo(norm_L.dtype).tiny
    power = gram_LNN / norm_L.square().clamp_min(tiny)[..., None, None]
    for _ in range(_SQUARINGS):
        power = power @ power
    return norm_L * _frobenius(power) ** (1 / 2 ** (_SQUARINGS + 1)) * (1 + _MARGIN)


def _wide(w: Tensor) -> torch.dtype:
    return torch.complex128 if w.is_complex() else torch.float64


def _trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).real.sum(dim=-1)


def _frobenius(a: Tensor) -> Tensor:
    """Of complex matrices as real numbers: no root is taken of every entry."""
    real = torch.view_as_real(a) if a.is_complex() else a.unsqueeze(-1)
    return torch.linalg.vector_norm(real, dim=(-3, -2, -1))


def orthogonalise(w_LMN: Tensor, steps: int = 6) -> Tensor:
    """Moves all singular values in [0, 1] towards 1 and none above it.

    s ↦ (15s − 10s³ + 3s⁵)/8 has derivative 15(1 − s²)²/8 ≥ 0 and value 1 at 1, so it maps [0, 1]
    into [0, 1]; its error at 1 is cubic, 1 − p(s) ≈ (5/2)(1 − s)³  [the quintic of Björck 1971].
    On matrices, with A = WᵀW: W·P(A), P(A) = (15 − 10A + 3A²)/8. It needs ‖W‖ ≤ 1; the result is
    certified afterwards all the same.

    All steps are polynomials of the first A, so a tall W is multiplied once by their product, and
    A ← P(A)·A·P(A) is iterated instead; one last step on W itself corrects roundings.
    """
    wide = w_LMN.shape[-1] > w_LMN.shape[-2]
    w = w_LMN.mT if wide else w_LMN
    shape = w.shape
    w = w.reshape(-1, *shape[-2:])
    direct = steps
    if w.shape[-2] >= 2 * w.shape[-1] and steps > 1:
        w, direct = w @ _product(w.mT @ w, steps - 1), 1
    for _ in range(direct):
        w = w @ _polynomial(w.mT @ w)
    w = w.reshape(shape)
    return w.mT if wide else w


def orthogonalise_cost(rows: int, columns: int, steps: int = 6) -> float:
    """Floating-point operations of `orthogonalise` for one matrix: about n²m per product, n ≤ m."""
    n, m = sorted((rows, columns))
    if m >= 2 * n:
        return 2.0 * n * n * (4 * m + 4 * steps * n)
    return 2.0 * steps * n * n * (2 * m + n)


def _product(gram: Tensor, steps: int) -> Tensor:
    total = last = _polynomial(gram)
    for _ in range(steps - 1):
        gram = last @ gram @ last
        last = _polynomial(gram)
        total = total @ last
    return total


def _polynomial(gram: Tensor) -> Tensor:
    """(15 − 10A + 3A²)/8 in two launches: on a GPU these matrices are smaller than a launch."""
    polynomial = torch.baddbmm(gram, gram, gram, beta=-1.25, alpha=0.375)
    polynomial.diagonal(dim1=-2, dim2=-1).add_(1.875)
    return polynomial


# ---- convolutions --------------------------------------------------------------------------------


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
        here, bound = _usage(self, size), self.usage()
        return here.reads <= bound.reads and here.copies <= bound.copies

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
    """The most over all large sizes: the ends do not meet, so that only size mod s matters.

    Circular padding is taken to close; an image on which it does not is not covered.
    """
    if axis.padding_mode == "zeros":
        return Usage(axis.taps, 1, None)
    span = axis.kernel * axis.dilation + axis.before + axis.after
    large = _multiple(4 * (span + axis.stride), axis.stride)
    sizes = range(large, large + (1 if axis.padding_mode == "circular" else axis.stride))
    usages = [_usage(axis, size) for size in sizes]
    return Usage(max(u.reads for u in usages), max(u.copies for u in usages), None)


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
    kernels: Tensor,
    axes: Sequence[Axis],
    *,
    density: float = DENSITY,
    norms: Callable[[Tensor], Tensor] = operator_norm_upper,
) -> Tensor:
    """√copies·max_θ ‖K̂(θ)‖·∏ᵢ looseᵢ over a grid of angles (`_angles`), K̂ bounded by `norms`.

    K is real, so K̂(−θ) is the conjugate of K̂(θ) and half of the last axis's angles will do.
    """
    folded = _folded(kernels.detach().to(torch.float64), axes)
    grids = [_angles(axis, density) for axis in axes]
    counts = [count for count, _ in grids]
    cosines, sines = _waves(axes, counts, folded.device)
    layers, groups, _, outs, ins = folded.shape
    flat = folded.flatten(3)
    largest = torch.zeros(layers, groups, dtype=flat.dtype, device=flat.device)
    chunk = _CHUNK.get(flat.device.type, _CHUNK_ELSEWHERE)
    step = max(1, chunk // max(1, layers * groups * outs * ins))
    for cosine, sine in zip(cosines.split(step), sines.split(step), strict=True):
        symbol = torch.complex(cosine @ flat, sine @ flat).unflatten(-1, (outs, ins))
        largest = torch.maximum(largest, norms(symbol).amax(dim=-1))
    # A symbol is rounded by less than this, which shows where a whole kernel cancels.
    rounding = 2.0**-40 * torch.linalg.vector_norm(flat, dim=(2, 3))
    loose = math.prod(factor for _, factor in grids) * math.sqrt(most_copies(axes))
    return (largest + rounding) * loose


def torus_cost(shape: Sequence[int], axes: Sequence[Axis]) -> float:
    """Floating-point operations of `torus_norm_upper` for one kernel (groups, out, in, k₁, …).

    n × m symbols, n ≤ m, at F frequencies: a Gram matrix and its squarings, 8F·(n²m + 5n³).
    """
    groups, outs, ins = shape[:3]
    ins *= math.prod(axis.folding for axis in axes)
    n, m = sorted((outs, ins))
    counts = [_angles(axis, DENSITY)[0] for axis in axes]
    frequencies = math.prod(counts[:-1]) * (counts[-1] // 2 + 1)
    return 8.0 * groups * frequencies * (n * n * m + _SQUARINGS * n**3)


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
