"""The best of a random number of whole runs, as one event: what a search by selection costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import attr
import dp_accounting as dpa
import numpy as np

from tacit.randomness import Stream
from tacit.sampling.scheme import (
    Scheme,
    Unit,
    register_scheme,
    require_records,
    set_probability,
    set_whole_numbers,
)

_MOST_RUNS, _MOST_POISSON = 10**7, 500
_CUT = 60  # e^-60: what is left of the law beyond the most runs


@dataclass(frozen=True)
class NumRuns:
    """The law of a secret number of runs K, with E[K] = `mean`.

    `shape` η > −1: the truncated negative binomial law on K ≥ 1, with parameter γ in (0, 1),
    [Papernot & Steinke 2022, Def. 1], whose probability generating function f has

        f'(x) = E[K]·(γ / (1 − (1 − γ)x))^(η + 1).

    η = 1 is the geometric law, η = 0 the logarithmic one; the nearer to −1, the heavier the tail,
    the smaller the most likely K, and the less each run costs. `shape` None: the Poisson law, with
    f'(x) = E[K]·e^(E[K](x − 1)), which may draw no run at all.
    """

    mean: float
    shape: float | None = 0.0

    def __post_init__(self) -> None:
        if not 1 < self.mean < _MOST_RUNS:
            raise ValueError(f"the mean number of runs is {self.mean!r}; give a number above 1")
        if self.shape is not None and not -1 < self.shape <= 100:
            raise ValueError(
                f"the shape is {self.shape!r}; give a number above -1 and at most 100, or None"
            )
        object.__setattr__(self, "mean", float(self.mean))
        object.__setattr__(self, "shape", None if self.shape is None else float(self.shape))
        if self.shape is None and self.mean > _MOST_POISSON:
            raise ValueError(f"a Poisson law of mean {self.mean:g}; give at most {_MOST_POISSON}")
        if self.shape is not None and self.gamma * _MOST_RUNS < _CUT:
            raise ValueError(
                f"with shape {self.shape:g} and mean {self.mean:g} more than {_MOST_RUNS:,} runs "
                "may be drawn; give a larger shape, or fewer runs"
            )

    @property
    def gamma(self) -> float:
        """γ with E[K] = `mean`: by bisection, rounded down, which only raises the mean."""
        low, high = -700.0, -1e-12  # of log γ, in which the mean falls
        while high - low > 1e-13 * abs(low):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_at(middle) >= self.mean else (low, middle)
        return math.exp(low)

    def _mean_at(self, log_gamma: float) -> float:
        """E[K] = η(1 − γ) / (γ(1 − γ^η)), and (1 − γ) / (γ·log(1/γ)) for η = 0."""
        assert self.shape is not None
        share = -math.expm1(log_gamma)
        if abs(self.shape) * -log_gamma < 1e-9:
            return share * math.exp(-log_gamma) / -log_gamma
        return self.shape * share * math.exp(-log_gamma) / -math.expm1(self.shape * log_gamma)

    def draw(self, stream: Stream) -> int:
        """K, by inversion of its distribution function from one 53-bit uniform of the stream."""
        uniform = (int(stream.words(1, np.uint64)[0]) >> 11) * 2.0**-53
        number, mass = self._first()
        below = mass
        while below <= uniform and number < _MOST_RUNS:
            mass *= self._ratio(number)
            number += 1
            if below + mass == below and number > self.mean:
                break
            below += mass
        return number

    def probabilities(self, most: int) -> list[float]:
        """P(K = 0), …, P(K = most)."""
        number, mass = self._first()
        masses = [0.0] * number + [mass]
        while len(masses) <= most:
            masses.append(masses[-1] * self._ratio(len(masses) - 1))
        return masses[: most + 1]

    def _first(self) -> tuple[int, float]:
        """The least K and its probability."""
        if self.shape is None:
            return 0, math.exp(-self.mean)
        return 1, self.mean * self.gamma ** (self.shape + 1)  # f'(0)

    def _ratio(self, number: int) -> float:
        """P(K = number + 1) / P(K = number)."""
        if self.shape is None:
            return self.mean / (number + 1)
        return (1 - self.gamma) * (number + self.shape) / (number + 1)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class SelectedRunDpEvent(dpa.DpEvent):
    """The best-scored of K independent runs, K secret; nothing is let out of the others.

    A run is `steps` Poisson-sampled Gaussians and one Gaussian for its score.
    """

    rate: float
    noise_multiplier: float
    steps: int
    score_noise: float
    runs: NumRuns

    @property
    def one_run(self) -> dpa.DpEvent:
        step = dpa.PoissonSampledDpEvent(self.rate, dpa.GaussianDpEvent(self.noise_multiplier))
        score = dpa.GaussianDpEvent(self.score_noise)
        return dpa.ComposedDpEvent([dpa.SelfComposedDpEvent(step, self.steps), score])


@register_scheme
@dataclass(frozen=True)
class SelectedRun(Scheme):
    """A whole search by selection as one step: see `SelectedRunDpEvent`.

    The event is an upper bound by [Papernot & Steinke 2022, Thms 2 and 6] and by the proof in
    `tacit.accounting.selection`, if the runs are independent draws of one mechanism: settings are
    drawn from a law that does not depend on earlier runs, and each run has noise of its own.
    """

    rate: float
    run_steps: int
    score_noise: float
    mean_runs: float
    shape: float | None = 0.0

    def __post_init__(self) -> None:
        set_probability(self, "rate", "sampling rate")
        set_whole_numbers(self, "run_steps")
        if not 0 < self.score_noise < math.inf:
            raise ValueError(f"score_noise is {self.score_noise!r}; give a finite number above 0")
        object.__setattr__(self, "score_noise", float(self.score_noise))
        object.__setattr__(self, "mean_runs", self.runs.mean)
        object.__setattr__(self, "shape", self.runs.shape)

    @property
    def runs(self) -> NumRuns:
        return NumRuns(self.mean_runs, self.shape)

    def step_event(self, noise_multiplier: float, unit: Unit = Unit.RECORD) -> dpa.DpEvent:
        require_records(self, unit)
        return SelectedRunDpEvent(
            self.rate, noise_multiplier, self.run_steps, self.score_noise, self.runs
        )

    def epochs(self, steps: int) -> float:
        """Of the selected run."""
        return min(1.0, self.run_steps * self.rate) * steps

    def amplifies(self) -> bool:
        return self.rate < 1

    def describe(self) -> str:
        law = "Poisson" if self.shape is None else f"negative binomial, shape {self.shape:g}"
        return (
            f"the best of a secret number of runs ({law}, {self.mean_runs:g} expected), each "
            f"{self.run_steps} steps of Poisson sampling at rate {self.rate:.6g}"
        )
