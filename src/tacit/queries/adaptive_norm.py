"""A clipping threshold that follows a quantile of the records' norms, for a count that is charged.

Each step releases, beside the gradient, a noisy count of the records whose norm is below C, and C
moves by that count alone. C is thus a function of earlier releases, as the weights are. Whatever C
is, the step is dominated by one Gaussian pair of the planned multiplier z, because noise is scaled
to the C in force: adaptive composition of dominating pairs [Zhu 2022, Thm 10] covers the run, and
its ε is that of a fixed C at the same z.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from torch import Tensor

from tacit.engines.clipping import COUNT_BOUND, as_norms
from tacit.queries.bounded_gradient import Statistic


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
    C stays within `limits`. The value is frozen and holds no threshold: the query of one run does
    (`Mechanism` starts each run at `initial`). To go on from an earlier run, give its last
    threshold as `initial`.
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float | None = None
    limits: tuple[float, float] = (1e-6, 1e6)

    def __post_init__(self) -> None:
        as_norms((self.initial, *self.limits))
        low, high = self.limits
        if not low <= self.initial <= high:
            raise ValueError(
                f"initial is {self.initial}, outside the limits {self.limits}; give limits around "
                "it, from public knowledge"
            )
        if not 0 < self.quantile < 1:
            raise ValueError(f"quantile is {self.quantile}; give a share between 0 and 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}; give a number above 0")
        if self.count_noise is not None and not 0 < self.count_noise < math.inf:
            raise ValueError(f"count_noise is {self.count_noise}; give a number above 0")

    def noise(self, divisor: float) -> float:
        """The standard deviation s of the count's noise."""
        return divisor / 20 if self.count_noise is None else self.count_noise

    def after(self, norm: float, noisy_count: float, divisor: float) -> float:
        """The next threshold: post-processing of a released count."""
        share = min(max(noisy_count / divisor + 0.5, 0.0), 1.0)
        moved = norm * math.exp(-self.learning_rate * (share - self.quantile))
        return min(max(moved, self.limits[0]), self.limits[1])


MaxNorm = float | AdaptiveNorm | Sequence[float | AdaptiveNorm]


def as_max_norms(max_norm: MaxNorm) -> float | AdaptiveNorm | tuple[float | AdaptiveNorm, ...]:
    """One constant or one a block, each a number that clipping can keep to, or adaptive."""
    if isinstance(max_norm, AdaptiveNorm):
        return max_norm
    if isinstance(max_norm, Sequence) and any(isinstance(m, AdaptiveNorm) for m in max_norm):
        return tuple(m if isinstance(m, AdaptiveNorm) else _one(m) for m in max_norm)
    return as_norms(max_norm)  # type: ignore[arg-type]


def _one(number: float) -> float:
    (norm,) = as_norms([number])  # type: ignore[misc]
    return norm


class Thresholds:
    """The C of each block of one run, and the way it has come. All of it may be shown.

    C is read by the query as a plain number, so a release waits once for the device.
    """

    def __init__(self, asked: Sequence[float | AdaptiveNorm]) -> None:
        self.asked = tuple(asked)
        self.paths = [[m.initial if isinstance(m, AdaptiveNorm) else m] for m in asked]

    @property
    def norms(self) -> tuple[float, ...]:
        return tuple(path[-1] for path in self.paths)

    @property
    def adaptive(self) -> dict[int, AdaptiveNorm]:
        return {h: m for h, m in enumerate(self.asked) if isinstance(m, AdaptiveNorm)}

    def observe(self, block: int, divisor: float, noisy_count: float) -> None:
        """Move one block's threshold by a count that was released."""
        path = self.paths[block]
        path.append(self.adaptive[block].after(path[-1], noisy_count, divisor))

    def statistics(self, counts: Tensor, divisor: float) -> tuple[Statistic, ...]:
        """The centred count of each block whose threshold follows it."""
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


class Following:
    """A query with thresholds of its own: what `Adapting` asks for."""

    _thresholds: Thresholds | None = None

    def fresh(self) -> Self:
        """The same query at its first thresholds: what a run begins with."""
        other = copy.copy(self)
        other._thresholds = None
        return other

    @property
    def thresholds(self) -> tuple[tuple[float, ...], ...]:
        """Where some adapt: each C, from the first to the one in force. Public."""
        return tuple(map(tuple, self._thresholds.paths)) if self._thresholds else ()
