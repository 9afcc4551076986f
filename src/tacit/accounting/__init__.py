"""Events to ε; trade-off curves; calibration; the ledger."""

from tacit.accounting.accountant import calibrate, epsilon, epsilon_rdp, steps_within
from tacit.accounting.ledger import Ledger
from tacit.accounting.ledger_statement import Statement
from tacit.accounting.plan import Plan
from tacit.accounting.trade_off import GaussianDpEstimate, TradeOff, gaussian_dp_mu, trade_off

__all__ = [
    "GaussianDpEstimate",
    "Ledger",
    "Plan",
    "Statement",
    "TradeOff",
    "calibrate",
    "epsilon",
    "epsilon_rdp",
    "gaussian_dp_mu",
    "steps_within",
    "trade_off",
]
