"""Events to Rényi curves: the cross-check of ε, and the filter for adaptive choices.

(α, ρ)-RDP: D_α(P‖Q) = log E_Q[(P/Q)^α] / (α − 1) ≤ ρ [Mironov 2017]. Curves add up under
adaptive composition, also when each mechanism is chosen after seeing the last one's output.

The RDP filter bounds what may be spent when each choice is made after looking at the last result.
Fix one order α before anything is released. However adaptively mechanisms are chosen, if their
RDP at α adds up to at most B in every outcome, the whole is (α, B)-RDP [Feldman 2021, Thm 4.3],
hence (ε, δ)-DP for ε = B + log(1 − 1/α) − log(δα)/(α − 1) [Canonne 2020, Prop. 12]. One order
must be enough: choosing the best of many orders *afterwards* is not covered by the theorem.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache

import dp_accounting as dpa
import numpy as np
from dp_accounting import rdp as dpa_rdp
from dp_accounting.rdp.rdp_privacy_accountant import compute_delta
from scipy.special import logsumexp

from tacit.accounting.dominating_pairs import truncated_share
from tacit.accounting.events import Component, component_of, components_of, refuse
from tacit.accounting.pld import not_private
from tacit.budget import Budget, Relation
from tacit.sampling.mini_sets import RevealedSampleDpEvent
from tacit.sampling.repeated_runs import NumRuns, SelectedRunDpEvent

ORDERS: tuple[float, ...] = (
    *(1 + x / 10 for x in range(1, 100)),
    *range(11, 64),
    *(80, 96, 128, 192, 256, 512, 1024),
)


def renyi_curve(event: dpa.DpEvent, relation: Relation) -> np.ndarray:
    """ρ at each order of `ORDERS`."""
    parts = components_of(event)
    total = np.zeros(len(ORDERS))
    if not_private(parts):
        return total + np.inf
    for part, count in parts.items():
        total = total + count * _part_curve(part, relation)
    return total


def epsilon_of_curve(curve: np.ndarray, delta: float) -> float:
    """The least ε over the orders, by the conversion of [Canonne 2020, Prop. 12]."""
    if not np.any(curve > 0):
        return 0.0
    if np.all(np.isinf(curve)):
        return math.inf
    return float(dpa_rdp.compute_epsilon(np.array(ORDERS), curve, delta)[0])


@lru_cache(maxsize=256)
def _part_curve(part: Component, relation: Relation) -> np.ndarray:
    orders = np.array(ORDERS)
    z, p, event = part.noise_multiplier, part.probability, part.event
    if isinstance(event, dpa.GaussianDpEvent):
        return orders / (2 * z**2)
    if isinstance(event, SelectedRunDpEvent):
        return selected_curve(renyi_curve(event.one_run, relation), event.runs)
    if isinstance(event, RevealedSampleDpEvent):
        # log(1 − p + p·e^((α−1)·α/2z²)) / (α − 1)
        exponent = orders * (orders - 1) / (2 * z**2)
        rest = math.log1p(-p) if p < 1 else -math.inf
        return np.logaddexp(rest, math.log(p) + exponent) / (orders - 1)
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        return _truncated_curve(event, relation)
    if isinstance(event, dpa.PoissonSampledDpEvent):
        if relation is Relation.REPLACE_ONE:
            return _poisson_replace_curve(p, z)
        return _from_dp_accounting(event, dpa.NeighboringRelation.ADD_OR_REMOVE_ONE)
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent) and relation is Relation.REPLACE_ONE:
        return _from_dp_accounting(event, dpa.NeighboringRelation.REPLACE_ONE)
    raise refuse(event, relation)


def selected_curve(one_run: np.ndarray, runs: NumRuns) -> np.ndarray:
    """ρ of the best of K runs, each with the curve `one_run` at `ORDERS`; see `selection`."""
    orders = np.array(ORDERS)
    chosen = math.log(runs.mean) / (orders - 1)
    if runs.shape is None:  # [Papernot & Steinke 2022, Thm 6]
        deltas = [
            compute_delta(orders, one_run, math.log1p(1 / (order - 1)))[0] for order in ORDERS
        ]
        return one_run + runs.mean * np.array(deltas) + chosen
    # [Papernot & Steinke 2022, Thm 2]
    lost = (1 - 1 / orders) * one_run - math.log(runs.gamma) / orders
    return one_run + (1 + runs.shape) * float(lost.min()) + chosen


def _truncated_curve(
    event: dpa.TruncatedSubsampledGaussianDpEvent, relation: Relation
) -> np.ndarray:
    """log((1 − τ)·e^((α−1)ρ) + τ·e^((α−1)ρ')) / (α − 1), ρ' the Poisson curve at half the noise."""
    tau = truncated_share(
        event.dataset_size, event.sampling_probability, event.truncated_batch_size
    )
    whole, halved = (
        _part_curve(
            component_of(
                dpa.PoissonSampledDpEvent(event.sampling_probability, dpa.GaussianDpEvent(z))
            ),
            relation,
        )
        for z in (event.noise_multiplier, event.noise_multiplier / 2)
    )
    above_one = np.array(ORDERS) - 1
    with np.errstate(divide="ignore"):
        logs = np.log1p(-tau) + above_one * whole, np.log(tau) + above_one * halved
    if tau == 0:
        return whole
    return np.logaddexp(*logs) / above_one


def _from_dp_accounting(event: dpa.DpEvent, relation: dpa.NeighboringRelation) -> np.ndarray:
    """With a rounding of 1e-14 in log E_Q[(P/Q)^α], which comes out negative where it is tiny."""
    accountant = dpa_rdp.RdpAccountant(orders=ORDERS, neighboring_relation=relation)
    # An order whose series does not converge is left out, which is valid: absl need not say so.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        accountant.compose(event)
    finally:
        logger.setLevel(level)
    above_one = np.array(ORDERS) - 1
    return (np.maximum(accountant.rdp * above_one, 0.0) + 1e-14) / above_one


def _poisson_replace_curve(rate: float, z: float) -> np.ndarray:
    """D_α of (1−q)N(0, s²) + qN(1, s²) against (1−q)N(0, s²) + qN(−1, s²), s = 2z.

    The pair dominates (proved in `dominating_pairs`), so it bounds every Rényi divergence too; it
    is its own mirror image, so one direction is enough. By the trapezoid rule, whose error falls
    exponentially for functions analytic in a strip: here of half-width πs². The integrand peaks
    between 0 and 2α − 1 (its place for q = 1). A rounding of 1e-14 is added, so that a tiny
    divergence is not taken for none.
    """
    s = 2 * z
    step = min(s, s * s) / 8
    curve = np.empty(len(ORDERS))
    for i, order in enumerate(ORDERS):
        low, high = -1 - 12 * s, 2 * order + 12 * s
        if (high - low) / step > 2_000_000:
            curve[i] = np.inf  # out of reach: an order left out is a valid, weaker curve
            continue
        x = np.arange(low, high, step)
        far = [(x - mean) ** 2 / (-2 * s * s) for mean in (-1.0, 0.0, 1.0)]
        rest = math.log1p(-rate) if rate < 1 else -math.inf
        log_p = np.logaddexp(rest + far[1], math.log(rate) + far[2])
        log_q = np.logaddexp(rest + far[1], math.log(rate) + far[0])
        log_sum = logsumexp(order * log_p + (1 - order) * log_q)
        log_integral = log_sum + math.log(step) - math.log(s) - 0.5 * math.log(2 * math.pi)
        curve[i] = (max(0.0, log_integral) + 1e-14) / (order - 1)
    return curve


def allowance(order: float, budget: Budget) -> float:
    """B: how much RDP at `order` the budget allows (below zero when the order cannot meet it)."""
    return budget.epsilon - math.log1p(-1 / order) + math.log(budget.delta * order) / (order - 1)


def epsilon_at(order: float, spent: float, budget: Budget) -> float:
    """The ε that an RDP of `spent` at `order` amounts to at the budget's δ; 0 for nothing."""
    if spent == 0:
        return 0.0
    return max(0.0, budget.epsilon + spent - allowance(order, budget))


def copies_within(
    curve: np.ndarray, budget: Budget, before: float | np.ndarray = 0.0
) -> np.ndarray:
    """How many copies of this RDP curve fit into the budget after `before`, at each order."""
    room = np.array([allowance(order, budget) for order in ORDERS]) - before
    with np.errstate(divide="ignore", invalid="ignore"):
        copies = np.where(curve > 0, room / curve, np.inf)
    return np.where(room > 0, np.where(np.isinf(curve), 0.0, copies), -np.inf)


def best_order(curve: np.ndarray, budget: Budget) -> float:
    """The order at which most copies of a run with this RDP curve fit into the budget.

    It is chosen from the first run's plan alone, before any data is touched.
    """
    return float(ORDERS[int(np.argmax(copies_within(curve, budget)))])
