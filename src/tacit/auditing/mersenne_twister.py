"""Recovers a Mersenne Twister from its numbers, and predicts the next ones.

MT19937 is the generator of PyTorch on the CPU, of Python's `random` and of NumPy's `RandomState`.
All its output bits are linear over GF(2) in 19,968 bits of state. A number that a program draws
tells most bits of one or two 32-bit outputs: a uniform number has them as its digits, and from the
two normals of a Box-Muller pair two uniforms follow to within a few units of the last place. The
unknown bits of 624 consecutive outputs are variables; later outputs give linear equations for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

N, M = 624, 397
_MARGIN = 4  # closer to a carry than this, nothing is taken for known
_MOST_OUTPUTS = 4 * N  # enough to determine all of the state in every format

# For each 32-bit output: its value, and a mask of the bits that are known.
Known = tuple[np.ndarray, np.ndarray]


class Inconsistent(Exception):
    """No Mersenne Twister makes these numbers, or there are too few of them."""


@dataclass(frozen=True)
class Format:
    """How a program makes numbers of 32-bit outputs: `words` of them for each number."""

    name: str
    words: int
    known: Callable[[np.ndarray], Known]
    made: Callable[[np.ndarray], np.ndarray]
    normal: bool
    tolerance: float  # of a number that is predicted
    block: int = 1


def recover(values: np.ndarray, masks: np.ndarray) -> list[int]:
    """The 624 untempered words from the first output on; Inconsistent if there are none."""
    known = ((masks[:, None] >> np.arange(32)) & 1).astype(bool)
    bits = ((values[:, None] >> np.arange(32)) & 1).astype(bool)
    unknown = int((~known[:N]).sum())
    width = unknown // 64 + 1  # the last bit is the constant
    one = np.uint64(1)
    constant = one << np.uint64(63)

    words: list[np.ndarray] = []
    variable = 0
    for k in range(min(N, len(values))):
        tempered = np.zeros((32, width), dtype=np.uint64)
        for b in range(32):
            if known[k, b]:
                tempered[b, -1] = constant if bits[k, b] else 0
            else:
                tempered[b, variable // 64] = one << np.uint64(variable % 64)
                variable += 1
        words.append(_untemper(tempered))

    equations: list[np.ndarray] = []
    for k in range(N, min(len(values), _MOST_OUTPUTS)):
        words.append(_twist(words[k - N], words[k - N + 1], words[k - N + M]))
        tempered = _temper(words[-1])
        tempered[bits[k], -1] ^= constant
        equations.extend(tempered[known[k]])
    if len(equations) < 1.1 * unknown + 64:  # so that it is no chance if they agree
        raise Inconsistent(f"{len(equations)} equations for {unknown} bits; draw more numbers")
    every = np.array(equations)
    # Some of them contradict each other where the numbers are of another kind, and are quick to
    # solve. All of them are needed for the last bits.
    some = np.random.default_rng(0).permutation(len(every))[: int(1.1 * unknown) + 64]
    _solve(every[some], unknown, partly=True)
    solution = _solve(every, unknown)
    found = []
    for word in words[:N]:
        parity = np.bitwise_count(word & solution[None, :]).sum(axis=1) & 1
        found.append(sum(int(bit) << b for b, bit in enumerate(parity.tolist())))
    return found


def outputs_after(words: list[int], count: int) -> np.ndarray:
    """The generator's outputs from the first of the 624 words on."""
    twister = np.random.MT19937(0)
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": np.array(words, dtype=np.uint32), "pos": 0},
    }
    return np.asarray(twister.random_raw(count), dtype=np.uint64)


def predicted(draws: np.ndarray, how: Format, ahead: int, piece: int | None = None) -> np.ndarray:
    """The `ahead` numbers that follow these draws; Inconsistent if they are no Mersenne Twister's.

    `draws` begin with a call of the program, and each call drew `piece` numbers; without it they
    are one call's.
    """
    if piece is None or piece % how.block == 0:
        usable = len(draws) // how.block * how.block
        words = recover(*how.known(draws[:usable]))
        total = len(draws) + ahead + how.block
        numbers = how.made(outputs_after(words, (total - total % how.block) * how.words))
        return numbers[len(draws) : len(draws) + ahead]
    if piece < 2 * how.block:
        raise Inconsistent(f"calls of {piece} numbers are too short")
    calls, more = len(draws) // piece, -(-(len(draws) + ahead) // piece)
    known = [_known_of_call(draws[i * piece : (i + 1) * piece], how) for i in range(calls)]
    values, masks = (np.concatenate(part) for part in zip(*known, strict=True))
    words = recover(values, masks)
    outputs = outputs_after(words, more * (piece + how.block) * how.words).reshape(more, -1)
    numbers = np.concatenate([_made_by_call(row, piece, how) for row in outputs])
    return numbers[len(draws) : len(draws) + ahead]


def _known_of_call(draws: np.ndarray, how: Format) -> Known:
    """The outputs behind one call whose length is no multiple of a block.

    PyTorch makes all numbers, and then the last block once more, from outputs of its own. So what
    was drawn for the numbers that are overwritten is not known.
    """
    end = len(draws) - how.block
    aligned = end // how.block * how.block
    gap = np.zeros((len(draws) - aligned) * how.words, dtype=np.int64)
    first, last = how.known(draws[:aligned]), how.known(draws[end:])
    values, masks = (np.concatenate([a, gap, b]) for a, b in zip(first, last, strict=True))
    return values, masks


def _made_by_call(outputs: np.ndarray, piece: int, how: Format) -> np.ndarray:
    end = piece - how.block
    whole = how.made(outputs[: (end // how.block + 1) * how.block * how.words])
    return np.concatenate([whole[:end], how.made(outputs[piece * how.words :])])


# ---- formats -------------------------------------------------------------------------------------


def _box_muller(cosine: np.ndarray, sine: np.ndarray, digits: int) -> tuple[np.ndarray, np.ndarray]:
    """The integers k, k' of the uniforms k/2^digits behind r·cos(2πv) and r·sin(2πv)."""
    scale, top = 2.0**digits, 2.0**digits - 1
    radius = np.exp(-(cosine**2 + sine**2) / 2)
    angle = np.mod(np.arctan2(sine, cosine) / (2 * math.pi), 1.0)
    pair = np.round((1 - radius) * scale), np.round(angle * scale)
    first, second = (np.clip(k, 0, top).astype(np.uint64) for k in pair)
    return first, second


def _sure(uniforms: np.ndarray, unsure: int) -> np.ndarray:
    """Whether the digits above the lowest `unsure` ones are known: no carry can be near."""
    low = uniforms & np.uint64((1 << unsure) - 1)
    return np.asarray((low >= _MARGIN) & (low < (1 << unsure) - _MARGIN))


def _halves(uniforms: np.ndarray, sure: np.ndarray, unsure: int) -> Known:
    """53-bit integers of which the first output is the high half, and the second the low one."""
    high_mask = np.where(sure, (1 << 21) - 1, 0)
    low_mask = np.where(sure, (1 << 32) - (1 << unsure), 0)
    values = np.stack([uniforms >> np.uint64(32), uniforms & np.uint64(0xFFFFFFFF)], axis=1)
    masks = np.stack([high_mask, low_mask], axis=1)
    return values.reshape(-1).astype(np.int64), masks.reshape(-1).astype(np.int64)


def uniforms_of(normals: np.ndarray, digits: int = 53) -> np.ndarray:
    """The integers behind PyTorch's normals, which come in blocks of 16 numbers."""
    blocks = normals.astype(np.float64).reshape(-1, 2, 8)
    first, second = _box_muller(blocks[:, 0], blocks[:, 1], digits)
    return np.stack([first, second], axis=1).reshape(-1)


def normals_of(uniforms: np.ndarray, digits: int = 53) -> np.ndarray:
    """The other way round: what PyTorch makes of these integers."""
    blocks = uniforms.astype(np.float64).reshape(-1, 2, 8) * 2.0**-digits
    radius = np.sqrt(-2 * np.log1p(-blocks[:, 0]))
    angle = 2 * np.pi * blocks[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)


def _known_double_normals(draws: np.ndarray) -> Known:
    uniforms = uniforms_of(draws)
    return _halves(uniforms, _sure(uniforms, 7), 7)


def _known_float_normals(draws: np.ndarray) -> Known:
    uniforms = uniforms_of(draws, 24)
    mask = np.where(_sure(uniforms, 6), (1 << 24) - (1 << 6), 0)
    return uniforms.astype(np.int64), mask.astype(np.int64)


def _joined(words: np.ndarray) -> np.ndarray:
    pairs = words.reshape(-1, 2)
    whole: np.ndarray = (pairs[:, 0] << np.uint64(32) | pairs[:, 1]) & np.uint64((1 << 53) - 1)
    return whole


def _known_double_uniforms(draws: np.ndarray) -> Known:
    uniforms = np.round(draws.astype(np.float64) * 2.0**53).astype(np.uint64)
    return _halves(uniforms, np.ones(len(uniforms), dtype=bool), 0)


def _known_float_uniforms(draws: np.ndarray) -> Known:
    uniforms = np.round(draws.astype(np.float64) * 2.0**24).astype(np.int64)
    return uniforms, np.full(len(uniforms), (1 << 24) - 1)


def _python_known(uniforms: np.ndarray, sure: np.ndarray, unsure: int) -> Known:
    """Python's 53-bit uniforms: 27 high bits of one output, then 26 of the next."""
    high, low = uniforms >> np.uint64(26), uniforms & np.uint64((1 << 26) - 1)
    values = np.stack([high << np.uint64(5), low << np.uint64(6)], axis=1)
    high_mask = np.where(sure, (1 << 32) - (1 << 5), 0)
    low_mask = np.where(sure, (1 << 32) - (1 << (6 + unsure)), 0)
    masks = np.stack([high_mask, low_mask], axis=1)
    return values.reshape(-1).astype(np.int64), masks.reshape(-1).astype(np.int64)


def _known_python_uniforms(draws: np.ndarray) -> Known:
    uniforms = np.round(draws.astype(np.float64) * 2.0**53).astype(np.uint64)
    return _python_known(uniforms, np.ones(len(uniforms), dtype=bool), 0)


def _python_uniforms(words: np.ndarray) -> np.ndarray:
    pairs = words.reshape(-1, 2)
    whole = (pairs[:, 0] >> np.uint64(5)).astype(np.float64) * 2.0**26
    numbers: np.ndarray = (whole + (pairs[:, 1] >> np.uint64(6)).astype(np.float64)) * 2.0**-53
    return numbers


def _known_python_normals(draws: np.ndarray) -> Known:
    """`random.gauss`: the angle is drawn first, then the radius."""
    pairs = draws.reshape(-1, 2)
    radius, angle = _box_muller(pairs[:, 0], pairs[:, 1], 53)
    uniforms = np.stack([angle, radius], axis=1).reshape(-1)
    return _python_known(uniforms, _sure(uniforms, 8), 8)


def _python_normals(words: np.ndarray) -> np.ndarray:
    pairs = _python_uniforms(words).reshape(-1, 2)
    angle, radius = 2 * np.pi * pairs[:, 0], np.sqrt(-2 * np.log1p(-pairs[:, 1]))
    return np.stack([np.cos(angle) * radius, np.sin(angle) * radius], axis=1).reshape(-1)


_BITS_24 = np.uint64((1 << 24) - 1)
FORMATS = (
    Format("torch.randn in float64", 2, _known_double_normals,
           lambda w: normals_of(_joined(w)), True, 1e-6, 16),
    Format("torch.randn in float32", 1, _known_float_normals,
           lambda w: normals_of(w & _BITS_24, 24), True, 1e-3, 16),
    Format("random.gauss", 2, _known_python_normals, _python_normals, True, 1e-6, 2),
    Format("torch.rand in float64", 2, _known_double_uniforms,
           lambda w: _joined(w) * 2.0**-53, False, 1e-12),
    Format("torch.rand in float32", 1, _known_float_uniforms,
           lambda w: (w & _BITS_24) * 2.0**-24, False, 1e-6),
    Format("random.random, RandomState.random_sample", 2, _known_python_uniforms,
           _python_uniforms, False, 1e-12),
)  # fmt: skip


# ---- the generator over GF(2) --------------------------------------------------------------------
# A word is 32 rows of packed GF(2) vectors; row b is bit b.


def _temper(y: np.ndarray) -> np.ndarray:
    y = y ^ _right(y, 11)
    y = y ^ (_left(y, 7) * _rows_of(0x9D2C5680))
    y = y ^ (_left(y, 15) * _rows_of(0xEFC60000))
    return y ^ _right(y, 18)


def _untemper(word: np.ndarray) -> np.ndarray:
    """The inverse, step by step: y ^ (y >> s) is undone by shifting again and again."""
    word = word ^ _right(word, 18)
    word = word ^ (_left(word, 15) * _rows_of(0xEFC60000))
    y = word
    for _ in range(4):
        y = word ^ (_left(y, 7) * _rows_of(0x9D2C5680))
    x = y
    for _ in range(2):
        x = y ^ _right(x, 11)
    return x


def _right(y: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate([y[by:], np.zeros_like(y[:by])])


def _left(y: np.ndarray, by: int) -> np.ndarray:
    return np.concatenate([np.zeros_like(y[:by]), y[:-by]])


def _rows_of(mask: int) -> np.ndarray:
    return np.array([[mask >> b & 1] for b in range(32)], dtype=np.uint64)


def _twist(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """x[k + 624] from x[k], x[k + 1] and x[k + 397], bit by bit."""
    y = np.concatenate([b[:31], a[31:]])
    return np.asarray(c ^ _right(y, 1) ^ (y[:1] * _rows_of(0x9908B0DF)))


def _solve(rows: np.ndarray, unknown: int, partly: bool = False) -> np.ndarray:
    """Gaussian elimination; the variables, with the constant 1, as one packed vector.

    Eight pivots at a time: their 256 sums are made once, and every other row is changed by one
    look-up instead of up to eight additions (the method of four Russians). The matrix is stored by
    columns of 64 bits, so that a column's bits lie side by side.
    """
    columns = np.ascontiguousarray(rows.T)
    used, column = 0, 0
    pivots: list[tuple[int, int]] = []
    while column < unknown and used < columns.shape[1]:
        begin = used
        group: list[int] = []
        while column < unknown and len(group) < 8:
            # The rows below have not been reduced by this group's pivots yet.
            bits = _bits(columns, column, used)
            for i, earlier in enumerate(group):
                if _bit(columns, begin + i, column):
                    bits = bits ^ _bits(columns, earlier, used)
            found = int(bits.argmax()) if len(bits) else 0
            if len(bits) and bits[found]:
                pivot = used + found
                for i, earlier in enumerate(group):
                    if _bit(columns, pivot, earlier):
                        columns[:, pivot] ^= columns[:, begin + i]
                columns[:, [used, pivot]] = columns[:, [pivot, used]]
                for i in range(begin, used):  # a pivot's column is zero in the group's other rows
                    if _bit(columns, i, column):
                        columns[:, i] ^= columns[:, used]
                pivots.append((used, column))
                group.append(column)
                used += 1
            column += 1
        _eliminate(columns, begin, used, group)
    if (columns[-1, used:] >> np.uint64(63)).any():
        raise Inconsistent("the equations contradict each other")
    if not partly and len(pivots) < unknown - 31:  # 31 bits of the first word play no part
        raise Inconsistent(f"{len(pivots)} independent equations for {unknown} bits")
    solution = np.zeros(len(columns), dtype=np.uint64)
    solution[-1] = np.uint64(1) << np.uint64(63)
    for row, at in reversed(pivots):
        if int(np.bitwise_count(columns[:, row] & solution).sum()) & 1:
            solution[at // 64] |= np.uint64(1) << np.uint64(at % 64)
    return solution


def _bits(columns: np.ndarray, column: int, first: int) -> np.ndarray:
    """The bits of a column in the rows from `first` on."""
    found: np.ndarray = (columns[column // 64, first:] >> np.uint64(column % 64)) & np.uint64(1)
    return found


def _bit(columns: np.ndarray, row: int, column: int) -> bool:
    return bool(int(columns[column // 64, row]) >> (column % 64) & 1)


def _eliminate(columns: np.ndarray, begin: int, used: int, group: list[int]) -> None:
    """Clear the group's columns in all rows below."""
    if not group:
        return
    first = group[0] // 64  # what lies before is zero in these rows
    table = np.zeros((len(columns) - first, 1 << len(group)), dtype=np.uint64)
    for i in range(len(group)):
        table[:, 1 << i : 2 << i] = table[:, : 1 << i] ^ columns[first:, begin + i : begin + i + 1]
    index = np.zeros(columns.shape[1] - used, dtype=np.int64)
    for i, column in enumerate(group):
        index |= _bits(columns, column, used).astype(np.int64) << i
    for place in range(first, len(columns)):
        columns[place, used:] ^= table[place - first].take(index)
