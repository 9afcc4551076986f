"""Clipping constants of the layers from a public set: adaptive layerwise clipping  [Nguyen 2023].

e_h, the expected norm of block h of what is clipped (a record's gradient, or a mini-set's), is
estimated on public records at the weights in force. Weights are released and the set is public,
so e_h and all that is made of it is post-processing: the analysis may treat every constant as
known, and noise is scaled to the constant in force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tacit.data.records import Records
from tacit.engines.clipping import as_norms

Schedule = float | Callable[[int], float]


@dataclass(frozen=True)
class Constants:
    """One norm a block; or one norm for all of them and a factor a block."""

    norms: tuple[float, ...]
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Decaying:
    """C·rate^⌊step/every⌋: a master constant that shrinks, for instance each epoch."""

    initial: float
    rate: float
    every: int

    def __post_init__(self) -> None:
        as_norms(self.initial)
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

    The first is the paper's own (Section 3.3), the second that of [Zhang 2018]. Every block has
    noise of its own: with `PerLayerNoise`, s_h = σ·Δ_h at σ = z·√L, so a layer with small
    gradients gets little noise, and L blocks pay √L.

    `master` is a number or a function of the step, such as `Decaying`. e_h is estimated anew every
    `every` steps from at most `records` public ones. A block never gets less than `floor` times
    the largest C_h: at e_h = 0 a layer could not learn again.
    """

    public: Records
    master: Schedule | None = None
    every: int = 1
    records: int = 2048
    floor: float = 1e-3

    def __post_init__(self) -> None:
        _check(self.every, self.records, self.floor)
        if self.master is not None and not callable(self.master):
            as_norms(self.master)

    def constants(self, expected: Sequence[float], step: int) -> Constants:
        largest = max(expected)
        shares = [max(e / largest, self.floor) if largest > 0 else 1.0 for e in expected]
        if self.master is None:
            master = largest if largest > 0 else 1.0
        else:
            master = self.master(step) if callable(self.master) else self.master
        (*norms,) = as_norms([max(master * share, 1e-12) for share in shares])  # type: ignore[misc]
        return Constants(tuple(norms))


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """Multiply layer h by m_h = max_j e_j/e_h, clip the whole once to C, add noise, divide again.

    The clipped vector (m_1·g_1 | … | m_L·g_L) has norm at most C, so all layers together are one
    block of bound C: there is no √L to pay. After division layer h has noise s/m_h, again in
    proportion to its gradients (Appendix B.2). All layers have norm near max e then, so C wants
    to be about √L times the master constant of `LayerwiseNorms`. m_h is at most 1/`floor`.
    """

    public: Records
    max_norm: Schedule
    every: int = 1
    records: int = 2048
    floor: float = 1e-3

    def __post_init__(self) -> None:
        _check(self.every, self.records, self.floor)
        if not callable(self.max_norm):
            as_norms(self.max_norm)

    def constants(self, expected: Sequence[float], step: int) -> Constants:
        largest = max(expected)
        factors = [largest / max(e, self.floor * largest) if largest > 0 else 1.0 for e in expected]
        norm = self.max_norm(step) if callable(self.max_norm) else self.max_norm
        (known,) = as_norms([norm])  # type: ignore[misc]
        return Constants((known,), tuple(factors))


FromPublic = LayerwiseNorms | LayerFactors


class Estimates:
    """The e_h of one run: taken at the steps when they are due, and kept in between.

    Steps count releases: to ask a query twice without releasing gives the same constants twice.
    """

    def __init__(self, source: FromPublic) -> None:
        self.source = source
        self.step = 0
        self.path: list[tuple[int, tuple[float, ...]]] = []
        self.checked: set[int] = set()

    @property
    def due(self) -> bool:
        return not self.path or (
            self.step % self.source.every == 0 and self.path[-1][0] != self.step
        )

    def take(self, expected: Sequence[float]) -> None:
        """New estimates; one that is not finite (weights that went astray) leaves the last."""
        if not all(math.isfinite(e) and e >= 0 for e in expected):
            expected = self.path[-1][1] if self.path else [1.0] * len(expected)
        self.path.append((self.step, tuple(expected)))

    def constants(self) -> Constants:
        return self.source.constants(self.path[-1][1], self.step)

    def advance(self) -> None:
        self.step += 1


def _check(every: int, records: int, floor: float) -> None:
    if every < 1 or records < 1:
        raise ValueError(f"every is {every} and records is {records}; give at least 1")
    if not 0 < floor <= 1:
        raise ValueError(f"floor is {floor}; give a share of the largest norm, such as 0.001")
