"""What batch clipping does not take, and what it leaves untouched."""

from __future__ import annotations

import pytest
import torch
from set_loop import a_batch, batch_norm_mlp, mlp, some_records, sums_of
from torch import nn

import tacit
from tacit import BatchClip
from tacit.errors import MixesRecords, UnsupportedEvent, UnsupportedModule
from tacit.losses import CrossEntropy

LOSS = CrossEntropy()


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: tacit.PoissonSampler(data, 0.5),
        lambda data: tacit.FixedSizeSampler(data, 6),
        lambda data: tacit.ShuffleSampler(data, 6),
        lambda data: tacit.MiniSetSampler(data, 3, chosen=2),
        lambda data: tacit.MiniSetSampler(data, 1, chosen=2),
    ],
)
def test_sets_must_be_drawn_as_sets_of_that_size(sampler):
    batch = sampler(some_records(12)).next_batch()
    with pytest.raises(UnsupportedEvent, match=r"MiniSetSampler\(data, 4"):
        BatchClip(0.1, 4)(mlp(), LOSS, batch)


def test_the_running_statistics_stay_as_they_are():
    model = batch_norm_mlp()
    before = {n: b.clone() for n, b in model.named_buffers()}
    query = BatchClip(0.1, 4)
    for _ in range(3):
        query(model, LOSS, a_batch(some_records(13), 4))
    assert all(torch.equal(before[n], b) for n, b in model.named_buffers())
    assert model[1].track_running_stats


class Counts(nn.Module):
    """Remembers something of the records it saw, in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2).double()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        self.seen += x.detach().mean(dim=0)
        return self.layer(x)


def test_a_buffer_that_remembers_is_refused():
    with pytest.raises(MixesRecords, match="'seen'"):
        BatchClip(0.1, 4)(Counts(), LOSS, a_batch(some_records(13), 4))


def test_embeddings_that_rewrite_themselves_are_refused():
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Flatten(), nn.Linear(20, 2))
    records = tacit.Records(torch.randint(0, 6, (12, 5)), torch.zeros(12).long(), public_size=12)
    with pytest.raises(MixesRecords, match="max_norm"):
        BatchClip(0.1, 4)(model, LOSS, a_batch(records, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("engine", [tacit.queries.SetBySet(), tacit.queries.SetsAsRecords()])
def test_a_set_that_is_not_finite_adds_nothing(bad, engine):
    torch.manual_seed(0)
    model, records = mlp(), some_records(12)
    records.inputs[3] = bad
    sampler = tacit.MiniSetSampler(records, 3, rate=1.0)
    spoilt = int(sampler.set_of_row[3])
    batch = sampler.next_batch()
    query = BatchClip(0.1, 3, engine=engine)
    found = sums_of(query(model, LOSS, batch))
    without = sums_of(query(model, LOSS, batch.only(batch.groups != spoilt)))
    assert all(value.isfinite().all() for value in found.values())
    if bad != 1e30:  # large and finite inputs saturate tanh, and count
        for key, value in found.items():
            torch.testing.assert_close(value, without[key], rtol=1e-9, atol=1e-12)


def test_sets_as_records_take_no_local_run():
    engine = tacit.queries.SetsAsRecords()
    query = BatchClip(0.1, 4, gradient=tacit.queries.LocalRun(torch.optim.SGD), engine=engine)
    with pytest.raises(UnsupportedModule, match="SetBySet"):
        query(mlp(), LOSS, a_batch(some_records(13), 4))


def test_a_batch_of_nobody_is_zero():
    records = some_records(12)
    batch = a_batch(records, 4)
    nobody = batch.only(torch.zeros(len(batch), dtype=torch.bool))
    for model in (mlp(), batch_norm_mlp()):
        found = sums_of(BatchClip(0.1, 4)(model, LOSS, nobody))
        assert all(not value.any() for value in found.values())


def test_wrong_arguments_say_what_was_given():
    with pytest.raises(ValueError, match="mini_set_size is 0"):
        BatchClip(0.1, 0)
    with pytest.raises(ValueError, match="at_once"):
        tacit.queries.LocalRun(torch.optim.SGD, at_once=0)


class OwnStatistics(nn.Module):
    """Running statistics that a kernel writes, in a module that nobody knows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2).double()
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return nn.functional.batch_norm(self.layer(x), self.mean, self.variance, training=True)


def test_a_kernel_that_writes_a_buffer_is_refused():
    with pytest.raises(MixesRecords, match="'mean'"):
        BatchClip(0.1, 4, engine=tacit.queries.SetBySet())(
            OwnStatistics(), LOSS, a_batch(some_records(12), 4)
        )


def test_batch_norm_over_processes_is_refused(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3), nn.Linear(3, 2)).double()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(MixesRecords, match="processes"):
        BatchClip(0.1, 4)(model, LOSS, a_batch(some_records(13), 4))
