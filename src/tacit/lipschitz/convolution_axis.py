"""One axis of a convolution: how often it reads a pixel, and the torus that it fits on.

Output i reads padded cell i·s + j·d through tap j < k (kernel k, stride s, dilation d). The
padding says which pixel, if any, a cell holds. Axes are independent: over several of them counts
multiply.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache


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
