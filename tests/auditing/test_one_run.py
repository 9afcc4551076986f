"""Audits of one run: published formula, a linear program, coverage, and a small training run."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.special import ndtr, ndtri
from torch import nn

import tacit
from tacit import Records
from tacit.accounting import Plan
from tacit.accounting.pld import gaussian_epsilon
from tacit.auditing import audit_one_run, gradient_scores, loss_scores, plant_canaries
from tacit.auditing.one_run import (
    least_epsilon,
    least_epsilon_of_plan,
    least_mu,
    p_value,
    refutes_curve,
)
from tacit.budget import Relation
from tacit.sampling import Poisson


def brute_force_p_value(guesses: int, right: int, epsilon: float) -> float:
    p = 1 / (1 + math.exp(-epsilon))
    return math.fsum(
        p ** sum(w) * (1 - p) ** (guesses - sum(w))
        for w in product((0, 1), repeat=guesses)
        if sum(w) >= right
    )


def test_the_p_value_is_the_binomial_tail_and_the_term_of_delta() -> None:
    assert p_value(10, 8, 6, 0.7, 0.0) == pytest.approx(brute_force_p_value(8, 6, 0.7))
    # The worst i by hand: f(v − i) − f(v) over i.
    f = [brute_force_p_value(8, v, 0.7) for v in range(9)]
    steepest = max((f[6 - i] - f[6]) / i for i in range(1, 7))
    assert p_value(10, 8, 6, 0.7, 1e-3) == pytest.approx(f[6] + 2 * 10 * 1e-3 * steepest)
    assert p_value(10, 8, 0, 0.7, 1e-3) == 1


def test_all_right_guesses_of_randomised_response() -> None:
    """r of r right: p^r = 1 − confidence, by hand."""
    p = 0.05 ** (1 / 100)
    assert least_epsilon(100, 100, 100, 0.0) == pytest.approx(math.log(p / (1 - p)))
    assert least_epsilon(100, 100, 50, 0.0) == 0


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomised_response_for_each_canary(epsilon: float) -> None:
    """Coverage at the tight case: 300 runs, at most 5% above; more than 27 would be 1 in 1,000."""
    generator, above, found = np.random.default_rng(1), 0, []
    for _ in range(300):
        right = generator.random(200) < 1 / (1 + math.exp(-epsilon))
        bound = least_epsilon(200, 200, int(right.sum()), 1e-9)
        found.append(bound)
        above += bound > epsilon
    assert above <= 27
    assert np.mean(found) > 0.5 * epsilon


@pytest.mark.parametrize("mu", [1.0, 2.0])
def test_gaussian_canaries_are_bounded_by_both_methods(mu: float) -> None:
    truth, above = gaussian_epsilon(1 / mu, 1e-5), np.zeros(2)
    bounds = []
    for seed in range(60):
        generator = np.random.default_rng(seed)
        coins = generator.random(1000) < 0.5
        scores = mu * coins + generator.normal(size=1000)
        audit = audit_one_run(scores, coins, delta=1e-5)
        bounds.append([bound.epsilon for bound in audit.bounds])
        above += np.array(bounds[-1]) > truth
    steinke, mahloujifar = np.mean(bounds, axis=0)
    assert above.max() <= 6
    assert 0 < steinke < mahloujifar < truth
    assert mahloujifar > 0.5 * truth


def by_linear_program(mu: float, m: int, r: int, v: int) -> float:
    """max P[W ≥ v] under R_i ≤ F(L_(i−1)), i ≤ v, with F the least of its tangents."""
    z = np.linspace(-6, 6, 400)
    slopes = np.exp(-mu * z - mu * mu / 2)
    tops = ndtr(z + mu) - slopes * ndtr(z)
    t = np.arange(r + 1)
    rows, limits = [], []
    for i in range(1, v + 1):
        right, wrong = np.where(t >= i, t / m, 0), np.where(t >= i - 1, (r - t) / m, 0)
        for slope, top in zip(slopes, tops, strict=True):
            scale = max(1.0, slope)
            rows.append((right - slope * wrong) / scale)
            limits.append(top / scale)
    ones = np.ones((1, r + 1))
    found = linprog(-(t >= v).astype(float), A_ub=rows, b_ub=limits, A_eq=ones, b_eq=[1])
    return -float(found.fun)


@pytest.mark.parametrize("case", [(1.0, 20, 20, 15), (0.5, 20, 10, 8), (1.5, 30, 10, 10)])
def test_the_recursion_solves_the_linear_program(case: tuple[float, int, int, int]) -> None:
    mu, m, r, v = case
    p = by_linear_program(*case)

    def refuted(confidence: float) -> bool:
        return refutes_curve(lambda y: float(ndtr(ndtri(min(y, 1.0)) - mu)), m, r, v, confidence)

    assert refuted(1 - 1.01 * p)
    assert not refuted(1 - 0.99 * p)


def test_fewer_right_guesses_prove_less() -> None:
    found = [least_mu(100, 50, right) for right in (25, 35, 45, 50)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] > 1


def test_a_plan_with_unknown_noise() -> None:
    """Without sampling the plan's curve is a Gaussian one, and the bound the same."""
    plan = Plan(Poisson(1.0), 1.0, Relation.ADD_OR_REMOVE_ONE, 1)
    by_plan = least_epsilon_of_plan(plan, 200, 60, 58, 1e-5)
    mu = least_mu(200, 60, 58)
    assert by_plan == pytest.approx(gaussian_epsilon(1 / mu, 1e-5), rel=0.03)
    assert least_epsilon_of_plan(plan, 200, 60, 30, 1e-5) == 0


def test_canaries_are_records_of_the_run() -> None:
    torch.manual_seed(0)
    train = Records(torch.randn(300, 4), torch.randint(2, (300,)), num_classes=2, public_size=300)
    canaries = Records(torch.randn(100, 4), torch.randint(2, (100,)), num_classes=2)
    planted = plant_canaries(train, canaries, seed=1)
    number = int(planted.included.sum())
    assert 30 < number < 70
    assert len(planted.train) == 300 + number
    assert planted.train.public_size == 350  # whatever the coins were
    assert planted.train.num_ids == 400
    ids = set(planted.train.record_ids.tolist())
    assert {i for i in ids if i >= 300} == {300 + i for i in np.flatnonzero(planted.included)}
    assert not np.array_equal(planted.included, plant_canaries(train, canaries).included)
    assert "100" in repr(planted)


def test_a_run_that_is_not_private_is_found_out_and_a_private_one_is_within_its_epsilon() -> None:
    torch.manual_seed(0)
    dimensions, count = 400, 120
    train = Records(
        torch.zeros(80, dimensions), torch.zeros(80).long(), num_classes=2, public_size=80
    )
    one_hot = torch.eye(dimensions)[:count]
    canaries = Records(one_hot, torch.ones(count).long(), num_classes=2)
    found = []
    for noise in (0.02, 4.0):
        planted = plant_canaries(train, canaries, seed=3)
        model = nn.Linear(dimensions, 2)
        nn.init.zeros_(model.weight)
        before = [p.detach().clone() for p in model.parameters()]
        initial = nn.Linear(dimensions, 2)
        initial.load_state_dict(model.state_dict())
        sampler = tacit.PoissonSampler(planted.train, expected_batch_size=70, steps=6)
        loss = tacit.losses.CrossEntropy()
        budget = tacit.Budget(epsilon=1e7, delta=1e-5)
        run = tacit.Trainer(
            model, loss, tacit.PerSampleClip(0.5), sampler,
            torch.optim.SGD(model.parameters(), lr=5.0), budget,
            noise=tacit.Noise(noise), callbacks=[],
        ).fit()  # fmt: skip
        moved = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
        by_loss = loss_scores(run.model, loss, planted.records, initial)
        by_gradient = gradient_scores(initial, loss, planted.records, moved)
        for scores in (by_loss, by_gradient):
            audit = audit_one_run(scores, planted.included, delta=1e-5, guesses=80)
            found.append((run.epsilon, audit.epsilon, audit.right))
    (_, loud, right), (_, by_gradient_loud, _), *private = found
    assert right > 75
    assert min(loud, by_gradient_loud) > 2
    assert all(proved <= claimed for claimed, proved, _ in private)


def test_what_cannot_be_audited_is_refused() -> None:
    coins = np.array([True, False, True])
    with pytest.raises(ValueError, match="one of each per canary"):
        audit_one_run([1.0, 2.0], coins, delta=1e-5)
    with pytest.raises(ValueError, match="NaN"):
        audit_one_run([1.0, math.nan, 2.0], coins, delta=1e-5)
    with pytest.raises(ValueError, match="0 ≤ right"):
        audit_one_run([1.0, 2.0, 3.0], coins, delta=1e-5, guesses=4)
    undeclared = Records(torch.randn(3, 2), torch.zeros(3).long())
    with pytest.raises(tacit.errors.UndeclaredConstant):
        plant_canaries(undeclared, undeclared)
    trees = Records({"a": torch.randn(3, 2)}, torch.zeros(3).long(), public_size=3)
    with pytest.raises(ValueError, match="plain tensors"):
        plant_canaries(trees, trees)
