"""The one random stream: ChaCha20 under secret keys, every draw at an address of its own.

Noise, sampling and augmentation draw from here and from nowhere else. General-purpose generators
(Mersenne Twister, PCG, Philox) are predictable: from a few thousand of their outputs all later ones
follow. ChaCha20 [RFC 8439] is a stream cipher. Whoever tells its output from uniform bits, or
predicts a draw from other draws, has broken the cipher.

A draw is addressed by (purpose, step, parameter, offset):

    key    = BLAKE2b(master key, purpose and step)          a key of its own for each step
    block  = ChaCha20(key, nonce = parameter, counter = offset)   64 bytes, random access

So a draw does not depend on how records were split into pieces, on what was drawn before, or on
which device draws it; and one that was made for a step is never made for another.

**Keys.** `Randomness()` takes its master key from the operating system, and takes a new one in a
forked process and in a copy. `Randomness(seed)` derives it from the seed: whoever knows the seed
can repeat every draw.

**Gaussians** are Box-Muller pairs in float64, from two 53-bit uniforms U = (k + 1/2)/2^53 and
V = k'/2^53:

    R = (-2 ln U)^(1/2),   X = R cos(2 pi V),   Y = R sin(2 pi V).

Distance from the true Gaussian. Let U' and V' be uniform reals whose first 53 bits are those of U
and V. They give exactly independent N(0, 1) numbers, so X' made from them is a coupling of the true
Gaussian with our X. |U - U'| <= 2^-54 and |V - V'| <= 2^-53; the derivative of R is -1/(U R); log,
sqrt, cos and the products round by a few units of 2^-53. Hence

    |X - X'| <= (2^-54/U + 2^-52)/R + 16 R 2^-53.

That is below 2^-38 for all but one in 4,096 draws (U >= 2^-13 and R >= 2^-6.5), and below 2^-29
outside an event of probability 2^-26 (U < 2^-27, or R < 2^-14). The distribution functions of X and
of the true Gaussian differ by at most 2^-48 everywhere: fewer than 16 * 2^53 of the 2^106 cells
(k, k') are cut by the line X = t, and the roundings move at most as much again. Draws reach out to
|X| = 8.65, which a true Gaussian passes with probability 5e-18.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
import random
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

if TYPE_CHECKING:
    from tacit.ranks import Ranks

NORMALS_PER_BLOCK = 8
_MASK_53 = (1 << 53) - 1
_CHUNK = 1 << 14  # normals at a time: they stay in the cache
_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype=np.uint32)

Address = str | int


class ProcessLock:
    """An RLock that is open in a forked child.

    Another thread may hold the lock at the fork. That thread does not exist in the child, which
    would wait forever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()
_token = object()  # of this process: a forked child has another


def current_process() -> tuple[int, object]:
    """The process that runs this. A forked child differs, even if it has its parent's number."""
    return os.getpid(), _token


def _after_fork() -> None:
    global _token
    _token = object()
    for lock in _locks:
        lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Randomness:
    """A master key, and the streams that belong to it.

    Args:
        seed: None draws the key from the operating system. A number makes every draw repeatable,
            and removable by anyone who knows the number.

    Example:
        >>> stream = Randomness().stream("noise", 0)
        >>> stream.normals([3], torch.device("cpu"))[0].shape
        torch.Size([3])
    """

    def __init__(self, seed: int | None = None) -> None:
        # True, 1.0 and "1" would be the seed 1 by accident.
        self.seed = None if seed is None else operator.index(seed)
        if isinstance(seed, bool):
            raise TypeError(f"the seed is {seed}; give a whole number, or None")
        self._process = current_process()
        self._master = self._new_master()
        self._is_shared = False

    def __repr__(self) -> str:
        return f"Randomness(<{'secret key' if self.seed is None else 'seeded'}>)"

    def _new_master(self) -> bytes:
        if self.seed is None:
            return secrets.token_bytes(32)
        return _hash(b"tacit seed", (self.seed,))

    def __getstate__(self) -> dict[str, Any]:
        return {"seed": self.seed}  # a copy with the same secret key would repeat its draws

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["seed"])  # type: ignore[misc]

    def share(self, ranks: Ranks) -> None:
        """Take the first rank's key, so that all ranks make the same draws. The key is sent."""
        self._master = ranks.from_first(self._master, "the key of the random stream")
        self._is_shared = True

    def stream(self, purpose: str, *step: Address) -> Stream:
        """The stream of one purpose at one step. Equal arguments give equal draws."""
        if self._process != current_process():
            if self._is_shared:
                raise RuntimeError(
                    "a process that shares its random draws with other ranks was forked; start "
                    "ranks as processes of their own, as torchrun does"
                )
            # A forked process has its parent's memory: with the same key it would repeat it.
            self._master = self._new_master()
            self._process = current_process()
        return Stream(_hash(self._master, (purpose, *step)))

    def fingerprint(self, *context: Address) -> str | None:
        """A public name for what this seed draws in this context; None without a seed.

        Two samplers with one fingerprint draw the same batches. It tells nothing about the draws.
        """
        if self.seed is None:
            return None
        return _hash(self._master, ("fingerprint", *context)).hex()[:32]


def _hash(key: bytes, items: Sequence[Address]) -> bytes:
    """BLAKE2b of the items, each after its type and length, so that no two lists collide."""
    digest = hashlib.blake2b(key=key, digest_size=32, person=b"tacit stream")
    for item in items:
        kind = b"i" if isinstance(item, int) else b"s"
        text = str(item).encode()
        digest.update(kind + len(text).to_bytes(8, "little") + text)
    return digest.digest()


class Stream:
    """Random words and numbers at fixed places, under one 256-bit key.

    Each place may be read any number of times and holds the same bits each time. Different methods
    read the same bits: give each use a stream, or a parameter, of its own.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ValueError(f"a key has 32 bytes, not {len(key)}")
        self.key = key

    def __repr__(self) -> str:
        return "Stream(<secret key>)"

    def derived(self, purpose: str) -> Stream:
        """Another stream, which only those can tell who know this one."""
        return Stream(_hash(self.key, (purpose,)))

    def keystream(self, num_bytes: int, parameter: int = 0, first_block: int = 0) -> bytearray:
        """`num_bytes` of ChaCha20's output from block `first_block` on, on the CPU."""
        out = bytearray(num_bytes)
        self._cipher(parameter, first_block).update_into(bytes(num_bytes), out)
        return out

    def _cipher(self, parameter: int, first_block: int) -> Any:
        place = _place(parameter, first_block)
        return Cipher(algorithms.ChaCha20(self.key, place), mode=None).encryptor()

    def words(self, count: int, dtype: type[np.unsignedinteger], parameter: int = 0) -> np.ndarray:
        """`count` independent uniform unsigned integers of the given NumPy type."""
        return np.frombuffer(self.keystream(count * np.dtype(dtype).itemsize, parameter), dtype)

    def blocks(self, offsets: Tensor, parameter: int = 0) -> Tensor:
        """The blocks at these offsets, wherever they are: (n,) to (n, 16) words of 32 bits.

        The words are int64 numbers from 0 to 2^32 - 1, on the offsets' device.
        """
        if offsets.is_cuda and _cuda() is not None:
            return _cuda().blocks(self.key, parameter, offsets)
        words = _blocks_by_numpy(self.key, parameter, offsets.cpu().numpy())
        return torch.from_numpy(words.astype(np.int64)).to(offsets.device)

    def normals(
        self,
        sizes: Sequence[int],
        device: torch.device,
        parameters: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Independent draws of N(0, 1) in float64: `sizes[i]` of them for parameter i.

        Draw i of parameter p is the same whatever the other sizes are, and on every device (but
        for the last digits of log and cos). Without `parameters` they are numbered from 0. With
        `starts` they are the draws from there on.
        """
        flat = self.flat_normals(sizes, device, parameters, starts)
        return list(flat.split(list(sizes)))

    def flat_normals(
        self,
        sizes: Sequence[int],
        device: torch.device,
        parameters: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> Tensor:
        """The numbers of `normals`, one parameter's after the other's, in one vector."""
        places = range(len(sizes)) if parameters is None else parameters
        first = [0] * len(sizes) if starts is None else starts
        blocks = [start // NORMALS_PER_BLOCK for start in first]
        before = [start % NORMALS_PER_BLOCK for start in first]
        if any(before):  # whole blocks are drawn, and what is before the first number is cut
            whole = [size + more for size, more in zip(sizes, before, strict=True)]
            pieces = self._whole_blocks(whole, device, places, blocks).split(whole)
            return torch.cat([piece[more:] for piece, more in zip(pieces, before, strict=True)])
        return self._whole_blocks(sizes, device, places, blocks)

    def _whole_blocks(
        self,
        sizes: Sequence[int],
        device: torch.device,
        places: Sequence[int],
        blocks: Sequence[int],
    ) -> Tensor:
        """So many numbers of each parameter, from the beginning of a block on."""
        if device.type == "cuda" and _cuda() is not None:
            return _cuda().normals(self.key, tuple(places), tuple(sizes), device, tuple(blocks))
        # A number more where a size is odd, so that no pair lies in two parameters.
        even = [size + size % 2 for size in sizes]
        numbers = np.empty(sum(even) + NORMALS_PER_BLOCK)
        bits, start = numbers.data.cast("B"), 0
        zeros = memoryview(bytes(8 * (max(even, default=0) + NORMALS_PER_BLOCK)))
        cipher = self._cipher(0, 0)  # one for all: to make one takes longer than to fill a bias
        for parameter, first_block, size in zip(places, blocks, even, strict=True):
            # Whole blocks: what is too much is overwritten by the next parameter.
            whole = -(-size // NORMALS_PER_BLOCK) * 8 * NORMALS_PER_BLOCK
            cipher.reset_nonce(_place(parameter, first_block))
            cipher.update_into(zeros[:whole], bits[start : start + whole])
            start += 8 * size
        numbers = numbers[: sum(even)]
        for start in range(0, len(numbers), _CHUNK):
            _box_muller(numbers[start : start + _CHUNK])
        drawn = torch.from_numpy(_without_gaps(numbers, sizes))
        return drawn if device.type in ("cpu", "mps") else drawn.to(device)

    def coins(self, count: int, probability: float) -> np.ndarray:
        """`count` independent coins, True with probability floor(2^80 p)/2^80: never above p.

        Coin i has 16 bits at offset i. If they equal the first 16 bits of p, which happens once in
        65,536 coins, 64 more bits of the coin's own decide.
        """
        threshold = int(Fraction(probability) * (1 << 80))
        first, rest = threshold >> 64, threshold & ((1 << 64) - 1)
        words = self.words(count, np.uint16)
        heads = words < first
        for i in np.flatnonzero(words == first).tolist():
            more = int.from_bytes(self.keystream(8, parameter=1, first_block=i), "little")
            heads[i] = more < rest
        return heads

    def permutation(self, count: int) -> np.ndarray:
        """0 ... count - 1 in a uniformly random order."""
        return self._without_ties(
            count, np.argsort, lambda keys: bool((keys[1:] == keys[:-1]).any())
        )

    def subset(self, count: int, size: int) -> np.ndarray:
        """`size` of 0 ... count - 1, all subsets equally likely."""
        if size == count:
            return np.arange(count)
        order = self._without_ties(
            count,
            lambda keys: np.argpartition(keys, size),
            lambda keys: bool(keys[:size].max(initial=0) == keys[size]) and size > 0,
        )
        return order[:size]

    def _without_ties(
        self,
        count: int,
        ordered: Callable[[np.ndarray], np.ndarray],
        tied: Callable[[np.ndarray], bool],
    ) -> np.ndarray:
        """Order 64-bit keys; draw them anew where a tie would let the sorting algorithm decide.

        Without ties every order of independent keys is equally likely, exactly.
        """
        attempt = 0
        while True:
            keys = self.words(count, np.uint64, parameter=attempt)
            order = ordered(keys)
            if not tied(keys[order]):
                return order
            attempt += 1


def _place(parameter: int, first_block: int) -> bytes:
    """The nonce with which ChaCha20 starts at a block of a parameter."""
    return first_block.to_bytes(8, "little") + parameter.to_bytes(8, "little")


def _without_gaps(numbers: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The numbers without the one that follows each piece of odd size."""
    pieces, start, end = [], 0, 0
    for size in sizes:
        end += size
        if size % 2:
            pieces.append(numbers[start:end])
            start = end = end + 1
    return np.concatenate([*pieces, numbers[start:end]]) if pieces else numbers


def _box_muller(numbers: np.ndarray) -> None:
    """Turn random bits into Gaussians in place: of two words one gives a radius, one an angle.

    NumPy does it in one thread: PyTorch's log and cos wake all threads even for a few numbers.
    """
    words = numbers.view(np.int64) & _MASK_53
    radius = words[::2] + 0.5
    radius *= 2.0**-53
    np.log(radius, out=radius)
    radius *= -2
    np.sqrt(radius, out=radius)
    angle = words[1::2] * (math.pi * 2.0**-52)
    np.multiply(radius, np.cos(angle), out=numbers[::2])
    np.multiply(radius, np.sin(angle, out=angle), out=numbers[1::2])


def _cuda() -> Any:
    """The kernels for CUDA; None where Triton is missing, and the CPU draws the same numbers."""
    try:
        from tacit import randomness_cuda
    except ImportError:
        return None
    return randomness_cuda


def _blocks_by_numpy(key: bytes, parameter: int, offsets: np.ndarray) -> np.ndarray:
    """ChaCha20 at scattered counters, all blocks side by side  [RFC 8439, Section 2.3]."""
    counters = offsets.astype(np.uint64)
    start = np.empty((16, len(counters)), dtype=np.uint32)
    start[:4] = _CONSTANTS[:, None]
    start[4:12] = np.frombuffer(key, dtype=np.uint32)[:, None]
    start[12], start[13] = counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32)
    start[14], start[15] = parameter & 0xFFFFFFFF, parameter >> 32
    rows: Sequence[np.ndarray] = [start[4 * row : 4 * row + 4] for row in range(4)]
    for _ in range(10):
        rows = _quarter_rounds(*rows)
        # The diagonal rounds are column rounds of rows turned by zero, one, two and three.
        rows = _quarter_rounds(*(np.roll(row, -turn, axis=0) for turn, row in enumerate(rows)))
        rows = [np.roll(row, turn, axis=0) for turn, row in enumerate(rows)]
    return (np.concatenate(rows) + start).T


def _quarter_rounds(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray
) -> Sequence[np.ndarray]:
    for bits_d, bits_b in ((16, 12), (8, 7)):
        a = a + b
        d = _rotated(d ^ a, bits_d)
        c = c + d
        b = _rotated(b ^ c, bits_b)
    return a, b, c, d


def _rotated(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << np.uint32(bits)) | (x >> np.uint32(32 - bits))


_MT_WORDS = 624
_MT_STATE_OFFSET = 24  # bytes before the Mersenne words in PyTorch's CPU generator state
_BLANK = torch.Generator().get_state()  # no words used, and no second half of a pair kept
_views: ContextVar[Stream | None] = ContextVar("views", default=None)
_one_at_a_time = ProcessLock()


def view_stream() -> Stream:
    """The stream for the views of the running step's records; outside a step, a new one."""
    return _views.get() or Randomness().stream("views")


@contextmanager
def step_draws(
    source: Randomness, step: int, device: torch.device, rank: int = 0
) -> Iterator[None]:
    """Key everything that a query draws in this step, and restore the process's generators.

    What a model draws by itself (dropout) comes from PyTorch's generators, which are keyed anew for
    each step, so that neither a known `torch.manual_seed` nor the masks of earlier steps tell
    anything about it. NumPy's and Python's are keyed as well. Steps of several threads wait for
    each other: the generators are the process's.

    Why secret masks are enough. They are drawn row by row from one generator, so without one record
    all later rows get other masks. The rows' masks are independent and equally distributed, so the
    step is a mixture over masks that belong to records, and for each of those neighbours differ by
    one record's share. What holds for every part of a mixture holds for the mixture, since the
    hockey-stick divergence is jointly convex [Balle et al. 2018, Theorem 2]. Ranks that train
    together draw masks of their own, so that those of two records are independent. Views have their
    records' addresses and are the same on every rank.
    """
    stream = source.stream("model", step, *((rank,) if rank else ()))
    with _one_at_a_time:
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        numpy_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        numpy_state: Any = np.random.get_state(legacy=False)
        token = _views.set(source.stream("views", step))
        try:
            # All 624 words of the state: `manual_seed` keeps 32 bits, few enough to try them all.
            state = _BLANK.clone()
            words = stream.words(_MT_WORDS, np.uint32).astype(np.uint64)
            place = slice(_MT_STATE_OFFSET, _MT_STATE_OFFSET + 8 * _MT_WORDS)
            state[place] = torch.from_numpy(words.view(np.uint8))
            more = stream.words(8, np.uint64, parameter=1)
            torch.set_rng_state(state)
            if cuda_state is not None:
                index = torch.cuda.current_device() if device.index is None else device.index
                torch.cuda.default_generators[index].manual_seed(int(more[0]) >> 1)
            philox = np.random.Philox(key=more[2:4], counter=more[4:8])
            np.random.set_bit_generator(philox)  # type: ignore[attr-defined]
            random.seed(stream.key)
            yield
        finally:
            _views.reset(token)
            torch.set_rng_state(torch_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state, device)
            np.random.set_bit_generator(numpy_generator)  # type: ignore[attr-defined]
            if numpy_state["has_gauss"]:
                np.random.set_state(numpy_state)  # exchanging generators drops a kept number
            random.setstate(python_state)
