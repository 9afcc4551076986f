"""Membership inference: how well attacks tell a model's training records from held-out ones.

The attacks of Table 1 of the clipless paper, a threshold on a score of the loss [Yeom 2018; Song &
Mittal 2021] and a logistic regression on the model's outputs [Shokri 2017], and LiRA, which
compares each record's confidence with that of models that were not trained on it [Carlini 2022].

**This is evidence, not a guarantee.** An attack that fails says nothing about the next one, and one
that succeeds may do so because held-out records are of another kind than training records. Records
were not put in or left out by a coin here, so that nothing of this bounds ε; `audit_one_run` and
`audit_step` do. ε is what holds against every attack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import log_softmax, logsumexp, ndtr
from scipy.stats import rankdata

from tacit.auditing.lower_bounds import upper_limit
from tacit.randomness import Randomness

EVIDENCE = "evidence, not a guarantee: epsilon is what holds against every attack"
RATES = (0.001, 0.01)


@dataclass(frozen=True)
class Measured:
    """A number with an interval that contains the true one with the given confidence."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


@dataclass(frozen=True)
class MembershipAttack:
    """How well one score tells members from non-members.

    `auroc` is P[a member scores higher than a non-member], equal scores counting one half.
    `advantage` is the largest TPR − FPR [Yeom 2018], at the threshold that the other half of the
    records chose, so that it is 0 in the mean for a useless score; `best_advantage` is that of the
    best threshold for these very records, as papers report it, and above 0 for any score.
    `true_positive_rates` are by false positive rate: the threshold is such that at most that share
    of the non-members is above it.
    """

    name: str
    members: int
    non_members: int
    auroc: Measured
    advantage: Measured
    best_advantage: float
    true_positive_rates: tuple[tuple[float, Measured], ...]
    confidence: float

    def facts(self) -> dict[str, Any]:
        return {
            "attack": self.name,
            "members": self.members,
            "non_members": self.non_members,
            "auroc": asdict(self.auroc),
            "advantage": asdict(self.advantage),
            "best_advantage": self.best_advantage,
            "true_positive_rates": [
                {"false_positive_rate": rate, **asdict(tpr)}
                for rate, tpr in self.true_positive_rates
            ],
            "confidence": self.confidence,
            "note": EVIDENCE,
        }


def measure_attack(
    name: str,
    member_scores: Any,
    other_scores: Any,
    *,
    confidence: float = 0.95,
    rates: Sequence[float] = RATES,
    resamples: int = 300,
    seed: int | None = None,
) -> MembershipAttack:
    """AUROC, advantage and true positive rates of a score, higher for members.

    Intervals of AUROC and advantage are bootstrap percentiles over both sides. Those of a true
    positive rate are exact: they hold at the true false positive rate, which takes some thousand
    non-members at 0.1%.

    Example:
        >>> attack = tacit.auditing.measure_attack("loss", -member_losses, -held_out_losses)
        >>> attack.auroc.value, attack.true_positive_rates[1]
    """
    sides = [np.asarray(s, dtype=np.float64).reshape(-1) for s in (member_scores, other_scores)]
    for side, what in zip(sides, ("member_scores", "other_scores"), strict=True):
        if len(side) < 2 or np.isnan(side).any():
            raise ValueError(f"{what} needs at least two scores, and no NaN")
    members, others = sides
    words = Randomness(seed).stream("attack").words(4, np.uint64)
    generator = np.random.default_rng(words.tolist())
    members, others = generator.permutation(members), generator.permutation(others)
    drawn = []
    for _ in range(resamples):
        # Each half by itself: a record in both would choose the threshold that it is measured at.
        some = [
            np.concatenate([half[generator.integers(len(half), size=len(half))] for half in halves])
            for halves in (np.split(s, [len(s) // 2]) for s in (members, others))
        ]
        drawn.append((_auroc(*some), _advantage(*some)))
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    lows, highs = np.quantile(np.array(drawn), tails, axis=0)
    return MembershipAttack(
        name,
        len(members),
        len(others),
        Measured(_auroc(members, others), float(lows[0]), float(highs[0])),
        Measured(_advantage(members, others), float(lows[1]), float(highs[1])),
        _best_threshold(members, others)[1],
        tuple((rate, _true_positives(members, others, rate, confidence)) for rate in rates),
        confidence,
    )


def _auroc(members: np.ndarray, others: np.ndarray) -> float:
    """(R − P(P + 1)/2)/(P·Q) from the ranks of the P members  [Mann & Whitney 1947]."""
    count = len(members)
    ranks = rankdata(np.concatenate([members, others]))[:count]
    return float((ranks.sum() - count * (count + 1) / 2) / (count * len(others)))


def _best_threshold(members: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    thresholds = np.unique(np.concatenate([members, others]))
    gaps = _rates_above(members, thresholds) - _rates_above(others, thresholds)
    best = int(np.argmax(gaps))
    return float(thresholds[best]), max(0.0, float(gaps[best]))


def _rates_above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    return 1 - np.searchsorted(np.sort(scores), thresholds, side="right") / len(scores)


def _advantage(members: np.ndarray, others: np.ndarray) -> float:
    """TPR − FPR on each half at the threshold of the other half; their mean."""
    halves = [(s[: len(s) // 2], s[len(s) // 2 :]) for s in (members, others)]
    found = []
    for seen, rest in ((0, 1), (1, 0)):
        threshold = np.array([_best_threshold(halves[0][seen], halves[1][seen])[0]])
        gap = _rates_above(halves[0][rest], threshold) - _rates_above(halves[1][rest], threshold)
        found.append(float(gap[0]))
    return math.fsum(found) / 2


def _true_positives(
    members: np.ndarray, others: np.ndarray, rate: float, confidence: float
) -> Measured:
    """TPR where at most this share of the non-members is above; the limits are for the true FPR.

    A threshold at an order statistic of the non-members has a true FPR within Clopper and Pearson's
    limits of its own count. The lower limit of the TPR is taken where the FPR is at most `rate`
    beyond doubt, and the upper one where it is at least `rate`: a union bound over four limits.
    """
    count, error = len(others), (1 - confidence) / 4
    ordered = np.sort(others)
    value = float((members > ordered[count - 1 - math.floor(rate * count)]).mean())
    above = np.arange(count)
    surely = above[upper_limit(above, count, error) <= rate]
    low, high = 0.0, 1.0
    if len(surely):
        hits = int((members > ordered[count - 1 - surely[-1]]).sum())
        low = 1 - float(upper_limit(len(members) - hits, len(members), error))
    at_least = above[1 - upper_limit(count - above, count, error) >= rate]
    if len(at_least):
        hits = int((members >= ordered[count - at_least[0]]).sum())
        high = float(upper_limit(hits, len(members), error))
    return Measured(value, min(low, value), max(high, value))


# ---- scores --------------------------------------------------------------------------------------


def threshold_scores(outputs: Any, targets: Any, temperature: float = 1.0) -> dict[str, np.ndarray]:
    """Scores of a classifier's outputs (N, K), higher for members; each makes a threshold attack.

    `loss`: −cross-entropy. `entropy`: that of the prediction, negated. `modified entropy`:
    (1 − p_y)·log p_y + Σ_{k≠y} p_k·log(1 − p_k), which also knows the label [Song & Mittal 2021].
    """
    logp = _log_probabilities(outputs, temperature)
    y = np.asarray(targets).astype(int)
    rows = np.arange(len(y))
    p = np.exp(logp)
    log_rest = np.log1p(-np.clip(p, 0, 1 - 1e-12))
    of_label = (1 - p[rows, y]) * logp[rows, y]
    return {
        "loss": logp[rows, y],
        "entropy": (p * logp).sum(axis=1),
        "modified entropy": of_label + (p * log_rest).sum(axis=1) - (p * log_rest)[rows, y],
    }


def _log_probabilities(outputs: Any, temperature: float) -> np.ndarray:
    raw = np.asarray(outputs, dtype=np.float64) / temperature
    if raw.ndim != 2 or raw.shape[1] < 2:
        raise ValueError(f"outputs have shape {raw.shape}; give one row per record, (N, classes)")
    return log_softmax(raw, axis=1)


def _features(outputs: Any, targets: Any, temperature: float) -> np.ndarray:
    """The outputs in descending order, and the scores of the threshold attacks."""
    logp = _log_probabilities(outputs, temperature)
    scores = threshold_scores(outputs, targets, temperature)
    return np.column_stack([-np.sort(-logp, axis=1)[:, :10], *scores.values()])


def logistic_scores(
    known: Iterable[tuple[Any, Any, Any]],
    outputs: Any,
    targets: Any,
    temperature: float = 1.0,
) -> np.ndarray:
    """Log odds of membership by a logistic regression on known cases  [Shokri 2017].

    `known` holds (outputs, targets, members) of models whose members are known: shadow models that
    the attacker trained alike on other records, or the attacked model on records of which the
    attacker knows it already.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    cases = list(known)
    if not cases:
        raise ValueError("known is empty; give at least one model whose members are known")
    inputs = np.concatenate([_features(o, t, temperature) for o, t, _ in cases])
    members = np.concatenate([np.asarray(m, dtype=bool) for _, _, m in cases])
    attack = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    attack.fit(inputs, members)
    return np.asarray(attack.decision_function(_features(outputs, targets, temperature)))


def confidence_of_label(outputs: Any, targets: Any, temperature: float = 1.0) -> np.ndarray:
    """φ = log p_y/(1 − p_y), which is nearly Gaussian over models  [Carlini 2022]."""
    logp = _log_probabilities(outputs, temperature)
    y = np.asarray(targets).astype(int)
    rows = np.arange(len(y))
    others = logp.copy()
    others[rows, y] = -np.inf
    return np.asarray(logp[rows, y] - logsumexp(others, axis=1))


def lira_scores(confidence: Any, shadows: Any, excluded: Any | None = None) -> np.ndarray:
    """Offline LiRA: P[N(μ, σ²) ≤ φ] with μ of models without the record  [Carlini 2022, Eq. 4].

    Args:
        confidence: φ (N,) of the attacked model, by `confidence_of_label`.
        shadows: φ (M, N) of M shadow models.
        excluded: (M, N), True where the record was not in the shadow model's training set; by
            default everywhere. Each record needs two such models. σ is one for all records, as few
            shadow models do not tell it record by record.
    """
    phi, of_shadows = np.asarray(confidence, float), np.asarray(shadows, float)
    outside = np.ones(of_shadows.shape, bool) if excluded is None else np.asarray(excluded, bool)
    if (
        of_shadows.ndim != 2
        or of_shadows.shape[1:] != phi.shape
        or outside.shape != of_shadows.shape
    ):
        raise ValueError(
            f"shadows have shape {of_shadows.shape} for {phi.shape} records; give (models, records)"
        )
    counts = outside.sum(axis=0)
    if counts.min() < 2:
        raise ValueError("a record has fewer than two shadow models without it; train more of them")
    means = np.where(outside, of_shadows, 0).sum(axis=0) / counts
    squared = np.where(outside, (of_shadows - means) ** 2, 0).sum() / (counts - 1).sum()
    z = (phi - means) / math.sqrt(max(float(squared), 1e-30))
    # Far out ndtr is 1 in a double, and z keeps the order.
    return np.asarray(np.where(np.abs(z) < 6, ndtr(z) - 0.5, np.sign(z) * (0.5 + np.abs(z))))


def attack_model(
    outputs: Any,
    targets: Any,
    members: Any,
    *,
    temperature: float = 1.0,
    confidence: float = 0.95,
    resamples: int = 300,
    seed: int | None = None,
) -> list[MembershipAttack]:
    """Threshold attacks, and a logistic regression that knows half of the records' membership.

    The regression is fitted on one half and measured on the other. Knowing members of the very
    model is more than a shadow model gives.

    Example:
        >>> for attack in tacit.auditing.attack_model(outputs, targets, members):
        ...     print(attack.name, attack.auroc)
    """
    raw, y, inside = np.asarray(outputs), np.asarray(targets), np.asarray(members, dtype=bool)
    if not len(raw) == len(y) == len(inside) or inside.all() or not inside.any():
        raise ValueError(
            f"{len(raw)} outputs, {len(y)} targets and {len(inside)} memberships; give one of each "
            "per record, with members and non-members among them"
        )
    how: dict[str, Any] = {"confidence": confidence, "resamples": resamples, "seed": seed}
    found = [
        measure_attack(f"threshold on {name}", scores[inside], scores[~inside], **how)
        for name, scores in threshold_scores(raw, y, temperature).items()
    ]
    coins = Randomness(seed).stream("known half").coins(len(y), 0.5)
    sides = [inside & coins, ~inside & coins, inside & ~coins, ~inside & ~coins]
    if min(side.sum() for side in sides) < 10:
        return found  # too few records to fit and to measure
    odds = logistic_scores(
        [(raw[coins], y[coins], inside[coins])], raw[~coins], y[~coins], temperature
    )
    rest = inside[~coins]
    name = "logistic regression that knows half of the members"
    found.append(measure_attack(name, odds[rest], odds[~rest], **how))
    return found
