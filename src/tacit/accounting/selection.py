"""What it costs to let out the best of K runs, where K is random and secret.

Let P and Q be the laws of one run's output (the model and its noisy score) on two neighbouring
datasets. K runs are drawn independently from the same mechanism, and the one with the best score
is let out; ties are broken by a fresh uniform number of each run, so that the order is strict. K
has the generating function f of `NumRuns`. Write F_P(y) for the probability that a run is not
better than y. The density of what is let out, relative to that of one run, is

    A_P(dy) = Σ_k P(K = k)·k·F_P(y)^(k−1)·P(dy) = f'(F_P(y))·P(dy),                           (1)

and where K = 0 is possible nothing is let out, with the same probability on both sides.

**Rényi DP** [Papernot & Steinke 2022]. If one run is (α, ρ(α))-RDP, then what is let out has

    ρ(α) + (1+η)·min_λ { (1 − 1/λ)·ρ(λ) + log(1/γ)/λ } + log E[K] / (α − 1)          (Thm 2)
    ρ(α) + E[K]·δ(log(1 + 1/(α − 1))) + log E[K] / (α − 1)         for the Poisson law (Thm 6)

at α, where δ(·) is one run's privacy profile.

**Privacy profile** [as Koskela, Redberg & Wang 2024, for one ε₁ and δ₁; here for all of them].
What is let out has δ_A(ε) ≤ E[K]·δ(ε − c), so ε_A at δ is c + ε_run(δ / E[K]), with

    c = sup_u log f'(1 − u) / f'(1 − T(u)),    T(u) = min(1, inf_{ε₁} e^ε₁·u + δ(ε₁)).

    Proof. Fix y. The set of outputs that are better than y has probability u = 1 − F_P(y) on one
    side and at most T(u) on the other, since each (ε₁, δ(ε₁)) bounds it. f' increases, because f
    is a power series with nonnegative coefficients, so f'(F_P) ≤ e^c·f'(F_Q) for all y. By (1)
        A_P(S) − e^ε·A_Q(S) = ∫_S f'(F_P)·P(dy) − e^ε·f'(F_Q)·Q(dy)
                            ≤ ∫_S f'(F_P)·(P(dy) − e^(ε−c)·Q(dy))
                            ≤ f'(1)·δ(ε − c),
    where the last step takes S to be where the integrand is positive and f'(F_P) ≤ f'(1) = E[K].
    The part with K = 0 adds P(K = 0)·(1 − e^ε) ≤ 0 for ε ≥ 0.  ∎

For the negative binomial laws c = (1+η)·sup_u log (γ + (1−γ)·T(u)) / (γ + (1−γ)·u), and for the
Poisson law c = E[K]·sup_u (T(u) − u) = E[K]·δ(0). Both bounds hold, so the smaller one is used.

The number of runs is part of the secret. Neither bound covers somebody who learns K, or anything
of another run: how long a search took, what it printed meanwhile, a study with all its trials.
"""

from __future__ import annotations

import math

import dp_accounting as dpa
import numpy as np

from tacit.accounting.composition import FINE, Grid
from tacit.accounting.events import components_of
from tacit.accounting.pld import epsilon_of, privacy_loss, profile_of
from tacit.accounting.rdp import epsilon_of_curve, renyi_curve
from tacit.budget import Relation
from tacit.sampling.repeated_runs import NumRuns, SelectedRunDpEvent

_LEAST_SHARE = 1e-14  # of u; below it, 1 − F is bounded by what it is there
_CELLS = 20_000


def selection_epsilon(
    event: dpa.DpEvent, delta: float, relation: Relation, grid: Grid = FINE
) -> float | None:
    """ε of an event with a selection in it; None if there is none.

    The better of the two bounds for a selection alone; Rényi DP for what is composed of it.
    """
    parts = components_of(event)
    selected = [part.event for part in parts if isinstance(part.event, SelectedRunDpEvent)]
    if not selected:
        return None
    by_rdp = epsilon_of_curve(renyi_curve(event, relation), delta)
    if len(parts) > 1 or parts.total() > 1:
        return by_rdp
    return min(by_rdp, _by_profile(selected[0], delta, relation, grid))


def _by_profile(event: SelectedRunDpEvent, delta: float, relation: Relation, grid: Grid) -> float:
    loss = privacy_loss(event.one_run, relation, grid)
    if loss is None:
        return math.inf
    parts, share = components_of(event.one_run), delta / event.runs.mean
    return loss_shift(event.runs, *profile_of(loss)) + epsilon_of(parts, relation, share, grid)


def loss_shift(runs: NumRuns, epsilons: np.ndarray, deltas: np.ndarray) -> float:
    """c of the proof, rounded up, from points (ε₁, δ(ε₁)) of one run's privacy profile.

    `epsilons` ascend from 0. T(u) is an infimum of increasing lines, so on [a, b] it is at most
    T(b), and γ + (1−γ)·u at least its value at a. The cells [a, b] grow geometrically from
    `_LEAST_SHARE`; the first one begins at 0.
    """
    if runs.shape is None:
        return runs.mean * float(deltas[0])
    ends = np.geomspace(_LEAST_SHARE, 1.0, _CELLS)
    others = np.ones(len(ends))
    with np.errstate(over="ignore"):
        for epsilon, delta in zip(epsilons, deltas, strict=True):
            if epsilon < 700:
                np.minimum(others, math.exp(epsilon) * ends + delta, out=others)
    starts, gamma = np.concatenate([[0.0], ends[:-1]]), runs.gamma
    ratios = (gamma + (1 - gamma) * others) / (gamma + (1 - gamma) * starts)
    return (1 + runs.shape) * math.log(float(ratios.max()))
