"""Released category counts: what one record moves, the noise, its cost, and what is merged."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import numpy as np
import pytest
import torch

import tacit
from tacit import Relation
from tacit.data import (
    Categorical,
    MergedCategories,
    Numeric,
    Preprocessing,
    Schema,
    load_preprocessing,
    private_counts,
    release_category_counts,
)
from tacit.data.private_counts import categories_of, sum_of_categories
from tacit.errors import BudgetExceeded

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


def schema_of(d: int) -> Schema:
    """d categorical columns, with and without "(other)" and blanks, among numbers."""
    columns = []
    for i in range(d):
        names = tuple("abcde"[: 2 + i % 4])
        unknown = "other" if i % 2 else "error"
        columns += [
            Categorical(f"c{i}", names, unknown=unknown, missing=i % 3 == 0),
            Numeric(f"x{i}", (0, 1)),
        ]
    return Schema(tuple(columns))


def attacks(width: int) -> torch.Tensor:
    """Rows of every kind: of one category, of several at once, and of what no schema makes."""
    generator = torch.Generator().manual_seed(width)
    rows = [torch.full((width,), v) for v in (0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 0.5)]
    rows += [torch.full((width,), 1e30), torch.full((width,), 0.5001)]
    rows += list(torch.eye(width))
    rows += list(torch.randn(50, width, generator=generator))
    rows += list((torch.rand(50, width, generator=generator) < 0.5).float())
    return torch.stack(rows)


@pytest.mark.parametrize("d", [1, 2, 9])
def test_one_record_moves_the_counts_at_most_their_sensitivity(d: int) -> None:
    schema = schema_of(d)
    columns, width = categories_of(schema), len(schema.feature_names)
    assert len(columns) == d
    first = torch.zeros(width)
    second = torch.zeros(width)
    for column in columns:
        first[column.first], second[column.first + 1] = 1.0, 1.0
    rows = torch.cat([attacks(width), first[None], second[None]])
    others = attacks(width)[:7]
    base = sum_of_categories(others, columns)
    totals = [sum_of_categories(torch.cat([others, row[None]]), columns) for row in rows]
    added = max((total - base).norm().item() for total in totals)
    assert added == pytest.approx(math.sqrt(d))  # the bound, and it is reached
    replaced = max((a - b).norm().item() for a, b in itertools.combinations(totals, 2))
    assert replaced == pytest.approx(math.sqrt(2 * d))
    for total in totals:  # in each column one count moves by one, or none does
        moved, start = total - base, 0
        for column in columns:
            own = moved[start : start + column.number]
            assert own.abs().sum() <= 1
            assert own.min() >= 0
            start += column.number


def test_counts_are_those_of_the_cells() -> None:
    schema = Schema(
        (
            Numeric("x", (0, 1)),
            Categorical("c", ("a", "b"), missing=True),
            Categorical("d", ("u", "v", "w"), unknown="error"),
        )
    )
    table = {"x": [0.5] * 6, "c": ["a", "a", "b", "z", None, "a"], "d": list("uvvvww")}
    inputs = schema.inputs(table)
    counts = sum_of_categories(inputs, categories_of(schema))
    assert counts.tolist() == [3, 1, 1, 3, 2]


@pytest.mark.parametrize(("relation", "bound"), [(ADD, math.sqrt(40)), (REPLACE, math.sqrt(80))])
def test_the_noise_has_the_stated_standard_deviation(relation, bound, monkeypatch) -> None:
    stds = []
    real = tacit.data.private_scaling.noisy_sum

    def watched(total, std, seed, address):
        noisy = real(total, std, seed, address)
        stds.append((std, (noisy - total).std().item()))
        return noisy

    monkeypatch.setattr(tacit.data.private_scaling, "noisy_sum", watched)
    names = tuple(map(str, range(100)))
    schema = Schema(tuple(Categorical(f"c{i}", names) for i in range(40)))
    inputs = torch.zeros(0, len(schema.feature_names))
    _, event = release_category_counts(
        inputs, schema, noise_multiplier=0.7, public_size=10, relation=relation
    )
    ((std, measured),) = stds
    assert std == pytest.approx(0.7 * bound)
    assert measured == pytest.approx(std, rel=0.05)  # of 4,000 draws
    assert event == dp_accounting.GaussianDpEvent(0.7)
    assert event.relation is relation


def cities(size: int = 2000) -> tuple[Schema, dict[str, list[str]], torch.Tensor]:
    r = np.random.default_rng(0)
    common, rare = ["Rome", "Oslo"], ["Ulm", "Bonn", "Cork"]
    names = r.choice(common + rare, size, p=[0.49, 0.49, 0.01, 0.005, 0.005]).tolist()
    codes = r.choice(["1", "2", "3", "4"], size, p=[0.6, 0.39, 0.005, 0.005]).tolist()
    schema = Schema(
        (
            Categorical("city", (*common, *rare), missing=True),
            Categorical("code", ("1", "2", "3", "4"), unknown="error"),
        )
    )
    table = {"city": names, "code": codes}
    return schema, table, schema.inputs(table)


@pytest.mark.parametrize("seed", range(3))
def test_rare_categories_of_a_column_share_an_input(seed: int) -> None:
    schema, table, inputs = cities()
    names = schema.feature_names
    stage, _ = release_category_counts(
        inputs, schema, noise_multiplier=3, public_size=2000, seed=seed, rare_below=100
    )
    merged = stage(inputs)
    assert merged.shape == inputs.shape
    assert torch.equal(merged.sum(dim=1), inputs.sum(dim=1))
    assert ((merged == 0) | (merged == 1)).all()
    rare_city = torch.tensor([name in ("Ulm", "Bonn", "Cork") for name in table["city"]])
    assert torch.equal(merged[:, names.index("city=(other)")].bool(), rare_city)
    rare_code = torch.tensor([code in "34" for code in table["code"]])
    assert torch.equal(merged[:, names.index("code=3")].bool(), rare_code)  # no "(other)" there
    for name in ("city=Ulm", "city=Bonn", "city=Cork", "code=4"):
        assert (merged[:, names.index(name)] == 0).all()
    for name in ("city=Rome", "city=Oslo", "code=1", "code=2"):
        assert torch.equal(merged[:, names.index(name)], inputs[:, names.index(name)])
    true = sum_of_categories(inputs, categories_of(schema))
    assert (stage.counts - true).abs().max() < 6 * 3 * math.sqrt(2)
    assert stage.describe().startswith("5 of 9 categories have a noisy count below 100")


def test_nothing_rare_changes_nothing_and_records_stay_apart() -> None:
    schema, _, inputs = cities(60)
    stage, _ = release_category_counts(
        inputs, schema, noise_multiplier=0.01, public_size=60, seed=0, rare_below=0.5
    )
    kept = (stage.counts >= 0.5).tolist()
    assert len(stage.entries) == kept.count(False) - (0 if all(kept[5:]) else 1)
    whole = stage(inputs)
    assert torch.equal(torch.cat([stage(inputs[i : i + 1]) for i in range(60)]), whole)
    before = inputs.clone()
    stage(inputs)
    assert torch.equal(inputs, before)


def test_the_usual_threshold_is_public() -> None:
    schema, _, inputs = cities(50)
    for size, z, threshold in ((10_000, 1.0, 100.0), (100, 5.0, 4 * 5 * math.sqrt(2))):
        for records in (inputs, inputs[:1]):
            stage, _ = release_category_counts(
                records, schema, noise_multiplier=z, public_size=size
            )
            assert stage.threshold == pytest.approx(threshold)


def test_a_folder_keeps_the_counts(tmp_path) -> None:
    schema, _, inputs = cities()
    stage, _ = release_category_counts(inputs, schema, noise_multiplier=3, public_size=2000)
    Preprocessing((stage,)).save(tmp_path)
    (found,) = load_preprocessing(tmp_path).stages
    assert isinstance(found, MergedCategories)
    assert torch.equal(found.counts, stage.counts)
    assert torch.equal(found(inputs), stage(inputs))
    nothing = MergedCategories(
        stage.entries[:0], stage.into[:0], stage.counted, stage.counts, 1.0, "made up"
    )
    Preprocessing((nothing,)).save(tmp_path)
    (found,) = load_preprocessing(tmp_path).stages
    assert torch.equal(found(inputs), inputs)


def test_a_claim_is_made_before_a_record_is_read(tmp_path, monkeypatch) -> None:
    schema, _, inputs = cities(60)
    book = tacit.Ledger(tmp_path / "book.sqlite", tacit.Budget(5.0, 1e-3))
    plan = tacit.accounting.Plan(
        tacit.sampling.Poisson(0.5), 3.0, ADD, 2, prelude=(dp_accounting.GaussianDpEvent(2.0),)
    )
    book.begin(plan, name="r", budget=tacit.Budget(5.0, 1e-3))
    how = {"noise_multiplier": 2.0, "public_size": 60, "ledger": book}
    release_category_counts(inputs, schema, **how)
    monkeypatch.setattr(private_counts, "sum_of_categories", None)
    with pytest.raises(BudgetExceeded):
        release_category_counts(inputs, schema, **how)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": torch.zeros(5, 3)}, "give schema.inputs"),
        ({"schema": Schema((Numeric("x"),))}, "no categorical column"),
        ({"rare_below": -1.0}, "above 0"),
        ({"noise_multiplier": 0.0}, "above 0"),
    ],
)
def test_mistakes(change, words) -> None:
    schema, _, inputs = cities(60)
    given = {"inputs": inputs, "schema": schema, "noise_multiplier": 2.0, "public_size": 60}
    with pytest.raises(ValueError, match=words):
        release_category_counts(**(given | change))
