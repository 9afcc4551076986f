"""One record moves the sum of moments by at most its sensitivity, and the noise is as stated."""

import itertools
import math

import dp_accounting
import pytest
import torch

from tacit.budget import Relation
from tacit.data import PublicScaler, release_statistics
from tacit.data.private_scaling import _range
from tacit.data.private_scaling import scaling_sensitivity as sensitivity
from tacit.data.private_scaling import sum_of_scaling_moments as sum_of_moments

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
LOWER, UPPER = -3.0, 5.0


def moments(inputs, lower=LOWER, upper=UPPER):
    return sum_of_moments(inputs, *_range(inputs, lower, upper))


def nasty_records(d):
    """Corners, middles, far outside, not finite, and random records of d features."""
    generator = torch.Generator().manual_seed(d)
    ends = [LOWER, 1.0, UPPER]
    corners = list(itertools.product(ends, repeat=d))[:200] if d <= 4 else []
    special = [LOWER, UPPER, 1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 0.0]
    rows = [torch.tensor(row, dtype=torch.float64) for row in corners]
    rows += [torch.full((d,), value, dtype=torch.float64) for value in special]
    mixed = torch.tensor(special, dtype=torch.float64)
    rows += [mixed[torch.randint(len(special), (d,), generator=generator)] for _ in range(100)]
    rows += [6 * torch.randn(d, dtype=torch.float64, generator=generator) for _ in range(100)]
    return torch.stack(rows)


@pytest.mark.parametrize("d", [1, 2, 3, 17, 200])
def test_one_record_moves_the_sum_at_most_its_sensitivity(d):
    others = torch.randn(30, d, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    records = nasty_records(d)
    base = moments(others)
    with_one = [moments(torch.cat([others, record[None]])) for record in records]
    added = max((total - base).norm().item() for total in with_one)
    removed = max((base - moments(others[1:])).norm().item(), 0)
    assert max(added, removed) <= sensitivity(d, ADD) * (1 + 1e-12)
    assert added == pytest.approx(sensitivity(d, ADD))  # tight: a smaller bound is broken

    flat = torch.stack(with_one).flatten(1)
    replaced = torch.cdist(flat, flat).max().item()
    assert replaced <= sensitivity(d, REPLACE) * (1 + 1e-7)  # cdist rounds
    assert replaced == pytest.approx(sensitivity(d, REPLACE))


def test_gradient_ascent_finds_no_worse_record_or_pair():
    middle, half = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)

    def t(u):
        return torch.cat((u, u**2 - 1))

    for start in range(20):
        generator = torch.Generator().manual_seed(start)
        pair = (2 * torch.rand(2, 5, generator=generator, dtype=torch.float64) - 1).requires_grad_()
        for _ in range(100):
            grads = torch.autograd.grad((t(pair[0]) - t(pair[1])).norm() + t(pair[0]).norm(), pair)
            with torch.no_grad():
                pair += 0.1 * grads[0]
                pair.clamp_(-1, 1)
        one = sum_of_moments(pair.detach()[:1], middle, half)
        other = sum_of_moments(pair.detach()[1:], middle, half)
        assert one.norm() <= sensitivity(5, ADD) + 1e-9
        assert (one - other).norm() <= sensitivity(5, REPLACE) + 1e-9


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_noise_has_the_stated_standard_deviation(relation):
    d, z, size = 20_000, 0.7, 10**9
    scaler, event = release_statistics(
        torch.empty(0, d), -1, 1, noise_multiplier=z, public_size=size, relation=relation
    )
    measured = (scaler.mean * size).std().item()
    assert measured == pytest.approx(z * sensitivity(d, relation), rel=0.03)
    assert event == dp_accounting.GaussianDpEvent(z)
    assert str(relation) in scaler.describe()
    assert "must be charged" in scaler.describe()


def test_the_second_moment_is_noised_too():
    d, z, size = 20_000, 0.5, 10**9
    x = torch.zeros(1, d)
    clean = 1 + moments(x, -1, 1)[1] / size
    scaler, _ = release_statistics(x, -1, 1, noise_multiplier=z, public_size=size)
    noisy = (scaler.std**2 + scaler.mean**2 - clean) * size
    # The variance is cut at 1, the largest that [-1, 1] allows: half of the noise is seen.
    std = z * sensitivity(d, ADD)
    assert noisy[noisy < -1e-3].pow(2).mean().sqrt().item() == pytest.approx(std, rel=0.05)


def test_the_estimate_is_right_when_the_noise_is_small():
    x = 2 + 0.5 * torch.randn(200_000, 2, 3, generator=torch.Generator().manual_seed(1))
    x[..., 1] = x[..., 1] * 2 - 1
    scaler, _ = release_statistics(
        x, LOWER, UPPER, noise_multiplier=1.0, public_size=200_000, seed=3
    )
    assert isinstance(scaler, PublicScaler)
    assert scaler.mean.shape == (2, 3)
    assert torch.allclose(scaler.mean, x.double().mean(0), atol=0.01)
    assert torch.allclose(scaler.std, x.double().std(0), atol=0.03)  # ranges cut the tails
    assert torch.allclose(scaler(x).std(0), torch.ones(2, 3), atol=0.05)


def test_chunks_add_up(monkeypatch):
    x = torch.randn(1000, 7)
    whole = moments(x)
    monkeypatch.setattr("tacit.data.private_scaling._SCALING_CHUNK", 64)
    assert torch.allclose(moments(x), whole)


def test_the_divisor_is_the_declared_size_and_never_the_count():
    x = torch.ones(1000, 1)
    scaler, _ = release_statistics(x, -1, 1, noise_multiplier=1e-6, public_size=4000)
    assert scaler.mean.item() == pytest.approx(0.25, abs=1e-5)


def test_a_constant_feature_gets_the_floor_and_not_zero():
    x = torch.ones(1000, 4)
    scaler, _ = release_statistics(x, -1, 1, noise_multiplier=2.0, public_size=1000)
    floor = 2.0 * sensitivity(4, ADD) / 1000
    assert (scaler.std**2 >= floor - 1e-12).all()
    assert (scaler.std <= 1).all()


def test_too_few_records_give_a_useless_answer_and_not_a_nan():
    scaler, _ = release_statistics(
        torch.full((1, 3), math.nan), (0, 0, 0), (1, 2, 3), noise_multiplier=50, public_size=1
    )
    assert scaler.mean.isfinite().all()
    assert (scaler.std > 0).all()


def test_fresh_noise_unless_seeded():
    def once(**kwargs):
        x = torch.zeros(10, 5)
        return release_statistics(x, -1, 1, noise_multiplier=1, public_size=100, **kwargs)[0]

    assert not torch.equal(once().mean, once().mean)
    assert torch.equal(once(seed=5).mean, once(seed=5).mean)
    assert "not private against whoever knows the seed" in once(seed=5).describe()
    assert "seed" not in once().describe()


@pytest.mark.parametrize(
    "bad",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"public_size": 0},
        {"lower": 1.0},
        {"lower": math.nan},
        {"upper": (1.0, 2.0)},
        {"relation": "neighbours"},
    ],
)
def test_what_must_be_declared_well(bad):
    given = {"lower": -1.0, "upper": 1.0, "noise_multiplier": 1.0, "public_size": 10} | bad
    with pytest.raises(ValueError, match="|".join(map(str, [*bad, "valid Relation"]))):
        release_statistics(torch.zeros(10, 3), **given)
