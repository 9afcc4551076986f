"""What is checked of every query: how far one record moves each block, against what it declares.

The queries are called from outside, as any caller would. Nothing here knows how they bound.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

import tacit
from tacit import Batch, Records, Relation
from tacit.queries import BoundedGradient

# float64 sums of a few records: anything above this is not rounding.
ROUNDING = 1e-9


def everyone(records: Records, max_physical: int | None = None) -> Batch:
    """A batch of all records, in mini-sets by id, divided by a constant."""
    return Batch(
        records=records,
        indices=torch.arange(len(records)),
        divisor=10.0,
        scheme=tacit.sampling.Poisson(0.5),
        groups=records.record_ids // 3,
        max_physical=max_physical,
    )


def added(records: Records, x: Tensor, y: Tensor | int) -> Records:
    """The neighbour with one record more, under an id that nobody has."""
    new_id = records.record_ids.max().reshape(1) + 1 if len(records) else torch.zeros(1).long()
    return dataclasses.replace(
        records,
        inputs=torch.cat([records.inputs, x.reshape(1, *records.shape)]),
        targets=torch.cat([records.targets, torch.as_tensor(y, device=records.device).reshape(1)]),
        record_ids=torch.cat([records.record_ids, new_id]),
    )


def nobody_of(records: Records) -> Records:
    """The same kind of records, and none of them."""
    return dataclasses.replace(
        records,
        inputs=records.inputs[:0],
        targets=records.targets[:0],
        record_ids=records.record_ids[:0],
    )


def flat_sums(bounded: BoundedGradient) -> list[Tensor]:
    """Each block's sum as one long vector, in float64; then each statistic, as one of length 1."""
    blocks = [torch.cat([s.reshape(-1).double() for s in b.sums]) for b in bounded.blocks]
    return blocks + [s.value.reshape(1).double() for s in bounded.statistics]


def limits(bounded: BoundedGradient, relation: Relation) -> list[float]:
    """The declared sensitivity of each of `flat_sums`."""
    return bounded.sensitivities(relation) + bounded.statistic_sensitivities(relation)


def distances(one: BoundedGradient, other: BoundedGradient) -> list[float]:
    pieces = zip(flat_sums(one), flat_sums(other), strict=True)
    return [float(torch.linalg.vector_norm(a - b)) for a, b in pieces]


def shares(here: BoundedGradient, there: BoundedGradient, relation: Relation) -> list[float]:
    """‖S(D) − S(D')‖ / Δ of each block and statistic. Above 1 the declared sensitivity is a lie."""
    sensitivities = limits(here, relation)
    assert sensitivities == limits(there, relation), "a sensitivity must be public"
    return [m / d for m, d in zip(distances(here, there), sensitivities, strict=True)]


def worst_share(query, model, loss, records, candidates, relation: Relation) -> list[float]:
    """The largest share over candidate records (x, y), added, removed or replaced.

    Of each block, and then of each statistic.
    """
    if relation is Relation.REPLACE_ONE:
        neighbours = [records.replaced(0, x, y) for x, y in candidates]
    else:
        neighbours = [records.without(0), *(added(records, x, y) for x, y in candidates)]
    here = query(model, loss, everyone(records))
    found = [shares(here, query(model, loss, everyone(n)), relation) for n in neighbours]
    return [max(of_block) for of_block in zip(*found, strict=True)]


def worst_alone(query, model, loss, records, candidates) -> list[float]:
    """The largest share of its bound that one record adds to nobody.

    Stronger than the distance of two records: sampled under replace-one, each must be within
    half of it, so a sum that is off-centre is not safe although it moves by no more than Δ.
    """
    nobody = query(model, loss, everyone(nobody_of(records)))
    bounds = [p.bound for p in (*nobody.blocks, *nobody.statistics)]
    found = []
    for x, y in candidates:
        one = query(model, loss, everyone(added(nobody_of(records), x, y)))
        found.append([m / b for m, b in zip(distances(one, nobody), bounds, strict=True)])
    return [max(of_block) for of_block in zip(*found, strict=True)]


def gradient_of_one(model: nn.Module, loss, x: Tensor, y: Tensor, create_graph=False) -> Tensor:
    """One record's whole gradient by plain autograd, as one vector."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    value = loss(model(x.unsqueeze(0)), y.reshape(1)).sum()
    grads = torch.autograd.grad(value, parameters, create_graph=create_graph, allow_unused=True)
    return torch.cat([g.reshape(-1) for g in grads if g is not None])


def ascend(model, loss, x0: Tensor, y0: Tensor, start: Tensor, y: Tensor, steps=25) -> Tensor:
    """An input found by gradient ascent on ‖∇ℓ(x, y) − ∇ℓ(x0, y0)‖: the strongest replacement."""
    target = gradient_of_one(model, loss, x0, y0).detach()
    x = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([x], lr=0.3, maximize=True)
    for _ in range(steps):
        optimizer.zero_grad()
        difference = gradient_of_one(model, loss, x, y, create_graph=True) - target
        torch.linalg.vector_norm(difference).backward(inputs=[x])
        optimizer.step()
    return x.detach()
