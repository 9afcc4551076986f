"""Events to ε; trade-off curves; calibration; the ledger."""

from tacit.accounting.accountant import calibrate, epsilon, epsilon_rdp, steps_within
from tacit.accounting.check_scheme import check_scheme
from tacit.accounting.gaussian_dp import GaussianDpEstimate, gaussian_dp_mu
from tacit.accounting.layerwise import layerwise_multiplier
from tacit.accounting.ledger import Ledger
from tacit.accounting.ledger_statement import Statement
from tacit.accounting.no_privacy import no_privacy
from tacit.accounting.plan import Plan
from tacit.accounting.subsample import subsample
from tacit.accounting.tensor_product import tensor_power, tensor_product
from tacit.accounting.trade_off import TradeOff, gaussian_trade_off, trade_off

__all__ = [
    "GaussianDpEstimate",
    "Ledger",
    "Plan",
    "Statement",
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
