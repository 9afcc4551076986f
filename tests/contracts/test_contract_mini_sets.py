"""One record moves a clipped sum over mini-sets by at most 2·C, however it is made.

Over every pair of what a mini-set proposes, how it is clipped and computed, a model with or
without BatchNorm, and the relation: a record replaced, added and removed, huge, and of the other
class.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from contract_checks import ROUNDING, added, distances, limits
from pairwise import Constraint, pairwise
from torch import nn

import tacit
from tacit import AdaptiveNorm, Batch, BatchClip, Records, Relation
from tacit.queries import LayerFactors, LayerwiseNorms, LocalRun, MeanGradient
from tacit.sampling import MiniSets

SIZES = ("1", "2", "3", "12")  # of 12 records: individual clipping, general, and all in one set
LOSS = tacit.losses.CrossEntropy(temperature=0.5)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double()


def records_of(n: int = 12, seed: int = 1) -> Records:
    torch.manual_seed(seed)
    return Records(torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 2, (n,)), public_size=n)


def public_records() -> Records:
    return dataclasses.replace(records_of(24, seed=7), name="public")


def grouped(model: nn.Module):
    layers = tacit.by_layer(model)
    return tacit.queries.group_by_norm(layers, [1.0, 1.1, 5.0][: len(layers)], 2)


GRADIENTS = {
    "mean": MeanGradient(),
    "sgd": LocalRun(partial(torch.optim.SGD, lr=0.5), at_once=2),
    "momentum": LocalRun(partial(torch.optim.SGD, lr=0.5, momentum=0.9), epochs=2, at_once=3),
    "adam": LocalRun(partial(torch.optim.Adam, lr=0.1), at_once=2),
}
CONSTANTS = {
    "flat": lambda: (0.05, None),
    "by-layer": lambda: (0.02, tacit.by_layer),
    "grouped": lambda: (0.02, grouped),
    "original": lambda: (LayerwiseNorms(public_records()), tacit.by_parameter),
    "enhanced": lambda: (LayerwiseNorms(public_records(), 0.02), tacit.by_parameter),
    "factors": lambda: (LayerFactors(public_records(), 0.05), tacit.by_parameter),
    "adaptive": lambda: (AdaptiveNorm(0.05, count_noise=10.0), tacit.by_layer),
}
MODELS = {"mlp": mlp, "batch-norm": batch_norm}
MEAN_ENGINES = {"as-records": tacit.queries.SetsAsRecords()}


@dataclass
class Case:
    gradient: str
    constants: str
    model: str
    size: int
    engine: str = "default"
    relation: Relation | None = None

    def __str__(self) -> str:
        return "/".join(map(str, dataclasses.astuple(self)))

    def query(self) -> BatchClip:
        norm, blocks = CONSTANTS[self.constants]()
        engine = MEAN_ENGINES.get(self.engine)
        return BatchClip(
            norm, self.size, blocks=blocks, gradient=GRADIENTS[self.gradient], engine=engine
        )

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[self.model]()


FACTORS = {
    "gradient": tuple(GRADIENTS),
    "constants": tuple(CONSTANTS),
    "model": tuple(MODELS),
    "size": SIZES,
    "engine": ("default", *MEAN_ENGINES),
    "relation": tuple(map(str, Relation)),
}
CONSTRAINTS = [
    Constraint(("gradient", "engine"), lambda g, e: e == "default" or g == "mean"),
    Constraint(("model", "engine"), lambda m, e: (m, e) != ("batch-norm", "as-records")),
]
CASES = [
    Case(
        r["gradient"],
        r["constants"],
        r["model"],
        int(r["size"]),
        r["engine"],
        Relation(r["relation"]),
    )
    for r in pairwise(FACTORS, CONSTRAINTS)
]


def everyone(records: Records, size: int) -> Batch:
    """All records, in sets by their id."""
    return Batch(
        records=records,
        indices=torch.arange(len(records)),
        divisor=12.0,
        scheme=MiniSets(12, size, rate=0.5),
        groups=records.record_ids // size,
    )


def candidates(records: Records) -> list[tuple[torch.Tensor, int]]:
    torch.manual_seed(3)
    some = torch.randn(2, 4, dtype=torch.float64)
    own = records.inputs[0]
    return [(own, 1 - int(records.targets[0])), (1e6 * some[0], 0), (-1e3 * own, 1), (some[1], 1)]


def neighbours(records: Records, relation: Relation) -> list[Records]:
    if relation is Relation.REPLACE_ONE:
        return [records.replaced(0, x, y) for x, y in candidates(records)]
    without = [records.without(i) for i in (0, 5, 11)]
    fewer = records.without(11)  # whose set has room for one more
    return without + [added(fewer, x, y) for x, y in candidates(records)]


def shares(case: Case, query, relation: Relation) -> list[list[float]]:
    model, records = case.network(), records_of()
    base = records if relation is Relation.REPLACE_ONE else None
    found = []
    for neighbour in neighbours(records, relation):
        here = base if base is not None else records
        if base is None and len(neighbour) == len(records):
            here = records.without(11)
        a = query(model, LOSS, everyone(here, case.size))
        b = query(model, LOSS, everyone(neighbour, case.size))
        allowed = limits(a, relation)
        assert allowed == limits(b, relation), "a sensitivity must be public"
        found.append([m / d for m, d in zip(distances(a, b), allowed, strict=True)])
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_record_moves_each_block_by_at_most_its_sensitivity(case):
    worst = max(max(of_one) for of_one in shares(case, case.query(), case.relation))
    assert worst <= 1 + ROUNDING
    # One record has no variance, so BatchNorm of one record gives nothing.
    assert worst > 0 or (case.model, case.size) == ("batch-norm", 1)


def turned_around(query, size: int, relation: Relation) -> list[float]:
    """Of equal records one is huge, and turns its whole set's gradient around."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    x = records_of().inputs[0]
    same = Records(x.expand(12, 4).clone(), torch.zeros(12).long(), public_size=12)
    best = [0.0]
    for huge, y in ((1e4 * x, 1), (-1e4 * x, 0)):  # one of the two is misclassified
        turned = same.replaced(0, huge, y)
        other = same if relation is Relation.REPLACE_ONE else turned.without(0)
        a = query(model, LOSS, everyone(other, size))
        b = query(model, LOSS, everyone(turned, size))
        reached = [m / d for m, d in zip(distances(a, b), limits(a, relation), strict=True)]
        best = max(best, reached, key=lambda found: found[0])
    return best


@pytest.mark.parametrize("constants", CONSTANTS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_bound_of_two_times_c_is_nearly_attained(constants, size, relation):
    norm, _ = CONSTANTS[constants]()
    reached = turned_around(BatchClip(norm, size, blocks=tacit.by_parameter), size, relation)
    # The original constants are mean norms, which not every set reaches.
    assert reached[0] > {"original": 0.5, "factors": 0.8}.get(constants, 0.9)
    assert max(reached) <= 1 + ROUNDING


@pytest.mark.parametrize("chosen", [True, False], ids=["without-replacement", "poisson"])
@pytest.mark.parametrize("model", MODELS)
def test_through_the_sampler_every_step_is_bounded(model, chosen, relation):
    case = Case("mean", "enhanced", model, 3)
    how = {"chosen": 2} if chosen else {"rate": 0.5}
    records = records_of()
    changed = 4
    other = (
        records.replaced(changed, 1e6 * records.inputs[4], 1 - records.targets[4])
        if relation is Relation.REPLACE_ONE
        else records.without(changed)
    )
    query, network = case.query(), case.network()
    here = tacit.MiniSetSampler(records, 3, 20, seed=3, **how)
    there = tacit.MiniSetSampler(other, 3, 20, seed=3, **how)
    touched = 0
    for one, another in zip(here, there, strict=True):
        a, b = query(network, LOSS, one), query(network, LOSS, another)
        moved, allowed = distances(a, b), limits(a, relation)
        assert all(m <= d * (1 + ROUNDING) for m, d in zip(moved, allowed, strict=True))
        touched += max(moved) > 0
        if here.set_of_row[changed] not in one.groups:
            assert max(moved) == 0
    assert touched > 0


# Mistakes that these tests are there for.


class ByPosition(BatchClip):
    """Sets are cut from the batch as it comes: s rows, and s rows, and s rows."""

    def __call__(self, model, loss, batch):
        places = torch.arange(len(batch)) // self.mini_set_size
        return super().__call__(model, loss, dataclasses.replace(batch, groups=places))


class DeclaresOneC(BatchClip):
    """The factor 2 that Poisson sampling saves individual clipping, taken for sets as well."""

    unit = tacit.sampling.Unit.RECORD


class MeetsOtherSets(BatchClip):
    """All sets in one pass of a BatchNorm network: statistics of one set move all the others."""

    def __call__(self, model, loss, batch):
        parameters = dict(model.named_parameters())
        outputs = model(batch.inputs)
        bounded = super().__call__(model, loss, batch)
        sums = {n: torch.zeros_like(p) for n, p in parameters.items()}
        for group in batch.groups.unique():
            rows = batch.groups == group
            value = nn.functional.cross_entropy(outputs[rows] / 0.5, batch.targets[rows])
            grads = torch.autograd.grad(value, list(parameters.values()), retain_graph=True)
            norm = torch.sqrt(sum(g.square().sum() for g in grads))
            for name, g in zip(parameters, grads, strict=True):
                sums[name] += g * min(1.0, float(self.max_norm / norm))
        (block,) = bounded.blocks
        wrong = dataclasses.replace(block, sums=tuple(sums[n].detach() for n in block.names))
        return dataclasses.replace(bounded, blocks=(wrong,))


class FactorsButMergedBounds(BatchClip):
    """Multiplied by factors after clipping, and not before: C no longer holds for the whole."""

    def __call__(self, model, loss, batch):
        bounded = super().__call__(model, loss, batch)
        (block,) = bounded.blocks
        wrong = dataclasses.replace(block, sums=tuple(3.0 * s for s in block.sums))
        return dataclasses.replace(bounded, blocks=(wrong,))


def shifted(query) -> float:
    """AABBAABB…, B the stronger: cut by position, without the first A every set is B's."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2, bias=False).double()
    nn.init.zeros_(model.weight)
    x = records_of().inputs[0]
    strong = torch.tensor([0, 0, 1, 1] * 3)
    inputs = x * (1 + strong.double()[:, None])
    records = Records(inputs, strong, public_size=12)
    a = query(model, LOSS, everyone(records, 2))
    b = query(model, LOSS, everyone(records.without(0), 2))
    (moved,), (allowed,) = distances(a, b), limits(a, Relation.ADD_OR_REMOVE_ONE)
    return moved / allowed


def worst_of(query_class, model: str, relation: Relation) -> float:
    found = shares(Case("mean", "flat", model, 2), query_class(0.001, 2), relation)
    return max(max(of_one) for of_one in found)


def test_sets_by_position_are_caught():
    assert shifted(ByPosition(0.001, 2)) > 2
    assert shifted(BatchClip(0.001, 2)) <= 1 + ROUNDING


def test_one_c_for_a_set_is_caught():
    """Under add or remove: the factor 2 is there for a reason."""
    relation = Relation.ADD_OR_REMOVE_ONE
    assert max(turned_around(DeclaresOneC(0.001, 3), 3, relation)) > 1.8
    assert max(turned_around(BatchClip(0.001, 3), 3, relation)) <= 1 + ROUNDING


@pytest.mark.parametrize(
    ("planted", "model"), [(MeetsOtherSets, "batch-norm"), (FactorsButMergedBounds, "mlp")]
)
def test_a_planted_bug_is_caught(planted, model, relation):
    assert worst_of(planted, model, relation) > 1.05


@pytest.mark.parametrize("model", MODELS)
def test_the_same_without_a_bug_is_not(model, relation):
    assert worst_of(BatchClip, model, relation) <= 1 + ROUNDING


# From the sum to the noise: what an attacker sees, in standard deviations.


def seen_apart(mechanism, model, here: Batch, there: Batch) -> float:
    """How far two neighbours' releases are apart, in units of the noise that is really drawn."""
    a = mechanism.privatise(model, LOSS, here)
    b = mechanism.privatise(model, LOSS, there)
    assert a.stds == b.stds, "noise must be public"
    names = {id(p): name for name, p in model.named_parameters()}
    total = 0.0
    for one, other in zip(a._bounded.blocks, b._bounded.blocks, strict=True):
        factors = one.factors or (1.0,) * len(one.sums)
        for p, x, y, m in zip(one.parameters, one.sums, other.sums, factors, strict=True):
            moved = (x - y) / m / a.divisor  # as it is released: divided by factor and divisor
            total += float((moved / mechanism.noise_of[names[id(p)]]).square().sum())
    for one, other in zip(a._bounded.statistics, b._bounded.statistics, strict=True):
        total += float((one.value - other.value) / one.std) ** 2
    return total**0.5


@pytest.mark.parametrize("allocation", [tacit.GlobalNoise(), tacit.PerLayerNoise()], ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("constants", CONSTANTS)
def test_releases_of_neighbours_are_within_one_over_z(constants, model, allocation, relation):
    case, z = Case("mean", constants, model, 3), 0.7
    records, network = records_of(), case.network()
    sampler = tacit.MiniSetSampler(records, 3, 1, rate=0.5)
    mechanism = tacit.Mechanism(case.query(), sampler, z, relation=relation, allocation=allocation)

    def drawn(of: Records) -> Batch:
        return dataclasses.replace(everyone(of, 3), scheme=sampler.scheme)

    apart = [
        seen_apart(mechanism, network, drawn(records), drawn(other))
        for other in neighbours(records, relation)
        if relation is Relation.REPLACE_ONE or len(other) < len(records)
    ]
    assert 0 < max(apart) <= (1 + ROUNDING) / z
