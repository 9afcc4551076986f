"""Truncated Poisson: no batch is above the cap, who is dropped is uniform, and ε is a bound."""

from __future__ import annotations

import json
import math
from itertools import combinations

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from participation import SIGMAS, participation
from scipy.stats import binom
from tiny_run import ADD, REPLACE
from typer.testing import CliRunner

from tacit import Budget, PerSampleClip, PoissonSampler, Records, Trainer, epsilon
from tacit.accounting import Plan, check_scheme, epsilon_rdp
from tacit.accounting.pld import privacy_loss
from tacit.cli import app
from tacit.errors import UnsupportedEvent
from tacit.losses import CrossEntropy
from tacit.sampling import Poisson, TruncatedPoisson
from tacit.sampling.scheme import Unit

NUM, STEPS, RATE, CAP = 200, 6000, 0.2, 40


def records(num=NUM, public_size=NUM):
    return Records(torch.zeros(num, 1), torch.zeros(num), public_size=public_size)


@pytest.fixture(scope="module")
def took_part():
    return participation(PoissonSampler(records(), RATE, max_batch_size=CAP, seed=3), STEPS)


def test_no_batch_is_above_the_cap(took_part):
    sizes = took_part.sum(axis=1)
    assert sizes.max() == CAP
    # As often at the cap as a draw is at it or above.
    chance = binom.sf(CAP - 1, NUM, RATE)
    deviation = math.sqrt(chance * (1 - chance) / STEPS)
    assert abs((sizes == CAP).mean() - chance) < SIGMAS * deviation


def test_everybody_takes_part_equally_often(took_part):
    expected = sum(min(n, CAP) * binom.pmf(n, NUM, RATE) for n in range(NUM + 1)) / NUM
    deviation = math.sqrt(expected * (1 - expected) / STEPS)
    assert np.abs(took_part.mean(axis=0) - expected).max() < SIGMAS * deviation
    assert abs(took_part.mean() - expected) < SIGMAS * deviation / math.sqrt(NUM)


def test_first_come_first_served_would_be_seen(took_part):
    """The planted mistake: rows beyond the cap are cut off."""
    drawn = participation(PoissonSampler(records(), RATE, seed=3), STEPS)
    kept = drawn & (drawn.cumsum(axis=1) <= CAP)
    deviation = math.sqrt(RATE * (1 - RATE) / STEPS)
    assert took_part[:, -1].mean() - kept[:, -1].mean() > SIGMAS * deviation


def test_the_subset_is_of_the_draw_that_would_have_been(took_part):
    drawn = participation(PoissonSampler(records(), RATE, seed=3), STEPS)
    assert np.all(took_part <= drawn)
    whole = drawn.sum(axis=1) <= CAP
    assert np.array_equal(took_part[whole], drawn[whole])


def test_padded_batches_have_one_shape():
    sampler = PoissonSampler(records(), RATE, steps=50, max_batch_size=CAP, padded=True)
    assert {len(batch) for batch in sampler} == {CAP}


def test_what_the_cap_needs():
    with pytest.raises(ValueError, match="public_size"):
        PoissonSampler(
            Records(torch.zeros(9, 1), torch.zeros(9)),
            0.5,
            expected_batch_size=4,
            max_batch_size=6,
        )
    with pytest.raises(ValueError, match="more records"):
        PoissonSampler(records(num=300), RATE, max_batch_size=CAP)
    with pytest.raises(ValueError, match="max_batch_size"):
        PoissonSampler(records(), RATE, max_batch_size=0)
    with pytest.raises(UnsupportedEvent, match="mini-set"):
        Plan(TruncatedPoisson(RATE, CAP, NUM), 1.0, ADD, 1, Unit.MINI_SET)


# What it costs.


def test_the_scheme_meets_the_contract():
    check_scheme(TruncatedPoisson(RATE, CAP, NUM))


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_a_cap_far_above_costs_nothing_and_a_close_one_does(relation):
    def cost(scheme):
        return epsilon(1.0, scheme, 1000, delta=1e-6, relation=relation)

    free = cost(Poisson(0.01))
    assert cost(TruncatedPoisson(0.01, 300, 10_000)) == pytest.approx(free, rel=1e-4)
    costs = [cost(TruncatedPoisson(0.01, cap, 10_000)) for cap in (200, 130, 110, 100)]
    assert free * (1 - 1e-5) <= costs[0]
    assert costs == sorted(costs)
    assert costs[-1] > 1.2 * free


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_it_is_below_renyi_and_close_to_dp_accounting(relation):
    scheme = TruncatedPoisson(0.01, 110, 10_000)
    found = epsilon(1.0, scheme, 200, delta=1e-6, relation=relation)
    assert found <= epsilon_rdp(1.0, scheme, 200, delta=1e-6, relation=relation)
    if relation is ADD:
        theirs = dpa.pld.PLDAccountant()
        theirs.compose(scheme.step_event(1.0), 200)
        assert found == pytest.approx(theirs.get_epsilon(1e-6), rel=0.02)


def outputs(contributions, rate, cap):
    """Every sum that a step can release before its noise, with its probability."""
    found: dict[float, float] = {}
    num = len(contributions)
    for size in range(num + 1):
        for drawn in combinations(range(num), size):
            chance = rate**size * (1 - rate) ** (num - size)
            kept = list(combinations(drawn, min(size, cap)))
            for subset in kept:
                total = round(sum(contributions[i] for i in subset), 9)
                found[total] = found.get(total, 0.0) + chance / len(kept)
    return [(chance, total) for total, chance in found.items()]


def deltas(p, q, z, epsilons):
    x = np.linspace(-12 - 12 * z, 12 + 12 * z, 60_001)

    def density(mixture):
        return sum(w * np.exp(-((x - m) ** 2) / (2 * z * z)) for w, m in mixture) / (
            z * math.sqrt(2 * math.pi)
        )

    dense_p, dense_q = density(p), density(q)
    return np.array(
        [np.trapezoid(np.maximum(dense_p - math.exp(e) * dense_q, 0), x) for e in epsilons]
    )


EPSILONS = np.array([0.0, 0.1, 0.5, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("cap", [1, 2, 3])
@pytest.mark.parametrize(("rate", "z"), [(0.5, 1.0), (0.9, 0.5), (0.2, 0.7)])
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_no_small_population_beats_the_bound(cap, rate, z, relation):
    """All draws and all subsets of up to five records with contributions of norm C or less.

    The noise is z times the sensitivity: C when a record is added, 2C when it is replaced.
    """
    size = 1.0 if relation is ADD else 0.5  # C, in units of the sensitivity
    event = TruncatedPoisson(rate, cap, 5).step_event(z)
    bound = np.max([_delta(way) for way in privacy_loss(event, relation)], axis=0)
    draws = np.random.default_rng(0)
    attacks = [[size] * 4, [-size] * 4, [size, -size] * 2, [0.0] * 4, [-size] * 2, [-size]]
    attacks += [list(draws.uniform(-size, size, 4)) for _ in range(3)]
    worst = 0.0
    for others in attacks:
        for one, another in ((size, -size), (size, 0.0)):
            with_one = outputs([*others, one], rate, cap)
            without = outputs(others if relation is ADD else [*others, another], rate, cap)
            for p, q in ((with_one, without), (without, with_one)):
                found = deltas(p, q, z, EPSILONS)
                assert np.all(found <= bound + 1e-7)
                worst = max(worst, float((found / bound)[2]))
    assert worst > 0.1  # the attack is not idle


def _delta(losses):
    values = losses.values
    return np.array(
        [
            losses.infinity
            + float(np.sum(losses.masses[values > e] * -np.expm1(e - values[values > e])))
            for e in EPSILONS
        ]
    )


def test_charging_it_as_poisson_would_be_seen():
    """The planted mistake: a record that takes the place of another moves the sum by 2C."""
    rate, z = 0.5, 1.0
    event = dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(z))
    poisson = np.max([_delta(way) for way in privacy_loss(event, ADD)], axis=0)
    p, q = outputs([-1.0, 1.0], rate, 1), outputs([-1.0], rate, 1)
    assert np.any(deltas(p, q, z, EPSILONS) > poisson + 1e-3)


def test_a_run_is_charged_for_it_and_says_what_it_would_cost_without():
    train = Records(
        torch.randn(NUM, 4), torch.randint(0, 2, (NUM,)), num_classes=2, public_size=NUM
    )
    model = torch.nn.Linear(4, 2)
    run = Trainer(
        model,
        CrossEntropy(),
        PerSampleClip(max_norm=1.0),
        PoissonSampler(train, RATE, steps=3, max_batch_size=CAP + 10, padded=True),
        torch.optim.SGD(model.parameters(), lr=0.1),
        Budget(5.0, 1e-5),
    ).fit()
    scheme = TruncatedPoisson(RATE, CAP + 10, NUM)
    assert run.plan.scheme == scheme
    assert run.epsilon == epsilon(run.plan.noise_multiplier, scheme, 3, delta=1e-5)
    assert run.facts()["epsilon_without_cap"] < run.epsilon <= 5.0
    assert "truncated to 50 of 200" in run.facts()["sampling"]


def test_the_command_prints_both_epsilons():
    options = [
        "--noise-multiplier",
        "1",
        "--steps",
        "100",
        "--delta",
        "1e-5",
        "--max-batch-size",
        "110",
        "--json",
    ]
    known = ["--population", "10000", "--batch-size", "100"]
    told = CliRunner().invoke(app, ["epsilon", *options, *known])
    facts = json.loads(told.output)
    assert facts["epsilon_without_cap"] < facts["epsilon"]
    refused = CliRunner().invoke(app, ["epsilon", *options, "--sampling-rate", "0.01"])
    assert refused.exit_code != 0
