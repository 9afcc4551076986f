"""The GPU draws the CPU's numbers: the same bits, and Gaussians equal but for the last digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_stream import VECTORS, place_of

from tacit.randomness import Randomness, Stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(("key", "counter", "nonce", "expected"), VECTORS)
def test_published_vectors(key, counter, nonce, expected):
    stream, (block, parameter) = Stream(bytes.fromhex(key)), place_of(counter, nonce)
    (words,) = stream.blocks(torch.tensor([block], device=CUDA), parameter).cpu().numpy()
    assert words.astype(np.uint32).tobytes().hex() == expected


@pytest.mark.parametrize("count", [1, 127, 128, 129, 5000])
def test_scattered_blocks_are_the_cpus(count):
    stream = Randomness().stream("blocks")
    offsets = torch.randint(2**62, (count,))
    for parameter in (0, 2**33 + 7):
        found = stream.blocks(offsets.to(CUDA), parameter).cpu()
        assert torch.equal(found, stream.blocks(offsets, parameter))


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([1], None),
        ([7, 8, 9, 0, 1023, 1024, 1025, 100_003], None),
        ([3_000_001, 5], [4, 2**40]),
    ],
)
def test_normals_are_the_cpus(sizes, places):
    stream = Randomness().stream("normals")
    ours, theirs = (stream.normals(sizes, device, places) for device in (CPU, CUDA))
    for a, b in zip(ours, theirs, strict=True):
        assert b.dtype == torch.float64
        torch.testing.assert_close(b.cpu(), a, rtol=1e-13, atol=1e-13)


def test_other_keys_need_no_other_kernel():
    """Key words are numbers of any size; a kernel for each kind of number would be compiled."""
    import tacit.randomness_cuda as kernels

    def compiled() -> int:
        caches = [
            kernel.device_caches for kernel in (kernels._normals_kernel, kernels._blocks_kernel)
        ]
        return sum(len(held[0]) for each in caches for held in each.values())

    def draw() -> None:
        Randomness().stream("a").normals([2000], CUDA)
        Randomness().stream("b").blocks(torch.arange(9, device=CUDA))

    draw()
    before = compiled()
    for _ in range(20):
        draw()
    assert compiled() == before > 0


def test_ten_million():
    drawn = Randomness().stream("battery").normals([10_000_000], CUDA)[0]
    assert abs(float(drawn.mean())) < 2e-3
    assert abs(float(drawn.std()) - 1) < 2e-3
    assert abs(float((drawn**4).mean()) - 3) < 0.02
    assert float(drawn.abs().max()) > 4.5
