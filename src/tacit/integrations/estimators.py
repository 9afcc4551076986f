"""scikit-learn estimators that train with differential privacy: a classifier and a regressor.

`private_fit` has what both share: the plan, the ledger, the scales and the training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from tacit.integrations.private_fit import Columns, PrivateEstimator, bounds_of
from tacit.losses.classification import BinaryCrossEntropy, CrossEntropy
from tacit.losses.regression import Huber

CLASSES_NOTE = "the classes are those seen in y and are taken as public; declare them with classes"


@dataclass(eq=False, repr=False)
class TacitClassifier(ClassifierMixin, PrivateEstimator):
    """A classifier whose fitted parameters are (ε, δ)-differentially private in one record.

    Logistic regression, or a small network with `hidden` units, trained by gradient descent on
    clipped gradients with noise. The default releases the scales of the features with a share of
    the budget, so the features need no scaling before; a scaler that is fitted to the records, such
    as `StandardScaler`, is not private.

        model = TacitClassifier(epsilon=3.0, feature_range=(lowest, highest)).fit(X, y)
        model.predict_proba(X_new), model.epsilon_

    Args:
        epsilon, delta: the budget of one fit.
        hidden: sizes of hidden layers; none is a linear model.
        steps: noisy steps. The noise of each grows with their number, so that ε stays the same.
        batch_size: expected number of records in a step, by Poisson sampling. None: all records in
            every step, which gives the best accuracy at a given number of steps.
        learning_rate: of plain gradient descent.
        max_norm: the clipping constant, by default 0.4·√(features + 1).
        feature_range: (lowest, highest), each a number or one per feature, as public knowledge and
            never read off the records. Without it the ranges are released too; that needs more
            records: some thousand divided by ε.
        schema: a `Schema`, its plain values or its file, for frames with categories, dates and
            blanks. Its target is not read: y is.
        scaling_share: the share of the budget for releasing the scales: by default 0.3, and 0.1 if
            all ranges are declared. 0 releases nothing: declared ranges are mapped onto [−1, 1],
            and other columns are used as they are, clipped to [−3, 3].
        public_size: the declared number of records. None counts them, takes the count as public,
            and notes so.
        relation: "add-or-remove-one" or "replace-one".
        model: a function of (features, outputs) that makes the network; 1 output for two classes.
        query: a function without arguments that makes the gradient query, such as
            `lambda: tacit.PerSampleClip(1.0, rule=tacit.Normalise())`.
        ledger: the file of a ledger that exists. Each fit is a run of it, and is refused with
            BudgetExceeded before its first step if what is left does not cover all of it.
        callbacks: called during the fit (`tacit.Callback`), such as a logger.
        random_state: makes a fit reproducible, and not private against whoever knows it. None
            draws from the operating system.
        classes: the classes, as public knowledge. None takes those seen in y and notes so.

    Fitted attributes: `classes_`, `n_features_in_`, `feature_names_in_`, `epsilon_`, `delta_`,
    `ledger_epsilon_` (of all fits on the ledger), `statement_`, `run_`, `network_`, `scaler_`.
    """

    classes: Sequence[Any] | None = None

    def fit(self, X: Any, y: Any) -> Self:
        """Train on the records, within the budget."""
        features, y = self._encoded(X, y)
        check_classification_targets(y)
        y = column_or_1d(y, warn=True)
        notes = []
        if self.classes is None:
            self.classes_ = np.unique(y)
            notes.append(CLASSES_NOTE)
        else:
            self.classes_ = np.unique(np.asarray(self.classes))
            other = ~np.isin(y, self.classes_)
            if other.any():
                raise ValueError(
                    f"y has the class {y[other][0]!r}, and classes has only "
                    f"{self.classes_.tolist()}; declare every class that may occur"
                )
        count = len(self.classes_)
        if count < 2:
            raise ValueError(f"there is {count} class; a classifier needs two or more classes")
        codes = torch.from_numpy(np.searchsorted(self.classes_, y))
        if count == 2:
            self._train(self._columns(features), codes, BinaryCrossEntropy(), 1, notes)
        else:
            self._train(self._columns(features), codes, CrossEntropy(), count, notes)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """The network's outputs: (N,) for two classes, positive for the second; else (N, K)."""
        outputs = self._outputs(X)
        return outputs[:, 0] if len(self.classes_) == 2 else outputs

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, (N, K)."""
        outputs = torch.from_numpy(self._outputs(X))
        if len(self.classes_) == 2:
            outputs = torch.cat([torch.zeros_like(outputs), outputs], dim=1)
        return torch.softmax(outputs, dim=1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each record."""
        scores = self.decision_function(X)
        chosen = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[chosen]


@dataclass(eq=False, repr=False)
class TacitRegressor(RegressorMixin, PrivateEstimator):
    """A regressor whose fitted parameters are (ε, δ)-differentially private in one record.

    Linear regression with Huber's loss, or a small network with `hidden` units. The target is
    scaled as the features are: within `target_range` if it is declared, else by a range that is
    released with noise. Parameters and fitted attributes are those of `TacitClassifier`, without
    the classes.

        model = TacitRegressor(epsilon=3.0, feature_range=(-1, 1), target_range=(0, 400)).fit(X, y)

    Args:
        target_range: (lowest, highest) target, as public knowledge.
    """

    target_range: tuple[float, float] | None = None

    def fit(self, X: Any, y: Any) -> Self:
        """Train on the records, within the budget."""
        features, y = self._encoded(X, y, y_numeric=True)
        target = np.asarray(column_or_1d(y, warn=True), dtype=np.float64)
        if not np.isfinite(target).all():
            raise ValueError("y has a value that is not finite; drop the record")
        columns = self._columns(features)
        lower, upper = torch.full((2, 1), math.nan, dtype=torch.float64)
        if self.target_range is not None:
            lower, upper = bounds_of("target_range", self.target_range, 1)
        both = Columns(
            torch.cat([columns.values, torch.tensor(target)[:, None]], dim=1),
            torch.cat([columns.lower, lower]),
            torch.cat([columns.upper, upper]),
            torch.cat([columns.numeric, torch.tensor([True])]),
        )
        self._train(both, None, Huber(), 1, [])
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The predicted target of each record, in its own units."""
        outputs = self._outputs(X)[:, 0]
        centre, scale = self._target_scale
        return centre + scale * outputs
