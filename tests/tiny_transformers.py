"""Networks of the transformers library, small enough for a test."""

from __future__ import annotations

import pytest
import torch


def tiny(name: str, **options):
    """A model of this class from a configuration of a few numbers, in evaluation mode."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options)).eval()


def tiny_gpt2(vocabulary=11, positions=8):
    return tiny(
        "GPT2LMHeadModel",
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )


def tiny_bert(classes=3, vocabulary=20, positions=8):
    return tiny(
        "BertForSequenceClassification",
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        num_labels=classes,
    )
