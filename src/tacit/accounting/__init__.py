"""Events to ε; trade-off curves; calibration."""

from tacit.accounting.accountant import calibrate, epsilon, epsilon_rdp, no_privacy, steps_within
from tacit.accounting.f_dp import (
    TradeOff,
    gaussian_trade_off,
    subsample,
    tensor_power,
    tensor_product,
    trade_off,
)
from tacit.accounting.gaussian_dp import GaussianDpEstimate, gaussian_dp_mu, layerwise_multiplier
from tacit.accounting.plan import Plan
from tacit.accounting.scheme_check import check_scheme

__all__ = [
    "GaussianDpEstimate",
    "Plan",
    "TradeOff",
    "calibrate",
    "check_scheme",
    "epsilon",
    "epsilon_rdp",
    "gaussian_dp_mu",
    "gaussian_trade_off",
    "layerwise_multiplier",
    "no_privacy",
    "steps_within",
    "subsample",
    "tensor_power",
    "tensor_product",
    "trade_off",
]
