"""Lower bounds on ε: exact cases, coverage, and every way to choose a threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import binom

from tacit.accounting import Plan
from tacit.accounting.pld import gaussian_epsilon
from tacit.auditing import (
    FixedRanks,
    FixedThreshold,
    GaussianFamily,
    PlanFamily,
    SplitSample,
    ThresholdRule,
    UniformBand,
    audit_scores,
)
from tacit.auditing.lower_bounds import ErrorLimits, upper_limit
from tacit.budget import Relation
from tacit.sampling import Poisson

RULES = [FixedThreshold(2.3), SplitSample(), FixedRanks(), UniformBand()]


def gaussian_scores(mu: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    noise = np.random.default_rng(seed).normal(size=(2, count))
    return mu + noise[0], noise[1]


@pytest.mark.parametrize("count", [0, 3, 40, 99, 100])
def test_the_limit_is_the_probability_at_which_so_few_are_rare(count: int) -> None:
    limit = float(upper_limit(count, 100, 0.025))
    if count == 100:
        assert limit == 1
    else:
        assert binom.cdf(count, 100, limit) == pytest.approx(0.025)


def test_both_directions_of_the_definition_count() -> None:
    delta, a, b = 0.01, 0.02, 0.3
    forward, backward = math.log((1 - b - delta) / a), math.log((1 - a - delta) / b)
    assert ErrorLimits(a, b, 0.0).epsilon(delta) == pytest.approx(forward)
    assert ErrorLimits(b, a, 0.0).epsilon(delta) == pytest.approx(forward)
    assert backward < forward
    assert ErrorLimits(0.6, 0.6, 0.0).epsilon(delta) == 0


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_is_proved_to_be_what_it_is(epsilon: float) -> None:
    generator = np.random.default_rng(0)
    truthful = generator.random((2, 400_000)) < 1 / (1 + math.exp(-epsilon))
    for rule in (FixedThreshold(0.5), SplitSample(), FixedRanks(shares=(0.5,))):
        audit = audit_scores(truthful[0], ~truthful[1], delta=1e-9, threshold=rule)
        if not isinstance(rule, FixedRanks):  # ranks say little where all scores are tied
            assert 0.97 * epsilon < audit.epsilon < 1.01 * epsilon
        assert audit.epsilon <= 1.01 * epsilon


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_gaussian_is_proved_from_below_by_every_rule(rule: object) -> None:
    truth = gaussian_epsilon(1.0, 1e-2)
    audit = audit_scores(*gaussian_scores(1.0, 400_000, 3), delta=1e-2, threshold=rule)
    by_counts, by_curve = audit.bounds
    assert by_counts.assumes is None
    assert by_curve.assumes == "Gaussian DP"
    assert 0.8 * truth < by_counts.epsilon < 1.02 * truth
    assert 0.95 * truth < by_curve.epsilon < 1.02 * truth


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_at_most_one_audit_in_twenty_is_wrong(rule: ThresholdRule) -> None:
    """400 audits: more than 36 would happen once in 2,000 times if 5% were wrong.

    An audit is above the truth only if a limit is below the true error rate, so both are counted.
    """
    assert binom.sf(36, 400, 0.05) < 1 / 2000
    truth, above = gaussian_epsilon(1.0, 0.05), np.zeros(2, dtype=int)
    wrong, unpaid = 0, 0
    for seed in range(400):
        scores = gaussian_scores(1.0, 600, seed)
        audit = audit_scores(*scores, delta=0.05, threshold=rule)
        above += [bound.epsilon > truth for bound in audit.bounds]
        wrong += any_limit_is_wrong(audit.limits)
        # The same rule that spends all of the error on every single limit.
        careless = rule.limits(*scores, 0.05, min(0.05 * 2 * len(audit.limits), 0.9))
        unpaid += any_limit_is_wrong(careless)
    assert above.max() <= wrong <= 36
    assert unpaid > wrong


def any_limit_is_wrong(limits: Sequence[ErrorLimits]) -> bool:
    return any(
        one.false_positives < ndtr(-one.threshold) or one.false_negatives < ndtr(one.threshold - 1)
        for one in limits
    )


def test_a_plan_whose_noise_is_unknown() -> None:
    """Scores of Poisson sampling at rate ¼: the bound is for all ten steps."""
    plan = Plan(Poisson(0.25), 0.6, Relation.ADD_OR_REMOVE_ONE, 10)
    generator = np.random.default_rng(5)
    coins = generator.random(300_000) < 0.25
    noise = generator.normal(size=(2, 300_000))
    scores = coins / 0.6 + noise[0], noise[1]
    family = PlanFamily(plan, at=1, steps=10)
    audit = audit_scores(*scores, delta=1e-2, families=[family])
    claimed = plan.epsilon(10, 1e-2)
    assert 0.85 * claimed < audit.bounds[1].epsilon < claimed
    # Less noise than planned is found out.
    less = audit_scores(coins / 0.5 + noise[0], noise[1], delta=1e-2, families=[family])
    assert less.bounds[1].epsilon > claimed
    # A test without power proves nothing.
    nothing = audit_scores(noise[0], noise[1], delta=1e-2, families=[family, GaussianFamily()])
    assert [bound.epsilon for bound in nothing.bounds[:2]] == [0, 0]
    assert nothing.bounds[2].epsilon < 0.02
    assert not nothing.refutes(0.5)
    assert less.refutes(0.1)


def test_what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(ValueError, match="scores_with has NaN"):
        audit_scores([0.0, math.nan], [0.0, 1.0], delta=0.1)
    with pytest.raises(ValueError, match="at least two"):
        audit_scores([0.0], [0.0, 1.0], delta=0.1)
    with pytest.raises(ValueError, match="confidence is 95"):
        audit_scores([0.0, 1.0], [0.0, 1.0], delta=0.1, confidence=95)
    with pytest.raises(ValueError, match="share is 0"):
        SplitSample(0.0)
    infinite = audit_scores([math.inf, 1.0], [-math.inf, 0.0], delta=0.1)
    assert infinite.epsilon == 0
