"""Attack of the randomness: predict later draws from earlier ones, or find the seed.

Whoever predicts the noise subtracts it, and whoever predicts the sample knows who took part. A
general-purpose generator is predictable: the state of a Mersenne Twister follows from its numbers
(`mersenne_twister`), and any generator that was seeded by a small number, or by the clock, by
trying the seeds. The attacks here are those. That they find nothing is no proof: what makes Tacit's
stream unpredictable is ChaCha20 under a 256-bit key (`tacit.randomness`).

Not attacked: seeds of 2²⁰ and more other than recent times; the state of PCG64, of Philox with a
random key, and of NumPy's `RandomState.standard_normal`, whose rejections hide how many outputs
were used.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from tacit.auditing.mersenne_twister import FORMATS, Inconsistent, M, N, predicted
from tacit.auditing.released_step import Restored, Watching, release_once
from tacit.auditing.replay import in_memory
from tacit.auditing.verdicts import Factory, Verdict
from tacit.budget import Budget, Relation
from tacit.ledger import Ledger
from tacit.mechanism import Mechanism
from tacit.queries.bounded_gradient import GradientQuery, Loss
from tacit.randomness import Randomness, Stream
from tacit.records import as_records
from tacit.sampling.sampler import Sampler

_SEEDS = 1 << 20
_DAY = 86_400
_AHEAD = 64  # numbers that are predicted
_HEAD = 16  # of which a seed is recognised


def attack_draws(
    source: object, *, num_draws: int = 2560, seeds: Iterable[int] | None = None
) -> Verdict:
    """Try to predict a source of random numbers from its own output.

    1. *Mersenne Twister*: its state from `num_draws` numbers, and from it the next 64.
    2. *Seeds*: all below 2²⁰, and the times of the last day in seconds, for `torch.manual_seed` on
       CPU and GPU and NumPy's `RandomState`; those below 2¹⁶ for Python's `random` and for NumPy's
       generators. The first numbers are compared, so hand over a source that has just been seeded.
    3. *Repeats*: the same numbers again.

    Args:
        source: a callable that returns its next n numbers, normal or uniform ones, as an array or
            tensor; a `torch.Generator`, a `random.Random`, or a generator of NumPy; one of Tacit's
            streams; or an array of numbers that were drawn.
        seeds: the seeds to try instead.

    `largest` is the share of later numbers that were predicted, over one half. Faults name the
    generator.

        attack_draws(torch.Generator().manual_seed(7)).holds   # False
    """
    draw = _as_function(source)
    numbers = np.asarray(draw(num_draws + _AHEAD), dtype=np.float64).reshape(-1)
    if len(numbers) < 2 * _AHEAD:
        raise ValueError(f"{len(numbers)} draws are too few to attack; give at least {2 * _AHEAD}")
    faults = [words for words in (_seed_of(numbers, seeds), _repeat_in(numbers)) if words]
    share, name = (1.0, "") if faults else _share_predicted(numbers, getattr(source, "piece", None))
    if share > 0.5 and not faults:
        faults.append(
            f"{round(share * _AHEAD)} of the next {_AHEAD} numbers follow from {len(numbers)} "
            f"earlier ones: they are a Mersenne Twister's ({name}); draw from tacit.randomness"
        )
    compared = f"{len(numbers)} draws / a Mersenne Twister, small seeds, repeats"
    return Verdict("prediction of draws", compared, {"predicted": 2 * share}, tuple(faults))


def check_repeats(sources: Mapping[str, object], *, num_draws: int = 512) -> Verdict:
    """Compare the draws of several streams, steps or processes: none may repeat another's.

    Two that share eight numbers in a row are a fault. Independent draws share so many with
    probability below 10⁻⁹.

        check_repeats({"step 0": first.flatten(), "step 1": second.flatten()})
    """
    seen: dict[bytes, str] = {}
    faults = []
    for name, source in sources.items():
        numbers = np.asarray(_as_function(source)(num_draws), dtype=np.float64).reshape(-1)
        rounded = np.round(numbers * 2.0**20).astype(np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(rounded, min(8, len(rounded)))
        for window in windows:
            other = seen.setdefault(window.tobytes(), name)
            if other != name:
                faults.append(f"{name} repeats the draws of {other}")
                break
    compared = f"the draws of {len(sources)} streams with each other"
    return Verdict("repeated draws", compared, {"shared": float(bool(faults)) * 2}, tuple(faults))


def noise_of_releases(
    query: GradientQuery,
    model: nn.Module,
    loss: Loss,
    records: object,
    sampler: Factory,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    mechanism: Factory = Mechanism,
    seed: int | None = None,
) -> ReleasedNoise:
    """The noise that releases of empty batches show, as a source for `attack_draws`.

    Whoever sees a gradient of which some entries are known to be zero, such as an embedding's of
    tokens that nobody has, sees this noise. Works on a copy of the model in float64: rounding to
    fewer digits hides a weak generator without making it a strong one.

        attack_draws(noise_of_releases(query, model, loss, records, sampler)).require()
    """
    data = in_memory(as_records(records))
    data = data.to(data.device, torch.float64)
    drawn, watched = sampler(data, steps=1 << 20, seed=None), Watching(query)
    own = mechanism(watched, drawn, 1.0, relation=relation, seed=seed)
    twin = copy.deepcopy(model).double()
    return ReleasedNoise(own, watched, twin, loss, drawn)


@dataclass
class ReleasedNoise:
    """The next n numbers of noise that a mechanism releases; `piece` of them per step."""

    mechanism: Mechanism
    query: Watching
    model: nn.Module
    loss: Loss
    sampler: Sampler

    def __post_init__(self) -> None:
        self.piece = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self._ledger = Ledger(None, Budget(1e9, 1e-5, self.mechanism.plan.relation))

    def __call__(self, count: int) -> np.ndarray:
        pieces: list[np.ndarray] = []
        while sum(map(len, pieces)) < count:
            batch = self.sampler.next_batch().only(slice(0, 0))
            with Restored(self.model):
                one = release_once(
                    self._ledger, self.mechanism, self.query, self.model, self.loss, batch
                )
            noise = zip(one.noise, one.stds, one.names, strict=True)
            gradients = [n / s for n, s, name in noise if s > 0 and "statistic" not in name]
            pieces.append(torch.cat(gradients).numpy())
        return np.concatenate(pieces)[:count]


def _as_function(source: Any) -> Callable[[int], Any]:
    if isinstance(source, torch.Generator):
        generator = source

        def of_torch(count: int) -> np.ndarray:
            count += -count % 16  # shorter draws take another path
            where = generator.device
            dtype = torch.float64 if where.type == "cpu" else torch.float32
            drawn = torch.randn(count, dtype=dtype, generator=generator, device=where)
            return drawn.double().cpu().numpy()

        return of_torch
    if isinstance(source, random.Random):
        return lambda count: np.array([source.random() for _ in range(count)])
    if isinstance(source, np.random.RandomState):
        return lambda count: source.random_sample(count)
    if isinstance(source, np.random.Generator):
        return lambda count: source.standard_normal(count)
    if isinstance(source, Randomness):
        return _as_function(source.stream("noise", 0))
    if isinstance(source, Stream):
        return lambda count: source.normals([count], torch.device("cpu"))[0].numpy()
    if callable(source):
        return lambda count: source(count)
    values = source.detach().cpu().numpy() if isinstance(source, torch.Tensor) else source
    return lambda count: np.asarray(values).reshape(-1)[:count]


# ---- 1. a Mersenne Twister -----------------------------------------------------------------------


def _share_predicted(numbers: np.ndarray, piece: int | None) -> tuple[float, str]:
    """The share of the last numbers that some format predicts from the others, and its name."""
    normal = bool((numbers < 0).any() or (numbers > 1).any())
    best = 0.0, ""
    for how in FORMATS:
        earlier = numbers[:-_AHEAD]
        if how.normal != normal or len(earlier) * how.words < 2 * N:
            continue
        try:
            guess = predicted(earlier, how, _AHEAD, piece)
        except Inconsistent:
            continue
        right = np.abs(guess - numbers[len(earlier) :]) <= how.tolerance
        best = max(best, (float(right.mean()), how.name))
        if best[0] > 0.5:
            break
    return best


# ---- 2. seeds ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Family:
    """Generators by seed: the first numbers of many seeds at once, one row for each."""

    name: str
    heads: Callable[[np.ndarray], np.ndarray]
    most: int = _SEEDS
    tolerance: float = 1e-6
    at_once: int = 1 << 14


def _seed_of(numbers: np.ndarray, given: Iterable[int] | None) -> str | None:
    head = numbers[:_HEAD]
    normal = bool((numbers < 0).any() or (numbers > 1).any())
    for family in _NORMAL if normal else _UNIFORM:
        for seeds in _candidates(family, given):
            heads = family.heads(seeds)
            near = np.abs(heads - head[: heads.shape[1]]) <= family.tolerance
            found = np.flatnonzero(near.all(axis=1))
            if len(found):
                return (
                    f"the seed is {int(seeds[found[0]])} of {family.name}, found by trying; draw "
                    "from tacit.randomness, keyed by the operating system"
                )
    return None


def _candidates(family: _Family, given: Iterable[int] | None) -> Iterator[np.ndarray]:
    """Small seeds, and the seconds of the last day, a few thousand at a time."""
    now = int(time.time())
    ranges: Sequence[Sequence[int]]
    if given is not None:
        ranges = [sorted(set(given))]
    elif family.most < _SEEDS:
        ranges = [range(family.most)]
    else:
        ranges = [range(family.most), range(now - _DAY, now + 1)]
    for these in ranges:
        for start in range(0, len(these), family.at_once):
            yield np.array(these[start : start + family.at_once], dtype=np.uint64)


def _mersenne_outputs(seeds: np.ndarray, count: int) -> np.ndarray:
    """(seeds, count): the first outputs of `init_genrand(seed)`; count ≤ 227."""
    mask = np.uint64(0xFFFFFFFF)
    state = [seeds & mask]
    for i in range(1, M + count):
        before = state[-1]
        mixed = (before ^ (before >> np.uint64(30))) * np.uint64(1812433253)
        state.append((mixed + np.uint64(i)) & mask)
    return np.stack([_tempered(_twisted(state, i)) for i in range(count)], axis=1)


def _twisted(state: Sequence[np.ndarray], i: int) -> np.ndarray:
    upper, lower = np.uint64(0x80000000), np.uint64(0x7FFFFFFF)
    y = (state[i] & upper) | (state[i + 1] & lower)
    odd = (y & np.uint64(1)) * np.uint64(0x9908B0DF)
    return np.asarray(state[i + M] ^ (y >> np.uint64(1)) ^ odd)


def _tempered(y: np.ndarray) -> np.ndarray:
    y = y ^ (y >> np.uint64(11))
    y = y ^ ((y << np.uint64(7)) & np.uint64(0x9D2C5680))
    y = y ^ ((y << np.uint64(15)) & np.uint64(0xEFC60000))
    return np.asarray(y ^ (y >> np.uint64(18)))


def _made(how: str, seeds: np.ndarray) -> np.ndarray:
    """The first 16 numbers of a format, from Mersenne Twisters of these seeds."""
    made = next(one for one in FORMATS if one.name == how)
    outputs = _mersenne_outputs(seeds, _HEAD * made.words)
    return made.made(outputs.reshape(-1)).reshape(len(seeds), _HEAD)


def _philox(seeds: np.ndarray, counters: int) -> np.ndarray:
    """(seeds, counters, 4): Philox4x32-10 of the key `seed`, thread i at its offset 0.

    [Salmon et al. 2011]; thread i is the counter (0, 0, i, 0), as in `curand_init`.
    """
    mask = np.uint64(0xFFFFFFFF)
    threads = np.arange(counters, dtype=np.uint64)[None]
    zero = np.zeros((len(seeds), counters), dtype=np.uint64)
    words = [zero, zero, zero + threads, zero]
    keys = [(seeds & mask)[:, None] + zero, (seeds >> np.uint64(32))[:, None] + zero]
    for _ in range(10):
        one = words[0] * np.uint64(0xD2511F53)
        two = words[2] * np.uint64(0xCD9E8D57)
        words = [
            (two >> np.uint64(32)) ^ words[1] ^ keys[0],
            two & mask,
            (one >> np.uint64(32)) ^ words[3] ^ keys[1],
            one & mask,
        ]
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & mask, (keys[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack(words, axis=2)


def _cuda_normals(seeds: np.ndarray) -> np.ndarray:
    """The first numbers of `torch.randn` on a GPU: the sine of each thread's first pair."""
    words = _philox(seeds, 8).astype(np.float64)
    radius = np.sqrt(-2 * np.log(words[:, :, 0] * 2.0**-32 + 2.0**-33))
    angle = 2 * np.pi * (words[:, :, 1] * 2.0**-32 + 2.0**-33)
    return np.asarray(radius * np.sin(angle))


def _one_by_one(make: Callable[[int], Any], seeds: np.ndarray) -> np.ndarray:
    return np.stack([np.asarray(make(int(seed))) for seed in seeds])


def _python_heads(kind: str, seed: int) -> list[float]:
    source = random.Random(seed)
    draw = source.random if kind == "random" else partial(source.gauss, 0.0, 1.0)
    return [draw() for _ in range(4)]


_FEW = 1 << 16
_NORMAL = (
    _Family("torch.manual_seed, in float64", partial(_made, "torch.randn in float64")),
    _Family("torch.manual_seed, in float32", partial(_made, "torch.randn in float32"),
            tolerance=1e-3),
    _Family("torch.cuda.manual_seed", _cuda_normals, tolerance=1e-3),
    _Family("NumPy's default_rng", partial(
        _one_by_one, lambda s: np.random.default_rng(s).standard_normal(4)), _FEW),
    _Family("NumPy's RandomState", partial(
        _one_by_one, lambda s: np.random.RandomState(s).standard_normal(4)), _FEW),
    _Family("NumPy's Philox", partial(
        _one_by_one, lambda s: np.random.Generator(np.random.Philox(s)).standard_normal(4)), _FEW),
    _Family("NumPy's Philox, as a key", partial(
        _one_by_one,
        lambda s: np.random.Generator(np.random.Philox(key=s)).standard_normal(4)), _FEW),
    _Family("Python's random.gauss", partial(
        _one_by_one, partial(_python_heads, "gauss")), _FEW),
)  # fmt: skip
_UNIFORM = (
    _Family("torch.manual_seed, in float64", partial(_made, "torch.rand in float64")),
    _Family("torch.manual_seed, in float32", partial(_made, "torch.rand in float32")),
    _Family("NumPy's RandomState", partial(_made, "random.random, RandomState.random_sample")),
    _Family("Python's random", partial(
        _one_by_one, partial(_python_heads, "random")), _FEW),
    _Family("NumPy's default_rng", partial(
        _one_by_one, lambda s: np.random.default_rng(s).random(4)), _FEW),
)  # fmt: skip


# ---- 3. repeats ----------------------------------------------------------------------------------


def _repeat_in(numbers: np.ndarray) -> str | None:
    """Whether eight numbers in a row occur again."""
    rounded = np.round(numbers * 2.0**20).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(rounded, 8)
    unique = np.unique(np.ascontiguousarray(windows).view("V64"))
    if len(unique) == len(windows):
        return None
    return f"eight numbers in a row occur again, {len(windows) - len(unique)} times"
