"""Released channel statistics: what one record can move, what it costs, and that they are right."""

from __future__ import annotations

import math

import dp_accounting
import pytest
import torch
from torch import Tensor

from tacit import Relation
from tacit.data import private_scaling as channel_scaler
from tacit.data import release_channel_scaler
from tacit.data.private_scaling import moments_bound, sum_of_sizes
from tacit.data.private_scaling import sum_of_channel_moments as sum_of_moments

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
SPECIAL = (0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320, 1e155)
BOUND = 1.5


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


def largest_moves(channels: int, positions: int) -> list[tuple[float, float]]:
    """Of both sums: by a record that comes, and by one that takes another's place."""
    others = torch.randn(20, channels, positions, generator=torch.Generator().manual_seed(1))
    sizes = torch.logspace(-3, 1, channels, dtype=torch.float64)
    found = []
    for total in (
        lambda x: sum_of_sizes(x, BOUND),
        lambda x: sum_of_moments(x, sizes, moments_bound(channels)).flatten(),
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
    sizes, moments = largest_moves(channels, positions)
    for (added, replaced), bound in ((sizes, BOUND), (moments, moments_bound(channels))):
        assert added <= bound * (1 + 1e-9)
        assert replaced <= 2 * bound * (1 + 1e-9)
        assert added == pytest.approx(bound)  # no smaller bound holds


def test_the_attack_finds_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        channel_scaler, "_cut", lambda rows, bound: torch.nan_to_num(rows, 0, 9, -9)
    )
    sizes, moments = largest_moves(3, 4)
    assert sizes[0] > 2 * BOUND
    assert moments[0] > 2 * moments_bound(3)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_noise_is_that_of_the_event(relation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sums with √2·z·Δ each, which are one Gaussian mechanism of multiplier z."""
    stds, true = [], channel_scaler.noisy_sum

    def noted(total, std, seed, words):
        stds.append((std, (seed, words)))
        return true(total, std, seed, words)

    monkeypatch.setattr(channel_scaler, "noisy_sum", noted)
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


def test_the_declared_size_divides_not_the_count() -> None:
    given = {"size_bound": 10.0, "noise_multiplier": 1e-9}
    ones = torch.ones(4, 1)
    whole, _ = release_channel_scaler(ones, public_size=4, **given)
    half, _ = release_channel_scaler(ones, public_size=8, **given)
    assert whole.mean.item() == pytest.approx(1.0, rel=1e-3)
    # A size of 1/2, so moments (2, 4), cut to norm 3, and half of that.
    assert half.mean.item() == pytest.approx(0.5 * 0.5 * 2 * 3 / math.sqrt(20), rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size_bound": 0.0}, "size_bound"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"public_size": 0}, "public_size"),
    ],
)
def test_what_no_release_can_be_made_with_is_refused(wrong, message) -> None:
    given = {"size_bound": 1.0, "noise_multiplier": 1.0, "public_size": 3, **wrong}
    with pytest.raises(ValueError, match=message):
        release_channel_scaler(torch.ones(3, 2), **given)


def test_no_records_give_noise_alone() -> None:
    scaler, _ = release_channel_scaler(
        torch.zeros(0, 5, 2), size_bound=1.0, noise_multiplier=1.0, public_size=10, seed=0
    )
    assert scaler.std.isfinite().all()
