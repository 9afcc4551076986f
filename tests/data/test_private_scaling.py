"""Released scalers: what one record can move, the noise, what it costs, and that they are right."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import pytest
import torch
from torch import Tensor

import tacit
from tacit import Records, Relation
from tacit.data import PublicScaler, private_scaling, release_channel_scaler, release_statistics
from tacit.data.private_scaling import (
    Centre,
    GaussianRelease,
    moments_bound,
    noisy_sum,
    release_centre,
    sum_of_channel_moments,
    sum_of_directions,
    sum_of_moments,
    sum_of_sizes,
)
from tacit.data.scaling import unit_rows
from tacit.randomness import Randomness

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
LOWER, UPPER = -3.0, 5.0
SPECIAL = (0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320, 1e155)
BOUND = 1.5  # of channel sizes
RELEASES = {
    "statistics": lambda x, **more: release_statistics(x, -1.0, 1.0, **more),
    "centre": release_centre,
    "channels": lambda x, **more: release_channel_scaler(x, size_bound=1.0, **more),
}
each = pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)


def moments(inputs, lower=LOWER, upper=UPPER):
    middle, half = (upper + lower) / 2, (upper - lower) / 2
    ones = torch.ones(inputs[0].numel() if len(inputs) else 1, dtype=torch.float64)
    return sum_of_moments(inputs, middle * ones, half * ones)


def nasty(channels: int, positions: int) -> Tensor:
    draws = torch.Generator().manual_seed(channels)
    shape = (channels, positions)
    values = torch.tensor(SPECIAL, dtype=torch.float64)
    rows = [torch.full(shape, value, dtype=torch.float64) for value in SPECIAL]
    rows += [values[torch.randint(len(values), shape, generator=draws)] for _ in range(40)]
    for scale in (0.01, 1.0, 100.0):
        rows += [
            scale * torch.randn(shape, generator=draws, dtype=torch.float64) for _ in range(20)
        ]
        rows.append(scale * torch.eye(channels, positions, dtype=torch.float64))
    return torch.stack(rows)


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
def test_one_record_moves_the_moments_at_most_their_sensitivity(d):
    others = torch.randn(30, d, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    records = nasty_records(d)
    base = moments(others)
    with_one = [moments(torch.cat([others, record[None]])) for record in records]
    added = max((total - base).norm().item() for total in with_one)
    removed = max((base - moments(others[1:])).norm().item(), 0)
    assert max(added, removed) <= math.sqrt(d) * (1 + 1e-12)
    assert added == pytest.approx(math.sqrt(d))  # tight: a smaller bound is broken

    flat = torch.stack(with_one).flatten(1)
    replaced = torch.cdist(flat, flat).max().item()
    assert replaced <= 2 * math.sqrt(d) * (1 + 1e-7)  # cdist rounds
    assert replaced == pytest.approx(2 * math.sqrt(d))


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
        assert one.norm() <= math.sqrt(5) + 1e-9
        assert (one - other).norm() <= 2 * math.sqrt(5) + 1e-9


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_noise_has_the_stated_standard_deviation(relation):
    d, z, size = 20_000, 0.7, 10**9
    scaler, event = release_statistics(
        torch.empty(0, d), -1, 1, noise_multiplier=z, public_size=size, relation=relation
    )
    measured = (scaler.mean * size).std().item()
    assert measured == pytest.approx(z * relation.sensitivity(math.sqrt(d)), rel=0.03)
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
    std = z * math.sqrt(d)
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


def test_chunks_add_up():
    x = torch.randn(700, 7001)  # more than are converted to float64 at once
    assert torch.allclose(moments(x), moments(x[:350]) + moments(x[350:]))


def test_the_divisor_is_the_declared_size_and_never_the_count():
    x = torch.ones(1000, 1)
    scaler, _ = release_statistics(x, -1, 1, noise_multiplier=1e-6, public_size=4000)
    assert scaler.mean.item() == pytest.approx(0.25, abs=1e-5)


def test_a_constant_feature_gets_the_floor_and_not_zero():
    x = torch.ones(1000, 4)
    scaler, _ = release_statistics(x, -1, 1, noise_multiplier=2.0, public_size=1000)
    floor = 2.0 * 2 / 1000
    assert (scaler.std**2 >= floor - 1e-12).all()
    assert (scaler.std <= 1).all()


def test_too_few_records_give_a_useless_answer_and_not_a_nan():
    scaler, _ = release_statistics(
        torch.full((1, 3), math.nan), (0, 0, 0), (1, 2, 3), noise_multiplier=50, public_size=1
    )
    assert scaler.mean.isfinite().all()
    assert (scaler.std > 0).all()


def largest_centre_moves(d: int) -> tuple[float, float]:
    """By a record that comes, and by one that takes another's place."""
    others = torch.randn(20, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    base = sum_of_directions(others)
    totals = torch.stack(
        [sum_of_directions(torch.cat([others, row[None]])) for row in nasty(d, 1).flatten(1)]
    )
    replaced = (totals[:, None] - totals[None]).norm(dim=2).max().item()
    return (totals - base).norm(dim=1).max().item(), replaced


@pytest.mark.parametrize("d", [1, 3, 50])
def test_one_record_moves_the_centre_at_most_its_sensitivity(d: int) -> None:
    added, replaced = largest_centre_moves(d)
    assert added <= 1 + 1e-9
    assert replaced <= 2 + 2e-9
    assert (added, replaced) == pytest.approx((1, 2))  # no smaller bound holds


def test_the_attack_on_the_centre_finds_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        private_scaling, "unit_rows", lambda rows: torch.nan_to_num(rows).clamp(-9, 9)
    )
    assert largest_centre_moves(3)[0] > 1.5


def test_huge_records_keep_their_direction_and_broken_ones_count_for_nothing() -> None:
    rows = torch.tensor([[3e38, 0.0], [1e-44, 0.0], [math.nan, 1.0], [0.0, 0.0], [3.0, 4.0]])
    wanted = torch.tensor([[1.0, 0], [1, 0], [0, 0], [0, 0], [0.6, 0.8]])
    torch.testing.assert_close(unit_rows(rows), wanted)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_noise_in_the_centre_is_that_of_the_event(relation: Relation) -> None:
    """Of 4,000 coordinates: the standard deviation is z·Δ/N within three per cent."""
    found, event = release_centre(
        torch.zeros(3, 4000), noise_multiplier=2.5, public_size=10, relation=relation, seed=0
    )
    assert event == dp_accounting.GaussianDpEvent(2.5)
    assert found.centre.std().item() == pytest.approx(0.25 * relation.sensitivity(1.0), rel=0.03)
    assert "seeded" in found.describe()


def test_the_declared_size_divides_the_centre() -> None:
    found, _ = release_centre(torch.ones(4, 1), noise_multiplier=1e-9, public_size=8)
    assert found.centre.item() == pytest.approx(0.5)


def test_centred_records_lie_on_the_sphere_and_depend_on_themselves() -> None:
    inputs = torch.rand(7, 3, 2, 2) + 1
    moved = Centre(torch.full((3, 2, 2), 0.2), "declared")
    whole = moved(inputs)
    assert whole.flatten(1).norm(dim=1) == pytest.approx([1] * 7, abs=1e-5)
    torch.testing.assert_close(whole[2:3], moved(inputs[2:3]))


def test_the_trainer_charges_it_with_the_steps() -> None:
    inputs = torch.randn(60, 4) + 2
    found, event = release_centre(inputs, noise_multiplier=3.0, public_size=60)
    records = Records(found(inputs), torch.randint(2, (60,)), num_classes=2, public_size=60)
    model = torch.nn.Linear(4, 2)
    trainer = tacit.Trainer(
        model,
        tacit.losses.CrossEntropy(),
        tacit.PerSampleClip(1.0),
        tacit.PoissonSampler(records, 0.5, 4),
        torch.optim.SGD(model.parameters(), lr=0.1),
        tacit.Budget(3.0, 1e-5),
        ledger=tacit.LedgerRun(prelude=(event,)),
        callbacks=(),
    )
    run = trainer.fit()
    assert run.epsilon <= 3.0
    bare = tacit.epsilon(run.plan.noise_multiplier, tacit.sampling.Poisson(0.5), 4, delta=1e-5)
    assert bare < run.epsilon - 0.1  # the steps alone cost less than the run is charged
    with_centre = tacit.epsilon(
        run.plan.noise_multiplier, tacit.sampling.Poisson(0.5), 4, delta=1e-5, prelude=(event,)
    )
    assert run.epsilon == pytest.approx(with_centre, rel=1e-6)


def test_a_secret_key_repeats_a_release_and_is_no_seed():
    inputs, given = torch.randn(50, 3), {"noise_multiplier": 1.0, "public_size": 50}
    first, other = (
        release_statistics(inputs, -4, 4, key=key * 32, **given)[0] for key in (b"a", b"b")
    )
    again, _ = release_statistics(inputs, -4, 4, key=b"a" * 32, **given)
    free, _ = release_statistics(inputs, -4, 4, **given)
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.std, again.std)
    assert not torch.equal(first.mean, other.mean)
    assert first.origin == free.origin
    for wrong in ({"key": b"a" * 31}, {"key": b"a" * 32, "seed": 1}):
        with pytest.raises(ValueError, match="32 secret random bytes, or a seed"):
            release_statistics(inputs, -4, 4, **wrong, **given)
    release = GaussianRelease("a sum", key=b"a" * 32, **given)
    assert "aaaa" not in repr(release)


def test_one_seed_is_not_one_noise():
    """A run that is given the same number must not repeat this noise: it would cancel."""
    total = torch.zeros(1000)
    found = noisy_sum(total, 1.0, 3, "a sum")
    assert torch.equal(found, noisy_sum(total, 1.0, 3, "a sum"))
    other = noisy_sum(total, 1.0, 3, "another")
    assert float((found * other).mean().abs()) < 0.2
    gradients = Randomness(3).stream("noise", 0).normals([1000], torch.device("cpu"))[0]
    assert float((found * gradients).mean().abs()) < 0.2


def test_one_seed_with_another_deviation_is_other_noise():
    """Else two releases of one sum would be two equations for the sum and the noise."""
    total = torch.ones(1000, dtype=torch.float64)
    a, b = (noisy_sum(total, std, 3, "a sum") for std in (1.0, 3.0))
    assert float(((3 * a - b) / 2 - total).norm()) > 10


def largest_channel_moves(channels: int, positions: int) -> list[tuple[float, float]]:
    """Of both sums: by a record that comes, and by one that takes another's place."""
    others = torch.randn(20, channels, positions, generator=torch.Generator().manual_seed(1))
    sizes = torch.logspace(-3, 1, channels, dtype=torch.float64)
    found = []
    for total in (
        lambda x: sum_of_sizes(x, BOUND),
        lambda x: sum_of_channel_moments(x, sizes, moments_bound(channels)).flatten(),
    ):
        base = total(others.double())
        each = [
            total(torch.cat([others.double(), row[None]])) for row in nasty(channels, positions)
        ]
        totals = torch.stack(each)
        replaced = (totals[:, None] - totals[None]).norm(dim=2).max().item()
        found.append(((totals - base).norm(dim=1).max().item(), replaced))
    return found


@pytest.mark.parametrize(("channels", "positions"), [(1, 1), (3, 4), (30, 2)])
def test_one_record_moves_the_sums_at_most_their_sensitivities(channels, positions) -> None:
    sizes, moments = largest_channel_moves(channels, positions)
    for (added, replaced), bound in ((sizes, BOUND), (moments, moments_bound(channels))):
        assert added <= bound * (1 + 1e-9)
        assert replaced <= 2 * bound * (1 + 1e-9)
        assert added == pytest.approx(bound)  # no smaller bound holds


def test_the_attack_on_channels_finds_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        private_scaling, "_cut", lambda rows, bound: torch.nan_to_num(rows, 0, 9, -9)
    )
    sizes, moments = largest_channel_moves(3, 4)
    assert sizes[0] > 2 * BOUND
    assert moments[0] > 2 * moments_bound(3)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_noise_in_channels_is_that_of_the_event(
    relation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sums with √2·z·Δ each, which are one Gaussian mechanism of multiplier z."""
    stds, true = [], private_scaling.noisy_sum

    def noted(total, std, seed, address):
        stds.append((std, (seed, address)))
        return true(total, std, seed, address)

    monkeypatch.setattr(private_scaling, "noisy_sum", noted)
    _, event = release_channel_scaler(
        torch.zeros(3, 7, 2), size_bound=BOUND, noise_multiplier=2.5, public_size=10,
        relation=relation, seed=4,
    )  # fmt: skip
    times = 1 if relation is ADD else 2
    root = math.sqrt(2) * 2.5 * times
    assert [std for std, _ in stds] == pytest.approx([root * BOUND, root * moments_bound(7)])
    assert stds[0][1] != stds[1][1]  # two draws, not one twice
    assert event == dp_accounting.GaussianDpEvent(2.5)
    whole = dp_accounting.pld.PLDAccountant()
    whole.compose(dp_accounting.GaussianDpEvent(2.5 * math.sqrt(2)), 2)
    one = dp_accounting.pld.PLDAccountant().compose(event)
    assert whole.get_epsilon(1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-3)


def test_channels_of_all_sizes_are_standardised() -> None:
    """Sizes from 0.003 to 1, as scattering features have them: no channel drowns."""
    draws = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2.5, 0, 40)[:, None, None]
    inputs = (scale * (1 + 0.6 * torch.randn(20_000, 40, 2, 2, generator=draws))).abs()
    scaler, _ = release_channel_scaler(
        inputs, size_bound=3.0, noise_multiplier=5.0, public_size=len(inputs), seed=2
    )
    done = scaler(inputs)
    assert done.mean((0, 2, 3)).abs().max() < 0.15
    assert (done.std((0, 2, 3)) - 1).abs().max() < 0.15


def test_without_noise_and_cuts_it_is_the_usual_mean_and_std() -> None:
    inputs = torch.randn(500, 50, 3, generator=torch.Generator().manual_seed(2)) * 0.7 + 0.2
    scaler, _ = release_channel_scaler(
        inputs, size_bound=100.0, noise_multiplier=1e-7, public_size=500
    )
    assert "not private" not in scaler.describe()
    done = scaler(inputs)
    torch.testing.assert_close(done.mean((0, 2)), torch.zeros(50), atol=1e-3, rtol=0)
    torch.testing.assert_close(done.std((0, 2)), torch.ones(50), atol=1e-2, rtol=0)


def test_the_declared_size_divides_channel_sums() -> None:
    given = {"size_bound": 10.0, "noise_multiplier": 1e-9}
    ones = torch.ones(4, 1)
    whole, _ = release_channel_scaler(ones, public_size=4, **given)
    half, _ = release_channel_scaler(ones, public_size=8, **given)
    assert whole.mean.item() == pytest.approx(1.0, rel=1e-3)
    # A size of 1/2, so moments (2, 4), cut to norm 3, and half of that.
    assert half.mean.item() == pytest.approx(0.5 * 0.5 * 2 * 3 / math.sqrt(20), rel=1e-3)


def test_no_records_give_noise_alone() -> None:
    scaler, _ = release_channel_scaler(
        torch.zeros(0, 5, 2), size_bound=1.0, noise_multiplier=1.0, public_size=10, seed=0
    )
    assert scaler.std.isfinite().all()


@each
def test_fresh_noise_unless_seeded(release) -> None:
    def once(**more):
        return release(torch.ones(10, 5), noise_multiplier=1, public_size=100, **more)[0]

    def value(made) -> Tensor:
        return made.centre if isinstance(made, Centre) else made.mean

    assert not torch.equal(value(once()), value(once()))
    assert torch.equal(value(once(seed=5)), value(once(seed=5)))
    assert "not private against whoever knows the seed" in once(seed=5).describe()
    assert "seed" not in once().describe()


@each
@pytest.mark.parametrize(
    "bad",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"noise_multiplier": math.inf},
        {"public_size": 0},
        {"relation": "neighbours"},
    ],
)
def test_wrong_arguments_are_refused(release, bad) -> None:
    with pytest.raises(ValueError, match="|".join([*bad, "valid Relation"])):
        release(torch.zeros(10, 3), **{"noise_multiplier": 1.0, "public_size": 10} | bad)


@pytest.mark.parametrize("bad", [{"lower": 1.0}, {"lower": math.nan}, {"upper": (1.0, 2.0)}])
def test_wrong_ranges_are_refused(bad) -> None:
    given = {"lower": -1.0, "upper": 1.0, "noise_multiplier": 1.0, "public_size": 10} | bad
    with pytest.raises(ValueError, match="|".join(bad)):
        release_statistics(torch.zeros(10, 3), **given)


def test_wrong_size_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="size_bound"):
        release_channel_scaler(
            torch.ones(3, 2), size_bound=0.0, noise_multiplier=1.0, public_size=3
        )
