"""An audit of one training run, by many canaries at once  [Steinke 2023; Mahloujifar 2025].

m canaries are records of the run. Before it, a fair coin for each decides whether it is in; the run
charges for all records, canaries or not. After it, an auditor who does not know the coins scores
each canary, guesses "in" for the highest scores and "out" for the lowest, and abstains on the rest.
More right guesses than privacy allows are a lower bound on ε.

**(ε, δ)-DP** [Steinke 2023, Thm 5.2]. Let S be the coins, T the guesses, r of them not abstentions,
and W the number of right ones. For δ = 0: given the output and the coins before it, the odds of a
coin are within e^ε of 1, since the two outcomes are neighbours. So each guess is right with
probability at most p = e^ε/(1 + e^ε) whatever came before, and W is stochastically at most
Binomial(r, p). For δ > 0, with f(v) = P[Binomial(r, p) ≥ v],

    P[W ≥ v] ≤ f(v) + 2mδ·max_{1≤i≤v} (f(v − i) − f(v))/i.

The last term is large unless δ is far below 1/m.

**f-DP** [Mahloujifar 2025]. Let F = 1 − f, which is concave, and p_i = P[W = i]. Choose a canary j
at random. For each outcome s of its coin and all other coins, let O be the set of outputs at which
the guess for j is s and at least i guesses are right if j's coin is s. The probability of O under
s is at most F of that under the other outcome. The mean over j and the coins is, on the left, the
chance that j is guessed right and W ≥ i, and inside F, by Jensen's inequality, the chance that j is
guessed wrong and W ≥ i − 1:

    R_i ≤ F(L_(i−1)),    R_i = Σ_{t≥i} (t/m)·p_t,    L_i = Σ_{t≥i} ((r − t)/m)·p_t.

The largest P[W ≥ v] under these constraints for i ≤ v bounds the p-value. It is found from the
top. Say P[W ≥ v] = τ. Moving mass from above v to v lowers R_i and raises L_i for all i ≤ v, so
nothing is lost by R_v = τv/m and L_v = τ(r − v)/m. If constraint i has slack and p_(i−1) > 0,
moving mass from i − 1 to i − 2 keeps all constraints: below, R falls and L rises. So the least
total mass is had with the least p_(i−1) each time:

    L_(i−1) = max(L_i, F⁻¹(R_i)),   R_(i−1) = R_i + (i − 1)/(r − i + 1)·(L_(i−1) − L_i).

If R_0 + L_0 is then above r/m, no distribution has P[W ≥ v] = τ. Nor has one P[W ≥ v] > τ, as
moving mass from v to v − 1 keeps the constraints. So p < τ, and f is refuted with confidence 1 − τ.
For a symmetric f, F⁻¹(y) = f(1 − y). This r is a number that was fixed beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from scipy.stats import binom
from torch import Tensor, nn

from tacit.accounting.f_dp import trade_off
from tacit.accounting.plan import Plan
from tacit.accounting.pld import gaussian_epsilon
from tacit.auditing.lower_bounds import LowerBound
from tacit.budget import require_delta
from tacit.losses.record_loss import losses_of
from tacit.pytrees import call_model
from tacit.queries.bounded_gradient import Loss
from tacit.randomness import Randomness
from tacit.records import Records
from tacit.statistics.tracking import evaluating
from tacit.training.evaluation import pieces_of


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """An upper limit of P[W ≥ right] under (ε, δ)-DP.  [Steinke 2023, Thm 5.2]

    min(1, f(v) + 2mδ·max_{1≤i≤v} (f(v − i) − f(v))/i), f(v) = P[Binomial(r, e^ε/(1 + e^ε)) ≥ v].
    """
    _require_counts(canaries, guesses, right)
    if right == 0:
        return 1.0
    p = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, p))
    if delta == 0:
        return tail
    below = np.cumsum(binom.pmf(right - np.arange(1, right + 1), guesses, p))
    steepest = float(np.max(below / np.arange(1, right + 1)))
    return min(1.0, tail + 2 * canaries * delta * steepest)


def least_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95
) -> float:
    """The ε below which every value is refuted with this confidence; 0 where none is."""

    def refuted(epsilon: float) -> bool:
        return p_value(canaries, guesses, right, epsilon, delta) <= 1 - confidence

    return _largest_refuted(refuted, 50.0)


def refutes_curve(
    inverse: Callable[[float], float],
    canaries: int,
    guesses: int,
    right: int,
    confidence: float = 0.95,
) -> bool:
    """Whether so many right guesses refute f; `inverse` is F⁻¹, for F = 1 − f.

    See the module for the recursion and its proof.
    """
    _require_counts(canaries, guesses, right)
    tau = 1 - confidence
    right_mass, wrong_mass = tau * right / canaries, tau * (guesses - right) / canaries
    whole = guesses / canaries
    for i in range(right, 0, -1):
        needed = max(wrong_mass, inverse(right_mass))
        right_mass += (i - 1) / (guesses - i + 1) * (needed - wrong_mass)
        wrong_mass = needed
        if right_mass + wrong_mass > whole * (1 + 1e-9):
            return True
    return False


def least_mu(canaries: int, guesses: int, right: int, confidence: float = 0.95) -> float:
    """The μ below which every G_μ is refuted: F⁻¹(y) = Φ(Φ⁻¹(y) − μ)."""

    def refuted(mu: float) -> bool:
        return refutes_curve(
            lambda y: float(ndtr(ndtri(min(y, 1.0)) - mu)), canaries, guesses, right, confidence
        )

    return _largest_refuted(refuted, 30.0)


def least_epsilon_of_plan(
    plan: Plan, canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95
) -> float:
    """ε at δ of the plan with the most noise that is not refuted; its noise alone is unknown."""
    assert plan.steps is not None

    def refuted(log_z: float) -> bool:
        p = replace(plan, noise_multiplier=math.exp(log_z))
        f = trade_off(
            p.noise_multiplier, p.scheme, plan.steps or 0,
            relation=p.relation, unit=p.unit, prelude=p.prelude,
        )  # fmt: skip
        return refutes_curve(
            lambda y: float(f(1 - min(y, 1.0))[0]), canaries, guesses, right, confidence
        )

    low, high = math.log(plan.noise_multiplier) - 0.7, math.log(plan.noise_multiplier) + 4
    if not refuted(high):
        return 0.0
    while refuted(low):
        low -= 0.7
        if low < math.log(0.01):
            break
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return replace(plan, noise_multiplier=math.exp(high)).epsilon(plan.steps, delta)


def _largest_refuted(refuted: Callable[[float], bool], most: float) -> float:
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _require_counts(canaries: int, guesses: int, right: int) -> None:
    if not 0 <= right <= guesses <= canaries or guesses == 0:
        raise ValueError(
            f"{right} right ones of {guesses} guesses for {canaries} canaries; give 0 ≤ right ≤ "
            "guesses ≤ canaries, and at least one guess"
        )


# ---- canaries in a run ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Canaries:
    """The canaries of a run and their coins, which stay secret until the scores are in.

    `train` are the records to train on: the others, and the canaries whose coin says so.
    """

    records: Records
    included: np.ndarray
    train: Records

    def __repr__(self) -> str:
        return f"Canaries({len(self.records)} records)"


def plant_canaries(train: Records, canaries: Records, seed: int | None = None) -> Canaries:
    """Toss a fair coin for each canary, and return the records to train on.

    A canary is a record like any other: the run charges for it, and its ids follow those of
    `train`. The declared size, which rates and divisors come from, counts half of the canaries, so
    that it does not tell the coins. One run audits add-or-remove-one: a coin adds a record or not.

    Example:
        >>> planted = tacit.auditing.plant_canaries(train, mislabelled)
        >>> run = Trainer(model, loss, query, PoissonSampler(planted.train, ...), ...).fit()
    """
    count, before = len(canaries), train.num_ids or train.require_public_size("canaries")
    included = Randomness(seed).stream("canaries").coins(count, 0.5)
    kept = torch.from_numpy(np.flatnonzero(included))
    ids = torch.arange(before, before + count)
    drawn = canaries.take(kept)
    x, y, new_x, new_y = train.inputs, train.targets, drawn.inputs, drawn.targets
    tensors = all(isinstance(t, Tensor) for t in (x, y, new_x, new_y))
    if not tensors or train.is_lazy or canaries.is_lazy:
        raise ValueError(
            "records and canaries must be plain tensors in memory; give Records(...).read()"
        )
    joined = replace(
        train,
        inputs=torch.cat([x, new_x.to(x)]),
        targets=torch.cat([y, new_y.to(y)]),
        record_ids=torch.cat([train.record_ids, ids[kept].to(train.record_ids)]),
        public_size=train.require_public_size("canaries") + count // 2,
        num_ids=before + count,
        row_numbered=False,
        name=f"{train.name} with canaries",
    )
    return Canaries(replace(canaries, record_ids=ids), included, joined)


@torch.no_grad()
def loss_scores(
    model: nn.Module, loss: Loss, records: Records, initial: nn.Module | None = None
) -> np.ndarray:
    """−ℓ of each record: higher where the model fits it. With `initial`, how much ℓ fell since."""

    def losses(network: nn.Module) -> np.ndarray:
        with evaluating(network):
            parts = [
                losses_of(loss, call_model(network, piece.inputs), piece.targets).double().cpu()
                for piece in pieces_of(records, 2048, network)
            ]
        return torch.cat(parts).numpy()

    found = -losses(model)
    return found if initial is None else found + losses(initial)


def gradient_scores(
    model: nn.Module, loss: Loss, records: Records, moved: Sequence[Tensor]
) -> np.ndarray:
    """⟨−∇ℓ(record)/‖∇ℓ‖, moved⟩: how far the weights went where the record would take them.

    `model` has the weights at which gradients are taken, such as the initial ones, and `moved` is
    the released change of each trainable parameter since.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    scores = []
    with evaluating(model), torch.enable_grad():
        for piece in pieces_of(records, 1, model):
            one = losses_of(loss, call_model(model, piece.inputs), piece.targets).sum()
            grads = torch.autograd.grad(one, parameters, allow_unused=True)
            pairs = [(g, m) for g, m in zip(grads, moved, strict=True) if g is not None]
            norm = math.sqrt(math.fsum(float(g.double().square().sum()) for g, _ in pairs))
            dot = math.fsum(float((g.double() * m.double()).sum()) for g, m in pairs)
            scores.append(-dot / max(norm, 1e-30))
    return np.array(scores)


@dataclass(frozen=True)
class OneRunAudit:
    """Right guesses of one run, and the ε that they prove at least, by each method.

    Each bound holds with its own confidence, not all of them together.
    """

    canaries: int
    guesses: int
    right: int
    bounds: tuple[LowerBound, ...]

    @property
    def epsilon(self) -> float:
        """The bound that assumes nothing."""
        return self.bounds[0].epsilon

    def facts(self) -> dict[str, Any]:
        return {
            "canaries": self.canaries,
            "guesses": self.guesses,
            "right": self.right,
            "bounds": [bound.facts() for bound in self.bounds],
        }


def audit_one_run(
    scores: Any,
    included: Any,
    *,
    delta: float,
    guesses: int | None = None,
    confidence: float = 0.95,
    plan: Plan | None = None,
) -> OneRunAudit:
    """Guess the coins from the scores, and bound ε of the run from the right guesses.

    The ⌈r/2⌉ highest scores are guessed in and the ⌊r/2⌋ lowest out. `guesses` is r, by default a
    fifth of the canaries; it must be chosen before the scores are seen. If the run is (ε, δ)-DP
    under add-or-remove-one, `result.epsilon` is above ε with probability 1 − `confidence` at most.

    Args:
        plan: the run's plan; adds a bound by its own trade-off curves, in which nothing but the
            noise multiplier is unknown.

    Example:
        >>> scores = tacit.auditing.loss_scores(run.model, loss, planted.records)
        >>> tacit.auditing.audit_one_run(scores, planted.included, delta=1e-5).epsilon
    """
    require_delta(delta)
    values, coins = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if values.shape != coins.shape or values.ndim != 1 or len(values) < 2:
        raise ValueError(
            f"{values.shape} scores and {coins.shape} coins; give one of each per canary, and at "
            "least two canaries"
        )
    if np.isnan(values).any():
        raise ValueError(
            "a canary's score is NaN; give it a number, such as the mean of the others"
        )
    m = len(values)
    r = max(2, m // 5) if guesses is None else guesses
    _require_counts(m, r, 0)
    order = np.argsort(values, kind="stable")
    right = int(coins[order[m - (r + 1) // 2 :]].sum() + (~coins[order[: r // 2]]).sum())
    mu = least_mu(m, r, right, confidence)
    of_mu = gaussian_epsilon(1 / mu, delta) if mu > 0 else 0.0
    bounds = [
        LowerBound(least_epsilon(m, r, right, delta, confidence), delta, confidence,
                   "one run, Steinke 2023"),
        LowerBound(of_mu, delta, confidence, "one run, Mahloujifar 2025", "Gaussian DP"),
    ]  # fmt: skip
    if plan is not None:
        found = least_epsilon_of_plan(plan, m, r, right, delta, confidence)
        words = "the plan's own trade-off curve, with an unknown noise multiplier"
        bounds.append(LowerBound(found, delta, confidence, "one run, Mahloujifar 2025", words))
    return OneRunAudit(m, r, right, tuple(bounds))
