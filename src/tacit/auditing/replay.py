"""One step of a query, run again on other records with every random draw frozen.

Two runs that differ in one record then differ by what that record does, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tacit.auditing.verdicts import Factory, ratio_of
from tacit.budget import Relation
from tacit.pytrees import Tree, device_of, map_tensors, num_rows, take_rows
from tacit.queries.bounded_gradient import Adapting, BoundedGradient, GradientQuery, Loss
from tacit.randomness import Randomness, step_draws
from tacit.records import Records
from tacit.sampling.mini_sets import MiniSets
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import Batch
from tacit.sampling.scheme import Scheme, Unit

_DIVISOR = 8.0  # public, and no batch of an audit has this size


@dataclass(frozen=True)
class Side:
    """One run of a step: each block's sum as one float64 vector, then each statistic as one.

    `state` are the model's parameters and buffers afterwards.
    """

    bounded: BoundedGradient
    sums: tuple[Tensor, ...]
    state: dict[str, Tensor]

    @property
    def names(self) -> list[str]:
        """A name for each of `sums`."""
        blocks = [_shortened(block.names) for block in self.bounded.blocks]
        return blocks + [f"statistic {one.name}" for one in self.bounded.statistics]

    @property
    def bounds(self) -> list[float]:
        """What one unit may add to each of `sums`."""
        of_statistics = [one.bound for one in self.bounded.statistics]
        return [block.bound for block in self.bounded.blocks] + of_statistics

    def sensitivities(self, relation: Relation) -> list[float]:
        """How far one record may move each of `sums`."""
        return [
            *self.bounded.sensitivities(relation),
            *self.bounded.statistic_sensitivities(relation),
        ]


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]}, ... {names[-1]} ({len(names)})"


class Replay:
    """Runs a query on batches, each time from the same weights and with the same random draws.

    The model is put back after each run, and the given query is not changed.
    """

    def __init__(self, query: GradientQuery, model: nn.Module, loss: Loss, seed: int = 0) -> None:
        self.query: GradientQuery = query.fresh() if isinstance(query, Adapting) else query
        self.model, self.loss, self.seed = model, loss, seed
        self._start = {n: t.detach().clone() for n, t in tensors_in(model)}

    def run(self, batch: Batch, seed: int | None = None) -> Side:
        """One call of the query. What it leaves in the model is in the result, and undone."""
        source = Randomness(self.seed if seed is None else seed)
        try:
            with step_draws(source, 0, batch.indices.device):
                bounded = self.query(self.model, self.loss, batch)
            state = {n: t.detach().clone() for n, t in tensors_in(self.model)}
        finally:
            self.restore()
        return Side(bounded, tuple(_vectors(bounded)), state)

    def restore(self) -> None:
        """Put back the weights and buffers that the model had when this was made."""
        with torch.no_grad():
            for name, tensor in tensors_in(self.model):
                if not _same(tensor, self._start[name]):
                    tensor.copy_(self._start[name])

    def draws_matter(self, batch: Batch) -> bool:
        """Whether the step has random draws of its own, such as dropout or views."""
        here, there = self.run(batch), self.run(batch, self.seed + 1)
        return not all(torch.equal(a, b) for a, b in zip(here.sums, there.sums, strict=True))


def tensors_in(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters and buffers by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _vectors(bounded: BoundedGradient) -> Iterator[Tensor]:
    for block in bounded.blocks:
        yield torch.cat([s.detach().double().reshape(-1).cpu() for s in block.sums])
    for statistic in bounded.statistics:
        yield statistic.value.detach().double().reshape(1).cpu()


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal, where NaN equals NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def movements(here: Side, there: Side) -> list[float]:
    """‖S(D) − S(D')‖ of each block and statistic."""
    pairs = zip(here.sums, there.sums, strict=True)
    return [float(torch.linalg.vector_norm(a - b)) for a, b in pairs]


def ratios_between(
    here: Side, there: Side, relation: Relation, alone: bool = False
) -> list[tuple[str, float, float, float]]:
    """(name, movement, limit, ratio) of each block and statistic.

    The limit is the declared sensitivity; with `alone`, the bound on one unit's contribution.
    """
    limits = here.bounds if alone else here.sensitivities(relation)
    rows = zip(here.names, movements(here, there), limits, strict=True)
    return [(name, moved, limit, ratio_of(moved, limit)) for name, moved, limit in rows]


def public_differences(here: Side, there: Side) -> list[str]:
    """What must be a public constant and is not: it changes when one record does."""
    a, b = here.bounded, there.bounded
    found = []

    def compare(what: str, one: Any, other: Any) -> None:
        if one != other:
            found.append(
                f"{what} is {one} on one dataset and {other} on its neighbour; it must be a public "
                "constant, since it is released without noise"
            )

    compare("the divisor", a.divisor, b.divisor)
    compare("the unit", a.unit, b.unit)
    compare("the list of blocks", [x.names for x in a.blocks], [x.names for x in b.blocks])
    compare("the list of statistics", *([s.name for s in x.statistics] for x in (a, b)))
    compare("the bounds of the blocks", *([x.bound for x in y.blocks] for y in (a, b)))
    compare("the factors of the blocks", *([x.factors for x in y.blocks] for y in (a, b)))
    bounds = ([(s.bound, s.std) for s in y.statistics] for y in (a, b))
    compare("the bounds and noise of the statistics", *bounds)
    masks = ([_digest(block.active) for block in y.blocks] for y in (a, b))
    compare("the mask of active entries", *masks)
    for name, tensor in here.state.items():
        if not _same(tensor, there.state[name]):
            found.append(
                f"after the step, {name!r} of the model depends on one record, so that the model "
                "releases it without noise; freeze it, or use PublicStatistics or "
                "ReleasedStatistics for BatchNorm"
            )
    return found


def _digest(masks: Sequence[Tensor | None] | None) -> object:
    return masks and tuple(None if m is None else hash(m.cpu().numpy().tobytes()) for m in masks)


# ---- batches -------------------------------------------------------------------------------------


def set_size_of(query: GradientQuery) -> int:
    """How many records a unit of the query has."""
    size: int = getattr(query, "mini_set_size", 1)
    if query.unit is Unit.MINI_SET and size == 1:
        raise ValueError(
            f"{type(query).__name__} bounds mini-sets, and does not say how large they are; give "
            "it an attribute mini_set_size"
        )
    return size


def batch_of_all(
    records: Records, set_size: int = 1, max_physical: int | None = None, keep: int | None = None
) -> Batch:
    """All records in one batch, in mini-sets by id; with `keep` the rows from there on are padding.

    Padding is how a record is taken out where other records' random draws have to stay.
    """
    rows = torch.arange(len(records), device=records.device)
    groups = rows // set_size if set_size > 1 else None
    mask = None if keep is None else rows < keep
    if groups is not None and mask is not None:
        groups = torch.where(mask, groups, -1)
    scheme: Scheme = Poisson(0.5)
    if set_size > 1:
        scheme = MiniSets(1 << 20, set_size, rate=0.5)
    return Batch(records, rows, _DIVISOR, scheme, mask, groups, max_physical)


def few(records: Records, count: int) -> Records:
    """The first records, in memory, with their row numbers as ids."""
    some = records.take(slice(0, count)).read()
    ids = torch.arange(len(some), device=some.device)
    return replace(some, record_ids=ids, public_size=None, num_ids=None)


def with_rows(records: Records, inputs: Tree, targets: Tree) -> Records:
    """The same kind of records with other rows, numbered from 0."""
    ids = torch.arange(num_rows(inputs), device=device_of(inputs))
    return replace(records, inputs=inputs, targets=targets, record_ids=ids)


def joined(records: Records, more: Records) -> Records:
    """These records, and then more of them."""
    first, second = (records.inputs, records.targets), (more.inputs, more.targets)
    inputs, targets = map_tensors(lambda a, b: torch.cat([a, b.to(a)]), first, second)
    return with_rows(records, inputs, targets)


def chosen(records: Records, rows: Sequence[int]) -> Records:
    """These rows in this order, which may repeat, numbered from 0."""
    where = torch.tensor(list(rows), dtype=torch.long, device=records.device)
    inputs, targets = take_rows((records.inputs, records.targets), where)
    return with_rows(records, inputs, targets)


# ---- drawn neighbours ----------------------------------------------------------------------------

_MOST_IN_MEMORY = 4096


def in_memory(records: Records) -> Records:
    """The records; of those that are read from disk, the first few thousand."""
    return few(records, _MOST_IN_MEMORY) if records.is_lazy else records


@dataclass(frozen=True)
class DrawnPair:
    """Two neighbouring datasets that differ in a record that the step draws."""

    sides: tuple[Records, Records]
    changed: int  # its id


def neighbour_of(
    records: Records,
    sampler: Factory,
    extremes: Records,
    place: int,
    relation: Relation,
    seed: int,
) -> DrawnPair | None:
    """The records with an extreme one, and without it or with another one in its place.

    It is the first record that the seeded sampler draws; None if it draws nobody.
    """
    drawn = sampler(records, steps=1, seed=seed)
    drawn.scheme.require(relation)
    (batch,) = drawn
    rows = batch.indices if batch.mask is None else batch.indices[batch.mask]
    if len(rows) == 0:
        return None
    row = int(rows[0])

    def with_extreme(i: int) -> Records:
        one = chosen(extremes, [i % len(extremes)])
        return records.replaced(row, *(map_tensors(lambda t: t[0], t) for t in _parts(one)))

    here = with_extreme(place)
    other = with_extreme(place + 4) if relation is Relation.REPLACE_ONE else here.without(row)
    return DrawnPair((here, other), int(records.record_ids[row]))


def _parts(one: Records) -> tuple[Tree, Tree]:
    return one.inputs, one.targets
