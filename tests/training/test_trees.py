"""Evaluation and held-out checks of records, outputs and targets that are pytrees."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_trainer import some_records
from tiny_transformers import tiny_bert, tiny_gpt2
from torch import nn

import tacit
from tacit.errors import NotPublic
from tacit.losses import CrossEntropy, Huber, TokenCrossEntropy, WithConstant
from tacit.queries.record_overlap import require_held_out


def texts(count=30, seed=0, vocabulary=20, classes=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocabulary, (count, 8), generator=generator)
    lengths = torch.randint(2, 9, (count, 1), generator=generator)
    mask = (torch.arange(8) < lengths).long()
    return tacit.Records(
        {"input_ids": ids * mask, "attention_mask": mask},
        torch.randint(classes, (count,), generator=generator),
        public_size=count,
    )


def tokens(count=30, seed=0, vocabulary=11):
    """The tokens are their own targets; padding is ignored."""
    records = texts(count, seed, vocabulary)
    ids, mask = records.inputs["input_ids"], records.inputs["attention_mask"]
    return tacit.Records(records.inputs, torch.where(mask > 0, ids, -100), public_size=count)


@pytest.mark.parametrize(
    "loss",
    [
        CrossEntropy(),
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        lambda out, y: F.cross_entropy(out.logits, y),
        lambda out, y: F.cross_entropy(out.logits, y, reduction="none"),
    ],
    ids=["tacit", "module", "function", "mean", "per record"],
)
def test_a_classifier_of_transformers_is_evaluated(loss):
    model, records = tiny_bert(), texts()
    with torch.no_grad():
        logits = model(**records.inputs).logits
    found = tacit.evaluate(model, records, loss, batch_size=7)
    assert found.loss == pytest.approx(F.cross_entropy(logits, records.targets).item(), rel=1e-5)
    right = (logits.argmax(1) == records.targets).double().mean()
    assert found.accuracy == pytest.approx(right.item())


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_language_model_has_the_accuracy_of_its_next_tokens(wrapped):
    model, records = tiny_gpt2(), tokens()
    loss = TokenCrossEntropy(shift=True)
    with torch.no_grad():
        logits = model(**records.inputs).logits[:, :-1]
    y = records.targets[:, 1:]
    found = tacit.evaluate(
        model, records, WithConstant(loss, 2.0) if wrapped else loss, batch_size=7
    )
    kept = y != -100
    assert found.accuracy == pytest.approx((logits.argmax(-1) == y)[kept].double().mean().item())
    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").sum(1) / kept.sum(1)
    assert found.loss == pytest.approx(each.mean().item(), rel=1e-5)
    own = tacit.evaluate(model, records, lambda out, y: loss(out.logits, y))
    assert own.loss == pytest.approx(found.loss, rel=1e-5)
    assert own.accuracy is None  # whether it shifts is not known


def test_padding_does_not_count_as_a_token():
    model = nn.Embedding(5, 5)
    ids = torch.tensor([[1, 2, 3], [4, 0, 0]])
    with torch.no_grad():
        model.weight.copy_(torch.eye(5))
    records = tacit.Records(ids, torch.where(ids > 0, ids, -100))
    assert tacit.evaluate(model, records, TokenCrossEntropy()).accuracy == 1.0
    nothing = tacit.Records(ids, torch.full_like(ids, -100))
    found = tacit.evaluate(model, nothing, TokenCrossEntropy())
    assert (found.accuracy, found.loss) == (None, 0.0)


class TwoTowers(nn.Module):
    """Two inputs, and a class and a number as outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 1)

    def forward(self, left, right):
        return self.a(left), self.b(right)


def towers(count=12):
    generator = torch.Generator().manual_seed(3)
    inputs = tuple(torch.randn(count, n, generator=generator) for n in (4, 2))
    targets = {"class": torch.arange(count) % 3, "size": inputs[1].sum(1)}
    return tacit.Records(inputs, targets, public_size=count)


def test_several_outputs_and_targets_have_their_loss_alone():
    model, records = TwoTowers(), towers()

    def both(outputs, targets):
        scores, size = outputs
        classes = CrossEntropy().per_record(scores, targets["class"])
        return classes + 0.5 * Huber().per_record(size, targets["size"])

    found = tacit.evaluate(model, records, both, batch_size=5)
    with torch.no_grad():
        expected = both(model(*records.inputs), records.targets).mean().item()
    assert found.loss == pytest.approx(expected, rel=1e-5)
    assert found.accuracy is None


def test_training_records_in_a_tree_are_known_again():
    private = texts()
    require_held_out(texts(seed=9), private)
    for same in (private, texts(), private.take(slice(3, 9)), private.to("cpu").take(slice(9))):
        with pytest.raises(NotPublic, match="train"):
            require_held_out(same, private)
    one = {**texts(seed=9).inputs, "attention_mask": private.inputs["attention_mask"]}
    with pytest.raises(NotPublic, match="holds training records"):
        require_held_out(tacit.Records(one, private.targets.clone()), private)
    # Equal inputs with other targets are other records.
    others = tacit.Records(texts().inputs, (private.targets + 1) % 3)
    require_held_out(others, private)
    require_held_out(some_records(), private)


def test_a_mask_that_everybody_shares_is_nobody_s_own():
    ones = torch.ones(1, 8, dtype=torch.long)
    held_out, private = (
        tacit.Records(
            {**texts(seed=s).inputs, "attention_mask": ones.expand(30, 8)}, torch.ones(30)
        )
        for s in (9, 0)
    )
    require_held_out(held_out, private)


def test_diagnostics_read_trees():
    model, records = tiny_bert(), texts()
    matrix = tacit.diagnostics.confusion_matrix(model, records)
    with torch.no_grad():
        predicted = model(**records.inputs).logits.argmax(1)
    assert int(matrix.diagonal().sum()) == int((predicted == records.targets).sum())
    norms = tacit.diagnostics.activation_norms(model, records)
    assert norms["logits"] > 0
    found = tacit.diagnostics.gradient_histogram(model, CrossEntropy(), records, max_records=3)
    assert all(len(row) == 3 for row in found.norms.values())
    with pytest.raises(ValueError, match="one tensor of logits"):
        tacit.diagnostics.confusion_matrix(TwoTowers(), towers())
