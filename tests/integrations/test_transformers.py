"""`TacitTrainer` takes what `transformers.Trainer` takes, and refuses what it cannot follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_language_models import WORDS, bert, gpt2, llama, saved, sentence, tokenizer

import tacit
from tacit.data.text import TextForm, TextLine
from tacit.errors import BudgetExceeded, NotPublic
from tacit.integrations import TacitTrainer
from tacit.integrations.language_models import Lora, load_language_model, tokenize_with
from tacit.losses import CrossEntropy, TokenCrossEntropy
from tacit.sampling import Poisson, batch_of

transformers = pytest.importorskip("transformers")


def texts(count: int, seed: int) -> list[tuple[str, int]]:
    import random

    draw = random.Random(seed)
    good = [draw.random() < 0.5 for _ in range(count)]
    return [(sentence(draw, g), int(g)) for g in good]


def labelled(count: int, seed: int = 0) -> list[dict]:
    words = tokenizer()
    return [
        {"input_ids": words(text)["input_ids"], "labels": label, "text": text}
        for text, label in texts(count, seed)
    ]


def to_continue(count: int, seed: int = 0) -> list[dict]:
    return [{"input_ids": item["input_ids"]} for item in labelled(count, seed)]


def causal_collator():
    return transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)


def arguments(folder: Path, **options):
    usual = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 4,
        "max_steps": 4,
        "learning_rate": 5e-3,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(str(folder), **(usual | options))


def trainer_of(folder: Path, model=None, train=None, options=None, **more) -> TacitTrainer:
    privacy = {"epsilon": 8.0, "delta": 1e-4, "seed": 0}
    return TacitTrainer(
        llama() if model is None else model,
        arguments(folder, **(options or {})),
        causal_collator(),
        train_dataset=to_continue(256) if train is None else train,
        **(privacy | more),
    )


def test_a_causal_model_trains_evaluates_predicts_and_is_saved(tmp_path: Path) -> None:
    seen = []

    def own(prediction) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
        return {"next_token": float(right.mean())}

    options = {"eval_strategy": "steps", "eval_steps": 10, "logging_steps": 5, "max_steps": 20}
    trainer = trainer_of(
        tmp_path,
        options=options,
        eval_dataset=to_continue(40, seed=1),
        compute_metrics=own,
        processing_class=tokenizer(),
    )
    before = trainer.evaluate()
    run = trainer.train()
    after = trainer.evaluate()
    assert run.epsilon <= 8
    assert run.plan.scheme.rate == 64 / 256
    assert after["eval_perplexity"] < 0.8 * before["eval_perplexity"]
    assert after["eval_next_token"] > before["eval_next_token"]
    steps = [entry["step"] for entry in trainer.log_history if "learning_rate" in entry]
    assert steps == [5, 10, 15, 20]
    assert not any("loss" in entry for entry in trainer.log_history)  # of training
    rates = [e["learning_rate"] for e in trainer.log_history if "learning_rate" in e]
    assert rates == pytest.approx([5e-3 * (20 - s) / 20 for s in steps])
    output = trainer.predict(to_continue(8, seed=2))
    assert output.predictions.shape[0] == len(output.label_ids) == 8
    assert output.metrics["test_loss"] > 0

    trainer.save_model(tmp_path / "model")
    kind = transformers.AutoModelForCausalLM
    again = kind.from_pretrained(tmp_path / "model")
    weights = again.state_dict()
    assert all(torch.equal(weights[n], p.cpu()) for n, p in trainer.model.state_dict().items())
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| unit of privacy | one record |" in card
    assert "counted and is taken as public" in card


@pytest.mark.parametrize("adapter", [False, True])
def test_a_classifier(tmp_path: Path, adapter: bool) -> None:
    folder = saved(tmp_path / "bert", bert())
    model = load_language_model(str(folder), "classification", ("bad", "good"))
    if adapter:
        model = Lora(2).onto(model, "classification")
    trainer = TacitTrainer(
        model,
        arguments(tmp_path, label_smoothing_factor=0.1),
        train_dataset=labelled(128),
        eval_dataset=labelled(32, seed=1),
        tokenizer=tokenizer(),
        epsilon=8.0,
        delta=1e-4,
        public_size=128,
    )
    assert trainer.loss == CrossEntropy(smoothing=0.1)
    run = trainer.train()
    assert not any("counted" in note for note in run.notes)
    assert 0 <= trainer.evaluate()["eval_accuracy"] <= 1
    trainer.save_model(tmp_path / "x")
    expected = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert (tmp_path / "x" / expected).is_file()


def test_stacks_of_rows_are_one_record(tmp_path: Path) -> None:
    form = TextForm("user", 8, 3, end=2)
    groups = [[TextLine(text) for text, _ in texts(4, seed)] for seed in range(64)]
    records = form.records(groups, tokenize_with(tokenizer(), 8), public_size=64)
    trainer = trainer_of(
        tmp_path, train=records, options={"gradient_accumulation_steps": 1}, model=gpt2()
    )
    assert trainer.loss == TokenCrossEntropy(shift=True)
    run = trainer.train()
    assert run.facts()["privacy_unit"] == "user (all of their lines)"


def test_the_arguments_of_transformers_are_followed(tmp_path: Path) -> None:
    options = {
        "max_steps": -1,
        "num_train_epochs": 3,
        "warmup_steps": 4,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "adam_beta2": 0.99,
        "max_grad_norm": 0.3,
        "bf16": True,
        "use_cpu": True,
        "gradient_checkpointing": True,
    }
    trainer = trainer_of(tmp_path, options=options, model=bert(), loss=TokenCrossEntropy())
    private = trainer.private
    assert trainer.steps == 12
    assert private.query.max_norm == (0.3,) or private.query.max_norm == 0.3
    first, second = private.optimizer.param_groups
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert first["betas"] == (0.9, 0.99)
    names = {id(p): n for n, p in private.model.named_parameters()}
    assert all("bias" in (n := names[id(p)]) or "Norm" in n for p in second["params"])
    reference = transformers.get_scheduler(
        "cosine", torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=5e-3), 4, 12
    )
    rates = []
    for scheduler in (private.scheduler, reference):
        rates.append([])
        for _ in range(12):
            rates[-1].append(scheduler.get_last_lr()[0])
            scheduler.optimizer.step()
            scheduler.step()
    assert rates[0] == pytest.approx(rates[1])
    assert trainer_of(tmp_path, max_grad_norm=0.7).private.query.max_norm in (0.7, (0.7,))


def test_a_run_that_was_killed_is_resumed(tmp_path: Path) -> None:
    class Killed(tacit.Callback):
        def on_step(self, trainer, step) -> None:
            if step == 3:
                raise RuntimeError("killed")

    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    with pytest.raises(RuntimeError, match="killed"):
        trainer_of(tmp_path, options=options, callbacks=[Killed()]).train()
    run = trainer_of(tmp_path, options=options).train(resume_from_checkpoint=True)
    assert run.stopped in ("plan complete", "budget")
    assert run.epsilon <= 8
    assert (tmp_path / "model.safetensors").is_file()
    assert (tmp_path / "README.md").is_file()
    with pytest.raises((BudgetExceeded, ValueError)):
        trainer_of(tmp_path, options=options).train()  # on the same ledger


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": 1}, r"seed is 1: .*TacitTrainer\(seed="),
        ({"data_seed": 1}, "data_seed is 1"),
        ({"train_sampling_strategy": "group_by_length"}, "same probability"),
        ({"dataloader_drop_last": True}, "Poisson samples"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha is 5"),
        ({"torch_compile": True}, "compiled without being asked"),
        ({"auto_find_batch_size": True}, "does not follow it"),
        ({"optim": "adafactor"}, "give adamw_torch or adamw_torch_fused or sgd"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
            "follows the loss",
        ),
        ({"push_to_hub": True}, "look at its card"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "there is no eval_dataset"),
        ({"max_grad_norm": 0.0}, "nothing bounds what one record does"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "does not follow it"),
    ],
)
def test_arguments_that_would_be_ignored_or_unsound(tmp_path, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        trainer_of(tmp_path, options=options)


def test_load_best_model_at_end(tmp_path: Path) -> None:
    options = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
    }
    with pytest.raises(ValueError, match="chosen by held-out text"):
        trainer_of(tmp_path, options=options, eval_dataset=to_continue(4, 1))


def test_every_argument_is_followed_harmless_or_refused() -> None:
    """A new version of transformers has new arguments: these are refused, not ignored."""
    import dataclasses

    from tacit.integrations.training_arguments import _FOLLOWED, _INSTEAD, _WITHOUT_EFFECT

    assert not _FOLLOWED & _WITHOUT_EFFECT
    assert not (_FOLLOWED | _WITHOUT_EFFECT) & set(_INSTEAD)
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert len(_FOLLOWED & known) > 25


def test_callbacks_of_transformers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"give a tacit\.Callback"):
        trainer_of(tmp_path, callbacks=[transformers.EarlyStoppingCallback()])


def test_data_that_cannot_be_private(tmp_path: Path) -> None:
    items = to_continue(64)
    with pytest.raises(NotPublic):
        trainer_of(tmp_path, train=items).evaluate(items)
    with pytest.raises(ValueError, match="is empty"):
        _ = trainer_of(tmp_path, train=[]).records
    with pytest.raises(TypeError, match="is a generator"):
        _ = trainer_of(tmp_path, train=(item for item in items)).records


def joined(items: list[dict]) -> dict[str, torch.Tensor]:
    """Packs all items into one row, as some collators do."""
    ids = torch.cat([torch.tensor(item["input_ids"]) for item in items])[None]
    return {"input_ids": ids, "labels": ids}


def centred(items: list[dict]) -> dict[str, torch.Tensor]:
    """Rows that depend on each other."""
    ids = torch.tensor([item["input_ids"] for item in items])
    ids = (ids + ids.sum()) % len(WORDS)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("collator", "says"), [(joined, "packing joins different"), (centred, "makes another")]
)
def test_a_collator_in_which_records_meet(tmp_path: Path, collator, says: str) -> None:
    trainer = trainer_of(tmp_path)
    trainer.data_collator = collator
    with pytest.raises(ValueError, match=says):
        _ = trainer.records


def test_padding_at_the_beginning_would_let_the_longest_text_move_all_others(tmp_path) -> None:
    items = [{"input_ids": [3, 4, 5, 6]}, {"input_ids": [3, 4]}, {"input_ids": [3, 4, 5]}]
    trainer = trainer_of(tmp_path, train=items)
    trainer.data_collator.tokenizer.padding_side = "left"
    with pytest.raises(ValueError, match="padding_side = 'right'"):
        _ = trainer.records
    trainer.data_collator.tokenizer.padding_side = "right"
    assert trainer.records.shape["input_ids"] == (4,)


def test_a_random_collator(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path)
    trainer.data_collator.mlm = True
    with pytest.raises(ValueError, match="masks tokens at random"):
        _ = trainer.records


def test_a_record_has_the_gradient_of_transformers_own_loss(tmp_path: Path) -> None:
    model = llama().double()
    trainer = trainer_of(tmp_path, model=model, train=to_continue(64), max_grad_norm=1e6)
    records, private = trainer.records, trainer.private
    losses = []
    for ids, labels in zip(records.inputs["input_ids"], records.targets, strict=True):
        real = int((labels != -100).sum())
        losses.append(model(input_ids=ids[None, :real], labels=labels[None, :real]).loss)
    expected = torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters()))
    batch = batch_of(records.inputs, records.targets, divisor=64.0, scheme=Poisson(1.0))
    (block,) = private.query(private.model, trainer.loss, batch).blocks
    for total, gradient in zip(block.sums, expected, strict=True):
        torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-6)  # theirs is float32
