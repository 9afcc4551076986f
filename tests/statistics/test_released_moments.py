"""One record moves the sum of moments by at most R, or 2R, and some records do."""

import math
from dataclasses import replace

import pytest
import torch
from norm_cases import ADD, REPLACE, generator, image_net, images

from tacit.data import Records
from tacit.statistics import ReleasedStatistics
from tacit.statistics.running_statistics import clipped_moments, moments_bound


def nasty(channels: int, positions: int) -> torch.Tensor:
    """Records at a norm: zero, huge, opposite, alternating, not finite, and at random."""
    shape = (channels, positions)
    signs = torch.ones(shape, dtype=torch.float64)
    signs[:, ::2] = -1
    some = [torch.full(shape, v, dtype=torch.float64) for v in (0, 1e-9, 1, -1, 1e30, -1e30)]
    some += [1e30 * signs, 3 * signs, 1e200 * signs]
    some += [torch.full(shape, v, dtype=torch.float64) for v in (math.nan, math.inf, -math.inf)]
    partly = torch.zeros(shape, dtype=torch.float64)
    partly[0, 0] = math.nan
    one = torch.zeros(shape, dtype=torch.float64)
    one[0] = 1e10
    some += [partly, one, -one]
    drawn = torch.randn(40, *shape, dtype=torch.float64, generator=generator())
    spread = torch.logspace(-2, 3, 40, dtype=torch.float64)[:, None, None]
    return torch.cat((torch.stack(some), drawn * spread))


@pytest.mark.parametrize(("channels", "positions"), [(1, 2), (3, 4), (64, 16)])
@pytest.mark.parametrize("max_norm", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("scale", [0.1, 1.0, 7.0])
def test_no_record_adds_more_and_no_pair_is_further_apart(channels, positions, max_norm, scale):
    each = clipped_moments(nasty(channels, positions), scale, max_norm)
    assert each.isfinite().all()
    bound = ADD.sensitivity(moments_bound(channels, max_norm))
    assert each.norm(dim=1).max() <= bound
    assert each.norm(dim=1).max() == pytest.approx(bound)  # tight: a smaller bound is broken
    apart = (each[:, None] - each[None]).norm(dim=2).max()
    assert apart <= REPLACE.sensitivity(moments_bound(channels, max_norm))
    if max_norm <= 1:
        assert apart == pytest.approx(2 * bound)  # tight too


def test_gradient_ascent_finds_no_longer_record():
    for seed in range(5):
        x = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator(seed)).requires_grad_()
        for _ in range(60):
            one, other = clipped_moments(x, 0.7, 0.9)
            goal = one.norm() + other.norm() + (one - other).norm()
            (slope,) = torch.autograd.grad(goal, x)
            with torch.no_grad():
                x += 0.3 * slope
        with torch.no_grad():
            one, other = clipped_moments(x, 0.7, 0.9)
        assert max(one.norm(), other.norm()) <= moments_bound(3, 0.9)
        assert (one - other).norm() <= 2 * moments_bound(3, 0.9)


def test_a_record_that_is_not_finite_adds_exactly_nothing():
    x = nasty(3, 4)
    each = clipped_moments(x, 1.0, 1.0)
    bad = ~x.flatten(1).isfinite().all(1)
    assert bad.sum() == 4
    assert (each[bad] == 0).all()


def neighbours(records: Records):
    """Removed, added and replaced: by huge, tiny, opposite and broken records."""
    extremes = [0.0, 1e30, -1e30, 1e4, math.nan, math.inf]
    shape = records.shape
    sign = torch.randn(shape, generator=generator(3)).sign()
    xs = [torch.full(shape, v) for v in extremes] + [1e3 * sign, -1e3 * sign]
    yield ADD, records.without(0)
    for x in xs:
        yield REPLACE, records.replaced(0, x, 0)
        inputs = torch.cat((records.inputs, x[None]))
        targets = torch.cat((records.targets, records.targets[:1]))
        yield ADD, Records(inputs, targets, public_size=records.public_size)


@pytest.mark.parametrize("place", [1, 4])
def test_neighbours_through_the_network(place):
    # In float64: a batch of another size rounds everyone's forward pass differently.
    model, records = image_net().eval().double(), images(12)
    records = replace(records, inputs=records.inputs.double())
    settings = {"noise_multiplier": 1.0, "max_norm": 0.8, "max_physical_batch": 5}
    norm = model[place]

    def total(data):
        with torch.no_grad():
            return ReleasedStatistics(data, **settings).sum_of_moments(model, norm)

    base, moved = total(records), {ADD: 0.0, REPLACE: 0.0}
    for relation, other in neighbours(records):
        distance = (total(other) - base).norm().item()
        assert distance <= relation.sensitivity(moments_bound(norm.num_features, 0.8)) + 1e-9
        moved[relation] = max(moved[relation], distance)
    assert moved[ADD] > 0.99 * ADD.sensitivity(moments_bound(norm.num_features, 0.8))
    assert moved[REPLACE] > 0.7 * REPLACE.sensitivity(moments_bound(norm.num_features, 0.8))


def test_batch_statistics_would_be_caught():
    """The planted bug: in training mode one record moves everyone's moments."""
    model, records = image_net().train(), images(40)
    release = ReleasedStatistics(records, 1.0, 0.8)
    huge = ReleasedStatistics(records.replaced(0, torch.full((2, 4, 4), 1e4), 0), 1.0, 0.8)
    with torch.no_grad():
        distance = release.sum_of_moments(model, model[4]) - huge.sum_of_moments(model, model[4])
    assert distance.norm() > REPLACE.sensitivity(moments_bound(4, 0.8))


def test_physical_batches_add_up():
    model, records = image_net().eval(), images(13)
    with torch.no_grad():
        sums = [
            ReleasedStatistics(records, 1.0, max_physical_batch=size).sum_of_moments(
                model, model[4]
            )
            for size in (1, 4, 13, 100)
        ]
    for found in sums:
        assert torch.allclose(found, sums[0], rtol=1e-5)
