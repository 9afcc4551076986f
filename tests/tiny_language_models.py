"""Tiny language models with their tokenizer, and files of text, made without a download."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

NOUNS = ["cat", "dog", "bird", "fish", "horse", "mouse", "owl", "fox", "bear", "wolf"]
VERBS = ["sees", "hears", "likes", "finds", "follows"]
PLACES = ["home", "school", "water", "trees", "town"]
WORDS = [*NOUNS, *VERBS, *PLACES, *["the", "a", "near", "good", "bad", "very", "day"]]
CONTEXT = 32


def tokenizer() -> Any:
    """One token per word, and per unknown word one for all."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        eos_token="[EOS]",
        model_max_length=CONTEXT,
    )


def llama(size: int = 32, layers: int = 1) -> Any:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def gpt2() -> Any:
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(WORDS) + 3,
        n_positions=CONTEXT,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=2,
        eos_token_id=2,
    )
    return GPT2LMHeadModel(config)


def bert() -> Any:
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS) + 3,
        max_position_embeddings=CONTEXT,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        pad_token_id=0,
    )
    return BertForMaskedLM(config)


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def sentence(draw: random.Random, good: bool = True) -> str:
    subject, other = draw.sample(NOUNS, 2)
    end = "good day" if good else "bad day"
    return f"the {subject} {draw.choice(VERBS)} a {other} near the {draw.choice(PLACES)} very {end}"


def write_lines(file: Path, count: int, *, users: int = 0, seed: int = 0) -> Path:
    """Sentences with a label, which their end tells, and a user each where `users` is given."""
    draw = random.Random(seed)
    with file.open("w", encoding="utf-8") as opened:
        for i in range(count):
            good = draw.random() < 0.5
            line = {"text": sentence(draw, good), "label": "good" if good else "bad"}
            if users:
                line["user"] = f"u{i % users}"
            opened.write(json.dumps(line) + "\n")
    return file


def write_toy(folder: Path) -> None:
    """What docs/language-models.md begins with: a model, and text of 300 users and of 40 more."""
    saved(folder / "llama", llama())
    write_lines(folder / "train.jsonl", 2000, users=300)
    write_lines(folder / "test.jsonl", 200, users=40, seed=1)


if __name__ == "__main__":
    write_toy(Path(sys.argv[1]))
