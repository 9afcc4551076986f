"""One step under a white-box attack: a canary at the bound, a million trials  [Nasr 2023].

The step is that of the library. The real query bounds the gradients of a batch with the canary and
of one without, the real mechanism chooses the noise, and the attacker, who knows the model and all
other records, measures how far the released sum goes in the canary's direction. `audit_step`
repeats the two random parts a million times, and bounds ε of the step by the scores.

**The canary is at the sensitivity**, and the other records are the worst that each sampler's proof
allows: `tacit.auditing.scenes` makes them.

**The trials are vectorised, and the same distribution.** Let D_h be the sum of block h with the
canary less that without, s_h its noise, v = (D_h/s_h)_h. The attacker's score is ⟨R, v⟩/‖v‖, where
R is the release less the sum without the canary, each block over s_h. Noise of independent
N(0, s_h²) entries has a part of N(0, 1) in each block's direction, so that with independent n_h

    score = (place of what was drawn along v/‖v‖) + Σ_h (‖v_h‖/‖v‖)·n_h,   n_h ~ N(0, 1).

A trial draws each n_h with the mechanism's own generator (`Stream.normals`) and whether the canary
takes part with the sampler's own (`coins`, or the ranks of 64-bit keys, as `Stream.subset` has
them). `released_scores` makes whole releases through sampler, mechanism and ledger instead, to
compare; a test does.

Steps of shuffled epochs are accounted for somebody who knows the order, and so attacked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.accounting.f_dp import trade_off
from tacit.accounting.plan import Plan
from tacit.auditing.lower_bounds import (
    LowerBound,
    PlanFamily,
    ScoreAudit,
    SplitSample,
    audit_scores,
)
from tacit.auditing.scenes import Scene, worst_case
from tacit.budget import Budget, Relation
from tacit.errors import UnsupportedEvent
from tacit.ledger import Ledger
from tacit.mechanism import Mechanism
from tacit.noise import Allocation
from tacit.queries.bounded_gradient import BoundedGradient, GradientQuery
from tacit.randomness import Randomness, Stream
from tacit.sampling.fixed_size import (
    ShuffledEpochs,
    WithoutReplacement,
)
from tacit.sampling.mini_sets import MiniSets
from tacit.sampling.poisson import Poisson, TruncatedPoisson
from tacit.sampling.sampler import Batch
from tacit.sampling.scheme import Scheme

_AT_ONCE = 1 << 22  # random words at a time
_MOST_KEYS = 2048  # of a sample of fixed size; beyond, the canary has a coin of its probability


# ---- what the step does with the canary ----------------------------------------------------------


@dataclass(frozen=True)
class CanaryShift:
    """The canary's part in a release, in standard deviations of the noise.

    `direction` is v/‖v‖ block by block. `present` and `replaced` are the places along it of a
    batch with the canary and of the neighbour's, from a batch in which it was not drawn.
    `largest` is 1/z, the most that the sensitivity allows; `reveal` is v for the canary's
    mini-set, where that shows.
    """

    direction: tuple[Tensor, ...]
    present: float
    replaced: float
    largest: float
    baseline: tuple[Tensor, ...]
    stds: tuple[float, ...]
    reveal: tuple[tuple[Tensor, ...], float] | None = None

    @property
    def share_of_bound(self) -> float:
        """How near the canary comes to the sensitivity: 1 is at the bound."""
        return (self.present - self.replaced) / self.largest

    def at_the_bound(self) -> CanaryShift:
        """The same with a gradient at the bound in the canary's place."""
        factor = 1 / self.share_of_bound
        return replace(self, present=self.present * factor, replaced=self.replaced * factor)

    @property
    def block_norms(self) -> list[float]:
        return [float(part.norm()) for part in self.direction]


def shift_of(scene: Scene, mechanism: Mechanism) -> CanaryShift:
    """Run the query on the three batches, and the mechanism once, for its noise."""
    pending = mechanism.privatise(scene.model, scene.loss, scene.present)

    def sums(batch: Batch) -> tuple[BoundedGradient, list[Tensor]]:
        bounded = mechanism.query(scene.model, scene.loss, batch)
        parts = [torch.cat([s.reshape(-1) for s in b.sums]).double() for b in bounded.blocks]
        return bounded, parts + [s.value.reshape(1).double() for s in bounded.statistics]

    bounded, present = sums(scene.present)
    replaced, absent = sums(scene.replaced)[1], sums(scene.absent)[1]
    stds = (*pending.stds, *(s.std for s in bounded.statistics))
    difference = [(a - b) / s for a, b, s in zip(present, replaced, stds, strict=True)]
    norm = math.sqrt(math.fsum(float(part.square().sum()) for part in difference))
    if norm == 0:
        raise ValueError("the canary does not change the sum at all, so that nothing can be tested")
    direction = tuple(part / norm for part in difference)

    def along(parts: list[Tensor], way: tuple[Tensor, ...]) -> float:
        rows = zip(parts, absent, stds, way, strict=True)
        return math.fsum(float((p - a) @ w) / s for p, a, s, w in rows)

    found = CanaryShift(
        direction,
        along(present, direction),
        along(replaced, direction),
        1 / mechanism.plan.noise_multiplier,
        tuple(absent),
        tuple(stds),
    )
    if not scene.reveals:
        return found
    # What is drawn with the canary's set beside the canary, without its part along v.
    rest = [(r - a) / s for r, a, s in zip(replaced, absent, stds, strict=True)]
    place = found.replaced
    rest = [r - place * d for r, d in zip(rest, direction, strict=True)]
    size = math.sqrt(math.fsum(float(part.square().sum()) for part in rest))
    return replace(found, reveal=(tuple(part / size for part in rest), size))


# ---- trials --------------------------------------------------------------------------------------


def canary_takes_part(scheme: Scheme, stream: Stream, trials: int) -> np.ndarray:
    """For each trial whether the canary, record or mini-set 0, is drawn; by the samplers' rules."""
    if isinstance(scheme, ShuffledEpochs):
        return np.ones(trials, dtype=bool)  # once in each epoch
    if isinstance(scheme, Poisson):
        return stream.coins(trials, scheme.rate)
    if isinstance(scheme, MiniSets) and scheme.chosen is None:
        return stream.coins(trials, scheme.probability)
    if isinstance(scheme, TruncatedPoisson):
        return _truncated(scheme, stream, trials)
    if isinstance(scheme, MiniSets):
        assert scheme.chosen is not None
        return _in_subset(stream, trials, scheme.num_sets, scheme.chosen)
    assert isinstance(scheme, WithoutReplacement)
    return _in_subset(stream, trials, scheme.population, scheme.sample_size)


def _pieces(stream: Stream, trials: int, each: int) -> list[tuple[Stream, int]]:
    """Streams of their own for as many trials at once as fit the memory."""
    size = max(1, _AT_ONCE // each)
    starts = range(0, trials, size)
    return [(stream.derived(f"trials {s}"), min(size, trials - s)) for s in starts]


def _truncated(scheme: TruncatedPoisson, stream: Stream, trials: int) -> np.ndarray:
    """The coins of the others are tossed where the canary's own is heads."""
    takes_part = stream.coins(trials, scheme.rate)
    heads, others, place = np.flatnonzero(takes_part), scheme.population - 1, 0
    for part, count in _pieces(stream, len(heads), scheme.population):
        coins = part.coins(count * others, scheme.rate).reshape(count, others)
        sizes = 1 + coins.sum(axis=1)
        for i in np.flatnonzero(sizes > scheme.max_batch_size).tolist():
            # The canary is the first of the drawn rows: does it stay?
            kept = part.derived(f"truncation {i}").subset(int(sizes[i]), scheme.max_batch_size)
            takes_part[heads[place + i]] = 0 in kept
        place += count
    return takes_part


def _in_subset(stream: Stream, trials: int, count: int, size: int) -> np.ndarray:
    """Whether item 0 is in a subset: its 64-bit key is among the `size` least of `count`.

    Two equal keys, which `Stream.subset` draws anew, have a probability below count²/2^64.
    """
    if count > _MOST_KEYS:
        return stream.coins(trials, size / count)
    found = []
    for part, rows in _pieces(stream, trials, count):
        keys = part.words(rows * count, np.uint64).reshape(rows, count)
        found.append((keys < keys[:, :1]).sum(axis=1) < size)
    return np.concatenate(found)


def trial_scores(
    shift: CanaryShift,
    scheme: Scheme,
    trials: int,
    randomness: Randomness,
    device: torch.device | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of `trials` steps with the canary, and of as many of the neighbour."""
    device = device or torch.device("cpu")
    both = []
    for side, place in (("with", shift.present), ("without", shift.replaced)):
        drawn = canary_takes_part(scheme, randomness.stream("audit sampling", side), trials)
        norms, score = shift.block_norms, place * torch.from_numpy(drawn).double().to(device)
        stream = randomness.stream("audit noise", side)
        for number, norm in enumerate(norms):
            score += norm * stream.normals([trials], device, [number])[0]
        if shift.reveal is not None:
            # Along the mini-set's own direction, which is orthogonal to the canary's.
            shown = shift.reveal[1] * torch.from_numpy(drawn).double().to(device)
            shown += stream.normals([trials], device, [len(norms)])[0]
            score[shown < shift.reveal[1] / 2] = -math.inf
        both.append(score.cpu().numpy())
    return both[0], both[1]


def released_scores(
    scene: Scene,
    noise_multiplier: float,
    steps: int,
    *,
    neighbour: bool = False,
    allocation: Allocation | None = None,
    seed: int | None = None,
) -> np.ndarray:
    """Scores of whole releases: the sampler's batch, the query, the ledger's charge, the noise.

    With a shuffled epoch the score is that of the batch that has the canary, the attacker being
    told the order; one epoch gives one score.
    """
    sampler = scene.neighbour if neighbour else scene.sampler
    sampler.steps = sampler.scheme.steps_within(steps)
    mechanism = Mechanism(
        scene.query, sampler, noise_multiplier,
        relation=scene.relation, allocation=allocation, seed=seed,
    )  # fmt: skip
    shift = shift_of(scene, mechanism)
    bounded = mechanism.query(scene.model, scene.loss, scene.present)
    if bounded.statistics:
        raise UnsupportedEvent(
            "a query that adapts has other noise in each step; compare whole releases of one with "
            "fixed constants"
        )
    budget = Budget(1e6, 1e-5, scene.relation)
    shuffled = isinstance(scene.sampler.scheme, ShuffledEpochs)
    scores: list[float] = []
    with Ledger(None, budget) as ledger:
        while len(scores) < steps:
            batch = sampler.next_batch()
            ids = batch.record_ids if batch.mask is None else batch.record_ids[batch.mask]
            pending = mechanism.privatise(scene.model, scene.loss, batch)
            ledger.release(pending, into=scene.model)
            if shuffled and 0 not in ids.tolist():
                continue
            total, shown = 0.0, 0.0
            for place, block in enumerate(bounded.blocks):
                factors = block.factors or (1.0,) * len(block.names)
                grads = [
                    (p.grad.double() * (pending.divisor * f)).reshape(-1)  # type: ignore[union-attr]
                    for p, f in zip(block.parameters, factors, strict=True)
                ]
                white = (torch.cat(grads) - shift.baseline[place]) / shift.stds[place]
                total += float(white @ shift.direction[place])
                if shift.reveal is not None:
                    shown += float(white @ shift.reveal[0][place])
            if shift.reveal is not None and shown < shift.reveal[1] / 2:
                total = -math.inf
            scores.append(total)
    return np.array(scores)


# ---- the audit -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepAudit:
    """What one step claims, and what its scores prove at least."""

    plan: Plan
    route: str
    claimed: float
    delta: float
    scores: ScoreAudit
    share_of_bound: float
    canary: str

    @property
    def largest_multiplier(self) -> float:
        """The most noise that the scores do not refute; ∞ where they refute none."""
        return PlanFamily(self.plan).largest_multiplier(self.scores.limits)

    @property
    def bounds(self) -> tuple[LowerBound, ...]:
        return self.scores.bounds

    @property
    def epsilon(self) -> float:
        """Proved at least, without assumptions."""
        return self.scores.epsilon

    @property
    def ratio(self) -> float:
        """The largest bound of the two methods over the claim. Above 1 the claim is refuted."""
        most = max(bound.epsilon for bound in self.bounds)
        if self.claimed == 0:
            return math.inf if most > 0 else 0.0
        return most / self.claimed

    def facts(self) -> dict[str, Any]:
        return {
            "route": self.route,
            "sampling": self.plan.scheme.describe(),
            "relation": str(self.plan.relation),
            "noise_multiplier": self.plan.noise_multiplier,
            "delta": self.delta,
            "claimed": self.claimed,
            "canary": self.canary,
            "share_of_bound": self.share_of_bound,
            **self.scores.facts(),
            "ratio": self.ratio,
        }


def audit_step(
    query: GradientQuery,
    scheme: Scheme,
    noise_multiplier: float,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    *,
    delta: float | None = None,
    trials: int = 1_000_000,
    confidence: float = 0.95,
    allocation: Allocation | None = None,
    device: torch.device | str = "cpu",
    seed: int | None = None,
) -> StepAudit:
    """Attack one step of a route and a sampler, and compare what it proves with what is claimed.

    The claim is ε of one step at δ by Tacit's accounting. On correct code the first bound is above
    it with probability 1 − `confidence` at most, and so is the second, which assumes that nothing
    but the noise multiplier is unknown. δ is that of the audit, by default a tenth of the advantage
    of the best test for one step: a million trials cannot see errors that are rarer than 1e-5, so
    that they prove little at the δ of a whole run.

    Where the canary stays below the bound (a loss whose gradients do), a gradient at the bound
    takes its place, and `canary` says so.

    Args:
        trials: of either side. As many again choose the threshold, and are not counted. In a
            sample of fixed size of more than 2,048 units, the canary's part is a coin of its
            probability.

    Example:
        >>> query, scheme = tacit.PerSampleClip(1.0), tacit.sampling.Poisson(0.25)
        >>> audit = tacit.auditing.audit_step(query, scheme, noise_multiplier=0.5)
        >>> audit.claimed, audit.epsilon, audit.ratio
    """
    scene = worst_case(query, scheme, relation)
    mechanism = Mechanism(
        query, scene.sampler, noise_multiplier, relation=relation, allocation=allocation
    )
    shift = shift_of(scene, mechanism)
    measured, canary = shift.share_of_bound, "a record"
    if measured < _AT_BOUND:
        shift, canary = shift.at_the_bound(), "a gradient at its bound, in place of the record's"
    plan = replace(mechanism.plan, scheme=scheme, steps=1)
    if delta is None:
        best = trade_off(noise_multiplier, scheme, 1, relation=relation, unit=plan.unit).advantage
        delta = float(f"{best / 10:.1g}")
    scores = trial_scores(shift, scheme, 2 * trials, Randomness(seed), torch.device(device))
    audit = audit_scores(
        *scores,
        delta=delta,
        confidence=confidence,
        threshold=SplitSample(),
        families=[PlanFamily(plan)],
    )
    claimed = plan.epsilon(1, delta)
    return StepAudit(plan, repr(query), claimed, delta, audit, measured, canary)


_AT_BOUND = 0.99
