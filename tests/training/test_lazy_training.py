"""A Trainer over records that are read when they are needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_transformers import tiny_bert
from torch import nn
from torch.utils.data import Dataset

import tacit
from tacit import Records


class Encoded(Dataset):
    """As tokenised text comes from transformers: dicts of lists, with labels."""

    def __init__(self, size: int = 60) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict:
        words = np.random.RandomState(row).randint(1, 20, 8)
        return {
            "input_ids": words.tolist(),
            "attention_mask": [1] * 6 + [0] * 2,
            "labels": int(words[0] % 3),
        }


def trained(train, test, model, query=None, **sampling):
    options = {"sampling_rate": 0.3, "expected_batch_size": 18, "steps": 5, "seed": 2} | sampling
    trainer = tacit.Trainer(
        model,
        tacit.losses.CrossEntropy(),
        # An engine that compiles nothing: a compiled step differs in its last digits.
        query or tacit.PerSampleClip(1.0, engine=tacit.engines.BookKeeping()),
        tacit.PoissonSampler(train, **options),
        torch.optim.SGD(model.parameters(), lr=0.1),
        tacit.Budget(8.0, 1e-3),
        noise=tacit.Noise(1.0),
        evaluate_on=test,
        callbacks=[],
        seed=2,
    )
    run = trainer.fit()
    weights = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    return weights, run


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dict_dataset_of_transformers_trains_as_in_memory(workers):
    pytest.importorskip("transformers")
    runs = []
    for lazily in (False, True):
        torch.manual_seed(0)
        train = Records.lazy(Encoded(), num_workers=workers) if lazily else Encoded()
        test = Encoded(100)
        held_out = torch.utils.data.Subset(test, range(60, 100))
        runs.append(trained(train, Records.lazy(held_out) if lazily else held_out, tiny_bert()))
    (one, first), (other, second) = runs
    assert torch.equal(one, other)
    assert first.epsilon == second.epsilon
    assert [e.metrics for e in first.history] == [e.metrics for e in second.history]


def test_items_that_draw_train_the_same_with_and_without_workers():
    class Noisy(Encoded):
        def __getitem__(self, row: int) -> tuple:
            torch.randn(row)  # however much a record draws, no other record notices
            x = torch.randn(6) + np.random.rand()
            return x.float(), row % 3

    def weights(**reading):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3))
        return trained(Records.lazy(Noisy(), **reading), None, model)[0]

    one = weights()
    assert torch.equal(one, weights(num_workers=2))
    assert torch.equal(one, weights(num_workers=1, prefetch=0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_are_delivered_on_the_gpu(prefetch, tmp_path):
    x, y = torch.randn(60, 6), torch.arange(60) % 3
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    records = Records.lazy((mapped, y), prefetch=prefetch, public_size=60).to("cuda")
    for batch in tacit.PoissonSampler(records, 0.3, steps=5, pad_to=8):
        assert batch.inputs.is_cuda
        assert torch.equal(batch.inputs.cpu(), x[batch.indices.cpu()])
        assert torch.equal(batch.targets.cpu(), y[batch.indices.cpu()])
    weights, _ = trained(Records(mapped, y), Records(mapped + 9, y), nn.Linear(6, 3).cuda())
    assert weights.isfinite().all()


@pytest.mark.parametrize(
    ("query", "model"),
    [
        (tacit.PerSampleClip(1.0, augmentation=None), lambda: nn.Linear(6, 3)),
        (
            tacit.PerSampleClip(
                1.0, augmentation=tacit.data.Augmentation(2, lambda x: x + torch.rand_like(x))
            ),
            lambda: nn.Linear(6, 3),
        ),
        (
            tacit.PerSampleClip(1.0, engine=tacit.engines.PerRecord()),
            lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)),
        ),
        (tacit.BatchClip(1.0, mini_set_size=1), lambda: nn.Linear(6, 3)),
        (
            tacit.Clipless(),
            lambda: tacit.models.lipschitz_mlp((6,), 3),
        ),
    ],
    ids=["clip", "views", "dropout", "sets", "clipless"],
)
@pytest.mark.parametrize("limits", [{}, {"max_physical_batch": 5}, {"padded": True}])
def test_every_route_trains_as_in_memory(query, model, limits, tmp_path):
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(60) % 3
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    weights = []
    for inputs in (x, mapped):
        torch.manual_seed(0)
        records = Records(inputs, y, num_classes=3, public_size=60)
        weights.append(trained(records, None, model(), query, **limits)[0])
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)  # one of them may be compiled


@pytest.mark.parametrize("task", ["classes", "sign", "regression", "three values of one output"])
def test_metrics_are_those_in_memory(task):
    torch.manual_seed(0)
    x = torch.randn(50, 4)
    y = torch.arange(50) % (2 if task == "sign" else 3)
    model, loss = nn.Linear(4, 3), tacit.losses.CrossEntropy()
    if task != "classes":
        model, loss = nn.Linear(4, 1), nn.BCEWithLogitsLoss()
        y = y.float()[:, None]
    if task == "regression":
        loss = nn.MSELoss()
    whole = tacit.evaluate(model, Records(x, y), loss, batch_size=16)
    lazy = tacit.evaluate(model, Records.lazy((x, y)), loss, batch_size=16)
    assert whole == lazy
    assert (whole.accuracy is not None) == (task in ("classes", "sign"))


def test_public_sets_and_statistics_may_be_read_when_needed():
    torch.manual_seed(0)
    x, y = torch.randn(80, 5), torch.arange(80) % 2
    private = Records.lazy((x, y), num_classes=2, public_size=80)
    public, private = tacit.split_public(private, 0.3)
    norms = tacit.queries.LayerwiseNorms(public)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    query = tacit.PerSampleClip(norms, blocks=tacit.by_layer(model))
    _, run = trained(private, None, model, query)
    assert run.steps == 5

    with_norm = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    for statistics in (
        tacit.PublicStatistics(public, 4),
        tacit.ReleasedStatistics(private, noise_multiplier=20.0),
    ):
        sampler = tacit.MiniSetSampler(private, 4, steps=2, chosen=3)
        run = tacit.Trainer(
            with_norm,
            tacit.losses.CrossEntropy(),
            tacit.BatchClip(1.0, mini_set_size=4),
            sampler,
            torch.optim.SGD(with_norm.parameters(), lr=0.1),
            tacit.Budget(8.0, 1e-2),
            statistics=statistics,
            callbacks=[],
        ).fit()
        assert run.steps == 2


def test_diagnostics_and_certificates_read_what_they_need():
    torch.manual_seed(0)
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    lazy = Records.lazy((x, y), num_classes=3, public_size=40)
    whole = Records(x, y, num_classes=3, public_size=40)
    model = tacit.models.lipschitz_mlp((6,), 3)
    certified = [
        tacit.certificates.certified_accuracy(model, r, batch_size=16) for r in (lazy, whole)
    ]
    assert torch.equal(certified[0].radii_N, certified[1].radii_N)
    matrices = [tacit.diagnostics.confusion_matrix(model, r, batch_size=16) for r in (lazy, whole)]
    assert torch.equal(*matrices)
    loss = tacit.losses.CrossEntropy()
    norms = [
        tacit.diagnostics.gradient_histogram(model, loss, r, max_records=8) for r in (lazy, whole)
    ]
    assert all(torch.equal(norms[0].norms[name], norms[1].norms[name]) for name in norms[0].norms)
