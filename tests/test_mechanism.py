"""From a bounded gradient to `.grad`: the noise that arrives is the noise that is accounted for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import tacit
from tacit import (
    Budget,
    GlobalNoise,
    Ledger,
    Mechanism,
    OptimisedNoise,
    PerLayerNoise,
    PerSampleClip,
    PoissonSampler,
    Records,
    Relation,
)
from tacit.mechanism import PendingRelease
from tacit.noise import joint_noise_multiplier, noise_left
from tacit.queries.bounded_gradient import Block, BoundedGradient
from tacit.randomness import Randomness

torch.set_num_threads(1)

MAX_NORMS = [0.5, 2.0]
Z = 1.3
ALLOCATIONS = [GlobalNoise(), PerLayerNoise(), OptimisedNoise(), OptimisedNoise((1.0, 40.0))]


class TwoBlocks(nn.Module):
    """A million parameters, and half a million: enough to measure a deviation to 0.1%."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 250_000, bias=False)
        self.narrow = nn.Linear(4, 125_000, bias=False)

    def forward(self, x):
        return self.wide(x).sum(dim=1) + self.narrow(x).sum(dim=1)


def outputs_themselves(outputs, targets):
    return outputs.mean()


@pytest.fixture(scope="module")
def model():
    return TwoBlocks()


def released_noise(model, allocation, max_physical=None, relation=Relation.ADD_OR_REMOVE_ONE):
    """Two releases through the ledger: `.grad` times the divisor, less the noiseless sum."""
    torch.manual_seed(0)
    records = Records(torch.randn(4, 4), torch.zeros(4), public_size=4)
    sampler = PoissonSampler(
        records, 1.0, steps=2, expected_batch_size=37.0, max_physical_batch=max_physical
    )
    query = PerSampleClip(MAX_NORMS, blocks=tacit.by_layer)
    mechanism = Mechanism(query, sampler, Z, relation=relation, allocation=allocation)
    releases = []
    with Ledger(budget=Budget(100.0, 1e-5, relation)) as ledger:
        for batch in sampler:
            exact = query(model, outputs_themselves, batch)
            private = mechanism.privatise(model, outputs_themselves, batch)
            ledger.release(private, into=model)
            releases.append(
                [
                    (37.0 * block.parameters[0].grad - block.sums[0]).reshape(-1).double()
                    for block in exact.blocks
                ]
            )
    return exact, private.stds, releases


@pytest.mark.parametrize(
    ("allocation", "max_physical"),
    [*((a, None) for a in ALLOCATIONS), (ALLOCATIONS[0], 2), (ALLOCATIONS[-1], 1)],
    ids=repr,
)
def test_the_noise_in_grad_has_the_declared_deviation(model, allocation, max_physical):
    exact, stds, releases = released_noise(model, allocation, max_physical)
    sensitivities = exact.sensitivities(Relation.ADD_OR_REMOVE_ONE)
    assert sensitivities == pytest.approx(MAX_NORMS, rel=2.0**-7)
    assert all(d >= c for d, c in zip(sensitivities, MAX_NORMS, strict=True))
    assert list(stds) == allocation(sensitivities, [1_000_000, 500_000], Z)
    measured = [torch.cat(pieces).std().item() for pieces in zip(*releases, strict=True)]
    assert measured == pytest.approx(list(stds), rel=5e-3)
    assert joint_noise_multiplier(sensitivities, measured) == pytest.approx(Z, rel=5e-3)


def test_replacing_a_record_takes_twice_the_noise(model):
    _, once, _ = released_noise(model, GlobalNoise())
    _, twice, releases = released_noise(model, GlobalNoise(), relation=Relation.REPLACE_ONE)
    assert list(twice) == [2 * std for std in once]
    assert releases[0][0].std().item() == pytest.approx(twice[0], rel=5e-3)


def test_the_noise_is_normal_white_and_new_each_time(model):
    _, stds, releases = released_noise(model, PerLayerNoise())
    first, second = (torch.cat([b / s for b, s in zip(r, stds, strict=True)]) for r in releases)
    blocks = releases[0][0][:500_000] / stds[0], releases[0][1] / stds[1]
    assert abs(first.mean()) < 5e-3
    assert abs((first**4).mean() / 3 - 1) < 0.02
    assert abs((first[1:] * first[:-1]).mean()) < 6e-3
    assert abs((first * second).mean()) < 6e-3  # one release tells nothing of the next
    assert abs((blocks[0] * blocks[1]).mean()) < 1e-2  # nor one block of another


def small_setting(**how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    records = Records(torch.randn(20, 3), torch.arange(20) % 2, public_size=20)
    sampler = PoissonSampler(records, 0.5, steps=3, seed=0)
    query = PerSampleClip(MAX_NORMS, blocks=tacit.by_layer)
    return model, sampler, Mechanism(query, sampler, Z, **how)


def release_all(seed):
    model, sampler, mechanism = small_setting(seed=seed)
    with Ledger(budget=Budget(100.0, 1e-5)) as ledger:
        for batch in sampler:
            private = mechanism.privatise(model, nn.CrossEntropyLoss(), batch)
            ledger.release(private, into=model)
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_a_seed_makes_a_run_reproducible_and_none_does_not():
    assert torch.equal(release_all(seed=3), release_all(seed=3))
    assert not torch.equal(release_all(seed=3), release_all(seed=4))
    assert not torch.equal(release_all(seed=None), release_all(seed=None))


UNDER_NOISED = {
    "half of it": lambda d, n, z: [0.5 * s for s in GlobalNoise()(d, n, z)],
    "a millionth less": lambda d, n, z: [(1 - 1e-6) * s for s in GlobalNoise()(d, n, z)],
    "each layer as if it were alone": lambda d, n, z: [z * x for x in d],
    "one block without": lambda d, n, z: [1e6 * d[0], 0.0],
    "not a number, and a trace": lambda d, n, z: [math.nan, 1e-9],
    "not numbers at all": lambda d, n, z: [math.nan, math.nan],
}


@pytest.mark.parametrize("allocation", UNDER_NOISED.values(), ids=UNDER_NOISED.keys())
def test_an_allocation_that_adds_too_little_is_refused(allocation):
    model, sampler, mechanism = small_setting(allocation=allocation)
    with pytest.raises(ValueError, match="joint noise multiplier"):
        mechanism.privatise(model, nn.CrossEntropyLoss(), sampler.next_batch())


@pytest.mark.parametrize("wrong", [[-1e9, -1e9], [math.inf, math.inf]])
def test_deviations_that_are_none_are_refused(wrong):
    model, sampler, mechanism = small_setting(allocation=lambda d, n, z: wrong)
    with pytest.raises(ValueError, match="give finite numbers"):
        mechanism.privatise(model, nn.CrossEntropyLoss(), sampler.next_batch())


def test_an_allocation_cannot_change_the_sensitivities_that_it_is_checked_against():
    def shrinks(d, n, z):
        d[0] *= 0.01
        return GlobalNoise()(d, n, z)

    model, sampler, mechanism = small_setting(allocation=shrinks)
    with pytest.raises(TypeError):
        mechanism.privatise(model, nn.CrossEntropyLoss(), sampler.next_batch())


def test_an_allocation_is_called_and_checked_in_every_step():
    times = iter([1.0, 3.0, 0.1])

    def shares(d, n, z):
        factor = next(times)
        return [factor * s for s in GlobalNoise()(d, n, z)]

    model, sampler, mechanism = small_setting(allocation=shares)
    batches = iter(sampler)
    first, second = (
        mechanism.privatise(model, nn.CrossEntropyLoss(), next(batches)).stds for _ in range(2)
    )
    assert second == pytest.approx([3 * s for s in first])
    with pytest.raises(ValueError, match="joint noise multiplier"):
        mechanism.privatise(model, nn.CrossEntropyLoss(), next(batches))


def test_more_noise_than_accounted_for_is_allowed():
    def generous(d, n, z):
        return [2 * s for s in GlobalNoise()(d, n, z)]

    model, sampler, mechanism = small_setting(allocation=generous)
    private = mechanism.privatise(model, nn.CrossEntropyLoss(), sampler.next_batch())
    assert list(private.stds) == pytest.approx([2 * Z * math.hypot(*MAX_NORMS)] * 2, rel=2.0**-7)


@pytest.mark.parametrize("z", [1e-3, 0.7, 1.3, 40.0])
@pytest.mark.parametrize("more", [1 + 1e-9, 1.01, 3.0, 1e6])
def test_what_statistics_leave_makes_up_the_whole(z, more):
    left = noise_left(z, more * z)
    assert joint_noise_multiplier([1.0, 1.0], [left, more * z]) == pytest.approx(z, rel=1e-12)
    assert left > z


def test_without_statistics_nothing_changes():
    assert noise_left(Z, math.inf) == Z
    assert noise_left(0.0, 5.0) == 0.0  # no noise at all, which the ledger refuses
    for taken in (Z, 0.5 * Z, 0.0, math.nan):
        with pytest.raises(ValueError, match="leaves nothing"):
            noise_left(Z, taken)


@pytest.mark.parametrize("z", [-1.0, math.nan])
def test_a_multiplier_that_is_none_is_refused(z):
    _, sampler, _ = small_setting()
    with pytest.raises(ValueError, match="noise multiplier"):
        Mechanism(PerSampleClip(1.0), sampler, z)


def test_the_plan_is_what_the_sampler_and_the_query_say():
    _, sampler, mechanism = small_setting()
    plan = mechanism.plan
    assert (plan.scheme, plan.steps, plan.noise_multiplier) == (sampler.scheme, 3, Z)


class Scale(nn.Module):
    """Elementwise, since oneDNN has no bfloat16 product on every machine."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300_000, dtype=torch.bfloat16))

    def forward(self, x):
        return (x * self.weight).sum(dim=1)


def test_a_bfloat16_gradient_is_rounded_after_the_noise_and_not_before():
    """Noise with the 8 bits of a bfloat16 would be no Gaussian; the sum's own is in float64."""
    model = Scale()
    records = Records(torch.zeros(2, 1).bfloat16(), torch.zeros(2), public_size=2)
    sampler = PoissonSampler(records, 1.0, steps=1)
    mechanism = Mechanism(PerSampleClip(1.0), sampler, Z, seed=5)
    private = mechanism.privatise(model, outputs_themselves, sampler.next_batch())
    with Ledger(budget=Budget(100.0, 1e-5)) as ledger:
        ledger.release(private, into=model)
        address = (ledger.identity, *ledger.attempt(), 1, 0)
    in_float64 = Randomness(5).stream("noise", *address).normals([300_000], torch.device("cpu"))[0]
    expected = (Z * in_float64 / 2).bfloat16()
    assert model.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-2, atol=1e-6)


def test_reprs_on_the_way_to_a_release_show_no_records_and_no_sums():
    """Neither the number of records that were drawn nor a gradient without noise."""
    records = Records(torch.randn(40, 4), torch.zeros(40), public_size=40, name="mine")
    sampler = PoissonSampler(records, 1.0, steps=1, expected_batch_size=37.0)
    query = PerSampleClip(tacit.AdaptiveNorm(1.0))
    model = nn.Linear(4, 1)
    batch = next(iter(sampler))
    assert repr(batch) == "Batch('mine', divisor=37, scheme=Poisson(rate=1.0))"
    bounded = query(model, outputs_themselves, batch)
    assert bounded.statistics
    pending = Mechanism(query, sampler, Z).privatise(model, outputs_themselves, batch)
    for shown in (repr(bounded), repr(pending)):
        assert "tensor" not in shown
        assert "40" not in shown
    assert "names=('weight', 'bias'), bound=1.0" in repr(bounded)


def test_blocks_of_several_scales_masks_and_types_are_released_as_each_parameter_alone():
    sizes = [(3, 5), (5,), (7,), (2, 2), (1,)]
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])
    model[3] = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    parameters, generator = list(model), torch.Generator().manual_seed(0)
    sums = [torch.randn(p.shape, dtype=torch.float64, generator=generator) for p in parameters]
    mask = torch.tensor([True, False, True, True, False])
    first, second = (
        (tuple(parameters[i] for i in places), tuple(sums[i] for i in places))
        for places in ((0, 1), (4, 2, 3))
    )
    blocks = (
        Block(("0", "1"), *first, 1.0, active=(None, mask)),
        Block(("4", "2", "3"), *second, 2.0, factors=(1, 3, 3)),
    )
    sampler = PoissonSampler(Records(torch.ones(4, 1), torch.ones(4)), 0.5, expected_batch_size=2)
    plan = Mechanism(PerSampleClip(1.0), sampler, 1.0).plan
    pending = PendingRelease(plan, BoundedGradient(blocks, 7.0), (0.3, 0.6), Randomness(5))
    pending.draw_into(model, 1)
    stream = Randomness(5).stream("noise", 1, 0)
    for place, (std, factor) in enumerate([(0.3, 1), (0.3, 1), (0.6, 3), (0.6, 3), (0.6, 1)]):
        (noise,) = stream.normals([sums[place].numel()], torch.device("cpu"), [place])
        grad = (noise.view(sums[place].shape) * std + sums[place]) / (7.0 * factor)
        expected = grad.to(parameters[place].dtype)
        expected = torch.where(mask, expected, 0.0) if place == 1 else expected
        assert torch.equal(parameters[place].grad, expected)
