"""A threshold that follows a quantile: what it costs, what it sees, and where it goes."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import tacit
from tacit import (
    AdaptiveNorm,
    Budget,
    FixedSizeSampler,
    Ledger,
    Mechanism,
    PerSampleClip,
    PoissonSampler,
    Records,
    Relation,
)
from tacit.engines.clipping import centred_count
from tacit.sampling import batch_of
from tacit.sampling.scheme import Unit

torch.set_num_threads(1)

Z = 1.3


class Dot(nn.Module):
    """⟨w, x⟩: a record's gradient is the record itself, so its norm can be chosen."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.w = nn.Linear(size, 1, bias=False).double()

    def forward(self, x):
        return self.w(x)


def output_itself(outputs, targets):
    return outputs.sum()


def records_with_norms(norms) -> Records:
    return Records(norms.reshape(-1, 1), torch.zeros(len(norms)), public_size=len(norms))


def run(query, sampler, z=Z, steps=None, relation=Relation.ADD_OR_REMOVE_ONE, seed=None):
    """Train a Dot; returns the mechanism, its model and the last private gradient."""
    model = Dot()
    mechanism = Mechanism(query, sampler, z, relation=relation, seed=seed)
    with Ledger(budget=Budget(1e4, 1e-5, relation)) as ledger:
        for _ in range(steps or sampler.steps):
            private = mechanism.privatise(model, output_itself, sampler.next_batch())
            ledger.release(private, into=model)
    return mechanism, model, private


# What is counted.


def test_a_record_is_counted_as_half_a_record_below_or_above():
    norms = torch.tensor([0.0, 0.5, 0.94, 1.0, 1.06, 3.0, math.inf])
    everyone = torch.ones(7, dtype=torch.bool)
    each = [float(centred_count(norms[i : i + 1], 1.0, everyone[:1])) for i in range(7)]
    assert each == pytest.approx([0.5, 0.5, 0.5, 0.0, -0.5, -0.5, -0.5], abs=1e-6)
    assert float(centred_count(norms, 1.0, everyone)) == pytest.approx(0.0, abs=1e-6)
    assert float(centred_count(norms, 1.0, norms < 1)) == pytest.approx(1.5)
    assert float(centred_count(norms * math.nan, 1.0, ~everyone)) == 0.0


def test_norms_that_tie_with_the_threshold_are_not_told_apart_by_their_roundings():
    """A million equal records, one rounding up or down: a step there would move it by a million."""
    ones = torch.ones(1_000_000)
    everyone = ones.bool()
    up, down = ones.nextafter(2 * ones), ones.nextafter(0 * ones)
    counts = [float(centred_count(norms, 1.0, everyone)) for norms in (up, ones, down)]
    assert max(counts) - min(counts) < 2
    assert float((down <= 1).sum() - (up <= 1).sum()) == 1e6


def test_the_update_is_the_formula():
    norm = AdaptiveNorm(2.0, quantile=0.3, learning_rate=0.4, limits=(0.1, 50.0))
    assert norm.after(2.0, 10.0, 100.0) == pytest.approx(2.0 * math.exp(-0.4 * (0.6 - 0.3)))
    assert norm.after(2.0, -1e9, 100.0) == pytest.approx(2.0 * math.exp(0.4 * 0.3))  # share 0
    assert norm.after(2.0, 1e9, 100.0) == pytest.approx(2.0 * math.exp(-0.4 * 0.7))  # share 1
    assert norm.after(0.1, 1e9, 100.0) == 0.1
    assert norm.after(50.0, -1e9, 100.0) == 50.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial": 0.0},
        {"initial": math.nan},
        {"initial": 1e9},
        {"quantile": 0.0},
        {"quantile": 1.0},
        {"learning_rate": -1.0},
        {"count_noise": 0.0},
        {"limits": (0.0, 1.0)},
        {"limits": (2.0, 1.0)},
        {"limits": (1e-13, 1.0)},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="give"):
        AdaptiveNorm(**{"initial": 1.0, **wrong})


# What it costs.


@pytest.mark.parametrize("relation", list(Relation), ids=str)
@pytest.mark.parametrize("blocks", [None, tacit.by_parameter])
@pytest.mark.parametrize(
    "allocation", [tacit.GlobalNoise(), tacit.PerLayerNoise(), tacit.OptimisedNoise()], ids=repr
)
def test_all_together_have_the_planned_multiplier(relation, blocks, allocation):
    """1/z² = Σ_h (Δ_h/s_h)² + Σ_b (Δ_b/s_b)², before and after the thresholds have moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    data = Records(torch.randn(40, 3), torch.arange(40) % 2, public_size=40)
    added = relation is Relation.ADD_OR_REMOVE_ONE
    sampler = PoissonSampler(data, 0.75, 3) if added else FixedSizeSampler(data, 30, 3)
    query = PerSampleClip(AdaptiveNorm(0.5, count_noise=7.0), blocks=blocks)
    mechanism = Mechanism(query, sampler, Z, relation=relation, allocation=allocation)
    with Ledger(budget=Budget(1e4, 1e-5, relation)) as ledger:
        for _ in range(3):
            batch = sampler.next_batch()
            bounded = mechanism.query(model, nn.CrossEntropyLoss(), batch)
            private = mechanism.privatise(model, nn.CrossEntropyLoss(), batch)
            pairs = [(b.bound, std) for b, std in zip(bounded.blocks, private.stds, strict=True)]
            pairs += [(0.5, 7.0)] * len(bounded.blocks)
            total = sum(((1 if added else 2) * bound / std) ** 2 for bound, std in pairs)
            assert total == pytest.approx(1 / Z**2, rel=1e-12)
            ledger.release(private, into=model)
    # Each step moves C; an estimate clamped at 0 and then one at 1 may bring it back.
    assert all(len(path) == 4 for path in mechanism.query.thresholds)
    assert all(a != b for path in mechanism.query.thresholds for a, b in pairwise(path))


def test_epsilon_is_that_of_a_fixed_threshold_at_the_same_noise():
    data = records_with_norms(torch.rand(200, dtype=torch.float64))
    runs = []
    for max_norm in (0.5, AdaptiveNorm(0.5)):
        model = Dot()
        runs.append(
            tacit.Trainer(
                model,
                loss=output_itself,
                query=PerSampleClip(max_norm),
                sampler=PoissonSampler(data, 0.5, steps=5, seed=0),
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                budget=Budget(20.0, 1e-5),
                noise=tacit.Noise(Z),
                callbacks=(),
            ).fit()
        )
    assert runs[0].epsilon == runs[1].epsilon
    assert runs[0].plan == runs[1].plan


def test_calibrated_noise_is_the_same_too_and_the_gradient_pays_for_the_count():
    data = records_with_norms(torch.rand(200, dtype=torch.float64))
    stds = []
    for max_norm in (0.5, AdaptiveNorm(0.5)):
        sampler = PoissonSampler(data, 0.5, steps=5, seed=0)
        stds.append(run(PerSampleClip(max_norm), sampler, steps=1)[2].stds[0])
    z_count = (100 / 20) / 0.5
    assert stds[0] == pytest.approx(0.5 * Z, rel=1e-10)
    assert stds[1] == pytest.approx(0.5 * (1 / Z**2 - 1 / z_count**2) ** -0.5, rel=1e-10)


@pytest.mark.parametrize("noise", [0.5 * Z, 0.5 * Z * 0.999, 0.01])
def test_a_count_that_takes_all_the_noise_is_refused_with_the_way_out(noise):
    data = records_with_norms(torch.rand(20, dtype=torch.float64))
    sampler = PoissonSampler(data, 0.5, steps=5)
    with pytest.raises(ValueError, match="times the noise"):
        run(PerSampleClip(AdaptiveNorm(0.5, count_noise=noise)), sampler, steps=1)
    run(PerSampleClip(AdaptiveNorm(0.5, count_noise=0.5 * Z * 1.001)), sampler, steps=1)


@pytest.mark.parametrize("relation", list(Relation), ids=str)
@pytest.mark.parametrize("unit", list(Unit), ids=str)
def test_a_statistic_of_a_mini_set_moves_by_twice_its_bound(relation, unit):
    data = records_with_norms(torch.rand(20, dtype=torch.float64))
    bounded = PerSampleClip(AdaptiveNorm(0.5))(
        Dot(), output_itself, PoissonSampler(data, 0.5).next_batch()
    )
    bounded = dataclasses.replace(bounded, unit=unit)
    once = relation is Relation.ADD_OR_REMOVE_ONE and unit is Unit.RECORD
    assert bounded.statistic_sensitivities(relation) == [0.5 if once else 1.0]
    assert bounded.sensitivities(relation) == pytest.approx([0.5 if once else 1.0], rel=1e-10)


# What is released.


def test_the_gradients_noise_is_what_it_was_without_statistics():
    """The same seed: a parameter's noise does not depend on what else is released."""
    empty = Records(torch.zeros(0, 1).double(), torch.zeros(0), public_size=100)
    drawn = []
    for max_norm in (0.5, AdaptiveNorm(0.5, count_noise=1e6)):
        sampler = PoissonSampler(empty, expected_batch_size=10, steps=1, seed=0)
        _, model, private = run(PerSampleClip(max_norm), sampler, seed=3)
        drawn.append(float(model.w.weight.grad) * 10 / private.stds[0])
    assert drawn[0] == pytest.approx(drawn[1], rel=1e-12)


def test_the_count_is_released_with_the_declared_noise():
    """Nobody takes part: what is observed is the noise itself."""
    empty = Records(torch.zeros(0, 1).double(), torch.zeros(0), public_size=100)
    sampler = PoissonSampler(empty, expected_batch_size=10, steps=3000)
    norm = AdaptiveNorm(1.0, learning_rate=1e-3, count_noise=2.0)
    mechanism, _, _ = run(PerSampleClip(norm), sampler, z=1.0)
    (path,) = mechanism.query.thresholds
    steps = torch.tensor(path).double().log().diff() / -norm.learning_rate + norm.quantile
    noise = (steps - 0.5) * 10
    inside = noise.abs() < 4.99  # the share is clamped to [0, 1]
    assert inside.double().mean() > 0.97
    # Of a normal distribution cut at 2.5 deviations, 0.955 of the deviation is left.
    assert float(noise[inside].std()) == pytest.approx(0.955 * 2.0, rel=0.06)
    assert abs(float(noise.mean())) < 0.15


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_threshold_finds_the_quantile_of_a_known_distribution(quantile):
    """Log-normal norms, Poisson batches, from far below: within what the noise allows."""
    torch.manual_seed(0)
    norms = torch.randn(4000, dtype=torch.float64).exp()
    sampler = PoissonSampler(records_with_norms(norms), 0.1, steps=400, seed=1)
    norm = AdaptiveNorm(0.01, quantile=quantile)
    mechanism, _, _ = run(PerSampleClip(norm), sampler, seed=2)
    (path,) = mechanism.query.thresholds
    settled = torch.tensor(path[200:]).double()
    shares = torch.stack([(norms <= c).double().mean() for c in settled])
    assert float(shares.mean()) == pytest.approx(quantile, abs=0.02)
    assert float(shares.std()) < 0.06


def test_the_real_size_of_a_batch_does_not_bias_it():
    """Batches of 10 to 90 records, expected 50: the estimate is right on average."""
    torch.manual_seed(0)
    norms = torch.linspace(0.1, 2.0, 1000, dtype=torch.float64)
    data = records_with_norms(norms)
    sampler = PoissonSampler(data, 0.05, seed=4)
    query = PerSampleClip(AdaptiveNorm(0.67))
    exact, model = float((norms <= 0.67).double().mean()), Dot()
    found = []
    for _ in range(300):
        batch = sampler.next_batch()
        (count,) = query(model, output_itself, batch).statistics
        found.append(float(count.value) / batch.divisor + 0.5)
    assert float(torch.tensor(found).mean()) == pytest.approx(exact, abs=0.02)
    assert float(torch.tensor(found).std()) <= 1.2 / (2 * math.sqrt(50))


# Whose it is.


def test_two_runs_of_one_query_do_not_share_a_threshold():
    data = records_with_norms(torch.rand(50, dtype=torch.float64))
    query = PerSampleClip(AdaptiveNorm(0.5, count_noise=5.0))
    first, _, _ = run(query, PoissonSampler(data, 0.5, steps=4))
    second = Mechanism(query, PoissonSampler(data, 0.5, steps=4), Z)
    third, _, _ = run(query, PoissonSampler(data, 0.5, steps=2))
    assert [len(m.query.thresholds[0]) for m in (first, third)] == [5, 3]
    assert first.query.thresholds[0][0] == third.query.thresholds[0][0] == 0.5
    assert second.query.thresholds == query.thresholds == ()


def test_each_block_follows_its_own_norms_and_constants_stay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    inputs = torch.randn(64, 3, dtype=torch.float64)
    query = PerSampleClip(
        [AdaptiveNorm(1.0), 0.7, AdaptiveNorm(2.0, quantile=0.9)], blocks=tacit.by_layer
    )
    batch = batch_of(inputs, torch.arange(64) % 2, divisor=64.0, scheme=tacit.sampling.Poisson(0.5))
    for _ in range(200):
        bounded = query(model, nn.CrossEntropyLoss(), batch)
        for statistic in bounded.statistics:
            statistic.observe(float(statistic.value))
    assert len(bounded.statistics) == 2
    norms = [block.bound for block in bounded.blocks]
    assert norms[1] == pytest.approx(0.7, rel=1e-10)
    assert [len(path) for path in query.thresholds] == [201, 1, 201]
    for h, share in ((0, 0.5), (2, 0.9)):
        names = bounded.blocks[h].names
        rows = []
        for i in range(64):
            value = nn.functional.cross_entropy(model(inputs[i : i + 1]), batch.targets[i : i + 1])
            parameters = [dict(model.named_parameters())[n] for n in names]
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)]))
        exact = torch.stack(rows).norm(dim=1).quantile(share)
        assert norms[h] == pytest.approx(float(exact), rel=0.06)


def test_a_query_with_a_threshold_a_block_is_for_one_model():
    query = PerSampleClip(AdaptiveNorm(1.0), blocks=tacit.by_layer)
    batch = batch_of(
        torch.randn(4, 3), torch.arange(4) % 2, divisor=1.0, scheme=tacit.sampling.Poisson(0.5)
    )
    query(nn.Sequential(nn.Linear(3, 2)), nn.CrossEntropyLoss(), batch)
    with pytest.raises(ValueError, match="a query for each model"):
        query(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), nn.CrossEntropyLoss(), batch)
