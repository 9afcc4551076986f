"""Small convolutions of every kind, and the dense matrices that they stand for."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tacit.lipschitz.layers import SpectralConv1d, SpectralConv2d, SpectralConv3d
from tacit.lipschitz.operator_norm import gram_matrix

CLASSES = {1: SpectralConv1d, 2: SpectralConv2d, 3: SpectralConv3d}
MODES = ["zeros", "circular", "reflect", "replicate"]
LARGEST_SIZE = {1: 9, 2: 6, 3: 4}


def dense(layer: nn.Module, channels: int, sizes: tuple[int, ...]) -> Tensor:
    """The matrix of a linear layer in float64: its answers to all basis vectors."""
    count = channels * math.prod(sizes)
    basis = torch.eye(count, dtype=torch.float64).reshape(count, channels, *sizes)
    with torch.no_grad():
        return layer(basis).reshape(count, -1).T


def true_norm(layer: nn.Module, channels: int, sizes: tuple[int, ...]) -> float:
    return float(torch.linalg.matrix_norm(dense(layer, channels, sizes), 2))


def operator_norm_exact(w_LMN: Tensor) -> Tensor:
    """√λ_max(WᴴW) by a symmetric eigensolver, backward stable in float64, plus a margin."""
    eigenvalues = torch.linalg.eigvalsh(gram_matrix(w_LMN))
    return eigenvalues[..., -1].clamp_min(0).sqrt() * (1 + 2.0**-26)


def with_random_kernel(layer: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator).double())
    return layer


@st.composite
def convolutions(draw, dims=(1, 2, 3), modes=tuple(MODES), sized=(True, False)):
    """A layer in float64 with a random kernel, and the size of its images."""
    r = draw(st.sampled_from(dims))
    mode = draw(st.sampled_from(modes))

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(r))

    kernel, stride, dilation = each(1, 5 if r < 3 else 3), each(1, 3), each(1, 2)
    sizes = each(1, LARGEST_SIZE[r])
    most = {"reflect": -1, "circular": 0}
    padding = tuple(draw(st.integers(0, min(5, n + most.get(mode, 4)))) for n in sizes)
    spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sizes = tuple(max(n, span - 2 * p) for n, span, p in zip(sizes, spans, padding, strict=True))
    groups = draw(st.integers(1, 2))
    channels = [groups * draw(st.integers(1, 2)) for _ in range(2)]
    layer = CLASSES[r](
        *channels,
        kernel,
        stride,
        padding,
        dilation,
        groups,
        padding_mode=mode,
        input_size=sizes if draw(st.sampled_from(sized)) else None,
        dtype=torch.float64,
    )
    return with_random_kernel(layer, draw(st.integers(0, 10**6))), sizes


@st.composite
def filled_tori(draw):
    """A layer under circular padding whose outputs fill the torus: outputs·stride = size."""
    r = draw(st.integers(1, 2))
    kernel, stride, dilation, padding, sizes = [], [], [], [], []
    for _ in range(r):
        k, s, d = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        p = max(0, -(-(d * (k - 1) + 1 - s) // 2))
        k, d, p = (k, d, p) if 2 * p <= d * (k - 1) else (s, 1, 0)
        least = max(1, -(-p // s))
        sizes.append(s * draw(st.integers(least, max(least, 6 // s))))
        for values, value in zip((kernel, stride, dilation, padding), (k, s, d, p), strict=True):
            values.append(value)
    layer = CLASSES[r](
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        tuple(kernel),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        padding_mode="circular",
        input_size=sizes,
        dtype=torch.float64,
    )
    return with_random_kernel(layer, draw(st.integers(0, 10**6))), tuple(sizes)


def steepest_gradient(layer: nn.Module, sizes: tuple[int, ...], seed: int, steps: int = 40):
    """The most that ascent finds of ‖∇_K⟨g, K*x⟩‖ over unit images x and cotangents g.

    ⟨g, K*x⟩ is linear in g, K and x apart: each in turn is set to its best, which never descends.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.rand if seed % 2 == 0 else torch.randn
    x = start(1, layer.in_channels, *sizes, generator=generator, dtype=torch.float64)
    kernel = start(layer.weight.shape, generator=generator, dtype=torch.float64)
    x, kernel = x / x.norm(), kernel / kernel.norm()
    for _ in range(steps):
        for name in ("kernel", "x"):
            x, kernel = x.detach().requires_grad_(), kernel.detach().requires_grad_()
            y = layer._conv_forward(x, kernel, None)
            g = (y / y.norm().clamp_min(1e-300)).detach()
            (best,) = torch.autograd.grad((g * y).sum(), kernel if name == "kernel" else x)
            found = float(best.norm())
            best = best / max(found, 1e-300)
            x, kernel = (x, best) if name == "kernel" else (best, kernel)
    return weight_gradient(layer, x, g)


def weight_gradient(layer: nn.Module, x: Tensor, g: Tensor) -> float:
    """‖∇_K⟨g, K*x⟩‖ for one image and one cotangent, over the product of their norms."""
    layer.zero_grad()
    (layer(x) * g).sum().backward()
    product = float(x.norm() * g.norm())
    return float(layer.weight.grad.norm()) / product if product else 0.0
