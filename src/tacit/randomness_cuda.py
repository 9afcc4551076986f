# mypy: disable-error-code="no-untyped-def"
"""ChaCha20 and its Gaussians as Triton kernels: the numbers that the CPU draws, on a GPU.

One lane computes one block of 64 bytes. A draw for hundreds of parameters is one launch: a table
says which parameter, and which of its blocks, each tile of lanes works on.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 128  # blocks of one program


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _word(value, like):
    """A 32-bit key word in each lane. Arguments come as signed numbers."""
    return (value + tl.zeros_like(like)).to(tl.uint32, bitcast=True)


@triton.jit
def _block(counter, parameter, k0, k1, k2, k3, k4, k5, k6, k7):
    """The 16 words of each lane's block; counter and parameter are uint64."""
    zero = (counter & 0).to(tl.int32)
    s0, s1 = _word(0x61707865, zero), _word(0x3320646E, zero)
    s2, s3 = _word(0x79622D32, zero), _word(0x6B206574, zero)
    s4, s5, s6, s7 = _word(k0, zero), _word(k1, zero), _word(k2, zero), _word(k3, zero)
    s8, s9, s10, s11 = _word(k4, zero), _word(k5, zero), _word(k6, zero), _word(k7, zero)
    s12, s13 = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    s14, s15 = (parameter & 0xFFFFFFFF).to(tl.uint32), (parameter >> 32).to(tl.uint32)
    x0, x1, x2, x3, x4, x5, x6, x7 = s0, s1, s2, s3, s4, s5, s6, s7
    x8, x9, x10, x11, x12, x13, x14, x15 = s8, s9, s10, s11, s12, s13, s14, s15
    for _ in tl.static_range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    x0, x1, x2, x3 = x0 + s0, x1 + s1, x2 + s2, x3 + s3
    x4, x5, x6, x7 = x4 + s4, x5 + s5, x6 + s6, x7 + s7
    x8, x9, x10, x11 = x8 + s8, x9 + s9, x10 + s10, x11 + s11
    x12, x13, x14, x15 = x12 + s12, x13 + s13, x14 + s14, x15 + s15
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _pair(low_u, high_u, low_v, high_v):
    """Box-Muller from two words of 64 bits, of which 53 count (see `tacit.randomness`)."""
    u = (low_u.to(tl.uint64) | (high_u.to(tl.uint64) << 32)) & 0x1FFFFFFFFFFFFF
    v = (low_v.to(tl.uint64) | (high_v.to(tl.uint64) << 32)) & 0x1FFFFFFFFFFFFF
    # 2^-53 and pi/2^52. The conversions are exact: 53 bits fit.
    radius = tl.sqrt(-2.0 * tl.log((u.to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16))
    angle = v.to(tl.int64).to(tl.float64) * 6.975736996017264e-16
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"])
def _normals_kernel(out, table, k0, k1, k2, k3, k4, k5, k6, k7, TILE: tl.constexpr):
    """table: for each program (parameter, first block, place in `out`, numbers that are left)."""
    row = table + 4 * tl.program_id(0)
    parameter, first = tl.load(row), tl.load(row + 1)
    place, left = tl.load(row + 2), tl.load(row + 3)
    lane = tl.arange(0, TILE)
    counter = (first + lane).to(tl.uint64)
    parameters = (parameter + tl.zeros_like(lane)).to(tl.uint64)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _block(
        counter, parameters, k0, k1, k2, k3, k4, k5, k6, k7
    )
    n0, n1 = _pair(x0, x1, x2, x3)
    n2, n3 = _pair(x4, x5, x6, x7)
    n4, n5 = _pair(x8, x9, x10, x11)
    n6, n7 = _pair(x12, x13, x14, x15)
    at = 8 * lane.to(tl.int64)
    to = out + place + at
    tl.store(to, n0, mask=at < left)
    tl.store(to + 1, n1, mask=at + 1 < left)
    tl.store(to + 2, n2, mask=at + 2 < left)
    tl.store(to + 3, n3, mask=at + 3 < left)
    tl.store(to + 4, n4, mask=at + 4 < left)
    tl.store(to + 5, n5, mask=at + 5 < left)
    tl.store(to + 6, n6, mask=at + 6 < left)
    tl.store(to + 7, n7, mask=at + 7 < left)


@triton.jit(do_not_specialize=["parameter", "count", *[f"k{i}" for i in range(8)]])
def _blocks_kernel(
    out, offsets, count, parameter, k0, k1, k2, k3, k4, k5, k6, k7, TILE: tl.constexpr
):
    lane = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = lane < count
    counter = tl.load(offsets + lane, mask=inside, other=0).to(tl.uint64)
    parameters = (parameter + tl.zeros_like(counter.to(tl.int64))).to(tl.uint64)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _block(
        counter, parameters, k0, k1, k2, k3, k4, k5, k6, k7
    )
    to = out + 16 * lane.to(tl.int64)
    tl.store(to, x0.to(tl.int64), mask=inside)
    tl.store(to + 1, x1.to(tl.int64), mask=inside)
    tl.store(to + 2, x2.to(tl.int64), mask=inside)
    tl.store(to + 3, x3.to(tl.int64), mask=inside)
    tl.store(to + 4, x4.to(tl.int64), mask=inside)
    tl.store(to + 5, x5.to(tl.int64), mask=inside)
    tl.store(to + 6, x6.to(tl.int64), mask=inside)
    tl.store(to + 7, x7.to(tl.int64), mask=inside)
    tl.store(to + 8, x8.to(tl.int64), mask=inside)
    tl.store(to + 9, x9.to(tl.int64), mask=inside)
    tl.store(to + 10, x10.to(tl.int64), mask=inside)
    tl.store(to + 11, x11.to(tl.int64), mask=inside)
    tl.store(to + 12, x12.to(tl.int64), mask=inside)
    tl.store(to + 13, x13.to(tl.int64), mask=inside)
    tl.store(to + 14, x14.to(tl.int64), mask=inside)
    tl.store(to + 15, x15.to(tl.int64), mask=inside)


def _key_words(key: bytes) -> list[int]:
    """As signed numbers: of those above 2^31 Triton would make another kernel."""
    return np.frombuffer(key, dtype=np.int32).tolist()


def blocks(key: bytes, parameter: int, offsets: Tensor) -> Tensor:
    """(n,) offsets to (n, 16) words, as int64."""
    count = len(offsets)
    out = torch.empty(count, 16, dtype=torch.int64, device=offsets.device)
    if count:
        with torch.cuda.device(offsets.device):
            _blocks_kernel[(triton.cdiv(count, _TILE),)](
                out, offsets.contiguous().long(), count, parameter, *_key_words(key), TILE=_TILE
            )
    return out


def normals(
    key: bytes,
    parameters: tuple[int, ...],
    sizes: tuple[int, ...],
    device: torch.device,
    blocks: tuple[int, ...],
) -> Tensor:
    """Draws of N(0, 1) for each parameter, from these blocks on, end to end, in one launch."""
    flat = torch.empty(sum(sizes), dtype=torch.float64, device=device)
    if flat.numel():
        table = _table(parameters, sizes, device, blocks)
        with torch.cuda.device(device):
            _normals_kernel[(len(table),)](flat, table, *_key_words(key), TILE=_TILE)
    return flat


@lru_cache(maxsize=64)
def _table(
    parameters: tuple[int, ...],
    sizes: tuple[int, ...],
    device: torch.device,
    blocks: tuple[int, ...],
) -> Tensor:
    """Which tile does what; the same for every step of a model, so it is made once."""
    rows, place = [], 0
    per_tile = 8 * _TILE
    for parameter, size, block in zip(parameters, sizes, blocks, strict=True):
        starts = np.arange(0, size, per_tile, dtype=np.int64)
        row = np.empty((len(starts), 4), dtype=np.int64)
        row[:, 0], row[:, 1] = parameter, block + starts // 8
        row[:, 2], row[:, 3] = place + starts, size - starts
        rows.append(row)
        place += size
    return torch.from_numpy(np.concatenate(rows)).to(device)
