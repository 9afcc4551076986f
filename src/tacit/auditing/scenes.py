"""The worst case of one step: model, records and batches with a canary at the bound.

The records are those of a linear network at
zero weights, whose gradients are (p − y)xᵀ with p = (½, …, ½). A long x has a gradient that is
clipped to the bound, the other label has the opposite gradient, and another entry of x an
orthogonal one. What others do is the worst that each sampler's proof allows:

- Poisson, also truncated, and shuffled epochs: the others are orthogonal to the canary.
- Fixed size: when the canary is not drawn, another record is in its place. All others have the
  opposite gradient, so that the sum is the same whenever the canary is absent.
- Mini-sets that are clipped as a whole: without the canary its set has the opposite gradient.
- Mini-sets of records that are clipped one by one: the others of the set are all alike, and show
  in a direction of their own whether the set was drawn. The attacker looks there first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tacit.accounting.plan import Plan
from tacit.budget import Relation
from tacit.errors import UnsupportedEvent
from tacit.lipschitz import BoundedInput, SpectralBall, SpectralLinear
from tacit.losses import CrossEntropy
from tacit.queries.bounded_gradient import GradientQuery
from tacit.queries.clipless import Clipless
from tacit.records import Records
from tacit.sampling.fixed_size import (
    FixedSizeSampler,
    ShuffledEpochs,
    ShuffleSampler,
    WithoutReplacement,
)
from tacit.sampling.mini_sets import MiniSets, MiniSetSampler
from tacit.sampling.poisson import Poisson, PoissonSampler, TruncatedPoisson
from tacit.sampling.sampler import Batch, Sampler
from tacit.sampling.scheme import Scheme, Unit

_CANARY, _OTHER, _MATE = 0, 1, 2  # the entry of x that is not zero: orthogonal gradients
_LONG = 1e3  # a gradient of this norm is clipped by any usual bound
_EXPECTED = 100.0  # the declared batch size of Poisson samplers, a public constant like any other
_BATCH = 4  # records in a batch of a shuffled epoch


class TwoLayers(nn.Module):
    """x ↦ Ax + Bx at zero weights: two layers with one gradient, for noise over blocks."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.first = nn.Linear(entries, 2, bias=False)
        self.second = nn.Linear(entries, 2, bias=False)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


@dataclass(frozen=True)
class Scene:
    """Model, loss and neighbouring records in which the canary, row 0, is at the bound.

    `present`, `replaced` and `absent` are batches that the sampler may draw: with the canary, the
    same from the neighbour, and one in which the canary was not drawn.
    """

    query: GradientQuery
    model: nn.Module
    loss: CrossEntropy
    sampler: Sampler
    neighbour: Sampler
    relation: Relation
    present: Batch
    replaced: Batch
    absent: Batch

    @property
    def reveals(self) -> bool:
        """Whether the canary's mini-set shows in a direction of its own that it was drawn."""
        scheme = self.sampler.scheme
        return (
            isinstance(scheme, MiniSets) and scheme.set_size > 1 and self.query.unit is Unit.RECORD
        )


def worst_case(
    query: GradientQuery, scheme: Scheme, relation: Relation, seed: int | None = None
) -> Scene:
    """The scene for a route, a sampling scheme and a relation; UnsupportedEvent where it has none.

    Of a scheme with many records, those that the attack does not need are left out, as an attacker
    may choose the other records.
    """
    Plan(scheme, 1.0, relation, 1, query.unit)  # raises for a relation that the scheme refuses
    alone = isinstance(scheme, MiniSets) and scheme.set_size == 1
    opposite = isinstance(scheme, WithoutReplacement) or (
        isinstance(scheme, MiniSets) and alone and scheme.chosen is not None
    )
    if isinstance(scheme, Poisson | ShuffledEpochs):
        count = 8 if isinstance(scheme, Poisson) else _BATCH * scheme.steps_per_epoch
    elif isinstance(scheme, TruncatedPoisson | WithoutReplacement):
        count = scheme.population
    elif isinstance(scheme, MiniSets):
        count = scheme.num_sets * scheme.set_size
    else:
        raise UnsupportedEvent(
            f"{type(scheme).__name__} has no canary audit: which neighbours are its worst case "
            "is not known here; give the scores of an attack of your own to audit_scores"
        )
    x, y = torch.zeros(count, 3), torch.zeros(count, dtype=torch.long)
    x[:, _OTHER] = _LONG
    if opposite:  # of the canary
        x[:, _OTHER], x[:, _CANARY], y[:] = 0, _LONG, 1
    x[0], y[0] = 0, 0
    x[0, _CANARY] = _LONG
    records = Records(x, y, num_classes=2, public_size=count, num_ids=count)
    if isinstance(scheme, MiniSets) and not alone:
        records = _in_sets(records, query, scheme)
    assert isinstance(records.inputs, Tensor)
    twin = records.replaced(0, records.inputs[0], torch.tensor(1))
    if isinstance(scheme, MiniSets) and query.unit is Unit.MINI_SET:  # like the rest of its set
        twin = records.replaced(0, records.inputs[0] / (_LONG * scheme.set_size), torch.tensor(1))
    other = twin if relation is Relation.REPLACE_ONE else records.without(0)
    if relation is Relation.ADD_OR_REMOVE_ONE and isinstance(scheme, TruncatedPoisson):
        other = replace(other, public_size=count)
    loss = CrossEntropy(temperature=1.0)
    model: nn.Module = TwoLayers(3)
    if isinstance(query, Clipless):
        # On the sphere x has norm 1 and the loss's gradient norm 1/(√2·τ): the clip is below it.
        clip = query.current_clip()
        loss = CrossEntropy(temperature=0.1 if clip is None else min(0.1, 0.5 / clip))
        last = SpectralLinear(3, 2, within=SpectralBall)
        nn.init.zeros_(last.weight)
        model = nn.Sequential(BoundedInput(1.0, sphere=True), last)
    sampler, neighbour = (_sampler(r, scheme, seed) for r in (records, other))
    rows = _rows(scheme, sampler)
    return Scene(
        query,
        model,
        loss,
        sampler,
        neighbour,
        relation,
        present=_batch(sampler, rows[0]),
        replaced=_batch(neighbour, _of_neighbour(rows[0], records, other)),
        absent=_batch(sampler, rows[1]),
    )


def _in_sets(records: Records, query: GradientQuery, scheme: MiniSets) -> Records:
    """Records by their mini-sets: those beside the canary, and those of other sets."""
    x, y = records.inputs, records.targets
    assert isinstance(x, Tensor)
    assert isinstance(y, Tensor)
    sets = MiniSetSampler(records, scheme.set_size, chosen=1).set_of_row
    mates = torch.from_numpy(sets == sets[0])
    mates[0] = False
    x, y = x.clone(), y.clone()
    if query.unit is Unit.RECORD:
        x[mates] = 0
        x[mates, _MATE] = _LONG
    else:
        # Without the canary the set's mean gradient is long and opposite, and with it the
        # canary's own, which is longer than those of all its mates together.
        x[mates] = 0
        x[mates, _CANARY], y[mates] = _LONG, 1
        x[0, _CANARY] = _LONG * _LONG * scheme.set_size
        if scheme.chosen is not None:  # another set takes its place
            elsewhere = ~mates
            elsewhere[0] = False
            x[elsewhere] = 0
            x[elsewhere, _CANARY], y[elsewhere] = _LONG, 1
    return replace(records, inputs=x, targets=y)


def _sampler(records: Records, scheme: Scheme, seed: int | None) -> Sampler:
    """The library's own sampler of this scheme. Padding spares whole releases many shapes."""
    if isinstance(scheme, Poisson | TruncatedPoisson):
        return PoissonSampler(
            records,
            scheme.rate,
            expected_batch_size=_EXPECTED,
            max_batch_size=getattr(scheme, "max_batch_size", None),
            pad_to=32,
            seed=seed,
        )
    if isinstance(scheme, WithoutReplacement):
        return FixedSizeSampler(records, scheme.sample_size, seed=seed)
    if isinstance(scheme, ShuffledEpochs):
        return ShuffleSampler(records, _BATCH, seed=seed)
    assert isinstance(scheme, MiniSets)
    return MiniSetSampler(
        records, scheme.set_size, chosen=scheme.chosen, rate=scheme.rate, pad_to=32, seed=seed
    )


def _rows(scheme: Scheme, sampler: Sampler) -> tuple[list[int], list[int]]:
    """Rows of a draw with the canary, and of one without."""
    if isinstance(scheme, WithoutReplacement):
        size = scheme.sample_size
        return list(range(size)), list(range(1, min(size + 1, scheme.population)))
    if isinstance(scheme, MiniSets):
        assert isinstance(sampler, MiniSetSampler)
        sets = sampler.set_of_row
        others = [s for s in range(scheme.num_sets) if s != sets[0]]
        count = scheme.chosen or 0  # without it, no other set need be drawn
        with_it, without = {sets[0], *others[: max(0, count - 1)]}, set(others[:count])
        return (
            [row for row, s in enumerate(sets) if s in with_it],
            [row for row, s in enumerate(sets) if s in without],
        )
    return [0], []


def _of_neighbour(rows: list[int], records: Records, other: Records) -> list[int]:
    """The rows of the neighbour that have the same ids."""
    if len(other) == len(records):
        return rows
    return [row - 1 for row in rows if row > 0]


def _batch(sampler: Sampler, rows: list[int]) -> Batch:
    indices = torch.tensor(rows, dtype=torch.long)
    groups = None
    if isinstance(sampler, MiniSetSampler):
        groups = torch.from_numpy(sampler.set_of_row[rows]).long()
    return Batch(
        sampler.records, indices, sampler.expected_batch_size, sampler.scheme, groups=groups
    )
