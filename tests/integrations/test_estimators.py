"""TacitClassifier and TacitRegressor as scikit-learn and its users call them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import dp_accounting as dpa
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, make_blobs, make_regression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import estimator_checks_generator
from torch import nn

import tacit
from tacit.integrations import TacitClassifier, TacitRegressor


@pytest.fixture(scope="module")
def blobs() -> tuple[np.ndarray, np.ndarray]:
    x, y = make_blobs(n_samples=300, centers=2, random_state=0)
    return x, np.array(["no", "yes"])[y]


@pytest.fixture(scope="module")
def line() -> tuple[np.ndarray, np.ndarray]:
    x, y = make_regression(n_samples=400, n_features=3, noise=5.0, random_state=0)
    return x, 1000 + y


@pytest.mark.parametrize("estimator", [TacitClassifier(), TacitRegressor()], ids=str)
def test_check_estimator(estimator: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks of scikit-learn: none skipped, none expected to fail, no tag for poor scores."""
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")  # without it, one of the checks skips itself
    number = 0
    for made, check in estimator_checks_generator(estimator):
        check(made)
        number += 1
    assert number > 50


def test_epsilon_is_that_of_the_whole_plan(blobs: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = blobs
    model = TacitClassifier(2.0, 1e-6, steps=10, batch_size=60, public_size=300).fit(x, y)
    plan = model.run_.plan
    # By another accountant than the one that planned it: the scales are charged too.
    event = dpa.ComposedDpEvent(
        [*plan.prelude, dpa.SelfComposedDpEvent(plan.step_event, plan.steps)]
    )
    accountant = dpa.rdp.RdpAccountant()
    accountant.compose(event)
    assert len(plan.prelude) == 1
    assert 0.9 * 2 < model.epsilon_ <= 2
    assert model.epsilon_ <= accountant.get_epsilon(1e-6) < 1.3 * model.epsilon_
    assert model.delta_ == 1e-6
    assert model.ledger_epsilon_ == model.epsilon_


def test_string_classes_and_probabilities(blobs: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = blobs
    model = TacitClassifier().fit(x, y)
    assert model.classes_.tolist() == ["no", "yes"]
    assert model.score(x, y) > 0.85
    np.testing.assert_allclose(model.predict_proba(x).sum(axis=1), 1)
    assert ((model.decision_function(x) > 0) == (model.predict(x) == "yes")).all()
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))


def test_features_of_any_scale_train(blobs: tuple[np.ndarray, np.ndarray]) -> None:
    """Neither ranges nor scales are known: both are released within the same budget."""
    x, y = blobs
    assert TacitClassifier().fit(x * [1e6, 1e-3] + [5e6, 0], y).score(
        x * [1e6, 1e-3] + [5e6, 0], y
    ) > 0.8  # fmt: skip


def test_a_target_of_any_scale_trains(line: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = line
    assert TacitRegressor().fit(x, y).score(x, y) > 0.7
    declared = TacitRegressor(feature_range=(-4, 4), target_range=(500, 1500), scaling_share=0)
    model = declared.fit(x, y)
    assert model.run_.plan.prelude == ()
    assert model.score(x, y) > 0.5
    assert 500 < model.predict(x).min() < model.predict(x).max() < 1500


def test_breast_cancer_by_the_defaults() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    train, test, y_train, y_test = train_test_split(x, y, random_state=0)
    assert TacitClassifier(epsilon=3.0).fit(train, y_train).score(test, y_test) > 0.88


def test_a_mixed_column_of_declared_and_unknown_ranges(
    line: tuple[np.ndarray, np.ndarray],
) -> None:
    x, y = line
    model = TacitRegressor(feature_range=([-4, -4, -4], [4, 4, 4])).fit(x, y)
    assert len(model.run_.plan.prelude) == 2  # the target's range, and the features' moments
    assert model.epsilon_ <= 3
    assert model.score(x, y) > 0.7


def test_a_frame_in_a_pipeline(blobs: tuple[np.ndarray, np.ndarray]) -> None:
    pd = pytest.importorskip("pandas")
    x, y = blobs
    frame = pd.DataFrame(x, columns=["length", "width"])
    public = FunctionTransformer(lambda f: f / 10, feature_names_out="one-to-one")
    model = make_pipeline(public, TacitClassifier(feature_range=(-1, 1))).fit(frame, y)
    assert model.score(frame, y) > 0.85
    alone = TacitClassifier().fit(frame, y)
    assert alone.feature_names_in_.tolist() == ["length", "width"]
    with pytest.raises(ValueError, match="feature names"):
        alone.predict(frame[["width", "length"]])


SCHEMA = {
    "format": 1,
    "target": [],
    "columns": [
        {"name": "age", "kind": "numeric", "range": [0, 100]},
        {"name": "income", "kind": "numeric", "range": "release"},
        {"name": "ward", "kind": "categorical", "categories": ["north", "south"]},
    ],
}


@pytest.mark.parametrize("given", ["dict", "object", "file"])
def test_a_schema_encodes_mixed_columns(given: str, tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    age, ward = rng.uniform(20, 80, 500), rng.choice(["north", "south"], 500)
    frame = pd.DataFrame({"age": age, "income": rng.normal(3e4, 5e3, 500), "ward": ward})
    ill = (age > 50) ^ (rng.random(500) < 0.05)
    schema: object = tacit.data.Schema.from_dict(SCHEMA)
    if given == "dict":
        schema = SCHEMA
    elif given == "file":
        path = tmp_path / "schema.toml"
        path.write_text(schema.to_toml(), encoding="utf-8")  # type: ignore[attr-defined]
        schema = path
    model = clone(TacitClassifier(schema=schema)).fit(frame, ill)
    assert model.score(frame, ill) > 0.85
    assert model.feature_names_in_.tolist() == ["age", "income", "ward"]
    assert len(model.run_.plan.prelude) == 2
    # A category stays 0 or 1: only numbers are scaled.
    centre = (model.scaler_.lower + model.scaler_.upper) / 2
    assert [float(c) == 0 for c in centre] == [False, False, True, True, True]


TEXTS = {
    "age": [30.0, 40.0, 50.0] * 10,
    "code": ["1", "2.5", "nan"] * 10,  # numbers as text pass, as scikit-learn has it
    "city": ["Rome", "Oslo", "Rome"] * 10,
    "sex": ["m", None, "f"] * 10,
}


@pytest.mark.parametrize("kind", ["pandas", "category", "polars"])
@pytest.mark.parametrize("estimator", [TacitClassifier, TacitRegressor])
def test_text_without_a_schema_ends_in_a_sentence(kind: str, estimator: type) -> None:
    frame = pl.DataFrame(TEXTS) if kind == "polars" else pd.DataFrame(TEXTS)
    if kind == "category":
        frame = frame.astype({"city": "category", "sex": "category"})
    y = np.arange(30) % 2
    message = (
        "X has text in the columns 'city', 'sex', and no schema says what it means; give "
        f"{estimator.__name__}(schema=...), which tacit.data.describe(X) begins, or drop the "
        "columns"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        estimator().fit(frame, y)
    numbers = pd.DataFrame({"age": TEXTS["age"]})
    fitted = estimator(steps=1, feature_range=(0, 100)).fit(numbers, y)
    with pytest.raises(ValueError, match="X has text in the column 'age', and no schema"):
        fitted.predict(numbers.astype(str) + " years")
    # What it recommends works.
    schema = tacit.data.describe(frame).to_dict()
    for column in schema["columns"]:
        column["missing"] = True
        column |= {"categories": ["Rome", "m", "f"]} if column["kind"] == "categorical" else {}
    estimator(steps=1, schema=schema, scaling_share=0).fit(frame, y).predict(frame)


def test_a_seed_repeats_a_fit_and_is_noted(blobs: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = blobs
    secret = [TacitClassifier(steps=3).fit(x, y) for _ in range(2)]
    seeded = [TacitClassifier(steps=3, random_state=1).fit(x, y) for _ in range(2)]
    assert not np.array_equal(*(m.predict_proba(x) for m in secret))
    assert np.array_equal(*(m.predict_proba(x) for m in seeded))
    assert not any("seeded" in note for note in secret[0].run_.notes)
    assert "not private against whoever knows the seed" in seeded[0].statement_


def test_the_global_generators_are_left_alone(blobs: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = blobs
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    TacitClassifier(steps=2, hidden=(4,)).fit(x, y)
    assert torch.equal(torch.rand(3), expected)


def test_what_is_taken_as_public_is_said(blobs: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = blobs
    counted = TacitClassifier(steps=2).fit(x, y).statement_
    assert "declare it with public_size" in counted
    assert "declare them with classes" in counted
    assert "no ledger" in counted
    declared = TacitClassifier(steps=2, public_size=300, classes=["no", "yes", "maybe"]).fit(x, y)
    assert "taken as public" not in declared.statement_
    assert declared.predict_proba(x).shape == (300, 3)
    assert declared.run_.plan.noise_multiplier > 0


def test_rate_and_divisor_follow_the_declared_size(
    blobs: tuple[np.ndarray, np.ndarray],
) -> None:
    x, y = blobs
    model = TacitClassifier(steps=2, batch_size=100, public_size=1000).fit(x, y)
    assert model.run_.plan.scheme.rate == 0.1
    everyone = TacitClassifier(steps=2, batch_size=10_000, public_size=1000).fit(x, y)
    assert everyone.run_.plan.scheme.rate == 1


def test_a_network_and_a_query_of_ones_own(blobs: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = blobs

    def network(features: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, outputs))

    def query() -> tacit.PerSampleClip:
        return tacit.PerSampleClip(1.0, rule=tacit.Normalise())

    model = TacitClassifier(model=network, query=query, learning_rate=1.0).fit(x, y)
    assert model.score(x, y) > 0.8
    assert isinstance(model.network_[1], nn.ReLU)
    assert TacitClassifier(hidden=(8,)).fit(x, y).score(x, y) > 0.8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilon": 0}, "epsilon is 0"),
        ({"epsilon": "a"}, "epsilon is 'a'"),
        ({"delta": 2}, "delta is 2"),
        ({"hidden": 5}, "hidden is 5"),
        ({"hidden": (0,)}, "hidden is 0"),
        ({"query": tacit.PerSampleClip(1.0)}, "function without arguments"),
        ({"query": lambda: 3}, "function without arguments"),
        ({"model": lambda features, outputs: nn.Linear(features, 5)}, r"must be \(2, 1\)"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"max_norm": 0.0}, "0.0"),
        ({"public_size": 0}, "public_size"),
        ({"relation": "friends"}, "friends"),
        ({"scaling_share": 1.5}, "scaling_share is 1.5"),
        ({"feature_range": (1, 0)}, "feature_range"),
        ({"feature_range": ([0, 0, 0], [1, 1, 1])}, "feature_range"),
        ({"feature_range": 3}, "feature_range"),
        ({"classes": ["no"]}, "'yes'"),
        ({"classes": ["no", "maybe"]}, "'yes'"),
        ({"ledger": "nowhere.sqlite"}, "make it once"),
        ({"schema": {"columns": []}}, "format"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else value,
)
def test_wrong_parameters_end_in_a_sentence(
    options: dict, said: str, blobs: tuple[np.ndarray, np.ndarray]
) -> None:
    with pytest.raises(ValueError, match=said):
        TacitClassifier(**{"steps": 2, **options}).fit(*blobs)
