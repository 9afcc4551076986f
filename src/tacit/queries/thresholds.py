"""Clipping constants: fixed, following a quantile of norms, or taken from public records.

A query holds one object for the constants of its run (`RunConstants`): the constants of the next
step, the statistics to release beside its gradient, and what to do once it is released.

- `AdaptiveNorm`: each step releases, beside the gradient, a noisy count of the records whose norm
  is below C, and C moves by that count alone. C is thus a function of earlier releases, as the
  weights are. Whatever C is, the step is dominated by one Gaussian pair of the planned multiplier
  z, because noise is scaled to the current C. Adaptive composition of dominating pairs
  [Zhu 2022, Thm 10] covers the run, and its ε is that of a fixed C at the same z.
- `LayerwiseNorms` and `LayerFactors`: e_h, the expected norm of block h of what is clipped (a
  record's gradient, or a mini-set's), is estimated on public records at the current weights
  [Nguyen 2023]. Weights are released and the set is public, so everything that is computed from
  e_h is post-processing: the analysis may treat every constant as known.
- `group_by_norm`: few blocks instead of many, where layers have gradients of similar norms.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from torch import Tensor

from tacit.engines.clipping import COUNT_BOUND, LEAST_NORM
from tacit.errors import argument, in_words
from tacit.queries.bounded_gradient import Blocks, Statistic
from tacit.records import Records


@dataclass(frozen=True)
class AdaptiveNorm:
    """C ← C·exp(−η·(b̃ − γ)): a max_norm that follows the γ-quantile of norms.  [Andrew 2021]

    b̃ = clamp((Σ_i v_i + N(0, s²))/m + ½, 0, 1) estimates the share of records below C; m is the
    declared expected batch size, never the real one. With F the true share, a Poisson batch of
    mean size m has E[Σ v] = m·(F − ½): right on average, though its real size is random. As each
    record adds ±½, sampling gives b̃ a deviation of at most 1/(2√m), the size's randomness
    included. (Uncentred, k/m would have √(F/m), and twice the sensitivity.)

    `count_noise` is s, in records; by default m/20, as the authors recommend. It takes its share
    of the step's noise multiplier z, and the gradient gets what is left: see `noise_left`.
    C stays within `limits`. The object is frozen and holds no threshold: each run starts from
    `initial`. To continue from an earlier run, give its last threshold as `initial`.

        query = PerSampleClip(AdaptiveNorm(1.0, quantile=0.5))
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None
    limits: tuple[float, float] = (1e-6, 1e6)

    def __post_init__(self) -> None:
        as_max_norms((self.initial, *self.limits))
        low, high = self.limits
        if not low <= self.initial <= high:
            raise ValueError(
                f"initial is {self.initial}, outside the limits {self.limits}; give limits around "
                "it, from public knowledge"
            )
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile is {self.quantile}; give a share between 0 and 1")
        for name in ("learning_rate", "count_noise"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; give a number above 0")

    def noise(self, divisor: float) -> float:
        """The standard deviation s of the count's noise."""
        return divisor / 20 if self.count_noise is None else self.count_noise

    def after(self, norm: float, noisy_count: float, divisor: float) -> float:
        """The next threshold: post-processing of a released count."""
        share = min(max(noisy_count / divisor + 0.5, 0.0), 1.0)
        moved = norm * math.exp(-self.learning_rate * (share - self.quantile))
        return min(max(moved, self.limits[0]), self.limits[1])


FixedOrAdaptive = float | AdaptiveNorm | tuple[float | AdaptiveNorm, ...]


def as_max_norms(
    max_norm: float | AdaptiveNorm | Sequence[float | AdaptiveNorm],
) -> FixedOrAdaptive:
    """One constant or one per block; raises ValueError for a number below 1e-12.

    Squares of float32 numbers below 4e-23 vanish, so a gradient of a billion entries may hide a
    norm of 1e-18. The least constant is far above that.
    """
    single = isinstance(max_norm, AdaptiveNorm | int | float)
    single = single or getattr(max_norm, "ndim", None) == 0  # a number of NumPy or PyTorch
    given: list[Any] = [max_norm] if single else []
    if not single and isinstance(max_norm, Iterable) and not isinstance(max_norm, str):
        given = [*max_norm]
    fixed = [m for m in given if not isinstance(m, AdaptiveNorm)]
    if (
        not given
        or any(isinstance(m, bool | str) for m in fixed)
        or not all(LEAST_NORM <= float(m) < math.inf for m in fixed)
    ):
        raise ValueError(
            f"{argument('max_norm')} is {max_norm!r}; give a finite number of at least {LEAST_NORM}"
            + in_words(
                ", an AdaptiveNorm, or one of these per block; constants from public records, or "
                "by a schedule such as Decaying, go into LayerwiseNorms or LayerFactors",
                "",
            )
        )
    norms = tuple(m if isinstance(m, AdaptiveNorm) else float(m) for m in given)
    return norms[0] if single else norms


ConstantSchedule = float | Callable[[int], float]


@dataclass(frozen=True)
class Constants:
    """One norm per block; or one norm for all blocks together, and one factor per block."""

    norms: tuple[float, ...]
    factors: tuple[float, ...] | None = None


def _constants(norms: Sequence[float], factors: Sequence[float] | None = None) -> Constants:
    """Constants that are large enough; raises ValueError otherwise."""
    checked: Any = as_max_norms(norms)
    return Constants(checked, None if factors is None else tuple(factors))


@dataclass(frozen=True)
class Decaying:
    """C·rate^⌊step/every⌋: a master constant that shrinks, for instance each epoch."""

    initial: float
    rate: float
    every: int

    def __post_init__(self) -> None:
        as_max_norms(self.initial)
        if not 0 < self.rate <= 1 or self.every < 1:
            raise ValueError(
                f"a rate of {self.rate} every {self.every} steps; give a rate above 0 and at most "
                "1, and at least 1 step"
            )

    def __call__(self, step: int) -> float:
        return self.initial * self.rate ** (step // self.every)


@dataclass(frozen=True, eq=False)
class LayerwiseNorms:
    """C_h = C·e_h/max_j e_j, with C the master constant; without one, C_h = e_h.

    The first is [Nguyen 2023, Section 3.3], the second [Zhang 2018]. Every block has noise of its
    own: with `PerLayerNoise`, s_h = σ·Δ_h at σ = z·√L, so a layer with small gradients gets little
    noise, and L blocks pay √L.

    `master` is a number or a function of the step, such as `Decaying`. e_h is estimated every
    `every` steps from at most `records` public records. A block never gets less than `floor` times
    the largest C_h: at e_h = 0 a layer could not learn again.

        query = BatchClip(LayerwiseNorms(public, master=0.3), mini_set_size=8, blocks=by_layer)
    """

    public: Records
    master: ConstantSchedule | None = None
    every: int = 1
    records: int = 2048
    floor: float = 1e-3

    def __post_init__(self) -> None:
        _check_estimates(self.every, self.records, self.floor)
        if self.master is not None and not callable(self.master):
            as_max_norms(self.master)

    def constants(self, expected: Sequence[float], step: int) -> Constants:
        largest = max(expected)
        shares = [max(e / largest, self.floor) if largest > 0 else 1.0 for e in expected]
        if self.master is None:
            master = largest if largest > 0 else 1.0
        else:
            master = self.master(step) if callable(self.master) else self.master
        return _constants([max(master * share, LEAST_NORM) for share in shares])


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """Multiply layer h by m_h = max_j e_j/e_h, clip the whole once to C, add noise, divide again.

    The clipped vector (m_1·g_1 | … | m_L·g_L) has norm at most C, so all layers together are one
    block of bound C: there is no √L to pay. After division layer h has noise s/m_h, again in
    proportion to its gradients [Nguyen 2023, Appendix B.2]. All layers have norm near max e then,
    so C should be about √L times the master constant of `LayerwiseNorms`. m_h is at most
    1/`floor`; `every` and `records` are those of `LayerwiseNorms`.
    """

    public: Records
    max_norm: ConstantSchedule
    every: int = 1
    records: int = 2048
    floor: float = 1e-3

    def __post_init__(self) -> None:
        _check_estimates(self.every, self.records, self.floor)
        if not callable(self.max_norm):
            as_max_norms(self.max_norm)

    def constants(self, expected: Sequence[float], step: int) -> Constants:
        largest = max(expected)
        factors = [largest / max(e, self.floor * largest) if largest > 0 else 1.0 for e in expected]
        norm = self.max_norm(step) if callable(self.max_norm) else self.max_norm
        return _constants([norm], factors)


FromPublic = LayerwiseNorms | LayerFactors


def _check_estimates(every: int, records: int, floor: float) -> None:
    if every < 1 or records < 1:
        raise ValueError(f"every is {every} and records is {records}; give at least 1")
    if not 0 < floor <= 1:
        raise ValueError(f"floor is {floor}; give a share of the largest norm, such as 0.001")


class Thresholds:
    """The C of each block of one run, fixed or adaptive, with every value it has had. Public.

    The query reads C as a plain number, so a release of a count waits once for the device.
    """

    released: tuple[Callable[[], None], ...] = ()

    def __init__(self, given: tuple[float | AdaptiveNorm, ...]) -> None:
        self.given, self.num_blocks = given, len(given)
        self.adaptive = {h: m for h, m in enumerate(given) if isinstance(m, AdaptiveNorm)}
        self.paths = [[m.initial if isinstance(m, AdaptiveNorm) else m] for m in given]
        self.constants = Constants(tuple(path[-1] for path in self.paths))

    def observe(self, block: int, divisor: float, noisy_count: float) -> None:
        """Move one block's threshold by a count that was released."""
        path = self.paths[block]
        path.append(self.adaptive[block].after(path[-1], noisy_count, divisor))
        self.constants = Constants(tuple(path[-1] for path in self.paths))

    def state_dict(self) -> dict[str, Any]:
        return {"paths": [list(path) for path in self.paths]} if self.adaptive else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        paths = [[float(norm) for norm in path] for path in state["paths"]]
        for path in paths:
            as_max_norms(path)
        if len(paths) != self.num_blocks:
            raise ValueError(f"thresholds of {len(paths)} blocks, and there are {self.num_blocks}")
        self.paths = paths
        self.constants = Constants(tuple(path[-1] for path in self.paths))

    def statistics(self, counts: Tensor, divisor: float) -> tuple[Statistic, ...]:
        """The centred count of each block whose threshold is adaptive."""
        return tuple(
            Statistic(
                name=f"records below the threshold of block {block}",
                value=counts[block],
                bound=COUNT_BOUND,
                std=norm.noise(divisor),
                observe=partial(self.observe, block, divisor),
            )
            for block, norm in self.adaptive.items()
        )


class Estimates:
    """The e_h of one run: estimated when they are due, and constant in between.

    Steps count releases: a query that is called twice without a release uses the same constants.
    """

    def __init__(self, source: FromPublic) -> None:
        self.source = source
        self.step = 0
        self.path: list[tuple[int, tuple[float, ...]]] = []
        self.checked: int | None = None  # the id of the private records compared with the public
        self.adaptive: dict[int, AdaptiveNorm] = {}
        self.released = (self.advance,)

    @property
    def num_blocks(self) -> int:
        return len(self.path[-1][1])

    @property
    def due(self) -> bool:
        return not self.path or (
            self.step % self.source.every == 0 and self.path[-1][0] != self.step
        )

    def take(self, expected: Sequence[float]) -> None:
        """Store new estimates; where one is not finite (diverged weights), keep the last."""
        if not all(math.isfinite(e) and e >= 0 for e in expected):
            expected = self.path[-1][1] if self.path else [1.0] * len(expected)
        self.path.append((self.step, tuple(expected)))

    @property
    def constants(self) -> Constants:
        return self.source.constants(self.path[-1][1], self.step)

    def statistics(self, counts: Tensor, divisor: float) -> tuple[Statistic, ...]:
        return ()

    def advance(self) -> None:
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "path": [[step, list(norms)] for step, norms in self.path]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self.path = [(int(step), tuple(map(float, norms))) for step, norms in state["path"]]


RunConstants = Thresholds | Estimates
_Kind = TypeVar("_Kind", Thresholds, Estimates)


class AdaptingQuery:
    """A query whose constants change from release to release; they belong to one run."""

    _run_constants: RunConstants | None = None
    _resumed_from: Mapping[str, Any] | None = None  # until the first step makes the constants

    def fresh(self) -> Self:
        """The same query with its initial constants, as a run begins."""
        other = copy.copy(self)
        other._run_constants = other._resumed_from = None
        return other

    def state_dict(self) -> dict[str, Any]:
        """The constants of the run so far. They are post-processing of what was released."""
        if self._resumed_from is not None:
            return dict(self._resumed_from)
        return {} if self._run_constants is None else self._run_constants.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the constants of a run that is resumed."""
        self._run_constants, self._resumed_from = None, dict(state) or None

    def _begin_with(self, constants: _Kind) -> _Kind:
        """Use these constants from now on, moved to where a resumed run left them."""
        if self._resumed_from is not None:
            constants.load_state_dict(self._resumed_from)
        self._run_constants, self._resumed_from = constants, None
        return constants

    @property
    def thresholds(self) -> tuple[tuple[float, ...], ...]:
        """Every value that each C has had, the current one last, if some adapt. Public."""
        known = self._run_constants
        if not isinstance(known, Thresholds) or not known.adaptive:
            return ()
        return tuple(map(tuple, known.paths))

    @property
    def estimates(self) -> tuple[tuple[int, tuple[float, ...]], ...]:
        """(step, the e_h estimated there), if constants come from a public set. Public."""
        known = self._run_constants
        return tuple(known.path) if isinstance(known, Estimates) else ()


def group_by_norm(blocks: Blocks, expected: Sequence[float], groups: int) -> Blocks:
    """The partition into `groups` groups with the least spread of log e_h within them.

    Layerwise clipping of L blocks costs √L of the noise multiplier; clipped as one, blocks of
    norms e_h and e_j cost nothing more, as long as one constant suits both [Nguyen 2023, B.2].
    Minimises Σ_groups Σ_{h ∈ group} (log e_h − mean)². On a line the best groups are runs of the
    sorted values, so dynamic programming over cuts is exact: O(L²·G).

    `expected` must be public, such as `expected_norms` on a public set.
    """
    if len(expected) != len(blocks):
        raise ValueError(f"{len(expected)} norms for {len(blocks)} blocks; give one per block")
    if not 1 <= groups <= len(blocks):
        raise ValueError(
            f"{argument('groups')} is {groups}, and there are {len(blocks)} blocks; give 1 up to "
            f"{len(blocks)}"
        )
    if not all(math.isfinite(e) and e >= 0 for e in expected):
        raise ValueError(f"expected norms are {list(expected)}; give finite numbers of at least 0")
    least = 1e-12 * (max(expected) or 1.0)
    order = sorted(range(len(blocks)), key=lambda h: expected[h])
    cuts = _best_cuts([math.log(max(expected[h], least)) for h in order], groups)
    return tuple(
        tuple(name for h in sorted(order[start:end]) for name in blocks[h])
        for start, end in itertools.pairwise(cuts)
    )


def _best_cuts(values: Sequence[float], groups: int) -> list[int]:
    """0 = c_0 < c_1 < … < c_G = L: where to cut a sorted list for the least sum of squares."""
    count = len(values)

    def spread(start: int, end: int) -> float:
        part = values[start:end]
        mean = math.fsum(part) / len(part)
        return math.fsum((v - mean) ** 2 for v in part)

    best = {(0, 0): (0.0, 0)}
    for parts in range(1, groups + 1):
        for end in range(parts, count + 1):
            best[parts, end] = min(
                (best[parts - 1, start][0] + spread(start, end), start)
                for start in range(parts - 1, end)
                if (parts - 1, start) in best
            )
    cuts = [count]
    for parts in range(groups, 0, -1):
        cuts.append(best[parts, cuts[-1]][1])
    return cuts[::-1]
