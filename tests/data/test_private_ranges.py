"""Released ranges: what one record moves, the noise, its cost, and that they fit the columns."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
import torch

import tacit
from tacit import Relation
from tacit.data import Numeric, Preprocessing, Schema, load_preprocessing, release_ranges
from tacit.data.private_ranges import NUM_BINS, bin_ends, ranges_of, sum_of_bins
from tacit.errors import PlanChanged

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE
SPECIAL = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 2.0**42)


def records(d: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(d)
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    rows = [torch.full((d,), value, dtype=torch.float64) for value in SPECIAL]
    rows += [special[torch.randint(len(special), (d,), generator=generator)] for _ in range(40)]
    for scale in (1e-9, 1.0, 1e9):
        rows += list(scale * torch.randn(30, d, dtype=torch.float64, generator=generator))
    return torch.stack(rows)


@pytest.mark.parametrize("d", [1, 2, 17])
def test_one_record_moves_the_bins_at_most_their_sensitivity(d):
    others = torch.randn(20, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    base = sum_of_bins(others)
    neighbours = [sum_of_bins(torch.cat([others, record[None]])) for record in records(d)]
    added = max((total - base).norm().item() for total in neighbours)
    removed = max(
        (base - sum_of_bins(torch.cat([others[:i], others[i + 1 :]]))).norm().item()
        for i in range(len(others))
    )
    assert max(added, removed) == pytest.approx(math.sqrt(d))  # the bound, and it is reached
    replaced = max((a - b).norm().item() for a, b in itertools.combinations(neighbours, 2))
    assert replaced == pytest.approx(math.sqrt(2 * d))


def test_every_value_is_in_its_bin():
    low, high = bin_ends()
    values = records(1)[:, 0]
    for value in values[values.isfinite()].tolist():
        (found,) = sum_of_bins(torch.tensor([[value]], dtype=torch.float64))[0].nonzero()[:, 0]
        inside = low[found] <= value <= high[found]
        assert inside or abs(value) >= high[-1], value  # what is larger is in the last bin
    for value in (math.nan, math.inf, -math.inf):
        assert sum_of_bins(torch.tensor([[value]])).sum() == 0


@pytest.mark.parametrize(("relation", "bound"), [(ADD, math.sqrt(50)), (REPLACE, 10.0)])
def test_the_noise_has_the_stated_standard_deviation(relation, bound, monkeypatch):
    """√2·z·Δ in both sums, so that together they are one Gaussian of multiplier z."""
    stds = []
    real = tacit.data.private_scaling.noisy_sum

    def watched(total, std, seed, address):
        noisy = real(total, std, seed, address)
        measured = (noisy - total).std().item()
        stds.append((std, measured, total.numel()))
        return noisy

    monkeypatch.setattr(tacit.data.private_scaling, "noisy_sum", watched)
    z = 0.7
    _, event = release_ranges(
        torch.zeros(0, 50), noise_multiplier=z, public_size=10, relation=relation
    )
    (bins, measured, _), (moments, _, _) = stds
    assert bins == pytest.approx(math.sqrt(2) * z * bound)
    assert measured == pytest.approx(bins, rel=0.05)  # of 50 × 63 draws
    assert moments == pytest.approx(math.sqrt(2) * z * relation.sensitivity(math.sqrt(50)))
    assert event == dp_accounting.GaussianDpEvent(z)
    assert event.relation is relation


def columns(size: int) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
    """Columns of many sizes, and the middle 90% of each."""
    r = np.random.default_rng(0)
    table = {
        "normal": r.normal(size=size),
        "around minus five": r.normal(-5, 1, size),
        "wide": np.exp(10 + r.normal(size=size)),
        "tiny": 1e-4 * r.uniform(1, 3, size),
        "mostly zero": np.where(r.random(size) < 0.7, 0, 1000 * r.random(size)),
        "truth": r.integers(0, 2, size).astype(float),
    }
    inside = {name: tuple(np.quantile(c, [0.1, 0.9])) for name, c in table.items()}
    return torch.from_numpy(np.stack(list(table.values()), axis=1)).float(), inside


@pytest.mark.parametrize("seed", range(5))
def test_ranges_fit_their_columns(seed):
    inputs, inside = columns(5000)
    stage, _ = release_ranges(inputs, noise_multiplier=5, public_size=5000, seed=seed)
    for i, (name, (low, high)) in enumerate(inside.items()):
        lower, upper = stage.lower[i].item(), stage.upper[i].item()
        slack = 1e-6
        assert lower <= low + slack, name
        assert upper >= high * 0.9 - slack, name
        assert upper - lower <= 8 * (high - low), name  # what is inside fills an eighth or more
    mapped = stage(inputs)
    assert mapped.abs().max() <= 1
    assert (mapped.std(dim=0) > 0.1).all()


def test_a_table_of_nobody_has_a_finite_range():
    for rows in (torch.zeros(0, 3), torch.full((5, 3), math.nan), torch.full((5, 3), 1e30)):
        stage, _ = release_ranges(rows, noise_multiplier=1, public_size=5)
        assert (stage.lower < stage.upper).all()
        assert torch.stack([stage.lower, stage.upper]).isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_an_empty_bin_is_hardly_ever_full(sign):
    """Noise alone does not widen a range beyond the neighbours of its fullest size."""
    counts = torch.randn(300, NUM_BINS, generator=torch.Generator().manual_seed(0)).double()
    middle = NUM_BINS // 2
    counts[:, middle + sign * 18] += 50
    lower, upper = ranges_of(counts, 1.0)
    low, high = bin_ends()
    largest, smallest = high[middle + 18], low[middle + 18]
    nearer, farther = (lower, upper) if sign > 0 else (-upper, -lower)
    assert ((farther >= largest) & (farther <= 4 * largest)).double().mean() > 0.95
    assert ((nearer <= smallest) & (nearer >= 0)).double().mean() > 0.95


def test_without_a_full_bin_the_range_is_a_usual_one():
    """A range that is noise would be as wide as the grid, and make a regression predict 10¹²."""
    noise = torch.randn(300, NUM_BINS, generator=torch.Generator().manual_seed(0)).double()
    lower, upper = ranges_of(noise, 1.0)
    assert ((lower == -4) & (upper == 4)).double().mean() > 0.95


def test_values_of_both_signs_get_a_range_about_zero():
    """Even if the noise makes one sign look fuller than the other."""
    inputs = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    for seed in range(5):
        stage, _ = release_ranges(inputs, noise_multiplier=2, public_size=200, seed=seed)
        assert (stage.lower < -0.5).all()
        assert (stage.upper > 0.5).all()


def test_the_stage_maps_its_entries_alone_and_is_saved(tmp_path):
    schema = Schema((Numeric("a", (0, 1)), Numeric("b", missing=True), Numeric("c")))
    inputs = schema.inputs({"a": [0.5, 1] * 50, "b": [3.0, None] * 50, "c": [-2.0, -3.0] * 50})
    entries = schema.released_entries
    stage, _ = release_ranges(inputs, entries, noise_multiplier=0.5, public_size=100, seed=0)
    mapped = stage(inputs)
    others = [i for i in range(inputs.shape[1]) if i not in entries]
    assert torch.equal(mapped[:, others], inputs[:, others])
    assert mapped[1, 1] == 0  # missing
    assert mapped.abs().max() <= 1
    Preprocessing((stage,)).save(tmp_path)
    assert torch.equal(load_preprocessing(tmp_path)(inputs), mapped)
    with pytest.raises(ValueError, match="no entry whose range"):
        release_ranges(inputs, (), noise_multiplier=1, public_size=1)
    with pytest.raises(ValueError, match="one row per record"):
        release_ranges(torch.zeros(3, 2, 2), noise_multiplier=1, public_size=1)


def test_a_ledger_must_have_planned_for_it():
    plan = tacit.accounting.Plan(
        tacit.sampling.Poisson(1.0), 10.0, ADD, 1, prelude=(dp_accounting.GaussianDpEvent(8.0),)
    )
    ledger = tacit.Ledger(budget=tacit.Budget(3.0, 1e-5))
    ledger.begin(plan, name="a")
    inputs, _ = columns(100)
    with pytest.raises(PlanChanged):
        release_ranges(inputs, noise_multiplier=4, public_size=100, ledger=ledger)
    release_ranges(inputs, noise_multiplier=8, public_size=100, ledger=ledger)
    with pytest.raises(tacit.errors.BudgetExceeded):
        release_ranges(inputs, noise_multiplier=8, public_size=100, ledger=ledger)
