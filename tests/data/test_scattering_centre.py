"""A released centre: one record moves it at most by its sensitivity, and it is charged for."""

from __future__ import annotations

import math

import dp_accounting
import pytest
import torch

import tacit
from tacit import Records, Relation
from tacit.data import private_scaling as centre
from tacit.data.private_scaling import Centre, noisy_sum, on_sphere, release_centre, sum_on_sphere
from tacit.data.private_scaling import centre_sensitivity as sensitivity
from tacit.randomness import Randomness

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
SPECIAL = (0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-320)


def nasty(d: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(d)
    values = torch.tensor(SPECIAL, dtype=torch.float64)
    rows = [torch.full((d,), value, dtype=torch.float64) for value in SPECIAL]
    rows += [values[torch.randint(len(values), (d,), generator=generator)] for _ in range(60)]
    rows += [torch.randn(d, dtype=torch.float64, generator=generator) for _ in range(60)]
    return torch.stack(rows)


def largest_moves(d: int) -> tuple[float, float]:
    """By a record that comes, and by one that takes another's place."""
    others = torch.randn(20, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    base = sum_on_sphere(others)
    totals = torch.stack([sum_on_sphere(torch.cat([others, row[None]])) for row in nasty(d)])
    replaced = (totals[:, None] - totals[None]).norm(dim=2).max().item()
    return (totals - base).norm(dim=1).max().item(), replaced


@pytest.mark.parametrize("d", [1, 3, 50])
def test_one_record_moves_the_sum_at_most_its_sensitivity(d: int) -> None:
    added, replaced = largest_moves(d)
    assert added <= sensitivity(ADD) * (1 + 1e-9)
    assert replaced <= sensitivity(REPLACE) * (1 + 1e-9)
    assert (added, replaced) == pytest.approx((1, 2))  # no smaller bound holds


def test_the_attack_finds_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(centre, "on_sphere", lambda rows: torch.nan_to_num(rows).clamp(-9, 9))
    assert largest_moves(3)[0] > 1.5


def test_huge_records_keep_their_direction_and_broken_ones_count_for_nothing() -> None:
    rows = torch.tensor([[3e38, 0.0], [1e-44, 0.0], [math.nan, 1.0], [0.0, 0.0], [3.0, 4.0]])
    wanted = torch.tensor([[1.0, 0], [1, 0], [0, 0], [0, 0], [0.6, 0.8]])
    torch.testing.assert_close(on_sphere(rows), wanted)


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_the_noise_is_that_of_the_event(relation: Relation) -> None:
    """Of 4,000 coordinates: the standard deviation is z·Δ/N within three per cent."""
    found, event = release_centre(
        torch.zeros(3, 4000), noise_multiplier=2.5, public_size=10, relation=relation, seed=0
    )
    assert event == dp_accounting.GaussianDpEvent(2.5)
    assert found.centre.std().item() == pytest.approx(0.25 * sensitivity(relation), rel=0.03)
    assert "seeded" in found.describe()


def test_the_declared_size_divides_not_the_count() -> None:
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"noise_multiplier": 0.0}, "above 0"),
        ({"public_size": 0}, "positive"),
    ],
)
def test_wrong_numbers_are_refused(wrong: dict, words: str) -> None:
    given = {"noise_multiplier": 1.0, "public_size": 3, **wrong}
    with pytest.raises(ValueError, match=words):
        release_centre(torch.zeros(3, 2), **given)


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
