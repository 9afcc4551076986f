"""Mistakes in Python: one clear sentence, before anything is charged, with a remedy that works."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_trainer import network, small_trainer, some_records
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tacit
from tacit.training.preconditions import DIVERGED

X = some_records().inputs
Y = some_records().targets
PRICES = X[:, :1] * 2.0


def records(inputs=X, targets=Y, **more):
    return tacit.Records(inputs, targets, public_size=40, **more)


def with_one(targets, value):
    changed = targets.clone()
    changed[7] = value
    return changed


def with_column(value, rows=slice(None)):
    inputs = X.clone()
    inputs[rows, 2] = value
    return inputs


def trainer(*, inputs=X, targets=Y, outputs=2, **more):
    torch.manual_seed(0)
    model = more.pop("model", None) or nn.Linear(4, outputs)
    return small_trainer(model, records(inputs, targets, **more.pop("about", {})), **more)


def optimizer_of(kind):
    model = network()
    return {"model": model, "optimizer": kind(list(model.parameters()))}


def scheduler_of(kind, of_another=False, **options):
    model = network()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = kind(other if of_another else first, **options)
    return {"model": model, "optimizer": first, "scheduler": scheduler}


def frozen():
    model = network()
    return {"model": model.requires_grad_(False), "optimizer": torch.optim.SGD(model.parameters())}


def foreign():
    model = network()
    both = [*model.parameters(), *network().parameters()]
    return {"model": model, "optimizer": torch.optim.SGD(both, lr=0.1)}


def with_nan_weights():
    model = network()
    nn.init.constant_(model[0].weight, torch.nan)
    return {"model": model}


SCHEDULES = torch.optim.lr_scheduler
CE = nn.CrossEntropyLoss()


def unreduced(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


# What is given, what the error says, and what it says to give instead.
MISTAKES = {
    "classes beyond the outputs": (
        {"targets": with_one(Y, 9)},
        "targets of the training records reach from 0 to 9, and the model has 2 outputs.*10",
        {"targets": with_one(Y, 9), "outputs": 10},
    ),
    "in a loss of one's own": (
        {"targets": with_one(Y, 9), "loss": unreduced},
        "reach from 0 to 9",
        {"targets": with_one(Y, 9), "loss": unreduced, "outputs": 10},
    ),
    "classes below 0": (
        {"targets": Y * 2 - 1, "loss": CE},
        r"reach from -1 to 1.*targets - targets\.min\(\)",
        {"targets": (Y * 2 - 1) - (Y * 2 - 1).min(), "loss": CE, "outputs": 3},
    ),
    "fewer outputs than classes": (
        {"about": {"num_classes": 3}},
        "declare 3 classes, and the model has 2 outputs; give it 3",
        {"about": {"num_classes": 3}, "outputs": 3},
    ),
    "classes as real numbers": (
        {"targets": Y.float()},
        r"targets of the training records are float32.*targets\.long\(\)",
        {"targets": Y.float().long()},
    ),
    "classes as a column": (
        {"targets": Y[:, None], "loss": CE},
        r"shape \(1,\) per record.*targets\.squeeze\(1\)",
        {"targets": Y[:, None].squeeze(1), "loss": CE},
    ),
    "one-hot classes": (
        {"targets": F.one_hot(Y), "loss": CE},
        r"targets\.argmax\(1\)",
        {"targets": F.one_hot(Y).argmax(1), "loss": CE},
    ),
    "two outputs for one price": (
        {"targets": PRICES, "loss": nn.MSELoss()},
        r"outputs have shape \(2,\) and the targets \(1,\).*one output per target",
        {"targets": PRICES, "loss": nn.MSELoss(), "outputs": 1},
    ),
    "BCELoss of logits": (
        {"targets": Y.float()[:, None], "loss": nn.BCELoss(), "outputs": 1},
        r"use BCEWithLogitsLoss\(\)",
        {"targets": Y.float()[:, None], "loss": nn.BCEWithLogitsLoss(), "outputs": 1},
    ),
    "classes 0 and 2 for two": (
        {"targets": Y.float()[:, None] * 2, "loss": nn.BCEWithLogitsLoss(), "outputs": 1},
        r"reach from 0 to 2.*\(targets > 0\)\.float\(\)",
        {
            "targets": (Y.float()[:, None] * 2 > 0).float(),
            "loss": nn.BCEWithLogitsLoss(),
            "outputs": 1,
        },
    ),
    "a column of NaN": (
        {"inputs": with_column(torch.nan)},
        r"column 2 of inputs is NaN in all of the training records.*nan_to_num\(inputs\)",
        {"inputs": torch.nan_to_num(with_column(torch.nan))},
    ),
    "a column of NaN that has a name": (
        {"inputs": with_column(torch.nan), "about": {"feature_names": ("a", "b", "age", "d")}},
        "column 'age' of inputs is NaN",
        {},
    ),
    "a column of infinity": ({"inputs": with_column(torch.inf)}, "nan for the training recor", {}),
    "targets of NaN": (
        {"targets": PRICES * torch.nan, "loss": nn.MSELoss(), "outputs": 1},
        "targets is NaN in all",
        {},
    ),
    "another number of features": ({"inputs": X[:, :3]}, r"cannot be run.*shape \(3,\)", {}),
    "whole numbers": (
        {"inputs": (X * 10).long()},
        r"give inputs\.float\(\)",
        {"inputs": (X * 10).long().float()},
    ),
    "weights of NaN": (with_nan_weights(), "parameter '0.weight' of the model holds NaN", {}),
    "LBFGS": (
        optimizer_of(torch.optim.LBFGS),
        "LBFGS.*closure.*torch.optim.SGD",
        optimizer_of(torch.optim.SGD),
    ),
    "SparseAdam": (
        optimizer_of(torch.optim.SparseAdam),
        "SparseAdam.*torch.optim.Adam",
        optimizer_of(torch.optim.Adam),
    ),
    "ReduceLROnPlateau": (
        scheduler_of(SCHEDULES.ReduceLROnPlateau),
        "ReduceLROnPlateau, whose step needs 'metrics'.*CosineAnnealingLR",
        scheduler_of(SCHEDULES.CosineAnnealingLR, T_max=4),
    ),
    "a scheduler of another optimizer": (
        scheduler_of(SCHEDULES.StepLR, of_another=True, step_size=1),
        "of another optimizer",
        scheduler_of(SCHEDULES.StepLR, step_size=1),
    ),
    "a scheduler of too few steps": (
        scheduler_of(SCHEDULES.OneCycleLR, max_lr=1.0, total_steps=2),
        "OneCycleLR of 2 steps.*total_steps=4",
        scheduler_of(SCHEDULES.OneCycleLR, max_lr=1.0, total_steps=4),
    ),
    "parameters of two models": (foreign(), "4 parameters that are not the model's", {}),
    "a frozen model": (frozen(), r"frozen.*model\.requires_grad_\(True\)", {}),
    "a lazy layer": (
        {"model": nn.LazyLinear(2), "optimizer": torch.optim.SGD([nn.Parameter(X)], lr=0.1)},
        "run one batch of zeros",
        {},
    ),
    "no weights": ({"model": nn.Linear(4, 2, device="meta")}, "meta device.*to_empty", {}),
    "a detached loss": ({"loss": lambda h, y: h.detach().sum(1)}, "does not depend on", {}),
    "a loss of the wrong shape": (
        {"loss": lambda h, y: h**2},
        r"end it with `\.mean\(1\)`",
        {"loss": lambda h, y: (h**2).mean(1)},
    ),
    "evaluation classes": (
        {"evaluate_on": (X + 1, Y + 5)},
        "targets of the records of evaluate_on reach from 5 to 6",
        {"evaluate_on": (X + 1, Y)},
    ),
    "evaluation features": (
        {"evaluate_on": (X[:, :2] + 1, Y)},
        "the records of evaluate_on",
        {},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_its_remedy_works(name, tmp_path):
    given, says, instead = MISTAKES[name]
    file = tmp_path / "ledger.sqlite"
    with pytest.raises(ValueError, match=says) as raised:
        trainer(**given, ledger=file).fit()
    assert "\n" not in str(raised.value)
    assert not file.exists(), "a run was begun on the ledger"
    if instead:
        assert trainer(**instead, ledger=file).fit().steps == 4


KINDS = {
    "model": [nn.Linear, "resnet", torch.optim.SGD([nn.Parameter(X)])],
    "loss": [nn.CrossEntropyLoss, "cross-entropy", tacit.PerSampleClip(1.0), 1.0],
    "query": [tacit.PerSampleClip, 1.0, tacit.losses.CrossEntropy()],
    "sampler": [DataLoader(TensorDataset(X, Y)), some_records(), 0.1],
    "optimizer": [torch.optim.SGD, "sgd", nn.Linear(2, 2)],
    "budget": ["3.0", 3.0, (3.0, 1e-5), tacit.Budget],
    "noise": [1.1, "1.1"],
    "scheduler": [torch.optim.lr_scheduler.StepLR, 0.9],
    "moving_average": [0.99],
    "statistics": ["public"],
    "callbacks": [tacit.training.ProgressBar(), [print], [tacit.training.ProgressBar]],
    "ledger": [3],
    "seed": ["a", 1.5, True],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in KINDS.items() for v in values])
def test_an_argument_of_another_kind_is_refused_by_name(name, value):
    whole = {
        "model": network(),
        "loss": tacit.losses.CrossEntropy(),
        "query": tacit.PerSampleClip(0.5),
        "sampler": tacit.PoissonSampler(some_records(), 0.25, steps=4),
        "budget": tacit.Budget(8.0, 1e-3),
    }
    whole["optimizer"] = torch.optim.SGD(whole["model"].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"^{name} (is|holds) .*; give "):
        tacit.Trainer(**(whole | {name: value}))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: tacit.Budget("3.0", 1e-5), "epsilon is '3.0'"),
        (lambda: tacit.Budget(3.0, "1e-5"), "delta is '1e-5'"),
        (lambda: tacit.Budget(3.0, 1e-5, "add"), "'add-or-remove-one' or 'replace-one'"),
        (lambda: tacit.PoissonSampler(some_records(), "0.2"), "sampling rate is '0.2'"),
        (lambda: tacit.PoissonSampler(some_records(), expected_batch_size="4"), "size is '4'"),
        (lambda: tacit.PoissonSampler(some_records(), expected_batch_size=64), "at most 40"),
        (lambda: records(num_classes="2"), "num_classes is '2'"),
        (lambda: tacit.Records(X, Y, public_size=40.5), "public_size is 40.5"),
        (lambda: small_trainer(noise=tacit.Noise("1")), "noise multiplier is '1'"),
    ],
)
def test_a_number_that_is_none(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_what_cannot_be_sampled_says_what_can():
    loader = DataLoader(TensorDataset(X, Y))
    with pytest.raises(TypeError, match=r"give its dataset: loader\.dataset"):
        tacit.PoissonSampler(loader, 0.1)
    tacit.PoissonSampler(loader.dataset, 0.1, expected_batch_size=4)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(TypeError, match="a stream, and the guarantee needs random access"):
        tacit.PoissonSampler(Stream(), 0.1)


# ---- what is no mistake --------------------------------------------------------------------------


def test_float64_records_are_trained_on_as_float32():
    """NumPy's arrays are of float64 by default; the weights are those of float32 records."""
    first, second = network(), network()
    small_trainer(first, records(), seed=1).fit()
    wide = records(X.double().numpy(), Y.numpy())
    run = small_trainer(second, wide, seed=1, evaluate_on=((X + 1).double().numpy(), Y)).fit()
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert wide.inputs.dtype is torch.float64, "the user's own records stay as they are"
    assert len(run.history) == 4
    assert run.facts(((X + 1).double().numpy(), Y.numpy()))["accuracy"] is not None
    assert small_trainer(network().double(), records()).fit().steps == 4


@pytest.mark.parametrize("loss", [nn.MSELoss(), F.l1_loss, nn.BCEWithLogitsLoss()])
def test_a_column_beside_a_vector_is_compared_record_by_record(loss):
    """(N, 1) against (N,) would broadcast to N² pairs in PyTorch; both ways are one run here."""
    column, vector = Y.float()[:, None], Y.float()
    weights = []
    for targets, flat in ((column, False), (vector, False), (column, True), (vector, True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0) if flat else nn.Identity())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            small_trainer(model, records(X, targets), loss=loss, seed=3).fit()
        weights.append(model[0].weight.detach())
    assert all(torch.allclose(weights[0], other, atol=1e-6) for other in weights)


def test_some_nan_is_a_warning_without_a_count_and_the_run_says_nothing():
    with pytest.warns(UserWarning, match=r"some of the training records hold NaN") as caught:
        run = trainer(inputs=with_column(torch.nan, rows=[3, 5])).fit()
    assert not any(character.isdigit() for character in str(caught[0].message))
    assert not any("NaN" in note for note in run.notes)


def test_a_rehearsal_leaves_no_trace():
    """It draws nothing from PyTorch's generators, and changes no buffer and no mode."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen += 1
            return self.layers(x + 0.0 * torch.rand(()))

    model = Counting().train()
    ready = small_trainer(model, loss=CE)
    before, buffers = torch.get_rng_state(), copy.deepcopy(dict(model.named_buffers()))
    ready.rehearse()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.seen, buffers["seen"])
    assert model.training
    assert all(p.grad is None for p in model.parameters())


class ScaledByFirstRecords(nn.Module):
    """Takes its scale from the first records that it meets, as an ActNorm layer does."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layer, self.memory = nn.Linear(4, 2), {}

    def forward(self, x):
        if not self.training and "met" not in self.memory:
            self.scale.data.copy_(x.detach().mean(0))
            self.memory["met"] = x.detach()
        return self.layer(x * self.scale)


def test_what_a_model_keeps_of_a_rehearsal_is_not_in_the_run():
    model = ScaledByFirstRecords()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    small_trainer(model, loss=CE, optimizer=optimizer).fit()
    assert torch.allclose(model.scale.detach(), torch.ones(4))
    assert not model.memory


KEPT: list[torch.Tensor] = []


class KeepsElsewhere(nn.Module):
    """Keeps the mean of the first records that it meets where no copy of the model reaches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        if not self.training:
            KEPT.append(x.detach().mean(0))
        return self.layer(x - KEPT[0] if KEPT else x)


@pytest.mark.parametrize("engine", [None, tacit.engines.PerRecord()])
def test_what_a_rehearsal_leaves_elsewhere_is_not_read_by_a_step(engine):
    KEPT.clear()
    with pytest.raises(tacit.errors.MixesRecords):
        small_trainer(
            KeepsElsewhere(), loss=CE, query=tacit.PerSampleClip(1.0, engine=engine)
        ).fit()
    assert KEPT


@pytest.mark.parametrize("query", [tacit.Clipless(), tacit.BatchClip(1.0, 4)])
def test_training_records_are_not_run_where_steps_do_not_follow_them(query):
    KEPT.clear()
    records = some_records()
    sampler = tacit.MiniSetSampler(records, 4, steps=1, chosen=2)
    if isinstance(query, tacit.Clipless):
        sampler = tacit.PoissonSampler(records, expected_batch_size=8, steps=1)
    model, budget = KeepsElsewhere(), tacit.Budget(1e6, 1e-3, tacit.Relation.REPLACE_ONE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tacit.Trainer(model, CE, query, sampler, optimizer, budget, callbacks=()).rehearse()
    assert not KEPT


class CentredTogether:
    """Rows that depend on the other rows of the batch."""

    def __len__(self):
        return 40

    def read_rows(self, rows):
        inputs = torch.arange(160.0).view(40, 4)[rows]
        return inputs - inputs.mean(0), rows % 2


def test_rows_that_depend_on_the_other_rows_are_refused():
    lazily = tacit.Records.lazy(CentredTogether(), public_size=40)
    with pytest.raises(ValueError, match="another when it is read alone"):
        small_trainer(network(), lazily).fit()


def test_a_run_that_diverged_says_so():
    model = network()
    run = small_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e38)).fit()
    diverged = not all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert (DIVERGED in run.notes) is diverged
    nn.init.zeros_(model[0].weight)
    fresh = network()
    huge = torch.optim.SGD(fresh.parameters(), lr=float(np.finfo("float32").max))
    run = small_trainer(fresh, optimizer=huge, noise=tacit.Noise(1e4)).fit()
    assert DIVERGED in run.notes


@pytest.mark.parametrize("count", [0, 1, 2])
def test_almost_no_records(count):
    few = tacit.Records(X[:count], Y[:count], 2, public_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert small_trainer(records=few).fit().steps == 4
    assert any("empty" in str(w.message) for w in caught) is (count == 0)
