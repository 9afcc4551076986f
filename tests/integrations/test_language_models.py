"""A record that is a stack of rows is clipped whole, as a loop of autograd over records does it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tiny_language_models import CONTEXT, WORDS, bert, gpt2, llama, saved, tokenizer

import tacit
from tacit.data.text import IGNORED, TextForm, TextLine
from tacit.engines import Automatic, BookKeeping, PerRecord
from tacit.errors import MixesRecords
from tacit.integrations.language_models import (
    Lora,
    StackedRows,
    checkpoint_layers,
    context_of,
    generate,
    load_language_model,
    load_tokenizer,
    require_vocabulary,
    tokenize_with,
)
from tacit.queries.bounded_gradient import trainable
from tacit.sampling import Poisson, batch_of

LENGTH, ROWS, CLIP = 6, 3, 0.05


def classifier(name: str, folder: Path):
    """A classifier with the body of the saved model, and a new head."""
    torch.manual_seed(1)
    model = {"bert": bert, "llama": llama, "gpt2": gpt2}[name]()
    return load_language_model(
        str(saved(folder / name, model)), "classification", ("bad", "good"), pad=0
    )


def prepared(model, lora: int, task="causal") -> StackedRows:
    """In float64, without dropout, and with adapters that are not zero."""
    torch.manual_seed(2)
    if lora:
        model = Lora(lora).onto(model, task)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    stacked = StackedRows(model).double().train()
    for layer in stacked.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    for layer in stacked.modules():  # BERT passes it on as a number
        if isinstance(getattr(layer, "dropout_prob", None), float):
            layer.dropout_prob = 0.0
    if hasattr(model.config, "attention_probs_dropout_prob"):
        model.config.attention_probs_dropout_prob = 0.0
        model.config.hidden_dropout_prob = 0.0
    return stacked


def users(classes=None) -> tuple[TextForm, list[list[TextLine]]]:
    draw = torch.Generator().manual_seed(3)

    def line() -> TextLine:
        size = int(torch.randint(1, 9, (), generator=draw))
        words = torch.randint(len(WORDS), (size,), generator=draw).tolist()
        label = ("bad", "good")[int(torch.randint(2, (), generator=draw))]
        return TextLine(" ".join(WORDS[w] for w in words), label)

    groups = [[line() for _ in range(count)] for count in (1, 2, 3, 5, 1, 4)]
    form = TextForm("user", LENGTH, ROWS, end=None if classes else 2, classes=classes)
    return form, groups


def loss_of_record(model, ids, mask, targets, causal: bool) -> torch.Tensor:
    """Row by row, without padding, through the model itself."""
    losses = []
    for row, own, target in zip(ids, mask, targets, strict=True):
        size = int(own.sum())
        if causal:
            real = int((target != IGNORED).sum())
            if real < 2:
                continue
            logits = model(input_ids=row[None, :real]).logits[0]
            losses.append(F.cross_entropy(logits[:-1], row[1:real], reduction="none"))
        elif int(target) != IGNORED:
            logits = model(input_ids=row[None, :size]).logits
            losses.append(F.cross_entropy(logits, target[None], reduction="none"))
    return torch.cat(losses).mean()


def clipped_by_a_loop(stacked: StackedRows, records, causal: bool) -> dict[str, torch.Tensor]:
    parameters = trainable(stacked)
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    columns = records.inputs["input_ids"], records.inputs["attention_mask"], records.targets
    for ids, mask, targets in zip(*columns, strict=True):
        value = loss_of_record(stacked.model, ids, mask, targets, causal)
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        filled = [
            torch.zeros_like(p) if g is None else g
            for g, p in zip(grads, parameters.values(), strict=True)
        ]
        norm = torch.cat([g.flatten() for g in filled]).norm()
        for name, gradient in zip(parameters, filled, strict=True):
            total[name] += gradient * min(1.0, CLIP / float(norm))
    return total


def bounded_of(stacked, records, causal: bool, engine, physical=None) -> dict[str, torch.Tensor]:
    batch = batch_of(
        records.inputs, records.targets, divisor=1.0, scheme=Poisson(0.5), max_physical=physical
    )
    query = tacit.PerSampleClip(CLIP, engine=engine)
    loss = tacit.losses.TokenCrossEntropy(shift=causal)
    (block,) = query(stacked, loss, batch).blocks
    return dict(zip(block.names, block.sums, strict=True))


@pytest.mark.parametrize("lora", [0, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_stack_is_clipped_as_by_a_loop_over_records(name: str, lora: int) -> None:
    stacked = prepared({"llama": llama, "gpt2": gpt2}[name](), lora)
    form, groups = users()
    records = form.records(groups, tokenize_with(tokenizer(), LENGTH))
    expected = clipped_by_a_loop(stacked, records, causal=True)
    for engine, physical in ((Automatic(), None), (BookKeeping(), 4), (PerRecord(), None)):
        found = bounded_of(stacked, records, True, engine, physical)
        assert found.keys() == expected.keys()
        for key, total in found.items():
            torch.testing.assert_close(total, expected[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("lora", [0, 3])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_a_stack_of_labelled_rows_is_clipped_whole(tmp_path: Path, name: str, lora: int) -> None:
    stacked = prepared(classifier(name, tmp_path), lora, "classification")
    form, groups = users(("bad", "good"))
    records = form.records(groups, tokenize_with(tokenizer(), LENGTH))
    expected = clipped_by_a_loop(stacked, records, causal=False)
    found = bounded_of(stacked, records, False, BookKeeping())
    assert found.keys() == expected.keys()
    for key, total in found.items():
        torch.testing.assert_close(total, expected[key], rtol=0, atol=1e-10)


def test_checkpointed_layers_give_the_same_sums() -> None:
    stacked = prepared(llama(layers=2), 3)
    form, groups = users()
    records = form.records(groups, tokenize_with(tokenizer(), LENGTH))
    expected = bounded_of(stacked, records, True, BookKeeping())
    checkpoint_layers(stacked.model)
    found = bounded_of(stacked, records, True, BookKeeping())
    for key, total in found.items():
        torch.testing.assert_close(total, expected[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("pack", [False, True])
def test_no_user_moves_the_sum_by_more_than_the_clipping_norm(pack: bool) -> None:
    """Whatever the user wrote, and however much: also where gradients are huge."""
    stacked = prepared(llama(), 0)
    with torch.no_grad():
        for parameter in stacked.parameters():
            parameter.mul_(20)
    form = TextForm("user", LENGTH, ROWS, pack=pack, end=2)
    _, groups = users()
    tokenize = tokenize_with(tokenizer(), None if pack else LENGTH)
    attacks = [
        [],  # the user is not there
        [TextLine("cat " * 500)],
        [TextLine("cat dog")] * 10_000,
        [TextLine("unknown words everywhere")] * 3,
        [TextLine("")],
        groups[1],  # another user's lines
    ]

    def clipped(user: list[TextLine]) -> torch.Tensor:
        with_user = [*groups[:-1], user] if user else groups[:-1]
        records = form.records(with_user, tokenize)
        found = bounded_of(stacked, records, True, BookKeeping())
        return torch.cat([total.flatten() for total in found.values()])

    without = clipped([])
    moved = [float((clipped(user) - without).norm()) for user in attacks[1:]]
    assert max(moved) <= CLIP * (1 + 1e-9)
    assert max(moved) > 0.99 * CLIP  # the attack reaches it
    assert moved[3] < CLIP / 2 or pack  # a blank text of one token has nothing to predict


def test_a_model_in_which_rows_of_different_records_meet_is_refused() -> None:
    class Mixing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()
            self.config = self.inner.config

        def forward(self, input_ids, attention_mask):
            outputs = self.inner(input_ids=input_ids, attention_mask=attention_mask)
            outputs.logits = outputs.logits + outputs.logits.mean(dim=0, keepdim=True)
            return outputs

    form, groups = users()
    records = form.records(groups, tokenize_with(tokenizer(), LENGTH))
    with pytest.raises(MixesRecords):
        bounded_of(StackedRows(Mixing()).double(), records, True, BookKeeping())


def test_perplexity_weighs_tokens_and_not_records() -> None:
    stacked = prepared(llama(), 0)
    form, groups = users()
    records = form.records(groups, tokenize_with(tokenizer(), LENGTH))
    loss = tacit.losses.TokenCrossEntropy(shift=True)
    metrics = tacit.training.evaluate(stacked, records, loss, 2)
    losses, stacked = [], stacked.eval()
    for ids, targets in zip(records.inputs["input_ids"], records.targets, strict=True):
        for row, target in zip(ids, targets, strict=True):
            real = int((target != IGNORED).sum())
            if real > 1:
                logits = stacked.model(input_ids=row[None, :real]).logits[0, :-1]
                losses.append(F.cross_entropy(logits, row[1:real], reduction="none"))
    mean = torch.cat(losses).mean()
    assert metrics.perplexity == pytest.approx(float(mean.detach().exp()), rel=1e-9)
    assert metrics.loss != pytest.approx(float(mean.detach()), rel=1e-6)


def test_bfloat16_keeps_trained_weights_and_logits_in_float32(tmp_path: Path) -> None:
    folder = str(saved(tmp_path, llama()))
    inner = load_language_model(folder, "causal", dtype=torch.bfloat16)
    stacked = StackedRows(Lora(2).onto(inner, "causal"), torch.bfloat16)
    frozen = {p.dtype for p in stacked.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    assert {p.dtype for p in trainable(stacked).values()} == {torch.float32}
    form, groups = users()
    records = form.records(groups, tokenize_with(tokenizer(), LENGTH))
    assert stacked(**records.inputs).dtype == torch.float32
    sums = bounded_of(stacked, records, True, BookKeeping())
    assert all(total.isfinite().all() for total in sums.values())


def test_samples_leave_the_generator_and_the_mode_as_they_are() -> None:
    stacked = StackedRows(llama()).train()
    before = torch.get_rng_state()
    options = {"new_tokens": 6, "temperature": 1.0}
    first = generate(stacked, tokenizer(), ["the cat"], **options, seed=1)
    assert first == generate(stacked, tokenizer(), ["the cat"], **options, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert stacked.model.training
    greedy = generate(stacked, tokenizer(), ["the cat", "a dog"], new_tokens=6)
    assert greedy == generate(stacked, tokenizer(), ["the cat", "a dog"], new_tokens=6)


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    for name in ("/no/such/folder", "./nowhere", "a/b/c"):
        with pytest.raises(ValueError, match="there is no such folder"):
            load_tokenizer(name)
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded from this folder"):
        load_language_model(str(tmp_path), "causal")
    with pytest.raises(ValueError, match="cannot be loaded from the hub"):
        load_tokenizer("somebody/no-such-model-of-tacit")


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    model, words = llama(), tokenizer()
    require_vocabulary(model, words)
    assert context_of(model, words) == CONTEXT
    words.add_tokens(["more"])
    with pytest.raises(ValueError, match="tokens, and the model embeds"):
        require_vocabulary(model, words)


def test_adapters_that_fit_no_layer() -> None:
    with pytest.raises(ValueError, match="no adapter can be put on"):
        Lora(2, ("nothing",)).onto(llama(), "causal")
