"""A tracer sees the GPU kernels: traced without a GPU, on tensors without data.

A kernel that is launched directly would leave its first result in the recording as a constant.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tacit.engines import convolution_kernels as convolution
from tacit.engines import ghost_kernels as ghost
from tacit.engines import products
from tacit.engines.clipping import RowScale
from tacit.engines.convolution_gradients import kernel_gradients
from tacit.engines.products import Dense, Lookup, matrix_gradients

KERNELS = (convolution, ghost)


def called(make, *shapes) -> list[str]:
    """The operators of `tacit::` in the trace of `make`, on tensors of a GPU."""
    with FakeTensorMode():
        given = [torch.empty(shape, device="cuda") for shape in shapes]
        graph = make_fx(make, tracing_mode="fake")(*given)
    assert not list(graph.named_buffers())  # nothing became a constant
    names = [str(node.target) for node in graph.graph.nodes]
    return [name.split(".")[1] for name in names if name.startswith("tacit.")]


@pytest.fixture(autouse=True)
def _as_if_triton_were_here(monkeypatch):
    for module in KERNELS:
        monkeypatch.setattr(module, "AVAILABLE", True)


def step(found, scale_B):
    return found.squares(), found.total(RowScale(scale_B))


def test_products():
    def make(scale_B, a, b):
        return step(matrix_gradients([Dense(a, b)]), scale_B)

    assert called(make, (4,), (4, 3, 90), (4, 3, 80)) == ["ghost_norms"]


def test_products_that_are_joined():
    def make(scale_B, a, b, g):
        tokens = torch.zeros(g.shape[:2], dtype=torch.long, device=g.device)
        return step(matrix_gradients([Dense(a, b), Lookup(99, tokens, g)]), scale_B)

    found = called(make, (4,), (4, 3, 90), (4, 3, 99), (4, 5, 90))
    assert found.count("ghost_norms") == 1
    assert found.count("inner_products") == 2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("channels", "filters", "side", "operator"),
    [
        (3, 4, 9, "convolution_rows"),
        (40, 60, 12, "convolution_squares"),
        (256, 256, 4, "convolution_squares"),
    ],
)
def test_convolutions(channels, filters, side, operator, transposed):
    def make(scale_B, x, b, w):
        geometry = [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1
        return step(kernel_gradients(x, b, w, *geometry), scale_B)

    ends = (channels, filters) if transposed else (filters, channels)
    sides = ((4, channels, side, side), (4, filters, side, side))
    found = called(make, (4,), *sides, (*ends, 3, 3))
    assert operator in found


def test_kernels_are_chosen_by_device_type_and_shape():
    with FakeTensorMode():

        def gpu(*shape, dtype=torch.float32):
            return torch.empty(*shape, device="cuda", dtype=dtype)

        assert ghost.fits(gpu(1, 65, 65))
        assert not ghost.fits(gpu(1, 8, 8, dtype=torch.float64))
        assert not ghost.fits(torch.empty(1, 8, 8))
        assert convolution.fits(gpu(1, 3, 8, 8), 1)
        assert convolution.fits(gpu(1, 3, 8), 1)
        assert not convolution.fits(gpu(1, 3, 8, 8, 8), 1)
        assert not convolution.fits(gpu(1, 4, 8, 8), 2)
        assert not convolution.fits(torch.empty(1, 3, 8, 8), 1)


def test_a_kernel_that_is_launched_directly_would_be_caught(monkeypatch):
    """The planted bug: the trace holds no call."""
    monkeypatch.setattr(
        ghost, "ghost_norms", lambda a, b: (a.new_zeros(len(a)), a.new_zeros(len(a)))
    )
    with FakeTensorMode():
        x = torch.empty(2, 3, 90, device="cuda")
        graph = make_fx(lambda x: products.ghost_norms(x, x), tracing_mode="fake")(x)
    assert not any("ghost_norms" in str(node.target) for node in graph.graph.nodes)
