"""Recovers a Mersenne Twister from Gaussian noise, as an attacker would.

PyTorch's CPU generator is MT19937: all its output bits are linear over GF(2) in 19,968 state bits.
From two normals of a Box-Muller pair the two 53-bit uniforms follow to within a few units of the
last place, so most bits of two 32-bit outputs each are known. The unknown bits of 624 consecutive
outputs are variables; later outputs give linear equations for them.
"""

from __future__ import annotations

import numpy as np
import torch

N, M = 624, 397
_UNSURE = 7  # low bits of a uniform that rounding may have changed
_MARGIN = 3  # closer to a carry than this, nothing is taken for known


def uniforms_of(normals: np.ndarray) -> np.ndarray:
    """The 53-bit integers behind PyTorch's normals (float64, blocks of 16 numbers)."""
    blocks = normals.reshape(-1, 2, 8)
    cosine, sine = blocks[:, 0], blocks[:, 1]
    radius = np.exp(-(cosine**2 + sine**2) / 2)
    first = np.round((1 - radius) * 2.0**53)
    second = np.round(np.mod(np.arctan2(sine, cosine) / (2 * np.pi), 1.0) * 2.0**53)
    both = np.stack([first, second], axis=1).reshape(-1)
    return np.clip(both, 0, 2.0**53 - 1).astype(np.uint64)


def normals_of(uniforms: np.ndarray) -> np.ndarray:
    """The other way round: what PyTorch makes of these integers."""
    blocks = uniforms.astype(np.float64).reshape(-1, 2, 8) * 2.0**-53
    radius = np.sqrt(-2 * np.log1p(-blocks[:, 0]))
    angle = 2 * np.pi * blocks[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def _known_bits(uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each 32-bit output: its value, and a mask of the bits that are known.

    The first output of a pair is the high half, of which the uniform has the low 21 bits.
    """
    low = uniforms & np.uint64((1 << _UNSURE) - 1)
    sure = (low >= _MARGIN) & (low < (1 << _UNSURE) - _MARGIN)
    high_mask = np.where(sure, (1 << 21) - 1, 0)
    low_mask = np.where(sure, (1 << 32) - (1 << _UNSURE), 0)
    values = np.stack([uniforms >> np.uint64(32), uniforms & np.uint64(0xFFFFFFFF)], axis=1)
    masks = np.stack([high_mask, low_mask], axis=1)
    return values.reshape(-1).astype(np.int64), masks.reshape(-1).astype(np.int64)


def _temper(y: np.ndarray) -> np.ndarray:
    """Tempering of a word whose 32 bits are rows of GF(2) vectors; row b is bit b."""
    y = y ^ _right(y, 11)
    y = y ^ (_left(y, 7) * _bits(0x9D2C5680))
    y = y ^ (_left(y, 15) * _bits(0xEFC60000))
    return y ^ _right(y, 18)


def _untemper(word: np.ndarray) -> np.ndarray:
    # Bit b of the tempered word is the sum of matrix[b, c] times bit c of the word.
    matrix = _temper(np.eye(32, dtype=np.uint64))
    inverse = _inverse(matrix.astype(np.uint8))
    out = np.zeros_like(word)
    for b in range(32):
        out[b] = np.bitwise_xor.reduce(word[inverse[b] == 1], axis=0)
    return out


def _inverse(matrix: np.ndarray) -> np.ndarray:
    both = np.concatenate([matrix, np.eye(32, dtype=np.uint8)], axis=1)
    for c in range(32):
        pivot = c + int(np.argmax(both[c:, c]))
        both[[c, pivot]] = both[[pivot, c]]
        for r in range(32):
            if r != c and both[r, c]:
                both[r] ^= both[c]
    return both[:, 32:]


def _right(y: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate([y[by:], np.zeros_like(y[:by])])


def _left(y: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate([np.zeros_like(y[:by]), y[:-by]])


def _bits(mask: int) -> np.ndarray:
    return np.array([[mask >> b & 1] for b in range(32)], dtype=np.uint64)


def _twist(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """x[k + 624] from x[k], x[k + 1] and x[k + 397], bit by bit."""
    y = np.concatenate([b[:31], a[31:]])
    return c ^ _right(y, 1) ^ (y[:1] * _bits(0x9908B0DF))


class Inconsistent(Exception):
    """No Mersenne Twister makes these numbers."""


def recover(normals: np.ndarray) -> list[int]:
    """The 624 untempered words from the first known output on; Inconsistent if there are none."""
    values, masks = _known_bits(uniforms_of(normals))
    known = [[mask >> b & 1 for b in range(32)] for mask in masks.tolist()]
    unknown = sum(32 - sum(row) for row in known[:N])
    width = unknown // 64 + 1  # the last bit is the constant
    constant = (width - 1, np.uint64(1) << np.uint64(63))
    assert unknown < 64 * width - 1

    words, variable = [], 0
    for value, row in zip(values[:N].tolist(), known[:N], strict=True):
        tempered = np.zeros((32, width), dtype=np.uint64)
        for b in range(32):
            if row[b]:
                if value >> b & 1:
                    tempered[b, constant[0]] = constant[1]
            else:
                tempered[b, variable // 64] = np.uint64(1) << np.uint64(variable % 64)
                variable += 1
        words.append(_untemper(tempered))

    equations = []
    for k in range(len(values) - N):
        words.append(_twist(words[k], words[k + 1], words[k + M]))
        if masks[k + N] == 0:
            continue
        tempered = _temper(words[-1])
        for b in range(32):
            if known[k + N][b]:
                if values[k + N] >> b & 1:
                    tempered[b, constant[0]] ^= constant[1]
                equations.append(tempered[b])
    solution = _solve(np.array(equations), unknown)

    found = []
    for word in words[:N]:
        bits = np.bitwise_count(word[:, :] & solution[None, :]).sum(axis=1) & 1
        found.append(sum(int(bit) << b for b, bit in enumerate(bits.tolist())))
    return found


def _solve(rows: np.ndarray, unknown: int) -> np.ndarray:
    """Gaussian elimination; the variables, with the constant 1, as one packed vector."""
    rows = rows.copy()
    width = rows.shape[1]
    used, pivots = 0, []
    for column in range(unknown):
        place, bit = column // 64, np.uint64(1) << np.uint64(column % 64)
        candidates = np.flatnonzero(rows[used:, place] & bit)
        if len(candidates) == 0:
            continue
        pivot = used + int(candidates[0])
        rows[[used, pivot]] = rows[[pivot, used]]
        # What lies before `place` is zero in the rows that are left.
        others = used + 1 + np.flatnonzero(rows[used + 1 :, place] & bit)
        rows[others, place:] ^= rows[used, place:]
        pivots.append((used, column))
        used += 1
    if (rows[used:, width - 1] >> np.uint64(63)).any():
        raise Inconsistent
    if len(pivots) < unknown - 31:  # 31 bits of the first word play no part
        raise Inconsistent("too few equations")
    solution = np.zeros(width, dtype=np.uint64)
    solution[-1] = np.uint64(1) << np.uint64(63)
    for row, column in reversed(pivots):
        value = int(np.bitwise_count(rows[row] & solution).sum()) & 1
        if value:
            solution[column // 64] |= np.uint64(1) << np.uint64(column % 64)
    return solution


def later_normals(words: list[int], skip: int, count: int) -> np.ndarray:
    """The normals that follow: `skip` numbers after the first known one, `count` of them."""
    twister = np.random.MT19937(0)
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": np.array(words, dtype=np.uint32), "pos": 0},
    }
    raw = twister.random_raw(2 * (skip + count))[2 * skip :].reshape(-1, 2).astype(np.uint64)
    return normals_of((raw[:, 0] << np.uint64(32) | raw[:, 1]) & np.uint64((1 << 53) - 1))


class MersenneStream:
    """Draws as Tacit 0.1 did: from PyTorch's generator, one after the other."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def normals(self, sizes, device, parameters=None, starts=None) -> list[torch.Tensor]:
        return list(self.flat_normals(sizes, device, parameters).split(list(sizes)))

    def flat_normals(self, sizes, device, parameters=None, starts=None) -> torch.Tensor:
        return torch.randn(sum(sizes), generator=self.generator, dtype=torch.float64)


class MersenneRandomness:
    """A stand-in for `tacit.randomness.Randomness` with a generator of that kind."""

    seed = None

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def stream(self, purpose: str, *step: str | int) -> MersenneStream:
        if purpose == "noise":
            return MersenneStream(self.generator)
        from tacit.randomness import Randomness

        return Randomness().stream(purpose, *step)  # type: ignore[return-value]
