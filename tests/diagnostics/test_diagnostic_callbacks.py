"""Diagnostics as callbacks: when they look, at what, and what the run's notes say of it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from small_run import fit, network, some_records
from torch import nn

import tacit
from tacit.diagnostics import (
    ActivationNorms,
    ClippingAlignment,
    ConfusionHistory,
    Curvature,
    GradientNormHistory,
    WeightNorms,
    activation_norms,
    clipping_alignment,
    confusion_matrix,
    weight_norms,
    whole_norms,
)
from tacit.losses import CrossEntropy, TailoredLoss, watched

READ_RECORDS = [
    ActivationNorms,
    GradientNormHistory,
    ClippingAlignment,
    Curvature,
    ConfusionHistory,
]


@pytest.mark.parametrize("kind", READ_RECORDS)
def test_the_notes_say_when_private_records_were_read(kind):
    diagnostic = kind(max_records=8)
    notes = fit([diagnostic]).notes
    (said,) = [n for n in notes if kind.__name__ in n]
    assert "not private" in said
    assert diagnostic.reads in said
    assert "ot private" in kind.__doc__
    assert diagnostic.notice.startswith("not private: reads ")
    given = kind(some_records(seed=5), max_records=8)
    assert not any(kind.__name__ in n for n in fit([given]).notes)
    assert [p.step for p in given.points] == [0, 4, 8]


def test_private_records_given_by_hand_are_noticed():
    records = some_records()
    order = torch.randperm(len(records))
    copies = (records.inputs.clone(), records.inputs[order])
    for given in (records, *(tacit.Records(copy, records.targets) for copy in copies)):
        assert any("GradientNormHistory" in n for n in fit([GradientNormHistory(given)]).notes)


def test_weights_are_released_and_cost_nothing():
    diagnostic = WeightNorms()
    assert not any("WeightNorms" in n for n in fit([diagnostic]).notes)
    assert "private" not in diagnostic.notice


def test_it_looks_once_an_epoch_or_as_asked():
    by_epoch, by_step = WeightNorms(), WeightNorms(every=3)
    fit([by_epoch, by_step], steps=10, rate=0.2)
    assert [p.step for p in by_epoch.points] == [0, 5, 10]
    assert [p.epoch for p in by_epoch.points] == pytest.approx([0, 1, 2])
    assert [p.step for p in by_step.points] == [0, 3, 6, 9, 10]
    fit([by_epoch], steps=4)
    assert [p.step for p in by_epoch.points] == [0, 4]
    with pytest.raises(ValueError, match="every is 0"):
        WeightNorms(every=0)
    with pytest.raises(ValueError, match="there are no records"):
        fit([ActivationNorms(tacit.Records(torch.zeros(0, 4), torch.zeros(0)))])


def test_a_run_is_the_same_with_and_without():
    model, watched_model = (nn.Sequential(nn.Dropout(0.3), *network()) for _ in range(2))
    torch.manual_seed(3)
    fit([], model=model)
    torch.manual_seed(3)
    fit([kind(max_records=6, every=2) for kind in READ_RECORDS], model=watched_model)
    assert watched_model.training
    for a, b in zip(model.parameters(), watched_model.parameters(), strict=True):
        assert torch.equal(a, b)
    pickle.dumps(watched_model)  # a hook that was left behind could not be pickled


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("kind", [ActivationNorms, ConfusionHistory, Curvature])
def test_looking_writes_nothing_into_the_model(kind):
    """A running mean of the private records would be saved with the model, without noise."""
    torch.manual_seed(0)
    model, records = Norms(), some_records()
    trainer = SimpleNamespace(
        model=model,
        loss=CrossEntropy(),
        plan=SimpleNamespace(scheme=tacit.sampling.Poisson(0.5)),
        sampler=SimpleNamespace(records=records, device=torch.device("cpu"), steps=2),
    )
    before = {n: b.clone() for n, b in model.named_buffers()}
    kind(max_records=8).on_begin(trainer)
    assert all(torch.equal(before[n], b) for n, b in model.named_buffers())
    model(records.inputs)  # what the watch above would have seen
    assert not torch.equal(before["layers.1.running_mean"], model.layers[1].running_mean)


# --- what is measured ---------------------------------------------------------------------------


def test_weight_norms():
    model = network()
    model[0].bias.requires_grad_(False)
    found = weight_norms(model)
    assert set(found) == {"0.weight", "2.weight", "2.bias"}
    assert found["2.weight"] == pytest.approx(float(model[2].weight.detach().norm()))


def test_activation_norms_are_means_over_records():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.fc(self.fc(x).tanh()).tanh())

    torch.manual_seed(0)
    model, records = Twice(), some_records(10)
    found = activation_norms(model, records, batch_size=4)
    h1 = model.fc(records.inputs)
    h2 = model.fc(h1.tanh())
    h3 = model.last(h2.tanh())
    expected = {"fc": h1, "fc (2)": h2, "last": h3, "logits": h3}
    assert list(found) == list(expected)
    for name, h in expected.items():
        assert found[name] == pytest.approx(float(h.detach().norm(dim=1).mean()), rel=1e-6)


def test_whole_norms_are_those_of_all_parameters_together():
    diagnostic = GradientNormHistory(some_records(seed=3), max_records=5)
    loss = TailoredLoss(1.0, beta=1.0, gamma=2.0)
    fit([diagnostic], loss=loss)
    norms = whole_norms(diagnostic.points[0].value)
    model, records = network(), some_records(seed=3)
    for i in range(5):
        with watched(model, loss):
            value = loss(model(records.inputs[i : i + 1]), records.targets[i : i + 1])
        gradient = torch.autograd.grad(value, list(model.parameters()))
        expected = torch.cat([g.flatten() for g in gradient]).norm()
        assert float(norms[i]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("loss", [CrossEntropy(), TailoredLoss(1.0, beta=0.1, gamma=2.0)], ids=str)
def test_alignment_is_the_cosine_of_two_sums(loss):
    torch.manual_seed(0)
    model, records = network().double(), some_records(10)
    records = tacit.Records(3 * records.inputs.double(), records.targets)
    found = clipping_alignment(model, loss, records, tacit.PerSampleClip(0.2), batch_size=5)
    assert len(found) == 2
    for half, cosine in zip((slice(0, 5), slice(5, 10)), found, strict=True):
        clipped, plain = 0, 0
        for x, y in zip(records.inputs[half], records.targets[half], strict=True):
            with watched(model, loss):
                value = loss(model(x[None]), y[None])
            g = torch.cat(
                [g.flatten() for g in torch.autograd.grad(value, list(model.parameters()))]
            )
            plain = plain + g
            clipped = clipped + g * min(1.0, 0.2 / float(g.norm()))
        expected = torch.nn.functional.cosine_similarity(clipped, plain, dim=0)
        assert float(cosine) == pytest.approx(float(expected))
        assert cosine < 0.999
    unclipped = clipping_alignment(model, loss, records, tacit.PerSampleClip(1e6))
    assert unclipped.tolist() == pytest.approx([1.0])


def test_alignment_is_of_the_run_s_own_query():
    diagnostic = ClippingAlignment(some_records(seed=2))
    fit([diagnostic])
    expected = clipping_alignment(
        network(), CrossEntropy(), some_records(seed=2), tacit.PerSampleClip(0.5)
    )
    assert torch.allclose(diagnostic.points[0].value, expected)


def test_confusion_counts_records():
    model = nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [0.0], [1.0]]))
    x = torch.tensor([[-1.0], [-2.0], [3.0], [4.0], [5.0]])
    records = tacit.Records(x, torch.tensor([0, 1, 2, 2, 1]), 3)
    found = confusion_matrix(model, records, batch_size=2)
    assert found.tolist() == [[1, 0, 0], [1, 0, 1], [0, 0, 2]]
    signs = confusion_matrix(nn.Identity(), tacit.Records(x, torch.tensor([-1, 1, 1, 1, 1])))
    assert signs.tolist() == [[1, 0], [1, 3]]
    with pytest.raises(ValueError, match="below 3"):
        confusion_matrix(model, tacit.Records(x, torch.tensor([0, 1, 2, 3, 0])))


def test_confusion_leaves_the_mode():
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(4, 3))
    found = [confusion_matrix(model, some_records()) for _ in range(3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert model.training
