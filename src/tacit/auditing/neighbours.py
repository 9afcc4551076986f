"""Neighbour replay: does one record move a query's sums by more than they are declared to move?

The proof of every route ends in one inequality: for neighbouring datasets D and D', with equal
random draws, ‖S_h(D) − S_h(D')‖ ≤ Δ_h in each block h. Here it is tried out. A step is run on a
few records, and again with one of them added, removed or replaced, by ordinary records and by the
worst that can be made up: huge, zero, opposite, NaN and infinite ones. The query is called from
outside, so nothing here depends on how it bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tacit.auditing.replay import (
    Replay,
    Side,
    batch_of_all,
    chosen,
    few,
    in_memory,
    joined,
    neighbour_of,
    public_differences,
    ratios_between,
    set_size_of,
    with_rows,
)
from tacit.auditing.verdicts import TOLERANCE, Factory, Verdict, largest_of, words_of
from tacit.budget import Relation
from tacit.pytrees import map_tensors, take_rows
from tacit.queries.bounded_gradient import GradientQuery, Loss
from tacit.records import Records, as_records
from tacit.sampling.sampler import Batch


def replay_neighbours(
    query: GradientQuery,
    model: nn.Module,
    loss: Loss,
    records: object,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    candidates: object = None,
    sampler: Factory = None,
    company: int = 12,
    max_physical: int | None = None,
    seed: int = 0,
) -> Verdict:
    """Compare every block's movement ‖S(D) − S(D')‖ with its declared sensitivity.

    Args:
        query: any `GradientQuery`, of Tacit or of your own.
        records: real or invented records; the first `company` of them are the dataset D.
        relation: what a neighbour is: a record added or removed, or one replaced.
        candidates: the records to add or to put in the place of one. By default
            `extreme_records` makes them: huge, zero, opposite, random, NaN and infinite ones.
        sampler: makes a sampler, as in `sampler(records, steps=1, seed=0)`. Then sampled steps of
            D and D' are compared as well. A class is one, or `functools.partial` of it.
        max_physical: the most rows in a physical batch.

    `ratios` have movement / sensitivity of each block, over all changes. A fault is a ratio above
    1; a divisor, bound or buffer that changes with a record; and an error that a record causes.
    Each record is also tried alone, against the bound on one contribution.

        report = replay_neighbours(PerSampleClip(1.0), model, loss, records)
        print(report.largest, report.holds)
    """
    everyone = as_records(records)
    base = few(everyone, company)
    extremes = extreme_records(everyone, seed) if candidates is None else as_records(candidates)
    audit = _Comparison(query, model, loss, relation, max_physical, seed)
    pool = few(extremes, len(extremes))
    if relation is Relation.REPLACE_ONE:
        audit.replace_by_each(base, pool)
    else:
        audit.add_each(base, pool)
        audit.remove_some(base)
    audit.each_alone(base, pool)
    if sampler is not None:
        audit.sampled(sampler, in_memory(everyone), pool)
    return audit.verdict("neighbour replay")


def replay_among_identical(
    query: GradientQuery,
    model: nn.Module,
    loss: Loss,
    records: object,
    *,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    sizes: Sequence[int] = (1028, 4112),
    seed: int = 0,
) -> Verdict:
    """Neighbour replay with one record among thousands of identical ones.

    Identical records round alike, so the roundings of their sum add up instead of cancelling, and
    one record more may move all of them at once. A sum in bfloat16 moves by many times its bound,
    which no test with a few records shows. Sums are compared in float64.

    By default the sizes are just above a power of two, where a rounded sum has begun to take
    larger steps.

        replay_among_identical(query, model, loss, records).require()
    """
    everyone = few(as_records(records), 2)
    audit = _Comparison(query, model, loss, relation, None, seed)
    size_of_set = set_size_of(query)
    for size in sizes:
        crowd = chosen(everyone, [0] * size * size_of_set)
        if relation is Relation.REPLACE_ONE:
            other = chosen(everyone, [len(everyone) - 1] + [0] * (size * size_of_set - 1))
            audit.compare(f"replacing one of {size} equal records", crowd, other)
        else:
            audit.add(f"adding one to {size} equal records", crowd, chosen(everyone, [0]))
    return audit.verdict("one among identical records")


def extreme_records(records: object, seed: int = 0) -> Records:
    """Records that a query may handle badly, of the shapes and types of the given ones.

    Some records as they are and with each other's targets; inputs that are opposite, zero, random,
    10³ and 10³⁰ times as large; and, where inputs or targets are real numbers, NaN and infinities.
    """
    some = few(as_records(records), 4)
    n = len(some)
    generator = torch.Generator().manual_seed(seed)
    rolled = [(i + 1) % n for i in range(n)]
    exchanged = with_rows(some, some.inputs, take_rows(some.targets, torch.tensor(rolled)))
    found = [some, exchanged]
    first, last = chosen(some, [0]), chosen(some, [n - 1])

    def random(t: Tensor) -> Tensor:
        drawn = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return 3 * drawn.to(t)

    def with_one(value: float) -> Any:
        def change(t: Tensor) -> Tensor:
            t = t.clone()
            t.reshape(len(t), -1)[:, 0] = value
            return t

        return change

    changes: list[Any] = [
        lambda t: -t,
        lambda t: 1e3 * t,
        torch.zeros_like,
        random,
        lambda t: torch.full_like(t, min(1e30, torch.finfo(t.dtype).max / 4)),
        with_one(float("nan")),
        lambda t: torch.full_like(t, float("inf")),
        with_one(-float("inf")),
    ]
    for change in changes:
        for one in (first, last) if change is changes[0] else (first,):
            found.append(_changed(one, change, "inputs"))
    if _is_real(some.targets):
        found += [_changed(first, change, "targets") for change in changes]
    whole = found[0]
    for more in found[1:]:
        whole = joined(whole, more)
    return whole


def _is_real(tree: Any) -> bool:
    seen: list[bool] = []
    map_tensors(lambda t: seen.append(t.is_floating_point()), tree)
    return any(seen)


def _changed(one: Records, change: Any, part: str) -> Records:
    def where_real(t: Tensor) -> Tensor:
        changed: Tensor = change(t) if t.is_floating_point() else t
        return changed

    inputs = map_tensors(where_real, one.inputs) if part == "inputs" else one.inputs
    targets = map_tensors(where_real, one.targets) if part == "targets" else one.targets
    return with_rows(one, inputs, targets)


@dataclass
class _Comparison:
    """Runs a query on pairs of neighbours and keeps the worst of what it sees."""

    query: GradientQuery
    model: nn.Module
    loss: Loss
    relation: Relation
    max_physical: int | None
    seed: int
    ratios: dict[str, float] = field(default_factory=dict)
    worst: dict[str, str] = field(default_factory=dict)  # a sentence for each block above its limit
    faults: list[str] = field(default_factory=list)
    pairs: int = 0

    def __post_init__(self) -> None:
        self.replay = Replay(self.query, self.model, self.loss, self.seed)
        self.set_size = set_size_of(self.query)
        self.random: bool | None = None  # whether the step has draws of its own
        self._kept: tuple[Batch, Side] | None = None

    def verdict(self, check: str) -> Verdict:
        notes = []
        if self.random:
            notes.append("the step makes random draws: records were taken out by masking their row")
        compared = f"{self.pairs} pairs of neighbours ({self.relation}), movement / sensitivity"
        faults = (*dict.fromkeys(self.faults), *self.worst.values())
        return Verdict(check, compared, self.ratios, faults, tuple(notes))

    # ---- changes ---------------------------------------------------------------------------------

    def add_each(self, base: Records, pool: Records) -> None:
        for i in range(len(pool)):
            self.add(f"adding candidate {i}", base, chosen(pool, [i]))

    def add(self, change: str, base: Records, one: Records) -> None:
        """Compare the records with those and one more."""
        more = joined(base, one)
        if self._draws_matter(base):
            self._compare(change, self._batch(more, keep=len(base)), self._batch(more))
        else:
            self._compare(change, self._batch(base), self._batch(more))

    def remove_some(self, base: Records) -> None:
        """Take out the last record, and the first, so that all others move by a row."""
        n = len(base)
        if n == 0:
            return
        whole = self._batch(base)
        if self._draws_matter(base):
            self._compare("removing the last record", whole, self._batch(base, keep=n - 1))
            return
        keep_ids = torch.arange(n, device=base.device)
        for place, kept in (("last", keep_ids[:-1]), ("first", keep_ids[1:])):
            self._compare(f"removing the {place} record", whole, whole.only(kept))

    def replace_by_each(self, base: Records, pool: Records) -> None:
        """Exchange the first record for each candidate, and opposite candidates for each other."""
        rest = chosen(base, range(1, len(base)))
        for i in range(len(pool)):
            one = chosen(pool, [i])
            self.compare(f"replacing a record by candidate {i}", base, joined(one, rest))
            before = joined(chosen(pool, [(i + 4) % len(pool)]), rest)
            self.compare(f"replacing one candidate by candidate {i}", before, joined(one, rest))

    def compare(self, change: str, base: Records, other: Records) -> None:
        self._compare(change, self._batch(base), self._batch(other))

    def each_alone(self, base: Records, pool: Records) -> None:
        """One unit's whole contribution: a record, or a mini-set with it, against nobody."""
        everyone = joined(base, pool)
        nobody = self._batch(chosen(base, []))
        rest = range(min(self.set_size - 1, len(base)))
        for i in range(len(everyone)):
            one = self._batch(chosen(everyone, [i, *rest]))
            self._compare(f"record {i} alone", nobody, one, alone=True)

    def sampled(self, make: Factory, records: Records, pool: Records) -> None:
        """Drawn steps of D and D' under one seed: everybody else is drawn alike."""
        for place in range(0, len(pool), 3):
            pair = neighbour_of(records, make, pool, place, self.relation, self.seed + place)
            if pair is None:
                continue
            samplers = [make(side, steps=1, seed=self.seed + place) for side in pair.sides]
            one, other = (next(iter(sampler)) for sampler in samplers)
            if others_in(one, pair.changed) != others_in(other, pair.changed):
                self.faults.append(
                    "one record changes which others a step draws, or their mini-sets; draw by "
                    "record id"
                )
            elif not self.random or self.relation is Relation.REPLACE_ONE:
                self._compare(f"a drawn step with candidate {place}", one, other)

    # ---- one pair --------------------------------------------------------------------------------

    def _batch(self, records: Records, keep: int | None = None) -> Batch:
        return batch_of_all(records, self.set_size, self.max_physical, keep)

    def _draws_matter(self, base: Records) -> bool:
        if self.random is None:
            self.random = len(base) > 0 and self.replay.draws_matter(self._batch(base))
        return self.random

    def _side(self, batch: Batch, change: str) -> Side | None:
        if self._kept is not None and self._kept[0] is batch:
            return self._kept[1]
        try:
            return self.replay.run(batch)
        except Exception as error:
            self.faults.append(
                f"{change} ends the step with an error, which tells that the record is there: "
                f"{words_of(error)}"
            )
            return None

    def _compare(self, change: str, here: Batch, there: Batch, alone: bool = False) -> None:
        if self.pairs == 0:
            self.replay.run(here)  # what fails without a neighbour is no finding of ours
        a, b = self._side(here, change), self._side(there, change)
        if a is None or b is None:
            return
        self.pairs += 1
        self.faults += public_differences(a, b)
        if len(a.sums) != len(b.sums) or a.names != b.names:
            return
        rows = ratios_between(a, b, self.relation, alone)
        for name, moved, limit, ratio in rows:
            if not ratio <= (1 + TOLERANCE) * max(1.0, self.ratios.get(name, 0.0)):
                what = "the bound of one contribution" if alone else "its declared sensitivity"
                limit_of = "" if alone else f" under {self.relation}"
                self.worst[name] = (
                    f"{change} moves block [{name}] by {moved:.6g}, {ratio:.4g} times {what}, "
                    f"{limit:.6g}{limit_of}"
                )
        self.ratios = largest_of([*self.ratios.items(), *((r[0], r[3]) for r in rows)])


def others_in(batch: Batch, row_id: int) -> dict[int, int]:
    """{record id: its mini-set} of everybody who takes part, but for one."""
    if batch.mask is not None:
        batch = batch.only(batch.mask)
    sets = batch.groups if batch.groups is not None else torch.zeros(len(batch)).long()
    found = dict(zip(batch.record_ids.tolist(), sets.tolist(), strict=True))
    found.pop(row_id, None)
    return found
