"""The tensor product of trade-off curves: what several releases give away together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import privacy_loss_distribution as dpa_pld

from tacit.accounting.leaves import leaves_of
from tacit.accounting.pld import (
    PrivacyLoss,
    grid_step,
    not_private,
    num_convolutions,
    privacy_loss,
    symmetric_pmf,
)
from tacit.accounting.trade_off import Release, TradeOff, curve_of_event, curve_of_loss
from tacit.budget import Relation

_MAX_POINTS = 2_000_000
_POINTS_PER_DEVIATION = 500

Factor = tuple[Release | TradeOff, int]


def tensor_product(*curves: TradeOff) -> TradeOff:
    """f ⊗ g ⊗ …: T(P × P', Q × Q') where f = T(P, Q) and g = T(P', Q').  [Dong 2022, Def. 3.1]

    The guarantee of all releases together, each chosen knowing the ones before it but with its
    curve fixed beforehand [Dong 2022, Thm 3.2]. Privacy losses add up, so their distributions
    are convolved: those of the events behind the curves where there are events (Gaussians in
    closed form), else that of the curve itself, whose lines are the losses of a discrete pair.
    Every step rounds towards a lower curve, so that the product is never above the true one.
    """
    return _composed([factor for curve in curves for factor in _factors(curve)], curves)


def tensor_power(curve: TradeOff, count: int) -> TradeOff:
    """f^{⊗T}: the same release T times."""
    if count < 0:
        raise ValueError(f"a curve composed {count} times; give 0 or more")
    return _composed([(source, count * times) for source, times in _factors(curve)], [curve])


def _factors(curve: TradeOff) -> tuple[Factor, ...]:
    return curve.factors or ((curve, 1),)


def _composed(factors: Sequence[Factor], curves: Sequence[TradeOff]) -> TradeOff:
    relation = _one_of({curve.relation for curve in curves} - {None})
    factors = tuple(factor for factor in factors if factor[1] > 0)
    events = [
        Release(dpa.SelfComposedDpEvent(source.event, count), source.relation)
        for source, count in factors
        if isinstance(source, Release)
    ]
    outlines = [(source, count) for source, count in factors if isinstance(source, TradeOff)]
    accounted = {release.relation for release in events} - {None}
    if not outlines and len(accounted) < 2:
        under = next(iter(accounted), None)
        joint = dpa.ComposedDpEvent([release.event for release in events])
        return curve_of_event(joint, under, relation)
    loss, convolutions = _loss(events, outlines)
    return curve_of_loss(loss, convolutions, relation, factors)


def _one_of(relations: Iterable[Relation | None]) -> Relation | None:
    found = sorted(str(relation) for relation in relations)
    if len(found) > 1:
        raise ValueError(
            f"curves for {' and '.join(found)} say nothing together: the neighbours differ; "
            "make all of them for one relation"
        )
    return Relation(found[0]) if found else None


def _loss(
    events: Sequence[Release], outlines: Sequence[tuple[TradeOff, int]]
) -> tuple[PrivacyLoss | None, int]:
    """The joint loss on one grid, and how many convolutions made it; None if nothing is private."""
    every = dpa.ComposedDpEvent([release.event for release in events])
    if not_private(leaves_of(every)):
        return None, 0
    interval = min(_interval(outlines), grid_step(every)) if events else _interval(outlines)
    total = dpa_pld.identity(value_discretization_interval=interval)
    for release in events:
        under = release.relation or Relation.ADD_OR_REMOVE_ONE
        loss = privacy_loss(release.event, under, interval=interval)
        assert loss is not None
        total = total.compose(loss)
    for curve, count in outlines:
        total = total.compose(loss_of_curve(curve, interval).self_compose(count))
    copies = sum(count for _, count in outlines)
    return total, num_convolutions(every) + copies + len(events) + len(outlines)


def loss_of_curve(curve: TradeOff, interval: float) -> PrivacyLoss:
    """A pair with this symmetric curve, its losses rounded to a grid so that δ only grows."""
    num = math.ceil(curve.epsilons[-1] / interval) + 1
    return PrivacyLoss(symmetric_pmf(curve.delta(np.arange(num + 1) * interval), interval))


def _interval(outlines: Sequence[tuple[TradeOff, int]]) -> float:
    """A power of two: h = √(V/N)/500 for N losses of joint variance V, if that fits in memory.

    Rounding to a grid h adds at most h²/4 to the variance of each loss.
    """
    variance, reach, copies = 0.0, 0.0, 0
    for curve, count in outlines:
        second, furthest = _moments(curve)
        variance += count * second
        reach = max(reach, furthest)
        copies += count
    if variance == 0:
        return 1e-4
    deviation = math.sqrt(variance)
    # The mean of a loss is at most half its second moment where it is small, and its root always.
    whole = 2 * (11 * deviation + min(variance, math.sqrt(copies) * deviation) + reach)
    step = max(math.sqrt(variance / copies) / _POINTS_PER_DEVIATION, whole / _MAX_POINTS)
    return 2.0 ** math.floor(math.log2(step))


def _moments(curve: TradeOff) -> tuple[float, float]:
    """E_P[l²] of the finite losses, and the largest. Line by line: a loss of ε has mass e^ε·Δα."""
    reach = float(curve.epsilons[-1])
    corners = np.concatenate([[1.0], np.clip(curve._corners, 0.0, 1.0), [0.0]])
    masses = np.maximum(-np.diff(corners), 0.0) * curve._slopes
    with np.errstate(divide="ignore"):
        losses = np.where(curve._slopes > 0, np.log(curve._slopes), 0.0)
    return float(np.sum(masses * losses**2)), reach
