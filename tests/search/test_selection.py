"""The best of a random number of runs: its bounds against exact laws, and against dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting import rdp as dpa_rdp

import tacit
from tacit.accounting import Plan, check_scheme
from tacit.accounting.rdp import ORDERS, renyi_curve, selected_curve
from tacit.accounting.selection import loss_shift, selection_epsilon
from tacit.budget import Relation
from tacit.randomness import Randomness
from tacit.sampling import NumRuns, Poisson, SelectedRun
from tests.search.two_answers import best_of, delta_at, randomised_response, renyi

RELATION = Relation.ADD_OR_REMOVE_ONE
LAWS = [
    NumRuns(5, 1.0), NumRuns(50, 1.0), NumRuns(50, 0.0), NumRuns(20, -0.5), NumRuns(10, 3.0),
    NumRuns(4, None), NumRuns(30, None),
]  # fmt: skip
EPSILONS = np.linspace(0, 12, 400)


def mechanisms():
    for order in ("own", "other"):
        yield randomised_response(1.0, order)
        yield randomised_response(0.2, order)
    generator = np.random.default_rng(0)
    for outcomes in (3, 4, 8):
        for _ in range(6):
            one = generator.dirichlet(np.ones(outcomes))
            other = one * np.exp(generator.uniform(-0.5, 0.5, outcomes))
            yield one, other / other.sum()


@pytest.mark.parametrize("runs", LAWS, ids=str)
def test_the_profile_bound_holds_for_every_mechanism_and_order_of_outcomes(runs) -> None:
    closest = math.inf
    for one, other in mechanisms():
        profile = np.array([delta_at(one, other, epsilon) for epsilon in EPSILONS])
        shift = loss_shift(runs, EPSILONS, profile)
        best, best_other = best_of(runs, one), best_of(runs, other)
        for epsilon in (0.0, 0.3, 1.0, 2.0, 4.0):
            exact = delta_at(best, best_other, epsilon)
            below = epsilon - shift
            one_run = delta_at(one, other, below) if below >= 0 else 1.0
            assert exact <= runs.mean * one_run + 1e-12
        # Where every outcome's probability ratio is bounded, ε = c + ε₀ is pure; how near is it?
        pure = math.log(max(float((one / other).max()), float((other / one).max())))
        kept = best_other > 0
        exact = float(np.abs(np.log(best[kept] / best_other[kept])).max())
        assert exact <= shift + pure + 1e-9
        closest = min(closest, (shift + pure) / max(exact, 1e-9))
    assert closest < 1.5  # the bound is not vacuous: it nearly reached somewhere


@pytest.mark.parametrize("runs", LAWS, ids=str)
def test_the_renyi_bound_holds_for_every_mechanism(runs) -> None:
    for one, other in mechanisms():
        curve = np.array([renyi(one, other, order) for order in ORDERS])
        bound = selected_curve(curve, runs)
        best, best_other = best_of(runs, one), best_of(runs, other)
        for place in range(4, len(ORDERS), 13):
            exact = renyi(best, best_other, ORDERS[place])
            assert exact <= bound[place] + 1e-9


def test_dp_accounting_has_the_same_renyi_bound() -> None:
    for shape in (0.0, 1.0, 2.5, None):
        event = SelectedRun(0.05, 100, 20.0, 50, shape).step_event(1.5)
        reference = dpa_rdp.RdpAccountant(orders=ORDERS)
        theirs = math.inf if shape is None else shape
        reference.compose(dp_event.RepeatAndSelectDpEvent(event.one_run, 50, theirs))
        ours = renyi_curve(event, RELATION)
        expected = reference.get_epsilon(1e-5)
        found = dpa_rdp.compute_epsilon(np.array(ORDERS), ours, 1e-5)[0]
        assert found == pytest.approx(expected, rel=1e-6)


def test_the_profile_bound_is_the_tighter_one_and_above_one_run() -> None:
    one = Plan(Poisson(0.03), 2.0, RELATION, 1000).epsilon(1000, 1e-5)
    spent = []
    for shape in (-0.5, 0.0, 1.0):
        event = SelectedRun(0.03, 1000, 20.0, 50, shape).step_event(2.0)
        found = selection_epsilon(event, 1e-5, RELATION)
        plan = Plan(SelectedRun(0.03, 1000, 20.0, 50, shape), 2.0, RELATION, 1)
        assert one < found < plan.epsilon_rdp(1, 1e-5)
        spent.append(found)
    assert spent == sorted(spent)  # lighter tails cost more
    assert spent[1] == pytest.approx(3.6, abs=0.1)


def test_the_number_of_runs_follows_its_law() -> None:
    for runs in (NumRuns(6, 1.0), NumRuns(6, 0.0), NumRuns(6, -0.3), NumRuns(6, None)):
        masses = np.array(runs.probabilities(4000))
        assert masses.sum() == pytest.approx(1, abs=1e-6)
        assert np.dot(np.arange(len(masses)), masses) == pytest.approx(6, rel=1e-3)
        drawn = [runs.draw(Randomness(seed).stream("test")) for seed in range(3000)]
        counts = np.bincount(drawn, minlength=12)[:12]
        expected = 3000 * masses[:12]
        assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected + 4))


def test_the_scheme_meets_its_contract_and_is_stored() -> None:
    scheme = SelectedRun(0.1, 10, 20.0, 50, 0.0)
    check_scheme(scheme)
    plan = Plan(scheme, 2.0, RELATION, 1)
    assert Plan.from_json(plan.to_json()) == plan


def test_what_is_no_law_is_refused() -> None:
    for mean, shape in ((1, 0.0), (50, -1.0), (1e9, 0.0), (50, -0.99), (1000, None)):
        with pytest.raises(ValueError, match=r"mean|shape|runs"):
            NumRuns(mean, shape)


def test_the_best_of_runs_composes_with_other_releases() -> None:
    event = SelectedRun(0.1, 10, 20.0, 50, 0.0).step_event(3.0)
    plan = Plan(SelectedRun(0.1, 10, 20.0, 50, 0.0), 3.0, RELATION, 1)
    alone = selection_epsilon(event, 1e-5, RELATION)
    assert plan.epsilon(1, 1e-5) == alone < plan.epsilon(2, 1e-5)
    assert tacit.calibrate(tacit.Budget(alone, 1e-5), plan.scheme, 1) == pytest.approx(3, rel=1e-3)
