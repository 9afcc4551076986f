"""The whole released step, mechanism and ledger included: what moves, and what it is divided by.

A release is read off `.grad`: the sums are known to the audit, so noise = `.grad` · divisor − sum.
`replay_release` releases one step of two neighbours with equal noise. `noise_check` tests the noise
of many releases.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tacit.auditing.neighbours import extreme_records, others_in
from tacit.auditing.replay import Replay, in_memory, neighbour_of
from tacit.auditing.verdicts import TOLERANCE, Factory, Verdict, largest_of, ratio_of
from tacit.budget import Budget, Relation
from tacit.ledger import Ledger
from tacit.mechanism import Mechanism
from tacit.noise import Allocation, joint_noise_multiplier
from tacit.queries.bounded_gradient import Adapting, BoundedGradient, GradientQuery, Loss
from tacit.records import as_records
from tacit.sampling.sampler import Batch

PLENTY = 1e7  # the ε of a ledger that is thrown away


class Watching:
    """A query that keeps what it returned, for an audit that compares it with what is released."""

    def __init__(self, query: GradientQuery) -> None:
        self.query: GradientQuery = query.fresh() if isinstance(query, Adapting) else query
        self.unit = self.query.unit
        self.observed: list[float] = []

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        bounded = self.query(model, loss, batch)
        self.observed = []

        def noting(observe: Callable[[float], None]) -> Callable[[float], None]:
            def both(value: float) -> None:
                self.observed.append(value)
                observe(value)

            return both

        statistics = tuple(replace(s, observe=noting(s.observe)) for s in bounded.statistics)
        self.seen = replace(bounded, statistics=statistics)
        self.sums = [[_flat(s) for s in block.sums] for block in bounded.blocks]
        return self.seen


@dataclass(frozen=True)
class Released:
    """One released step. Of each block: the released sum, its noise, and its deviation."""

    totals: tuple[Tensor, ...]
    noise: tuple[Tensor, ...]
    stds: tuple[float, ...]
    names: tuple[str, ...]
    sensitivities: tuple[float, ...]
    joint: float  # the noise multiplier that the mechanism says it has
    divisor: float
    rounding: tuple[float, ...]  # what rounding to the parameters' type may add to a total's norm


def release_once(
    ledger: Ledger, mechanism: Mechanism, query: Watching, model: nn.Module, loss: Loss, batch: Any
) -> Released:
    """Privatise and release one batch, and read totals and noise off the gradients."""
    relation = mechanism.plan.relation
    pending = mechanism.privatise(model, loss, batch)
    bounded = query.seen
    ledger.release(pending, into=model)
    totals, noise, rounding = [], [], []
    for block, sums in zip(bounded.blocks, query.sums, strict=True):
        of_block = []
        factors = block.factors or (1.0,) * len(sums)
        masks = block.active or (None,) * len(sums)
        error = 0.0
        for parameter, total, factor, mask in zip(
            block.parameters, sums, factors, masks, strict=True
        ):
            grad = parameter.grad
            assert grad is not None
            released = _flat(grad) * (bounded.divisor * factor)
            keep = slice(None) if mask is None else mask.cpu().reshape(-1)
            of_block.append((released[keep], (released - total)[keep]))
            error += float(released.norm()) * 2 * torch.finfo(grad.dtype).eps
        totals.append(torch.cat([pair[0] for pair in of_block]))
        noise.append(torch.cat([pair[1] for pair in of_block]))
        rounding.append(error)
    for value, statistic in zip(query.observed, bounded.statistics, strict=True):
        totals.append(torch.tensor([value], dtype=torch.float64))
        noise.append(totals[-1] - float(statistic.value))
        rounding.append(0.0)
    of_noise = [s.std for s in bounded.statistics]
    stds = (*pending.stds, *of_noise)
    names = [", ".join(block.names[:2]) for block in bounded.blocks]
    names += [f"statistic {s.name}" for s in bounded.statistics]
    sensitivities = bounded.sensitivities(relation)
    sensitivities += bounded.statistic_sensitivities(relation)
    joint = joint_noise_multiplier(sensitivities, stds)
    return Released(
        tuple(totals), tuple(noise), stds, tuple(names), tuple(sensitivities), joint,
        bounded.divisor, tuple(rounding),
    )  # fmt: skip


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().double().reshape(-1).cpu().clone()


def replay_release(
    query: GradientQuery,
    model: nn.Module,
    loss: Loss,
    records: object,
    sampler: Factory,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    noise_multiplier: float = 1.0,
    allocation: Allocation | None = None,
    mechanism: Factory = Mechanism,
    changes: int = 4,
    seed: int = 0,
) -> Verdict:
    """Release one step of neighbouring datasets with equal noise, and compare what comes out.

    Two copies of one ledger, and equal seeds, give both sides the same batch and the same noise.
    Then the released gradients' difference, times the divisor, is at most the sensitivity; noise
    and divisor are the same on both sides, and so is everybody else in the batch. Where the model
    draws by itself (dropout), a record is taken out by masking its row, so that others keep their
    draws.

    Args:
        sampler: makes a sampler, as in `sampler(records, steps=1, seed=0)`.
        mechanism: makes the mechanism; a class with the arguments of `Mechanism`.
        changes: how many records are tried, of those that a step drew.

        replay_release(query, model, loss, records, partial(PoissonSampler, sampling_rate=0.1))
    """
    data = in_memory(as_records(records))
    extremes = extreme_records(data, seed)
    ratios: dict[str, float] = {}
    faults: list[str] = []
    removed = relation is Relation.ADD_OR_REMOVE_ONE
    with Restored(model), tempfile.TemporaryDirectory() as folder:
        for change in range(changes):
            place = change * len(extremes) // changes
            pair = neighbour_of(data, sampler, extremes, place, relation, seed + change)
            if pair is None:
                continue
            original = Path(folder, f"{change}.ledger")
            Ledger(original, Budget(PLENTY, 1e-5, relation)).close()
            sides = []
            for side, of_side in enumerate(pair.sides):
                path = Path(folder, f"{change}-{side}.ledger")
                shutil.copy(original, path)
                drawn = sampler(of_side, steps=1, seed=seed + change)
                watched = Watching(query)
                own = mechanism(
                    watched, drawn, noise_multiplier, relation=relation, allocation=allocation,
                    seed=seed,
                )  # fmt: skip
                (batch,) = drawn
                others = others_in(batch, pair.changed)
                if side == 0:
                    first = batch
                elif removed and Replay(query, model, loss, seed).draws_matter(first):
                    batch = _without(first, pair.changed)
                with Ledger(path) as ledger, Restored(model):
                    released = release_once(ledger, own, watched, model, loss, batch)
                sides.append((released, others))
            (here, others), (there, other_others) = sides
            if others != other_others:
                faults.append("one record changes which others are drawn; draw by record id")
            found = _differences(here, there)
            faults += found[1]
            ratios = largest_of([*ratios.items(), *found[0]])
    if not ratios:
        raise ValueError(
            f"the sampler drew nobody in {changes} steps, so there is nothing to compare; give one "
            "that draws more records"
        )
    compared = f"released gradients of {changes} pairs · divisor, distance / sensitivity"
    return Verdict("released step", compared, ratios, tuple(dict.fromkeys(faults)))


def _without(batch: Batch, record_id: int) -> Batch:
    """The same draw with one record's row as padding."""
    keep = batch.record_ids != record_id
    groups = None if batch.groups is None else torch.where(keep, batch.groups, -1)
    # A draw is released once in a process, and this one is of a neighbour's ledger.
    drawn = None if batch.drawn is None else replace(batch.drawn, released=False)
    mask = keep if batch.mask is None else keep & batch.mask
    return replace(batch, mask=mask, groups=groups, drawn=drawn)


def _differences(here: Released, there: Released) -> tuple[list[tuple[str, float]], list[str]]:
    ratios, faults = [], []
    if here.divisor != there.divisor:
        faults.append(
            f"the divisor is {here.divisor:g} on one dataset and {there.divisor:g} on its "
            "neighbour; divide by the declared expected batch size, never by the actual one"
        )
    rows = zip(
        here.names, here.totals, there.totals, here.noise, there.noise, here.sensitivities,
        here.rounding, there.rounding, strict=True,
    )  # fmt: skip
    for name, a, b, noise_a, noise_b, limit, *errors in rows:
        error = 4 * sum(errors)
        if float((noise_a - noise_b).norm()) > error + 1e-6 * float(noise_a.norm()):
            faults.append(
                f"the noise of block [{name}], or the number that it is divided by, changes when "
                "one record does, although all randomness is the same"
            )
        moved = max(0.0, float((a - b).norm()) - error)
        ratios.append((name, ratio_of(moved, limit)))
        if not ratios[-1][1] <= 1 + TOLERANCE:
            faults.append(
                f"one record moves the released block [{name}] by {moved:.6g}, "
                f"{ratios[-1][1]:.4g} times its declared sensitivity {limit:.6g}"
            )
    return ratios, faults


class Restored:
    """Puts a model's weights, buffers and gradients back at the end."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.state = {n: t.detach().clone() for n, t in self._tensors()}
        self.grads = {n: p.grad for n, p in self.model.named_parameters()}

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors():
                if not torch.equal(tensor, self.state[name]):
                    tensor.copy_(self.state[name])
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.grads[name]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()
