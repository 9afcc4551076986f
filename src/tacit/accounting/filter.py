"""An RDP filter: what may be spent when each choice is made after looking at the last result.

Fix one order α before anything is released. However adaptively mechanisms are chosen, if their
RDP at α adds up to at most B in every outcome, the whole is (α, B)-RDP [Feldman 2021, Thm 4.3],
hence (ε, δ)-DP for ε = B + log(1 − 1/α) − log(δα)/(α − 1) [Canonne 2020, Prop. 12]. One order
must be enough: choosing the best of many orders *afterwards* is not covered by the theorem.
"""

from __future__ import annotations

import math

import numpy as np

from tacit.accounting.rdp import ORDERS
from tacit.budget import Budget


def allowance(order: float, budget: Budget) -> float:
    """B: how much RDP at `order` the budget allows (below zero when the order cannot meet it)."""
    return budget.epsilon - math.log1p(-1 / order) + math.log(budget.delta * order) / (order - 1)


def epsilon_at(order: float, spent: float, budget: Budget) -> float:
    """The ε that an RDP of `spent` at `order` amounts to at the budget's δ; 0 for nothing."""
    if spent == 0:
        return 0.0
    return max(0.0, budget.epsilon + spent - allowance(order, budget))


def best_order(curve: np.ndarray, budget: Budget) -> float:
    """The order at which most copies of a run with this RDP curve fit into the budget.

    It is chosen from the first run's plan alone, before any data is touched.
    """
    room = np.array([allowance(order, budget) for order in ORDERS])
    with np.errstate(divide="ignore", invalid="ignore"):
        copies = np.where(curve > 0, room / curve, np.inf)
    copies = np.where(room > 0, np.where(np.isinf(curve), 0.0, copies), -np.inf)
    return float(ORDERS[int(np.argmax(copies))])
