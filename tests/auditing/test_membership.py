"""Membership inference: metrics by hand, useless and perfect scores, LiRA and the regression."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from sklearn.metrics import roc_auc_score

from tacit.auditing import (
    attack_model,
    confidence_of_label,
    lira_scores,
    logistic_scores,
    measure_attack,
    threshold_scores,
)


def test_metrics_are_those_of_the_scores() -> None:
    generator = np.random.default_rng(0)
    members, others = 1 + generator.normal(size=2000), generator.normal(size=3000)
    attack = measure_attack("shifted", members, others, seed=0)
    truth = np.r_[np.ones(2000), np.zeros(3000)]
    assert attack.auroc.value == pytest.approx(roc_auc_score(truth, np.r_[members, others]))
    for measured, exact in (
        (attack.auroc, ndtr(1 / np.sqrt(2))),
        (attack.advantage, 2 * ndtr(0.5) - 1),
        (dict(attack.true_positive_rates)[0.01], ndtr(1 - 2.326)),
    ):
        assert measured.low <= exact <= measured.high
        assert measured.high - measured.low < 0.13
    assert attack.best_advantage >= attack.advantage.value
    facts = attack.facts()
    assert "not a guarantee" in facts["note"]
    assert facts["true_positive_rates"][0]["false_positive_rate"] == 0.001


def test_at_most_the_share_of_non_members_is_above_the_threshold() -> None:
    others = np.arange(1000.0)
    attack = measure_attack("ranks", others + 0.5, others, seed=0)
    # Above the 990th of 0 … 999 are 989.5 … 999.5, and above the 999th 998.5 and 999.5.
    rates = dict(attack.true_positive_rates)
    assert rates[0.01].value == pytest.approx(11 / 1000)
    assert rates[0.001].value == pytest.approx(2 / 1000)
    # A thousand non-members cannot show that a threshold has a rate below 0.1%.
    assert rates[0.001].low == 0
    assert 0 < rates[0.01].low < 0.01 < rates[0.01].high < 0.05


def test_intervals_of_true_positive_rates_hold_at_the_true_rate() -> None:
    """200 attacks at 90%: more than 35 misses would happen once in 2,000 times."""
    exact, missed = ndtr(1 + ndtri(0.01)), 0
    for seed in range(200):
        noise = np.random.default_rng(seed).normal(size=(2, 1500))
        attack = measure_attack("shifted", 1 + noise[0], noise[1], confidence=0.9, resamples=1)
        measured = dict(attack.true_positive_rates)[0.01]
        missed += not measured.low <= exact <= measured.high
    assert missed <= 35


def test_useless_scores_have_no_advantage_but_in_the_best_threshold() -> None:
    generator, found = np.random.default_rng(0), []
    for seed in range(20):
        attack = measure_attack("none", *generator.normal(size=(2, 100)), resamples=2, seed=seed)
        found.append((attack.advantage.value, attack.best_advantage))
    fair, best = np.mean(found, axis=0)
    assert abs(fair) < 0.03
    assert best > 0.05
    constant = measure_attack("constant", np.zeros(10), np.zeros(10), resamples=5)
    assert constant.auroc.value == 0.5
    assert constant.advantage.value == 0
    assert constant.true_positive_rates[0][1].value == 0


def test_scores_of_outputs() -> None:
    outputs = np.log([[0.7, 0.2, 0.1], [0.2, 0.2, 0.6]])
    scores = threshold_scores(outputs, [0, 1])
    assert scores["loss"] == pytest.approx(np.log([0.7, 0.2]))
    p = np.array([0.7, 0.2, 0.1])
    assert scores["entropy"][0] == pytest.approx((p * np.log(p)).sum())
    by_hand = 0.3 * np.log(0.7) + 0.2 * np.log(0.8) + 0.1 * np.log(0.9)
    assert scores["modified entropy"][0] == pytest.approx(by_hand)
    assert confidence_of_label(outputs, [0, 1]) == pytest.approx(np.log([7 / 3, 1 / 4]))
    assert threshold_scores(2 * outputs, [0, 1], temperature=2.0)["loss"] == pytest.approx(
        scores["loss"]
    )


def overfitted(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs of a model that is surer of its members."""
    generator = np.random.default_rng(seed)
    targets, members = generator.integers(4, size=count), generator.random(count) < 0.5
    outputs = generator.normal(size=(count, 4))
    outputs[np.arange(count), targets] += 1 + 2.0 * members
    return outputs, targets, members


def test_attacks_on_a_model() -> None:
    outputs, targets, members = overfitted(2000, 0)
    attacks = attack_model(outputs, targets, members, seed=0)
    assert len(attacks) == 4
    assert all(attack.auroc.low > 0.55 for attack in attacks if "entropy" not in attack.name)
    assert attacks[-1].auroc.value > 0.7
    assert attacks[-1].members < 0.6 * attacks[0].members  # the others were fitted on
    shuffled = attack_model(outputs, targets, np.random.default_rng(1).permutation(members), seed=0)
    assert all(attack.auroc.low < 0.5 < attack.auroc.high for attack in shuffled)


def test_a_shadow_model_teaches_the_regression() -> None:
    outputs, targets, members = overfitted(1000, 1)
    odds = logistic_scores([overfitted(1000, 2), overfitted(1000, 3)], outputs, targets)
    assert roc_auc_score(members, odds) > 0.7


def test_lira_sees_what_a_threshold_cannot() -> None:
    """Records differ in difficulty by far more than membership moves them."""
    generator = np.random.default_rng(0)
    members = generator.random(1000) < 0.5
    difficulty = 10 * generator.normal(size=1000)
    target = difficulty + 2.0 * members + generator.normal(size=1000)
    inside = generator.random((16, 1000)) < 0.5
    shadows = difficulty + 2.0 * inside + generator.normal(size=(16, 1000))
    scores = lira_scores(target, shadows, ~inside)
    assert roc_auc_score(members, target) < 0.6
    assert roc_auc_score(members, scores) > 0.85
    # What the models say that did train on the record makes no difference.
    other = np.where(inside, 100 * generator.normal(size=shadows.shape), shadows)
    assert lira_scores(target, other, ~inside) == pytest.approx(scores)
    far = lira_scores(np.array([30.0, 31.0]), np.array([[0.0, 0.0], [1.0, 1.0]]))
    assert far[0] < far[1]


def test_what_cannot_be_attacked_is_refused() -> None:
    outputs, targets, members = overfitted(50, 0)
    with pytest.raises(ValueError, match="members and non-members"):
        attack_model(outputs, targets, np.ones(50))
    with pytest.raises(ValueError, match=r"\(N, classes\)"):
        threshold_scores(outputs[:, 0], targets)
    with pytest.raises(ValueError, match="no NaN"):
        measure_attack("nan", [np.nan, 1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="two shadow models"):
        lira_scores(np.zeros(3), np.zeros((1, 3)))
    with pytest.raises(ValueError, match="known is empty"):
        logistic_scores([], outputs, targets)
    assert len(attack_model(outputs[:12], targets[:12], members[:12])) == 3
