"""Batch clipping of models that take dicts or tuples of tensors and return several."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from set_loop import norm, sums_of
from tiny_transformers import tiny_bert
from torch import nn
from torch.func import functional_call

import tacit
from tacit import BatchClip, MiniSetSampler, Records, Relation
from tacit.pytrees import take_rows
from tacit.queries import LocalRun
from tacit.queries.bounded_gradient import trainable

torch.set_num_threads(1)
COUNT = 12


class Table(nn.Module):
    """Numbers and category codes by name; a score for each class, and a size."""

    def __init__(self, normalise: bool = False) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, 3)
        self.hidden = nn.Linear(7, 6)
        self.norm = nn.BatchNorm1d(6) if normalise else nn.LayerNorm(6)
        self.scores, self.size = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, *, numbers, code):
        h = self.hidden(torch.cat([numbers, self.codes(code)], dim=1))
        h = torch.tanh(self.norm(h))
        return {"scores": self.scores(h), "size": self.size(h)}


class Pair(nn.Module):
    """Two inputs by position, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 1)

    def forward(self, left, right):
        return self.a(left), self.b(right)


def of_table(outputs, targets):
    classes = F.cross_entropy(outputs["scores"], targets["class"], reduction="none")
    return classes + (outputs["size"].squeeze(1) - targets["size"]).square()


def of_pair(outputs, targets):
    scores, size = outputs
    classes = F.cross_entropy(scores, targets["class"], reduction="none")
    return classes + F.huber_loss(size.squeeze(1), targets["size"], reduction="none")


def table_records(seed=0):
    draws = torch.Generator().manual_seed(seed)
    numbers = torch.randn(COUNT, 4, generator=draws, dtype=torch.float64)
    code = torch.randint(5, (COUNT,), generator=draws)
    targets = {"class": code % 3, "size": numbers.sum(1)}
    return Records({"numbers": numbers, "code": code}, targets, public_size=COUNT)


def pair_records():
    draws = torch.Generator().manual_seed(1)
    left, right = (torch.randn(COUNT, n, generator=draws, dtype=torch.float64) for n in (4, 2))
    targets = {"class": torch.arange(COUNT) % 3, "size": right.sum(1)}
    return Records((left, right), targets, public_size=COUNT)


def text_records():
    draws = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 20, (COUNT, 8), generator=draws)
    mask = (torch.arange(8) < torch.randint(2, 9, (COUNT, 1), generator=draws)).long()
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    return Records(inputs, torch.arange(COUNT) % 3, public_size=COUNT)


CASES = {
    "table": (lambda: Table().double(), of_table, table_records),
    "table with BatchNorm": (lambda: Table(True).double(), of_table, table_records),
    "pair": (lambda: Pair().double(), of_pair, pair_records),
    "bert": (tiny_bert, nn.CrossEntropyLoss(), text_records),
}
ENGINES = {
    "default": lambda: None,
    "set by set": tacit.queries.SetBySet,
    "at once": tacit.queries.SetsAsRecords,
}


def made(name):
    model, loss, records = CASES[name]
    torch.manual_seed(0)
    return model(), loss, records()


def call(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def mean_gradient(model, loss, inputs, targets):
    """By autograd, of the mean of the records' losses. PyTorch's own loss takes the logits."""
    outputs = call(model, inputs)
    value = loss(outputs.logits if isinstance(loss, nn.Module) else outputs, targets).mean()
    parameters = trainable(model)
    found = torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def loop(model, loss, batch, blocks, limit, gradient=mean_gradient):
    total = {n: torch.zeros_like(p) for n, p in trainable(model).items()}
    for group in batch.groups.unique():
        rows = batch.groups == group
        found = gradient(model, loss, take_rows(batch.inputs, rows), take_rows(batch.targets, rows))
        for names in blocks:
            scale = torch.clamp(limit / norm(found[n] for n in names), max=1.0)
            for name in names:
                total[name] += scale * found[name]
    return total


def assert_equals(found, expected):
    for name, value in sums_of(found).items():
        exact = 1e-5 if expected[name].dtype == torch.float32 else 1e-10
        torch.testing.assert_close(
            value.to(expected[name].dtype), expected[name], rtol=exact, atol=exact
        )


# Of 12 records the last set of five has two. BatchNorm has no variance in sets of one.
COMBINED = [
    (name, engine, size)
    for name, engine, size in product(CASES, ENGINES, (1, 3, 5))
    if "BatchNorm" not in name or (engine != "at once" and size > 1)
]


@pytest.mark.parametrize(("name", "engine", "size"), COMBINED)
def test_the_sums_are_those_of_a_loop(name, engine, size):
    model, loss, records = made(name)
    batch = MiniSetSampler(records, size, rate=1.0, seed=0).next_batch()
    query = BatchClip(0.05, size, blocks=tacit.by_layer, engine=ENGINES[engine]())
    expected = loop(copy.deepcopy(model), loss, batch, tacit.by_layer(model), 0.05)
    assert_equals(query(model, loss, batch), expected)


@pytest.mark.parametrize("name", ["table", "pair"])
def test_a_local_run_is_that_of_an_optimizer(name):
    model, loss, records = made(name)
    batch = MiniSetSampler(records, 4, rate=1.0, seed=0).next_batch()

    def by_hand(model, loss, inputs, targets):
        moving = {n: p.detach().clone().requires_grad_() for n, p in trainable(model).items()}
        stepper = torch.optim.SGD(list(moving.values()), lr=0.2, momentum=0.9)
        for start in (0, 2):
            x, y = (take_rows(t, slice(start, start + 2)) for t in (inputs, targets))
            args = ((), x) if isinstance(x, dict) else (x, {})
            stepper.zero_grad()
            loss(functional_call(model, moving, *args), y).mean().backward()
            stepper.step()
        return {n: (p - moving[n]).detach() for n, p in trainable(model).items()}

    run = LocalRun(partial(torch.optim.SGD, lr=0.2, momentum=0.9), at_once=2)
    found = BatchClip(0.3, 4, gradient=run)(model, loss, batch)
    blocks = (tuple(trainable(model)),)
    assert_equals(found, loop(model, loss, batch, blocks, 0.3, by_hand))


@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("name", ["table", "table with BatchNorm"])
def test_one_record_moves_the_sum_by_at_most_its_sensitivity(name, relation):
    model, loss, records = made(name)
    query = BatchClip(1e-3, 3)
    x = {"numbers": 1e3 * records.inputs["numbers"][0], "code": torch.tensor(4)}
    turned = [records.replaced(0, x, {"class": k, "size": s}) for k in range(3) for s in (-99, 99)]
    if relation is Relation.ADD_OR_REMOVE_ONE:
        pairs = [(other, records.without(0)) for other in (records, *turned)]
    else:
        pairs = [(a, b) for a in (records, *turned) for b in turned]
    ratios = []
    for pair in pairs:
        drawn = (MiniSetSampler(r, 3, rate=1.0, seed=0).next_batch() for r in pair)
        a, b = (query(model, loss, batch) for batch in drawn)
        moved = norm(p - q for p, q in zip(a.blocks[0].sums, b.blocks[0].sums, strict=True))
        (allowed,) = a.sensitivities(relation)
        ratios.append(float(moved) / allowed)
    assert 0.5 < max(ratios) <= 1 + 1e-9  # of 2·C: a record can turn its set around


@pytest.mark.parametrize("name", ["table with BatchNorm", "bert"])
def test_a_trainer_takes_it(name, tmp_path):
    model, loss, records = made(name)
    public = dataclasses.replace(CASES[name][2](), name="public")
    if name == "bert":
        public.inputs["input_ids"].add_(1).remainder_(20)
        statistics = None
    else:
        public = dataclasses.replace(table_records(seed=9), name="public")
        statistics = tacit.PublicStatistics(public, 4)
    norms = tacit.queries.LayerwiseNorms(public, 0.1)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    run = tacit.Trainer(
        model,
        loss=loss,
        query=BatchClip(norms, 4, blocks=tacit.by_layer),
        sampler=MiniSetSampler(records, 4, 2, chosen=2),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        budget=tacit.Budget(epsilon=50.0, delta=1e-3, relation=Relation.REPLACE_ONE),
        statistics=statistics,
    ).fit()
    assert run.epsilon <= 50
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert moved == list(before)
    if statistics is not None:
        assert model.norm.running_mean.any()


def test_public_copies_of_private_trees_are_refused():
    model, loss, records = made("table")
    batch = MiniSetSampler(records, 4, rate=1.0, seed=0).next_batch()
    for public in (records, table_records()):
        query = BatchClip(
            tacit.queries.LayerwiseNorms(dataclasses.replace(public, name="p"), 0.1), 4
        )
        with pytest.raises(tacit.errors.NotPublic):
            query(model, loss, batch)


def test_released_statistics_of_a_table(tmp_path):
    model, loss, records = made("table with BatchNorm")
    tacit.Trainer(
        model,
        loss=loss,
        query=BatchClip(0.1, 4),
        sampler=MiniSetSampler(records, 4, 1, chosen=2),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        budget=tacit.Budget(epsilon=50.0, delta=1e-3, relation=Relation.REPLACE_ONE),
        statistics=tacit.ReleasedStatistics(records, 2.0),
    ).fit()
    assert model.norm.running_mean.any()
    assert (model.norm.running_var > 0).all()


# Which engine is chosen: by what the program does, whatever its modules are called.


class BatchNorm1d(nn.Module):
    """Only by name: it scales, and records do not meet."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, h):
        return self.weight * h


class Centred(nn.Module):
    """Records meet, in a module that nobody knows."""

    def forward(self, h):
        return h - h.mean(dim=0)


class Branches(nn.Module):
    def forward(self, h):
        return h if h.max() > 0 else -h


class Remembers(nn.Module):
    """Adds what it saw in the pass before."""

    last: torch.Tensor | float = 0.0

    def forward(self, h):
        seen, self.last = self.last, h.detach().mean()
        return h + seen


def with_norm(module):
    model, loss, records = made("table")
    model.norm = module
    return model, loss, MiniSetSampler(records, 4, rate=1.0, seed=0).next_batch()


ROWS_SEEN: list[int] = []


class Noted(nn.Module):
    """How many rows each pass has."""

    def forward(self, h):
        ROWS_SEEN.append(len(h))
        return h


def chosen(model, loss, batch):
    """The engine of a step after the first: it passes all sets through the model, or one by one."""
    model, query = copy.deepcopy(model), BatchClip(0.05, 4)
    model.norm = nn.Sequential(Noted(), model.norm)
    query(model, loss, batch)
    ROWS_SEEN.clear()
    query(model, loss, batch)
    whole = {4: tacit.queries.SetBySet, len(batch): tacit.queries.SetsAsRecords}
    return {whole[rows] for rows in ROWS_SEEN}


@pytest.mark.parametrize(
    ("module", "engine"),
    [
        (BatchNorm1d, tacit.queries.SetsAsRecords),
        (lambda: nn.BatchNorm1d(6).double().eval(), tacit.queries.SetsAsRecords),
        (lambda: nn.BatchNorm1d(6).double(), tacit.queries.SetBySet),
        (Centred, tacit.queries.SetBySet),
        (Branches, tacit.queries.SetBySet),
    ],
    ids=["name", "evaluation", "BatchNorm", "own mean", "branch"],
)
def test_the_proof_chooses_the_engine(module, engine):
    model, loss, batch = with_norm(module())
    assert chosen(model, loss, batch) == {engine}
    query = BatchClip(0.05, 4)
    blocks = (tuple(trainable(model)),)
    assert_equals(query(model, loss, batch), loop(copy.deepcopy(model), loss, batch, blocks, 0.05))


def test_a_loss_in_which_records_of_a_set_meet_runs_set_by_set():
    model, _, batch = with_norm(nn.Identity())

    def spread(outputs, targets):
        size = outputs["size"].squeeze(1)
        return (size - size.mean()).square()

    assert chosen(model, spread, batch) == {tacit.queries.SetBySet}
    blocks = (tuple(trainable(model)),)
    found = BatchClip(0.05, 4)(model, spread, batch)
    assert_equals(found, loop(model, spread, batch, blocks, 0.05))


def test_the_choice_follows_the_mode():
    model, loss, batch = with_norm(nn.BatchNorm1d(6).double())
    assert chosen(model, loss, batch) == {tacit.queries.SetBySet}
    model.eval()
    assert chosen(model, loss, batch) == {tacit.queries.SetsAsRecords}


def test_the_choice_draws_nothing():
    model, loss, batch = with_norm(nn.Dropout(0.5))
    query, found = BatchClip(0.05, 4), []
    for seed in (0, 0, 1):  # the first step chooses
        torch.manual_seed(seed)
        found.append(query(model, loss, batch).blocks[0].sums)
    assert all(map(torch.equal, found[0], found[1]))
    assert not all(map(torch.equal, found[0], found[2]))


@pytest.mark.parametrize("module", [nn.BatchNorm1d(6).double(), Centred(), Branches()])
def test_models_that_mix_sets_are_not_run_all_at_once(module):
    model, loss, batch = with_norm(module)
    with pytest.raises(
        tacit.errors.MixesRecords, match=r"at once.*engine=tacit.queries.SetBySet\(\)"
    ):
        BatchClip(0.05, 4, engine=tacit.queries.SetsAsRecords())(model, loss, batch)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_remembers_the_set_before_is_refused(engine):
    model, loss, batch = with_norm(Remembers())
    with pytest.raises(tacit.errors.MixesRecords, match="stateful"):
        BatchClip(0.05, 4, engine=ENGINES[engine]())(model, loss, batch)
