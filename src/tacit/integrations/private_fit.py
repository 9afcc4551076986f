"""A private fit behind scikit-learn's interface: the base of the estimators.

`PrivateEstimator` plans the run, asks the ledger for room, releases the scales of the columns under
the run's own charge, and hands the rest to a `Trainer`.
"""

from __future__ import annotations

import math
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Real
from typing import Any, Self

import dp_accounting as dpa
import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from tacit.accounting.plan import Plan, calibrate
from tacit.budget import Budget
from tacit.data.private_ranges import release_ranges
from tacit.data.private_scaling import ReleaseOptions, release_statistics
from tacit.data.scaling import RangeScaler, as_constants
from tacit.data.table_columns import Date, Numeric
from tacit.data.table_schema import Schema
from tacit.errors import BudgetExceeded, shown
from tacit.ledger import Ledger
from tacit.ledger.statement import read_statement
from tacit.losses.record_loss import LipschitzLoss, positive
from tacit.models.networks import mlp
from tacit.noise import Noise
from tacit.queries.bounded_gradient import GradientQuery
from tacit.queries.per_sample_clip import PerSampleClip
from tacit.records import Records
from tacit.sampling.poisson import Poisson, PoissonSampler
from tacit.sampling.scheme import whole_number
from tacit.training.callbacks import Callback
from tacit.training.preconditions import LedgerRun
from tacit.training.run import Run
from tacit.training.trainer import Trainer

Constants = float | Sequence[float]

SIZE_NOTE = "the number of records was counted and is taken as public; declare it with public_size"
ONE_FIT_NOTE = "no ledger: epsilon is that of this fit alone; give all fits on one dataset a ledger"

# The shares of the budget for the scales of columns without and with a declared range.
_SHARES = 0.3, 0.1


@dataclass(frozen=True, eq=False)
class Columns:
    """Features, and for a regression the target as the last column: float64 (N, K).

    `lower` and `upper` are the declared range of each column, NaN where it has none. Columns that
    are not `numeric`, such as categories, are left as they are.
    """

    values: Tensor
    lower: Tensor
    upper: Tensor
    numeric: Tensor

    @property
    def undeclared(self) -> Tensor:
        """Positions of the numeric columns without a declared range."""
        return (self.numeric & self.lower.isnan()).nonzero().flatten()

    @property
    def declared(self) -> Tensor:
        """Positions of the numeric columns with a declared range."""
        return (self.numeric & ~self.lower.isnan()).nonzero().flatten()


@dataclass(eq=False, repr=False)
class PrivateEstimator(BaseEstimator, ABC):
    """What both estimators share: parameters, the private fit, and the network's outputs."""

    epsilon: float = 3.0
    delta: float = 1e-5
    _: KW_ONLY
    hidden: Sequence[int] = ()
    steps: int = 50
    batch_size: int | None = None
    learning_rate: float = 0.25
    max_norm: float | None = None
    feature_range: tuple[Constants, Constants] | None = None
    schema: Schema | Mapping[str, Any] | str | os.PathLike[str] | None = None
    scaling_share: float | None = None
    public_size: int | None = None
    relation: str = "add-or-remove-one"
    model: Callable[[int, int], nn.Module] | None = None
    query: Callable[[], GradientQuery] | None = None
    ledger: str | os.PathLike[str] | None = None
    callbacks: Sequence[Callback] | None = None
    random_state: int | np.random.RandomState | None = None

    @abstractmethod
    def fit(self, X: Any, y: Any) -> Self:
        """Train on the records, within the budget."""

    # ---- what a fitted estimator says ----------------------------------------------------------

    @property
    def ledger_epsilon_(self) -> float:
        """ε of all runs on the ledger together; without a ledger, that of this fit."""
        check_is_fitted(self)
        return self.epsilon_ if self.ledger is None else read_statement(self.ledger).epsilon

    @property
    def statement_(self) -> str:
        """What is guaranteed, and under which assumptions, as text."""
        check_is_fitted(self)
        run: Run = self.run_
        lines = [
            f"The fitted parameters are ({run.epsilon:.4g}, {run.budget.delta:g})-differentially "
            f"private in one record ({run.budget.relation}).",
            f"{run.steps} steps, {run.plan.scheme.describe()}, "
            f"noise multiplier {run.plan.noise_multiplier:.4g}.",
            "Scores and predictions on other records are not covered by epsilon.",
            *(f"Note: {note}." for note in run.notes),
        ]
        return "\n".join(lines)

    # ---- the fit -------------------------------------------------------------------------------

    def _encoded(self, X: Any, y: Any, **checks: Any) -> tuple[np.ndarray, Any]:
        """Features as float64 (N, D) and targets, checked as scikit-learn does."""
        self._table_schema = self._read_schema()
        if self._table_schema is None:
            _refuse_text(X, type(self).__name__)
            return validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2, **checks)
        validate_data(self, X, skip_check_array=True)
        inputs = self._table_schema.inputs(X).double().numpy()
        if len(inputs) != len(y):
            raise ValueError(f"X has {len(inputs)} rows and y {len(y)}; give one target per row")
        return inputs, y

    def _read_schema(self) -> Schema | None:
        given = self.schema
        if given is None or isinstance(given, Schema):
            return given
        if isinstance(given, Mapping):
            return Schema.from_dict(dict(given))
        return Schema.read(given)

    def _columns(self, features: np.ndarray) -> Columns:
        """The features with what is declared of their ranges."""
        values = torch.tensor(features, dtype=torch.float64)
        width = values.shape[1]
        unknown = torch.full((width,), math.nan, dtype=torch.float64)
        schema: Schema | None = self._table_schema
        if schema is None:
            numeric = torch.ones(width, dtype=torch.bool)
            if self.feature_range is None:
                return Columns(values, unknown, unknown, numeric)
            lower, upper = bounds_of("feature_range", self.feature_range, width)
            return Columns(values, lower, upper, numeric)
        if self.feature_range is not None:
            raise ValueError("feature_range and schema both declare ranges; give one of them")
        # A schema maps declared ranges onto [-1, 1]; categories and truth values stay as they are.
        numeric = torch.tensor(
            [
                isinstance(column, Numeric | Date) and entry == column.name
                for column in schema.features
                for entry in column.entry_names
            ]
        )
        lower = -torch.ones_like(unknown)
        lower[list(schema.released_entries)] = math.nan
        return Columns(values, lower, -lower, numeric)

    def _train(
        self,
        columns: Columns,
        codes: Tensor | None,
        loss: LipschitzLoss,
        num_outputs: int,
        notes: list[str],
    ) -> None:
        """Plan, ask for room, charge, release the scales, train.

        `codes` are the classes of a classification; a regression's target is the last column.
        """
        self._check_numbers()
        budget = Budget(self.epsilon, self.delta, self.relation)  # type: ignore[arg-type]
        steps = whole_number("steps", self.steps, least=1)
        seed = self._seed()
        width = columns.values.shape[1] - (codes is None)
        network, query = self._network(width, num_outputs, seed), self._query(width)
        size = len(columns.values)
        if self.public_size is None:
            notes.append(SIZE_NOTE)
        else:
            size = whole_number("public_size", self.public_size, least=1)
        batch = size
        if self.batch_size is not None:
            batch = min(whole_number("batch_size", self.batch_size, least=1), size)
        prelude = self._prelude(columns, budget)
        sampling = Poisson(batch / size)
        noise = calibrate(budget, sampling, steps, unit=query.unit, prelude=prelude)
        plan = Plan(sampling, noise, budget.relation, steps, query.unit, prelude)
        name = f"{type(self).__name__}-{secrets.token_hex(4)}"
        with closing(self._open_ledger(budget)) as ledger:
            ledger.require_room(plan, budget)
            ledger.begin(plan, name=name, budget=budget)
            scaler = self._release_scaler(columns, plan, size, ledger, seed)
            notes.append(scaler.describe())
            if self.ledger is None:
                notes.append(ONE_FIT_NOTE)
            features, targets = scaler(columns.values), codes
            if targets is None:
                features, targets = features[:, :-1], features[:, -1]
            records = Records(features, targets, public_size=size, notes=tuple(notes))
            trainer = Trainer(
                network,
                loss,
                query,
                PoissonSampler(records, sampling.rate, steps, expected_batch_size=batch),
                torch.optim.SGD(network.parameters(), lr=self.learning_rate),
                budget,
                noise=Noise(noise),
                callbacks=self.callbacks or (),
                ledger=LedgerRun(ledger, name, prelude),
                seed=seed,
            )
            trainer.config = {"estimator": type(self).__name__}  # its repr would show a seed
            run = trainer.fit()
        if run.stopped == "interrupted":
            raise KeyboardInterrupt
        if run.stopped == "budget":
            raise BudgetExceeded(
                f"the fit ended after {run.steps} of {steps} steps: other runs used up the ledger "
                "meanwhile. The steps are charged; fit again with a smaller epsilon"
            )
        self.run_, self.network_ = run, run.model.eval()
        self.epsilon_, self.delta_ = run.epsilon, budget.delta
        lower, upper = (as_constants(end, "range") for end in (scaler.lower, scaler.upper))
        self.scaler_ = replace(scaler, lower=lower[:width], upper=upper[:width])
        # Of a regression, whose target is the last column.
        self._target_scale = float(lower[-1] + upper[-1]) / 2, float(upper[-1] - lower[-1]) / 6

    def _check_numbers(self) -> None:
        for name in ("epsilon", "delta", "learning_rate", "scaling_share"):
            value = getattr(self, name)
            if not isinstance(value, Real) and not (value is None and name == "scaling_share"):
                raise ValueError(f"{name} is {shown(value)}; give a number")
        positive("learning_rate", self.learning_rate)
        if not isinstance(self.hidden, Sequence | np.ndarray):
            raise ValueError(f"hidden is {shown(self.hidden)}; give sizes of layers, such as (32,)")
        for size in self.hidden:
            whole_number("hidden", size, least=1)

    def _seed(self) -> int | None:
        """None keeps all draws secret."""
        if self.random_state is None:
            return None
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _prelude(self, columns: Columns, budget: Budget) -> tuple[dpa.GaussianDpEvent, ...]:
        """One Gaussian for the columns without a declared range, and one for those with one.

        Each has a share of 1/z², z being the multiplier that the whole budget allows.
        """
        parts = [columns.undeclared, columns.declared]
        weights = [w if len(of) else 0.0 for w, of in zip(_SHARES, parts, strict=True)]
        share = sum(weights) if self.scaling_share is None else self.scaling_share
        if not 0 <= share < 1:
            raise ValueError(f"scaling_share is {share}; give at least 0 and less than 1")
        if share == 0 or not any(weights):
            return ()
        whole = calibrate(budget, Poisson(1.0), 1)
        shares = [share * weight / sum(weights) for weight in weights if weight]
        return tuple(dpa.GaussianDpEvent(whole / math.sqrt(own)) for own in shares)

    def _open_ledger(self, budget: Budget) -> Ledger:
        if self.ledger is None:
            return Ledger(None, budget)
        if not isinstance(self.ledger, str | os.PathLike):
            raise ValueError(
                f"ledger is a {type(self.ledger).__name__}; give the path of its file, since an "
                "estimator is copied for each fit and a ledger cannot be"
            )
        if not os.path.exists(self.ledger):
            raise ValueError(
                f"there is no ledger at {os.fspath(self.ledger)}; make it once, with the budget of "
                "all fits together: tacit.Ledger(path, tacit.Budget(epsilon, delta)).close()"
            )
        return Ledger(self.ledger)

    def _release_scaler(
        self, columns: Columns, plan: Plan, size: int, ledger: Ledger, seed: int | None
    ) -> RangeScaler:
        """To mean 0 and standard deviation 1 within ±3: as released, or by the declared ranges."""
        mean, std = torch.zeros_like(columns.lower), torch.ones_like(columns.lower)
        declared, undeclared = columns.declared, columns.undeclared
        lower, upper = columns.lower[declared], columns.upper[declared]
        if not plan.prelude:
            mean[declared], std[declared] = (lower + upper) / 2, (upper - lower) / 2
            return _within_three(mean, std, "declared, or -3 to 3")
        options: ReleaseOptions = {
            "noise_multiplier": plan.prelude[0].noise_multiplier,
            "public_size": size,
            "relation": plan.relation,
            "seed": None if seed is None else seed + 1,  # not the seed of the gradients' noise
            "ledger": ledger,
        }
        if len(undeclared):
            ranges, _ = release_ranges(columns.values[:, undeclared], **options)
            # They reach about three standard deviations to each side of the mean.
            mean[undeclared] = (ranges.lower + ranges.upper) / 2
            std[undeclared] = (ranges.upper - ranges.lower) / 6
        if len(declared):
            options["noise_multiplier"] = plan.prelude[-1].noise_multiplier
            released, _ = release_statistics(columns.values[:, declared], lower, upper, **options)
            mean[declared] = as_constants(released.mean, "mean")
            std[declared] = as_constants(released.std, "std")
        return _within_three(mean, std, "released with noise that is charged to the budget")

    def _network(self, num_features: int, num_outputs: int, seed: int | None) -> nn.Module:
        """A new network in float64. The default's last layer is 0: it begins without an opinion."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(secrets.randbits(63) if seed is None else seed)
            if self.model is None:
                network: nn.Module = mlp((num_features,), num_outputs, tuple(self.hidden)).double()
                for parameter in list(network.parameters())[-2:]:
                    nn.init.zeros_(parameter)
                return network
            network = self.model(num_features, num_outputs).double().eval()
        # Before anything is charged, and with zeros, which tell nothing about the records.
        with torch.no_grad():
            shape = tuple(network(torch.zeros(2, num_features, dtype=torch.float64)).shape)
        if shape != (2, num_outputs):
            raise ValueError(
                f"model makes a network that maps 2 records of {num_features} features to shape "
                f"{shape}; it must be (2, {num_outputs}), as its second argument says"
            )
        return network.train()

    def _query(self, num_features: int) -> GradientQuery:
        if self.query is None:
            # Standardised features and the bias have norm √(D + 1); errors are usually below 1.
            usual = 0.4 * math.sqrt(num_features + 1)
            return PerSampleClip(usual if self.max_norm is None else self.max_norm)
        query = None if hasattr(self.query, "unit") else self.query()
        if query is None or not hasattr(query, "unit"):
            raise ValueError(
                "query must be a function without arguments that makes a new gradient query for "
                "each fit, such as lambda: tacit.PerSampleClip(1.0)"
            )
        return query

    def _outputs(self, X: Any) -> np.ndarray:
        """What the network says, (N, outputs), each record by itself."""
        check_is_fitted(self)
        schema: Schema | None = self._table_schema
        if schema is None:
            _refuse_text(X, type(self).__name__)
            inputs = torch.tensor(validate_data(self, X, reset=False, dtype=np.float64))
        else:
            validate_data(self, X, reset=False, skip_check_array=True)
            inputs = schema.inputs(X).double()
        with torch.no_grad():
            return self.network_(self.scaler_(inputs)).reshape(len(inputs), -1).numpy()


def _refuse_text(X: Any, estimator: str) -> None:
    """Raise ValueError for a frame with columns of text, which need a schema."""
    if not (hasattr(X, "columns") and hasattr(X, "dtypes")):
        return
    cells = [np.asarray(X.iloc[:, i] if hasattr(X, "iloc") else X[:, i]) for i in range(X.shape[1])]
    kept = zip(X.columns, cells, strict=True)
    named = [name for name, own in kept if own.dtype.kind in "OUT" and any(map(_is_text, own))]
    if named:
        columns = "column" if len(named) == 1 else "columns"
        raise ValueError(
            f"X has text in the {columns} {', '.join(map(repr, named[:12]))}"
            f"{', ...' if len(named) > 12 else ''}, and no schema says what it means; give "
            f"{estimator}(schema=...), which tacit.data.describe(X) begins, or drop the {columns}"
        )


def _is_text(cell: object) -> bool:
    """Whether it is text that is no number."""
    if not isinstance(cell, str):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False


def _within_three(mean: Tensor, std: Tensor, origin: str) -> RangeScaler:
    """Three standard deviations to each side: an outlier would shrink its record's other entries,
    since the gradient is clipped as a whole."""
    return RangeScaler(mean - 3 * std, mean + 3 * std, (-3.0, 3.0), origin)


def bounds_of(name: str, given: Any, width: int) -> tuple[Tensor, Tensor]:
    """A declared range, one pair of numbers per column."""
    try:
        lower, upper = given
        ends = [torch.as_tensor(np.asarray(end, dtype=float)) for end in (lower, upper)]
        lower, upper = (as_constants(end, name).expand(width).clone() for end in ends)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} is not (lowest, highest), each one finite number or {width} of them: {error}"
        ) from error
    if not (lower < upper).all():
        raise ValueError(f"{name} has a lowest that is not below its highest")
    return lower, upper
