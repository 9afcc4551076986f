"""Scalers act record by record with declared constants; a fitted one is refused."""

import math

import numpy as np
import pytest
import torch
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from tacit.data import PublicScaler, RangeScaler, UnitNorm, load
from tacit.data.scaling import Scaler, as_scalers
from tacit.errors import UndeclaredConstant

X = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))
SCALERS = [
    PublicScaler((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)),
    RangeScaler(-1.5, 1.5),
    RangeScaler(torch.full((3, 4, 4), -1.0), 2, onto=(0, 1)),
    UnitNorm(),
]


@pytest.mark.parametrize("scaler", SCALERS, ids=lambda s: type(s).__name__)
def test_a_record_is_scaled_the_same_alone_and_in_company(scaler):
    before = X.clone()
    together = scaler(X)
    alone = torch.cat([scaler(X[i : i + 1]) for i in range(len(X))])
    assert torch.equal(together, alone)
    assert torch.equal(X, before)
    assert together.dtype == torch.float32
    assert scaler(X[:0]).shape == X[:0].shape
    assert scaler.describe()


def test_public_scaler_takes_constants_per_channel_or_per_feature():
    by_channel = PublicScaler((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))(X)
    expected = (X - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor(
        [1.0, 2.0, 3.0]
    ).reshape(3, 1, 1)
    assert torch.allclose(by_channel, expected)
    by_feature = PublicScaler(np.arange(48.0).reshape(3, 4, 4), 2)(X)
    assert torch.allclose(by_feature, (X - torch.arange(48.0).reshape(3, 4, 4)) / 2)
    with pytest.raises(ValueError, match=r"mean has shape \(2,\) and a record has \(3, 4, 4\)"):
        PublicScaler((0, 0), 1)(X)


@pytest.mark.parametrize("std", [0, -1, (1, 0), math.nan, math.inf])
def test_public_scaler_refuses_a_std_that_is_no_scale(std):
    with pytest.raises(ValueError, match="std has"):
        PublicScaler(0, std)


def test_range_scaler_clips_and_centres_what_is_not_finite():
    x = torch.tensor([[0.0, 8, 16, -5, 99, math.nan, math.inf, -math.inf, 3e38, -3e38]])
    found = RangeScaler(0, 16)(x)
    assert found.tolist() == [[-1, 0, 1, -1, 1, 0, 0, 0, 1, -1]]
    assert RangeScaler(0, 16, onto=(0, 1))(x)[0, :6].tolist() == [0, 0.5, 1, 0, 1, 0.5]
    assert RangeScaler(0, 16)(torch.tensor([[4]])).tolist() == [[-0.5]]


@pytest.mark.parametrize("bounds", [(1, 1), (2, 1), ((0, 1), (1, 1)), (math.nan, 1), (0, math.inf)])
def test_range_scaler_refuses_an_empty_range(bounds):
    with pytest.raises(ValueError, match=r"below its upper|not finite"):
        RangeScaler(*bounds)


def test_unit_norm_survives_every_record():
    tiny, huge = 1e-44, 3e38
    x = torch.tensor(
        [[3, 4], [0, 0], [math.nan, 1], [math.inf, 1], [huge, huge], [tiny, 0], [-huge, 0]]
    )
    norms = torch.linalg.vector_norm(UnitNorm()(x), dim=1)
    assert torch.allclose(norms, torch.tensor([1.0, 0, 0, 0, 1, 1, 1]))
    assert torch.allclose(UnitNorm()(x)[0], torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize(
    "fitted",
    ["fit", StandardScaler(), StandardScaler().fit(np.eye(3)), MinMaxScaler(), lambda x: x, 3.0],
)
def test_what_is_fitted_or_may_be_is_refused(fitted):
    with pytest.raises(UndeclaredConstant, match=r"release_statistics.*PublicScaler\(mean, std\)"):
        load("digits", scale=fitted)
    with pytest.raises(UndeclaredConstant):
        as_scalers([UnitNorm(), fitted])


def test_a_typing_error_is_no_scaler():
    with pytest.raises(ValueError, match="'publik'"):
        load("digits", scale="publik")


def test_declaring_a_fitted_scaler_public_is_the_user_s_word():
    fitted = StandardScaler().fit(np.random.default_rng(0).normal(size=(50, 64)))
    scaler = PublicScaler(fitted.mean_.reshape(1, 8, 8), fitted.scale_.reshape(1, 8, 8))
    train, _ = load("digits", scale=[scaler, UnitNorm()])
    assert any("declared public by the user" in note for note in train.notes)
    assert torch.allclose(train.inputs.flatten(1).norm(dim=1), torch.ones(len(train)))


def test_a_scaling_of_one_s_own():
    class Negative(Scaler):
        def __call__(self, inputs):
            return -inputs

        def describe(self):
            return "inputs were negated"

    train, _ = load("digits", scale=Negative())
    assert train.inputs.max() == 0
    assert "inputs were negated" in train.notes
