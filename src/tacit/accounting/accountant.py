"""The three directions of accounting: ε from the noise, the noise from ε, the steps from both.

ε is by privacy loss distributions (`pld`); Rényi DP (`rdp`) is the cross-check and gives first
bounds for the search. `no_privacy` says when an ε is so large that it protects nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import dp_accounting as dpa
from scipy.optimize import brentq
from scipy.special import ndtri

from tacit.accounting.pld import (
    COARSE,
    FINE,
    Grid,
    gaussian_epsilon,
    gaussian_multiplier,
    num_convolutions,
    privacy_loss,
)
from tacit.accounting.rdp import epsilon_of_curve, renyi_curve
from tacit.budget import Budget, Relation
from tacit.errors import BudgetExceeded
from tacit.sampling.sampler import Sampler
from tacit.sampling.scheme import Scheme, Unit, accounted_relation

_MAX_STEPS = 10**8
_LEAST_NOISE = 1e-2
# The convolution rounds by about 5e-17 of mass a step; four times that is paid out of δ.
ROUNDING_A_STEP = 2e-16


def scheme_of(sampling: Scheme | Sampler) -> Scheme:
    return sampling.scheme if isinstance(sampling, Sampler) else sampling


def run_event(
    sampling: Scheme | Sampler,
    noise_multiplier: float,
    steps: int,
    *,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> dpa.DpEvent:
    """Everything a run releases: what came before it (`prelude`), then its steps."""
    scheme = scheme_of(sampling)
    step = scheme.step_event(noise_multiplier, unit)
    return composed(prelude, step, scheme.num_events(steps))


def composed(prelude: Sequence[dpa.DpEvent], step: dpa.DpEvent, count: int) -> dpa.DpEvent:
    """The events of `prelude`, then `count` times `step`."""
    steps = [dpa.SelfComposedDpEvent(step, count)] if count > 0 else []
    return dpa.ComposedDpEvent([*prelude, *steps])


def epsilon_of_event(
    event: dpa.DpEvent, delta: float, relation: Relation, grid: Grid = FINE
) -> float:
    """The reported ε of an event whose parameters were all fixed beforehand: by PLD.

    Where δ is so small that the convolution's rounding matters, the better of PLD (which pays
    for the rounding out of δ) and RDP; for a fixed plan both are valid.
    """
    _check_delta(delta)
    unsampled = gaussian_multiplier(event)
    if unsampled is not None:
        return gaussian_epsilon(unsampled, delta)
    paid = delta - num_convolutions(event) * ROUNDING_A_STEP
    by_pld = math.inf
    if paid > 0:
        loss = privacy_loss(event, relation, grid)
        by_pld = math.inf if loss is None else float(loss.get_epsilon_for_delta(paid))
    if paid > 0.99 * delta:
        return by_pld
    return min(by_pld, epsilon_of_curve(renyi_curve(event, relation), delta))


def epsilon(
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    steps: int | None = None,
    *,
    delta: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> float:
    """ε of `steps` noisy steps at this δ, by privacy loss distributions. [Koskela 2020]

    The parameters must have been fixed before the first step. `sampling` is a scheme, such as
    `Poisson(rate)`, or a sampler, whose own number of steps is the default.
    """
    event = _checked_event(noise_multiplier, sampling, steps, relation, unit, prelude)
    return epsilon_of_event(event, delta, accounted_relation(relation, unit))


def epsilon_rdp(
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    steps: int | None = None,
    *,
    delta: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> float:
    """The same by Rényi DP: a cross-check, always valid and usually some percent larger."""
    _check_delta(delta)
    event = _checked_event(noise_multiplier, sampling, steps, relation, unit, prelude)
    return epsilon_of_curve(renyi_curve(event, accounted_relation(relation, unit)), delta)


def calibrate(
    budget: Budget,
    sampling: Scheme | Sampler,
    steps: int | None = None,
    *,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> float:
    """The least noise multiplier (to five digits, rounded up) whose ε is within the budget."""
    steps = _steps(sampling, steps)
    relation = accounted_relation(budget.relation, unit)
    scheme_of(sampling).require(relation)
    before = dpa.ComposedDpEvent(list(prelude))
    if epsilon_of_event(before, budget.delta, relation) >= budget.epsilon:
        raise BudgetExceeded(
            f"what comes before the run spends all of epsilon {budget.epsilon:g} on its own; "
            "add noise to it, or raise the budget"
        )
    if scheme_of(sampling).num_events(steps) == 0:
        return 0.0

    def excess(log_z: float, grid: Grid) -> float:
        event = run_event(sampling, math.exp(log_z), steps, unit=unit, prelude=prelude)
        spent = epsilon_of_event(event, budget.delta, relation, grid)
        return math.log(max(spent, 1e-12) / budget.epsilon)

    low, high = _bracket(lambda log_z: excess(log_z, COARSE), budget)
    if math.exp(high) <= _LEAST_NOISE:
        return _LEAST_NOISE  # a budget so large that next to no noise is asked for; keep a little
    rough = brentq(lambda log_z: excess(log_z, COARSE), low, high, xtol=1e-4)
    fine = _polish(lambda log_z: excess(log_z, FINE), rough)
    return math.exp(fine)


def steps_within(
    budget: Budget,
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    *,
    unit: Unit = Unit.RECORD,
    prelude: Sequence[dpa.DpEvent] = (),
) -> int:
    """The largest number of steps whose ε is within the budget; one more would pass it."""
    relation = accounted_relation(budget.relation, unit)
    scheme_of(sampling).require(relation)

    def spent(steps: int) -> float:
        event = run_event(sampling, noise_multiplier, steps, unit=unit, prelude=prelude)
        return epsilon_of_event(event, budget.delta, relation)

    if noise_multiplier <= 0 or spent(1) > budget.epsilon:
        return 0
    # RDP over-estimates ε and is linear in the steps: what it allows is a first lower bound.
    low = max(1, _steps_by_rdp(budget, noise_multiplier, sampling, unit, prelude))
    if low >= _MAX_STEPS:
        return _MAX_STEPS
    at_low = spent(low)
    if at_low > budget.epsilon:
        low, at_low = 1, spent(1)
    high, at_high = low, at_low
    while at_high <= budget.epsilon:
        low, at_low = high, at_high
        if low == _MAX_STEPS:
            return _MAX_STEPS
        high = min(math.ceil(high * 1.3) + 1, _MAX_STEPS)
        at_high = spent(high)
    halve = False
    while high - low > 1:
        middle = (low + high) // 2
        if not halve and at_low > 0:
            # log ε is nearly linear in log steps; every other try halves, in case it is not.
            slope = math.log(at_high / at_low) / math.log(high / low)
            guess = round(low * (budget.epsilon / at_low) ** (1 / slope)) if slope > 0 else middle
            middle = min(max(guess, low + 1), high - 1)
        at_middle = spent(middle)
        if at_middle <= budget.epsilon:
            # A good guess lies next to the answer: look one further before anything else.
            halve = not halve and middle - low < high - middle - 1
            low, at_low = middle, at_middle
        else:
            halve = not halve and high - middle < middle - low - 1
            high, at_high = middle, at_middle
    return low


def _steps_by_rdp(
    budget: Budget,
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    unit: Unit,
    prelude: Sequence[dpa.DpEvent],
) -> int:
    low, high = 0, 1

    def within(steps: int) -> bool:
        event = run_event(sampling, noise_multiplier, steps, unit=unit, prelude=prelude)
        curve = renyi_curve(event, accounted_relation(budget.relation, unit))
        return epsilon_of_curve(curve, budget.delta) <= budget.epsilon

    while high <= _MAX_STEPS and within(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def _bracket(excess: Callable[[float], float], budget: Budget) -> tuple[float, float]:
    """Two values of log z, a factor two apart, between which ε passes the budget."""
    log_z, step = 0.0, math.log(2)
    if excess(log_z) > 0:
        while excess(log_z + step) > 0:
            log_z += step
            if log_z > math.log(1e6):
                raise BudgetExceeded(
                    f"no noise multiplier below 1e6 keeps this run within epsilon "
                    f"{budget.epsilon:g} at delta {budget.delta:g}; take fewer steps or more budget"
                )
        return log_z, log_z + step
    while log_z > math.log(_LEAST_NOISE) and excess(log_z - step) <= 0:
        log_z -= step
    return log_z - step, log_z


def _polish(excess: Callable[[float], float], rough: float) -> float:
    """From a root to a few 1e-4 to one to 1e-5, on the side where the budget holds.

    log ε is close to linear in log z over such a short way, so a secant needs few calls.
    """
    low, high = rough - 1e-3, rough + 1e-3
    at_low, at_high = excess(low), excess(high)
    while at_low <= 0 and low > rough - 1:
        high, at_high = low, at_low
        low -= 4e-3
        at_low = excess(low)
    while at_high > 0:
        low, at_low = high, at_high
        high += 4e-3
        at_high = excess(high)
    if at_low <= 0:
        return high
    guess = low + (high - low) * at_low / (at_low - at_high) + 2e-6
    while guess < high:
        if excess(guess) <= 0:
            return guess
        guess += 1e-5
    return high


def _checked_event(
    noise_multiplier: float,
    sampling: Scheme | Sampler,
    steps: int | None,
    relation: Relation,
    unit: Unit,
    prelude: Sequence[dpa.DpEvent],
) -> dpa.DpEvent:
    if not noise_multiplier >= 0:
        raise ValueError(f"noise multiplier is {noise_multiplier}; give 0 or more")
    scheme_of(sampling).require(accounted_relation(relation, unit))
    return run_event(
        sampling, noise_multiplier, _steps(sampling, steps), unit=unit, prelude=prelude
    )


def _steps(sampling: Scheme | Sampler, steps: int | None) -> int:
    if steps is None:
        if not isinstance(sampling, Sampler):
            raise ValueError("give the number of steps; a scheme has none of its own")
        return sampling.steps
    if steps < 0:
        raise ValueError(f"steps is {steps}; give 0 or more")
    return steps


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta!r}; give a number strictly between 0 and 1")


NO_PRIVACY = "this is no privacy"
CERTAINTY = 0.99


@lru_cache(maxsize=64)
def epsilon_of_no_privacy(delta: float) -> float:
    """The ε that the Gaussian curve G_μ has at δ when its best test is within 1% of certainty.

    The best test of G_μ has the advantage max_α 1 − α − G_μ(α) = 2Φ(μ/2) − 1, which is 0.99 at
    μ = 2Φ⁻¹(0.995) = 5.15: one who knows all other records then tells whether a record took part
    and is wrong one time in 200, in either direction. At δ = 1e-5 that is ε = 34.5. Runs in use
    are far from it: ε = 8 at 1e-5 is an advantage of 0.60. A sampled run with the same ε may leave
    its best test somewhat less, or much less where a rare sample gives all away, but what it
    *promises* by (ε, δ) is no more than this.
    """
    mu = 2 * float(ndtri((1 + CERTAINTY) / 2))
    return gaussian_epsilon(1 / mu, delta)


def no_privacy(epsilon: float, delta: float) -> bool:
    """Whether (ε, δ) promises no more than a mechanism whose best test is 99% certain."""
    return epsilon >= epsilon_of_no_privacy(delta)


def no_privacy_note(epsilon: float, delta: float) -> str | None:
    """The sentence that a report must carry, or None where it need not."""
    if not no_privacy(epsilon, delta):
        return None
    size = f"{epsilon:.4g}" if math.isfinite(epsilon) else "infinite"
    return (
        f"{NO_PRIVACY}: epsilon {size} at delta {delta:g} is past "
        f"{epsilon_of_no_privacy(delta):.3g}, which a Gaussian mechanism has when a test tells "
        f"with an advantage of {CERTAINTY:.0%} whether a record took part"
    )
