"""Accounting: from privacy events to ε, trade-off curves, and calibrated noise.

`epsilon`, `calibrate` and `steps_within` are the three directions; a `Plan` is a whole run, fixed
beforehand, as the ledger stores it. PLD gives the reported ε, RDP a cross-check and the ledger's
filter. `TradeOff` is the f-DP view, and `check_scheme` tests a sampling scheme of your own.
"""

from tacit.accounting.f_dp import (
    TradeOff,
    gaussian_trade_off,
    subsample,
    tensor_power,
    tensor_product,
    trade_off,
)
from tacit.accounting.gaussian_dp import (
    GaussianDpEstimate,
    gaussian_dp_mu,
    layerwise_multiplier,
    no_privacy,
)
from tacit.accounting.plan import (
    Plan,
    calibrate,
    check_scheme,
    epsilon,
    epsilon_rdp,
    steps_within,
)

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
