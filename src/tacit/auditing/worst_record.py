"""Adversarial search: the record, and the weights, that move a block the most.

Gradient ascent on ‖∂ℓ(x, y)/∂θ_h‖ over inputs and weights proposes records; a search without
gradients, which asks the query itself, improves them. What counts is measured through the query:
movement over declared sensitivity. Above 1 a bound is false. Far below 1 it is loose, or the search
was too weak: for `Clipless` the ratio says how much noise the bound wastes at most.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tacit.auditing.replay import (
    Replay,
    Side,
    batch_of_all,
    chosen,
    few,
    joined,
    set_size_of,
    with_rows,
)
from tacit.auditing.verdicts import TOLERANCE, Verdict, ratio_of
from tacit.budget import Relation
from tacit.lipschitz.audit import Points, climb, randomise, start_points
from tacit.losses.record_loss import losses_of
from tacit.pytrees import call_model, map_tensors
from tacit.queries.bounded_gradient import GradientQuery, Loss
from tacit.records import Records, as_records

_AT_ONCE = 6  # points that climb together
_LABELS = 8


@dataclass(frozen=True, repr=False)
class WorstRecord(Verdict):
    """The largest ratio of each block, and what reached the largest of all.

    `record` is the record that was added; under REPLACE_ONE it holds two, of which the second takes
    the place of the first. `weights` are the model's parameters at which it did.
    """

    record: Records | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)


def find_worst_record(
    query: GradientQuery,
    model: nn.Module,
    loss: Loss,
    records: object,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    steps: int = 24,
    restarts: int = 2,
    tries: int = 30,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> WorstRecord:
    """Search for the record that moves a block of this query the most, over its sensitivity.

    Works on a copy of the model, in `dtype` (None keeps the model's own). The first attempt has the
    given weights. Others begin with random ones, and let them climb too: weights of Lipschitz
    layers are projected after each step, so they are attacked at the boundary of their sets.

    Args:
        records: their targets are those that are tried, their inputs say what a record is like.
        steps: steps of gradient ascent per block and attempt, where inputs are one real tensor.
        restarts: attempts with other weights.
        tries: records that are tried at random around the best one, for each attempt.

    `largest` is the largest ratio and `record` the record that reached it.

        worst = find_worst_record(Clipless(), model, loss, records)
        print(worst.largest, worst.record.inputs)
    """
    search = _Search(query, model, loss, few(as_records(records), 16), relation, dtype, seed)
    for attempt in range(restarts + 1):
        search.attempt(attempt, steps, tries)
    return search.result()


class _Search:
    def __init__(
        self,
        query: GradientQuery,
        model: nn.Module,
        loss: Loss,
        records: Records,
        relation: Relation,
        dtype: torch.dtype | None,
        seed: int,
    ) -> None:
        self.query, self.loss, self.relation = query, loss, relation
        self.given = copy.deepcopy(model)
        if dtype is not None:
            self.given, records = self.given.to(dtype), records.to(records.device, dtype)
        self.records, self.set_size = records, set_size_of(query)
        self.generator = torch.Generator().manual_seed(seed)
        self.ratios: dict[str, float] = {}
        self.best: tuple[float, Records, dict[str, Tensor]] | None = None
        self.faults: dict[str, str] = {}
        self.tried = 0

    def attempt(self, number: int, steps: int, tries: int) -> None:
        model = copy.deepcopy(self.given)
        if number:
            randomise(model, self.generator)
        pool = self.records
        if self._can_climb():
            for points, labels in self._climbed(model, steps, weights_too=number > 0):
                pool = joined(pool, with_rows(self.records, points.to(pool.inputs), labels))
        best = self._measure(model, pool)
        for _ in range(math.ceil(tries / _AT_ONCE)):
            best = self._measure(model, joined(best, self._around(best)))

    def result(self) -> WorstRecord:
        best = self.best
        return WorstRecord(
            "search for the worst record",
            f"{self.tried} records ({self.relation}), movement / sensitivity",
            self.ratios,
            tuple(self.faults.values()),
            record=None if best is None else best[1],
            weights={} if best is None else best[2],
        )

    # ---- proposals -------------------------------------------------------------------------------

    def _can_climb(self) -> bool:
        inputs = self.records.inputs
        return isinstance(inputs, Tensor) and inputs.is_floating_point() and len(inputs) > 0

    def _climbed(
        self, model: nn.Module, steps: int, weights_too: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Points that ascent reaches for each block, with their labels."""
        names = [block.names for block in self._side(model, self.records).bounded.blocks]
        rows = torch.arange(_AT_ONCE) % min(len(self.records), _LABELS)
        inputs, targets = self.records.inputs, self.records.targets
        labels = map_tensors(lambda t: t[rows.to(t.device)], targets)
        moving = model if weights_too else nn.Module()
        for block in names:
            start = start_points(self.records.shape, math.inf, _AT_ONCE, self.generator)
            points = _Spread(start.rows.to(inputs), math.inf, False, self.generator)

            def values(x: Tensor, block: Sequence[str] = block) -> Tensor:
                return self._gradient_norms(model, x, labels, block)

            climb(values, [points], moving, steps)
            yield points.rows.detach(), labels

    def _gradient_norms(
        self, model: nn.Module, x: Tensor, labels: Tensor, block: Sequence[str]
    ) -> Tensor:
        """‖∂ℓ(x_i, y_i)/∂θ‖ of each row, over the block's parameters, by plain autograd."""
        parameters = [model.get_parameter(name) for name in block]
        norms = []
        for i in range(len(x)):
            target = map_tensors(lambda t, i=i: t[i : i + 1], labels)
            value = losses_of(self.loss, call_model(model, x[i : i + 1]), target).sum()
            gradients = torch.autograd.grad(
                value, parameters, create_graph=True, materialize_grads=True
            )
            norms.append(torch.cat([g.reshape(-1) for g in gradients]).norm())
        return torch.stack(norms)

    def _around(self, one: Records) -> Records:
        """Records like this one: moved, scaled, with an entry or a label of somebody else."""
        source, count = self.records, _AT_ONCE
        whole = chosen(one, [len(one) - 1] * count)
        others = torch.randint(0, len(source), (count,), generator=self.generator)

        def near(t: Tensor, of_source: Tensor) -> Tensor:
            t, flat = t.clone(), of_source[others.to(t.device)]
            if t.is_floating_point():
                drawn = torch.randn(t.shape, generator=self.generator, dtype=torch.float64)
                size = t.abs().double().mean().clamp_min(1e-3)
                return t + (drawn.to(t) * size * 10.0 ** -(self.tried % 4)).to(t)
            swap = torch.rand(t.shape, generator=self.generator).to(t.device) < 0.3
            return torch.where(swap, flat.to(t), t)

        inputs = map_tensors(near, whole.inputs, source.inputs)
        return with_rows(source, inputs, map_tensors(near, whole.targets, source.targets))

    # ---- measurement -----------------------------------------------------------------------------

    def _side(self, model: nn.Module, records: Records) -> Side:
        return Replay(self.query, model, self.loss).run(batch_of_all(records, self.set_size))

    def _measure(self, model: nn.Module, pool: Records) -> Records:
        """Ask the query about each record of the pool; the one that moves it most."""
        replay = Replay(self.query, model, self.loss)
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        company = chosen(self.records, range(min(5, len(self.records))))
        base = replay.run(batch_of_all(company, self.set_size))
        ones = [chosen(pool, [i]) for i in range(len(pool))]
        with_each = [replay.run(batch_of_all(joined(company, one), self.set_size)) for one in ones]
        self.tried += len(ones)
        limits = base.sensitivities(self.relation)
        top, worst = -1.0, ones[0]
        for b, (name, limit) in enumerate(zip(base.names, limits, strict=True)):
            sums = torch.stack([side.sums[b] for side in with_each])
            if self.relation is Relation.REPLACE_ONE:
                distances = torch.cdist(sums, sums, compute_mode="donot_use_mm_for_euclid_dist")
            else:
                distances = (sums - base.sums[b]).norm(dim=1)[None]
            place = int(distances.nan_to_num(math.inf).argmax())
            before, after = divmod(place, len(ones))
            moved = float(distances[before, after])
            ratio = ratio_of(moved, limit)
            both = self.relation is Relation.REPLACE_ONE
            found = joined(ones[before], ones[after]) if both else ones[after]
            if ratio > top:
                top, worst = ratio, found
            self._note(name, moved, limit, ratio, found, weights)
        return worst

    def _note(
        self,
        name: str,
        moved: float,
        limit: float,
        ratio: float,
        found: Records,
        weights: dict[str, Tensor],
    ) -> None:
        if ratio > self.ratios.get(name, -1.0):
            self.ratios[name] = ratio
            if not ratio <= 1 + TOLERANCE:
                self.faults[name] = (
                    f"a record moves block [{name}] by {moved:.6g}, {ratio:.4g} times its declared "
                    f"sensitivity {limit:.6g} under {self.relation}"
                )
        if self.best is None or ratio > self.best[0]:
            self.best = ratio, found, weights


class _Spread(Points):
    """Points without a radius, of which none runs away to infinity."""

    def move(self, uphill: Tensor | None, stride: float, wander: bool) -> None:
        super().move(uphill, stride, wander)
        self.rows = self.rows.clamp(-1e6, 1e6)
