"""`tacit finetune` from end to end: a folder of a model, a file of text, a private model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_language_models import bert, llama, saved, write_lines
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.ledger.statement import read_statement

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, and with text of 60 users."""
    folder = tmp_path_factory.mktemp("given")
    saved(folder / "llama", llama())
    saved(folder / "bert", bert())
    write_lines(folder / "train.jsonl", 600, users=60)
    write_lines(folder / "test.jsonl", 60, users=10, seed=1)
    return folder


def invoke(given: Path, *arguments: str, model: str = "llama"):
    fixed = ["--model", str(given / model), "--data", str(given / "train.jsonl"), "--quiet"]
    usual = ["--max-length", "16", "--delta", "1e-4"]
    return CliRunner().invoke(app, ["finetune", *fixed, *usual, *arguments])


def facts_of(given: Path, *arguments: str, model: str = "llama") -> dict:
    result = invoke(given, *arguments, "--json", model=model)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def refusal(given: Path, *arguments: str, model: str = "llama") -> str:
    result = invoke(given, *arguments, model=model)
    assert isinstance(result.exception, ValueError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_an_adapter_with_tokenizer_and_card_that_peft_loads(given: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "x"
    held_out = ["--held-out", str(given / "test.jsonl")]
    samples = ["--prompt", "the cat, and", "--prompt", "a dog", "--new-tokens", "5"]
    told = ["--lora", "4", "--steps", "3", "--lr", "1e-2", "--out", str(out)]
    result = invoke(given, *told, *held_out, *samples)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "ε = 8 for one line of the training file, δ = 0.0001" in result.stdout
    assert "before → after: perplexity" in result.stdout

    facts = json.loads((out / "run.json").read_text())
    assert [sample["prompt"] for sample in facts["samples"]] == ["the cat, and", "a dog"]
    assert facts["before"]["perplexity"] > 1
    assert facts["config"]["used"]["trained_parameters"] < facts["config"]["used"]["parameters"]
    assert {"adapter_model.safetensors", "tokenizer.json", "README.md"} <= {
        file.name for file in (out / "model").iterdir()
    }
    assert not (out / "model" / "model.safetensors").exists()

    card = (out / "model" / "README.md").read_text()
    for said in (
        "one line of the training file",
        "add-or-remove-one",
        "0.0001",
        "Poisson",
        "pretr",
    ):
        assert said in card
    assert str(given) not in card

    model = AutoModelForCausalLM.from_pretrained(given / "llama")
    model = PeftModel.from_pretrained(model, str(out / "model")).eval()
    words = AutoTokenizer.from_pretrained(out / "model")
    ids = torch.tensor([words("a dog")["input_ids"]])
    found = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    text = words.decode(found[0, ids.shape[1] :], skip_special_tokens=True)
    assert text == facts["samples"][1]["text"]
    with pytest.raises(ValueError, match="holds a language model, which transformers and peft"):
        tacit.load_run(out)


def test_users_are_what_is_protected(given: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    told = ["--record", "user", "--max-rows", "4", "--steps", "2", "--out", str(out)]
    facts = facts_of(given, *told, "--held-out-fraction", "0.2")
    assert facts["privacy_unit"] == "user (all of their lines)"
    assert "differ by one user (all of their lines) that is added" in facts["statement"]["text"]
    assert facts["statement"]["unit"]["name"] == facts["privacy_unit"]
    # 60 users, less those that are held out; and nothing says who wrote more than four lines.
    assert 40 <= facts["config"]["used"]["public_size"] <= 56
    assert facts["config"]["used"]["rows_per_record"] == 4
    assert (out / "model" / "model.safetensors").is_file()
    (run,) = read_statement(out / "ledger.sqlite").runs
    assert run.steps == 2
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    assert "which is one user (all of their lines)" in (out / "report.html").read_text()


def test_documents_and_packed_users(given: Path, tmp_path: Path) -> None:
    one = facts_of(given, "--record", "document", "--steps", "1", "--out", str(tmp_path / "x"))
    assert one["privacy_unit"] == "document (all of its text)"
    packed = ["--record", "user", "--pack", "--steps", "1", "--out", str(tmp_path / "y")]
    assert facts_of(given, *packed)["config"]["used"]["rows_per_record"] == 8


def test_a_classifier_has_its_class_names(given: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    told = ["--task", "classification", "--steps", "2", "--out", str(tmp_path / "x")]
    held_out = ["--held-out", str(given / "test.jsonl")]
    facts = facts_of(given, *told, *held_out, model="bert")
    assert 0 <= facts["accuracy"] <= 1
    assert facts.get("perplexity") is None
    assert "the classes were read from the file and are treated as public" in facts["notes"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "x" / "model")
    assert model.config.id2label == {0: "bad", 1: "good"}


@pytest.mark.slow
def test_perplexity_falls_as_epsilon_grows(given: Path, tmp_path: Path) -> None:
    told = ["--steps", "40", "--batch-size", "200", "--lr", "1e-2", "--seed", "0"]
    held_out = ["--held-out", str(given / "test.jsonl")]
    found = [
        facts_of(given, *told, *held_out, "--epsilon", epsilon, "--out", str(tmp_path / epsilon))
        for epsilon in ("0.1", "1", "8")
    ]
    before = found[0]["before"]["perplexity"]
    low, middle, high = (facts["perplexity"] for facts in found)
    assert high < 0.8 * middle < 0.8 * low
    assert high < before / 3


def test_a_seed_repeats_a_run_and_bfloat16_runs(given: Path, tmp_path: Path) -> None:
    told = ["--steps", "2", "--seed", "5", "--held-out", str(given / "test.jsonl"), "--lora", "2"]
    one, two = (facts_of(given, *told, "--out", str(tmp_path / name)) for name in "ab")
    assert one["perplexity"] == two["perplexity"]
    more = ["--bf16", "--gradient-checkpointing", "--out", str(tmp_path / "c")]
    assert facts_of(given, *told, *more)["perplexity"] == pytest.approx(one["perplexity"], rel=0.1)


def test_an_earlier_run_is_replaced_only_if_asked(given: Path, tmp_path: Path) -> None:
    out, book = tmp_path / "x", tmp_path / "book.sqlite"
    tacit.Ledger(book, tacit.Budget(20.0, 1e-4)).close()
    told = ["--steps", "1", "--out", str(out), "--ledger", str(book)]
    facts_of(given, *told)
    assert "holds a run already" in refusal(given, *told)
    facts_of(given, *told, "--lora", "2", "--overwrite")
    assert not (out / "model" / "model.safetensors").exists()  # of the run before
    assert len(read_statement(book).runs) == 2
    facts = facts_of(given, *told, "--overwrite", "--epsilon", "19")
    assert facts["steps"] == 0
    assert any("leave no budget" in note for note in facts["notes"])


def test_settings_in_a_file(given: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\nmodel = "{given / "llama"}"\n[samples]\nprompt = ["the cat, a dog"]\n'
        f'new_tokens = 2\n[text]\ndata = "{given / "train.jsonl"}"\nmax_length = 8\n'
        f'[training]\nsteps = 1\n[output]\nout = "{tmp_path / "x"}"\nquiet = true\njson = true\n'
    )
    result = CliRunner().invoke(app, ["finetune", "--config", str(file), "--delta", "1e-4"])
    assert result.exit_code == 0, result.exception
    assert [s["prompt"] for s in json.loads(result.stdout)["samples"]] == ["the cat, a dog"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text-field", "body"], "no field 'body', it has 'text', 'label', 'user'"),
        (["--record", "user", "--user-field", "author"], "with --user-field"),
        (["--data", "{given}/none.jsonl"], "No such file"),
        (["--model", "{given}/none"], "there is no such folder"),
        (["--model", "{given}"], "has no config.json"),
        (["--max-length", "64"], "--max-length is 64, and the model reads 32 tokens at most"),
        (["--max-blocks", "3"], "--max-blocks goes with --record document"),
        (["--max-rows", "3"], "--max-rows goes with --record user"),
        (["--pack"], "--pack goes with --record user"),
        (["--lora-alpha", "3"], "--lora-alpha goes with --lora"),
        (["--temperature", "0.5"], "--temperature goes with --prompt"),
        (["--classes", "a,b"], "--classes goes with --task classification"),
        (["--task", "classification", "--prompt", "x"], "which generates no text"),
        (["--task", "classification", "--classes", "bad,worse"], "label 'good', and the classes"),
        (["--task", "classification", "--classes", "bad"], "there is one class"),
        (["--task", "classification", "--classes", "bad,good,bad"], "names a class twice"),
        (["--held-out", "{given}/train.jsonl"], "give other text with --held-out"),
        (["--held-out-fraction", "1e-9"], "leaves no held-out line"),
        (["--held-out-fraction", "2"], "--held-out-fraction is 2"),
        (["--lora", "2", "--lora-targets", "nothing"], "give --lora-targets names"),
        (["--batch-size", "601"], "--batch-size is 601, and there are 600 records"),
        (["--prompt", "the cat", "--new-tokens", "31"], "more than the 32 tokens"),
        (["--lora", "-1"], "--lora is -1"),
        (["--epochs", "1", "--steps", "1"], "leave one of them out"),
    ],
)
def test_what_is_refused(given: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    out = tmp_path / "x"
    filled = [argument.replace("{given}", str(given)) for argument in arguments]
    result = invoke(given, "--out", str(out), *filled)
    assert says in str(result.exception) + result.output
    assert result.exit_code != 0
    assert not out.exists()


def test_without_a_model_or_a_file() -> None:
    for arguments, missing in ((["--data", "x.jsonl"], "--model"), (["--model", "x"], "--data")):
        result = CliRunner().invoke(app, ["finetune", *arguments])
        assert f"{missing} is not given" in str(result.exception)
