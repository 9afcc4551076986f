"""Every fit of a search is charged to one ledger, and refused past its budget."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import make_blobs
from sklearn.exceptions import FitFailedWarning
from sklearn.model_selection import GridSearchCV, cross_val_score

import tacit
from tacit.errors import BudgetExceeded
from tacit.integrations import TacitClassifier
from tacit.ledger import read_statement


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    return make_blobs(n_samples=300, centers=2, random_state=0)


def new_ledger(path: Path, epsilon: float) -> str:
    tacit.Ledger(path, tacit.Budget(epsilon, 1e-5)).close()
    return str(path)


def test_cross_validation_charges_every_fit(
    data: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    ledger = new_ledger(tmp_path / "data.sqlite", 6.0)
    model = TacitClassifier(epsilon=1.0, steps=10, ledger=ledger)
    scores = cross_val_score(model, *data, cv=3, error_score="raise")
    assert len(scores) == 3
    statement = read_statement(ledger)
    assert [round(run.epsilon, 2) for run in statement.runs] == [1.0, 1.0, 1.0]
    assert 1.0 < statement.epsilon_charged < 6.0
    fitted = model.fit(*data)
    assert fitted.epsilon_ <= 1.0
    assert fitted.ledger_epsilon_ == 6.0  # what the ledger guarantees of several runs
    assert "no ledger" not in fitted.statement_


def test_a_fit_past_the_budget_is_refused_before_it_begins(
    data: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    ledger = new_ledger(tmp_path / "data.sqlite", 3.0)
    model = TacitClassifier(epsilon=2.0, steps=10, ledger=ledger).fit(*data)
    before = read_statement(ledger)
    with pytest.raises(BudgetExceeded, match="do not fit into what is left"):
        model.fit(*data)
    after = read_statement(ledger)
    assert after == before
    with pytest.raises(BudgetExceeded):
        TacitClassifier(epsilon=4.0, steps=10, ledger=ledger).fit(*data)
    smaller = TacitClassifier(epsilon=0.5, steps=10, ledger=ledger).fit(*data)
    assert smaller.ledger_epsilon_ == 3.0


def test_a_search_that_runs_out_says_so(
    data: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    grid = {"learning_rate": [0.1, 0.2, 0.5]}
    ledger = new_ledger(tmp_path / "data.sqlite", 3.0)
    model = TacitClassifier(epsilon=1.0, steps=10, ledger=ledger)
    with pytest.raises(BudgetExceeded, match="nothing is charged"):
        GridSearchCV(model, grid, cv=2, error_score="raise").fit(*data)
    spent = read_statement(ledger).epsilon_charged
    assert spent <= 3.0
    # By default scikit-learn scores a refused fit as NaN, with a warning, and refits the best.
    other = new_ledger(tmp_path / "other.sqlite", 2.0)
    search = GridSearchCV(model.set_params(ledger=other), grid, cv=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(BudgetExceeded):
            search.fit(*data)
    failed = [str(w.message) for w in caught if w.category is FitFailedWarning]
    assert failed
    assert "do not fit into what is left" in failed[0]


def test_a_search_within_the_budget(data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path / "data.sqlite", 8.0)
    model = TacitClassifier(epsilon=1.0, steps=10, ledger=ledger, random_state=0)
    search = GridSearchCV(model, {"learning_rate": [0.1, 0.5]}, cv=2, error_score="raise")
    search.fit(*data)
    assert len(read_statement(ledger).runs) == 5
    assert search.best_estimator_.epsilon_ <= 1.0


def test_a_fit_that_another_overtakes_is_refused(
    data: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    """Two fits at once both found room: the one that runs out raises, with no half-fitted model."""
    ledger = new_ledger(tmp_path / "data.sqlite", 3.0)

    class Overtake(tacit.Callback):
        def on_step(self, trainer: tacit.Trainer, step: int) -> None:
            if step == 1:
                TacitClassifier(epsilon=2.2, steps=5, ledger=ledger).fit(*data)

    model = TacitClassifier(epsilon=2.2, steps=200, ledger=ledger, callbacks=[Overtake()])
    with pytest.raises(BudgetExceeded, match="other runs used up the ledger"):
        model.fit(*data)
    assert not hasattr(model, "epsilon_")
    statement = read_statement(ledger)
    assert len(statement.runs) == 2
    assert statement.epsilon_charged <= 3.0


def test_an_interrupted_fit_is_interrupted(data: tuple[np.ndarray, np.ndarray]) -> None:
    class Interrupt(tacit.Callback):
        def on_step(self, trainer: tacit.Trainer, step: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TacitClassifier(callbacks=[Interrupt()]).fit(*data)


def test_an_open_ledger_is_refused_with_the_reason(data: tuple[np.ndarray, np.ndarray]) -> None:
    ledger = tacit.Ledger(None, tacit.Budget(3.0, 1e-5))
    with pytest.raises(ValueError, match="give the path"):
        TacitClassifier(ledger=ledger).fit(*data)


def test_the_advice_for_a_missing_ledger_works(
    data: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    path = tmp_path / "data.sqlite"
    model = TacitClassifier(epsilon=1.0, steps=5, ledger=path)
    with pytest.raises(ValueError, match=r"tacit.Ledger\(path, tacit.Budget"):
        model.fit(*data)
    assert not path.exists()
    tacit.Ledger(path, tacit.Budget(3.0, 1e-5)).close()
    assert model.fit(*data).epsilon_ <= 1.0


def test_relations_must_agree(data: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    ledger = new_ledger(tmp_path / "data.sqlite", 3.0)
    with pytest.raises(ValueError, match="replace-one"):
        TacitClassifier(relation="replace-one", ledger=ledger).fit(*data)
