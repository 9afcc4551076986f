"""Lower bounds on ε with confidence, from scores of a membership test.

A mechanism is run many times with a record and many times without it, and each run gets a score,
higher where the record seems to be there. At a threshold t the test errs with the rates

    α = P[score > t | without]   and   β = P[score ≤ t | with].

**(ε, δ)-DP limits them** [Kairouz 2015, Thm 2.1]: the definition for the set {score > t} is
1 − β ≤ e^ε·α + δ, and with the neighbours exchanged, for {score ≤ t}, 1 − α ≤ e^ε·β + δ. So

    ε ≥ log((1 − β − δ)/α)   and   ε ≥ log((1 − α − δ)/β).

Both right-hand sides fall as α or β grows: upper limits of α and β that hold together with
probability 1 − γ give a lower bound of ε that is wrong with probability γ at most. Nothing is
assumed but that the scores of each side are independent draws of one distribution.

**A trade-off curve limits them too**: β ≥ f(α) for an f-DP mechanism [Dong 2022]. If f belongs to a
family that grows with one unknown number, each pair of upper limits (a, b) with f(a) > b refutes f,
since f falls: f(α) ≥ f(a) > b ≥ β. What is not refuted bounds ε from below. That is much tighter
than (ε, δ) where errors are common, and it rests on the family, which is named in `assumes`.

**Choosing the threshold.** The limits are Clopper and Pearson's [1934] for a threshold that was
fixed before the scores were seen. A `ThresholdRule` says how it is chosen and pays for it:
`FixedThreshold`, `SplitSample` (choose on one part, count on the rest), `FixedRanks` (a few order
statistics, a union bound) or `UniformBand` (every threshold at once).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from scipy.special import ndtri
from scipy.stats import beta as beta_distribution

from tacit.accounting.f_dp import TradeOff, trade_off
from tacit.accounting.plan import Plan
from tacit.accounting.pld import gaussian_epsilon
from tacit.budget import require_delta


def upper_limit(count: np.ndarray | int, trials: int, error: float) -> np.ndarray:
    """Clopper–Pearson: the p with P[Binomial(trials, p) ≤ count] = error; 1 where count = trials.

    A true probability is above it with probability `error` at most: P[Bin(p) ≤ x] falls in p, and
    {p > limit(X)} is {P[Bin(p) ≤ X] < error}, which has probability at most `error` under p.
    """
    x = np.asarray(count)
    inside = beta_distribution.ppf(
        1 - error, np.minimum(x, trials - 1) + 1, trials - x.clip(0, trials - 1)
    )
    return np.where(x >= trials, 1.0, inside)


@dataclass(frozen=True)
class ErrorLimits:
    """Upper limits of both error rates of one test, which hold together."""

    false_positives: float
    false_negatives: float
    threshold: float

    def epsilon(self, delta: float) -> float:
        """max(log((1 − b − δ)/a), log((1 − a − δ)/b), 0)."""
        a, b = self.false_positives, self.false_negatives
        pairs = ((1 - b - delta, a), (1 - a - delta, b))
        return max([0.0, *(math.log(top / below) for top, below in pairs if top > 0)])


class ThresholdRule(Protocol):
    """Chooses thresholds; its limits all hold together with probability 1 − `error` at least."""

    def limits(
        self, with_record: np.ndarray, without: np.ndarray, delta: float, error: float
    ) -> list[ErrorLimits]: ...


def _limits_at(
    thresholds: Sequence[float], with_record: np.ndarray, without: np.ndarray, error: float
) -> list[ErrorLimits]:
    """At thresholds that do not depend on these scores; a union bound over all limits."""
    each = error / (2 * len(thresholds))
    positives = [int(np.count_nonzero(without > t)) for t in thresholds]
    negatives = [int(np.count_nonzero(with_record <= t)) for t in thresholds]
    a = upper_limit(np.array(positives), len(without), each)
    b = upper_limit(np.array(negatives), len(with_record), each)
    return [ErrorLimits(*map(float, row)) for row in zip(a, b, thresholds, strict=True)]


@dataclass(frozen=True)
class FixedThreshold:
    """A threshold that was chosen before the scores were seen: 1 − γ/2 for each of two limits."""

    threshold: float

    def limits(
        self, with_record: np.ndarray, without: np.ndarray, delta: float, error: float
    ) -> list[ErrorLimits]:
        return _limits_at([self.threshold], with_record, without, error)


@dataclass(frozen=True)
class SplitSample:
    """Choose on the first `share` of the scores, count on the rest.

    The rest is independent of the choice, so that the limits hold given any choice. Three
    thresholds are chosen, for the two directions of (ε, δ) and for a Gaussian curve, and a union
    bound pays for all of them. The scores of a side must come in no particular order.
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share is {self.share}; give a number between 0 and 1")

    def limits(
        self, with_record: np.ndarray, without: np.ndarray, delta: float, error: float
    ) -> list[ErrorLimits]:
        cut_with, cut_without = (math.ceil(self.share * len(s)) for s in (with_record, without))
        if not (0 < cut_with < len(with_record) and 0 < cut_without < len(without)):
            raise ValueError("too few scores to split; give at least two of each side")
        seen = with_record[:cut_with], without[:cut_without]
        rest = with_record[cut_with:], without[cut_without:]
        thresholds = _best_thresholds(*seen, len(rest[0]), len(rest[1]), delta, error / 6)
        return _limits_at(thresholds, *rest, error)


@dataclass(frozen=True)
class FixedRanks:
    """Thresholds at given places of the sorted scores, which need no other sample.

    The r-th largest of n scores without the record, t_r, has P[score > t_r | without] at most a
    Beta(r, n − r + 1) variable (equal to it where scores have a density), whose 1 − γ' quantile is
    the limit of Clopper and Pearson for r − 1 of n. Given t_r, the scores with the record are
    independent of it, so that their own limit holds as for a fixed threshold. The same with both
    sides exchanged is for tests that rarely miss. γ' = γ/4K for K ranks: two limits, two sides.
    """

    shares: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)

    def limits(
        self, with_record: np.ndarray, without: np.ndarray, delta: float, error: float
    ) -> list[ErrorLimits]:
        found = []
        for positive, negative, swapped in (
            (with_record, without, False),
            (-without, -with_record, True),
        ):
            count = len(negative)
            ranks = sorted({max(1, math.ceil(share * count)) for share in self.shares})
            ordered = np.sort(negative)
            each = error / (4 * len(self.shares))
            for rank in ranks:
                threshold = float(ordered[count - rank])
                a = float(upper_limit(rank - 1, count, each))
                missed = int(np.count_nonzero(positive <= threshold))
                b = float(upper_limit(missed, len(positive), each))
                limits = ErrorLimits(a, b, threshold)
                found.append(ErrorLimits(b, a, -threshold) if swapped else limits)
        return found


@dataclass(frozen=True)
class UniformBand:
    """Every threshold at once: both empirical error rates plus √(log(2/γ)/2n).

    By Dvoretzky, Kiefer, Wolfowitz and Massart an empirical distribution function is nowhere more
    than s below the true one except with probability e^(−2ns²) ≤ ½ [Massart 1990, Thm 1]; the same
    from above. Half of γ for each side. The band is wide where errors are rare.
    """

    def limits(
        self, with_record: np.ndarray, without: np.ndarray, delta: float, error: float
    ) -> list[ErrorLimits]:
        thresholds = _candidates(with_record, without)
        a = 1 - np.searchsorted(np.sort(without), thresholds, side="right") / len(without)
        b = np.searchsorted(np.sort(with_record), thresholds, side="right") / len(with_record)
        wide = [math.sqrt(math.log(2 / error) / (2 * len(s))) for s in (without, with_record)]
        rows = zip(np.minimum(a + wide[0], 1), np.minimum(b + wide[1], 1), thresholds, strict=True)
        return [ErrorLimits(*map(float, row)) for row in rows]


_TAILS = np.geomspace(1e-6, 0.1, 120)
_QUANTILES = np.concatenate([[0.0], _TAILS, np.linspace(0.1, 0.9, 161)[1:-1], 1 - _TAILS[::-1]])


def _candidates(with_record: np.ndarray, without: np.ndarray) -> np.ndarray:
    """Scores that occur, dense in both tails."""
    pooled = np.sort(np.concatenate([with_record, without]))
    return np.unique(pooled[np.round(_QUANTILES * (len(pooled) - 1)).astype(int)])


def _best_thresholds(
    with_record: np.ndarray,
    without: np.ndarray,
    trials_with: int,
    trials_without: int,
    delta: float,
    error: float,
) -> list[float]:
    """The thresholds that promise the largest bounds on samples of the given sizes."""
    thresholds = _candidates(with_record, without)
    rates = []
    for scores, trials, above in (
        (without, trials_without, True),
        (with_record, trials_with, False),
    ):
        below = np.searchsorted(np.sort(scores), thresholds, side="right")
        count = len(scores) - below if above else below
        # One error more than was seen: a threshold where none was seen is not free of errors.
        expected = np.ceil((count + 1) / (len(scores) + 1) * trials).astype(int)
        rates.append(upper_limit(np.minimum(expected, trials), trials, error))
    a, b = rates
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = (
            np.log((1 - b - delta).clip(0) / a),
            np.log((1 - a - delta).clip(0) / b),
            ndtri(1 - a) - ndtri(b),
        )
    return sorted({float(thresholds[int(np.nanargmax(gain))]) for gain in gains})


class CurveFamily(Protocol):
    """Trade-off curves in one unknown; says which ε at least is not refuted.

    `assumes` names what is taken for granted, in words.
    """

    @property
    def assumes(self) -> str: ...

    def least_epsilon(self, limits: Sequence[ErrorLimits], delta: float) -> float: ...


@dataclass(frozen=True)
class GaussianFamily:
    """G_μ with unknown μ: μ ≥ Φ⁻¹(1 − a) − Φ⁻¹(b), and ε is that of G_μ at δ.  [Dong 2022]"""

    assumes: str = "Gaussian DP"

    def least_mu(self, limits: Sequence[ErrorLimits]) -> float:
        return max(0.0, *(
            float(-ndtri(one.false_positives) - ndtri(one.false_negatives)) for one in limits
        ))  # fmt: skip

    def least_epsilon(self, limits: Sequence[ErrorLimits], delta: float) -> float:
        mu = self.least_mu(limits)
        return gaussian_epsilon(1 / mu, delta) if mu > 0 else 0.0


@dataclass(frozen=True)
class PlanFamily:
    """The curves of a plan whose noise multiplier alone is unknown.

    `at` is how many of the plan's steps the scores are of, and `steps` those that ε is for, by
    default the same: what one step shows of the noise holds for all of them.
    """

    plan: Plan
    at: int = 1
    steps: int | None = None
    assumes: str = "the plan's own trade-off curve, with an unknown noise multiplier"

    def largest_multiplier(self, limits: Sequence[ErrorLimits]) -> float:
        """A z that is refuted, and hardly above the least that is; ∞ where none is."""
        tests = [one for one in limits if 1 - one.false_positives > one.false_negatives]

        def refuted(log_z: float) -> bool:
            curve = self._curve(math.exp(log_z))
            return any(float(curve(t.false_positives)[0]) > t.false_negatives for t in tests)

        low = math.log(max(self.plan.noise_multiplier, 0.01))
        step = 0.02
        if not tests:
            return math.inf
        if refuted(low):  # less noise than planned
            while refuted(low) and low > math.log(0.01):
                low, step = low - step, 2 * step
            high = low + step / 2
        else:
            high = low + step
            while not refuted(high):
                low, step = high, 2 * step
                high = low + step
                if high > math.log(1e4):
                    return math.inf
        while high - low > _LOG_MULTIPLIER:
            middle = (low + high) / 2
            low, high = (low, middle) if refuted(middle) else (middle, high)
        return math.exp(high)

    def _curve(self, z: float) -> TradeOff:
        p = self.plan
        return trade_off(z, p.scheme, self.at, relation=p.relation, unit=p.unit, prelude=p.prelude)

    def least_epsilon(self, limits: Sequence[ErrorLimits], delta: float) -> float:
        z = self.largest_multiplier(limits)
        if math.isinf(z):
            return 0.0
        return replace(self.plan, noise_multiplier=z).epsilon(self.steps or self.at, delta)


_LOG_MULTIPLIER = 1e-3


@dataclass(frozen=True)
class LowerBound:
    """ε is at least this at δ, with this confidence, if what `assumes` says holds (None: nothing).

    All bounds of one `audit_scores` follow from the same limits, and hold together.
    """

    epsilon: float
    delta: float
    confidence: float
    method: str
    assumes: str | None = None

    def facts(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ScoreAudit:
    """What the scores prove. `bounds[0]` assumes nothing; the others name what they assume.

    `trials` are the scores of a side, with those that chose a threshold.
    """

    bounds: tuple[LowerBound, ...]
    trials: int
    limits: tuple[ErrorLimits, ...] = field(default=(), repr=False)

    @property
    def epsilon(self) -> float:
        """The bound that assumes nothing."""
        return self.bounds[0].epsilon

    def refutes(self, epsilon: float) -> bool:
        """Whether a claimed ε, at the δ of the audit, is below what is proved without assumptions.

        A correct claim is refuted with probability 1 − confidence at most.
        """
        return self.epsilon > epsilon

    def facts(self) -> dict[str, Any]:
        return {"trials": self.trials, "bounds": [bound.facts() for bound in self.bounds]}


def audit_scores(
    scores_with: Any,
    scores_without: Any,
    *,
    delta: float,
    confidence: float = 0.95,
    threshold: ThresholdRule | None = None,
    families: Sequence[CurveFamily] = (GaussianFamily(),),
) -> ScoreAudit:
    """A lower bound on ε from scores of independent runs with and without one record.

    The scores may come from any library and any test: higher means that the record seems to be
    there. For a mechanism that is (ε, δ)-DP for these neighbours, `result.epsilon` is above ε with
    probability 1 − `confidence` at most. If neighbours differ by a replaced record, "without" means
    with the other one.

    Args:
        threshold: how the threshold is chosen; `SplitSample()` by default.
        families: trade-off curves for tighter bounds under an assumption, each with its name.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=(2, 100_000))
        >>> audit = tacit.auditing.audit_scores(1 + noise[0], noise[1], delta=1e-2)
        >>> audit.epsilon, audit.bounds[1].assumes  # a Gaussian with μ = 1 has ε = 2.2
    """
    require_delta(delta)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; give a number between 0 and 1, such as 0.95")
    there, absent = _scores(scores_with, "with"), _scores(scores_without, "without")
    rule = threshold or SplitSample()
    limits = rule.limits(there, absent, delta, 1 - confidence)
    found = max((one.epsilon(delta) for one in limits), default=0.0)
    name = f"Clopper-Pearson, {type(rule).__name__}"
    if isinstance(rule, UniformBand):
        name = "Dvoretzky-Kiefer-Wolfowitz band"
    bounds = [LowerBound(found, delta, confidence, name)]
    for family in families:
        least = family.least_epsilon(limits, delta)
        bounds.append(LowerBound(least, delta, confidence, type(family).__name__, family.assumes))
    return ScoreAudit(tuple(bounds), min(len(there), len(absent)), tuple(limits))


def _scores(given: Any, name: str) -> np.ndarray:
    detached = given.detach().cpu() if hasattr(given, "detach") else given
    scores = np.asarray(detached, dtype=np.float64).reshape(-1)
    if len(scores) < 2:
        raise ValueError(f"scores_{name} has {len(scores)} scores; give at least two")
    if np.isnan(scores).any():
        raise ValueError(
            f"scores_{name} has NaN; give those runs a number, such as -inf where the record seems "
            "not to be there: leaving them out would bias the rates"
        )
    return scores
