"""Language models of transformers and peft, small and otherwise as the libraries make them."""

from __future__ import annotations

import peft
import transformers
from torch import nn
from zoo_case import (
    CLASSES,
    HIDDEN,
    VOCABULARY,
    case,
    class_loss,
    masked_text,
    masked_text_with_types,
    next_token_loss,
    text_to_continue,
    text_to_translate,
    token_loss,
    unmasked_text,
    unmasked_text_to_continue,
)

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
ENCODER = {**SIZES, "max_position_embeddings": 16, "num_labels": CLASSES, "pad_token_id": 0}
DECODER = {**SIZES, "max_position_embeddings": 32, "num_key_value_heads": 1}


# Encoders ----------------------------------------------------------------------------------------


@case("transformers/bert", masked_text_with_types, class_loss)
def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER))


@case("transformers/distilbert", masked_text, class_loss)
def distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=HIDDEN,
        n_layers=2,
        n_heads=2,
        hidden_dim=32,
        max_position_embeddings=16,
        num_labels=CLASSES,
    )
    return transformers.DistilBertForSequenceClassification(config)


@case("transformers/roberta", masked_text, class_loss)
def roberta() -> nn.Module:
    """Numbers its positions by the tokens that are not padding."""
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**ENCODER))


@case("transformers/albert", masked_text, class_loss, held_out=True)
def albert() -> nn.Module:
    """Runs one layer's weights twice."""
    config = transformers.AlbertConfig(**ENCODER, embedding_size=8)
    return transformers.AlbertForSequenceClassification(config)


@case("transformers/electra", masked_text, class_loss, held_out=True)
def electra() -> nn.Module:
    config = transformers.ElectraConfig(**ENCODER, embedding_size=8)
    return transformers.ElectraForSequenceClassification(config)


@case("transformers/deberta_v2", masked_text, class_loss, held_out=True)
def deberta_v2() -> nn.Module:
    """Disentangled attention: relative positions are gathered from projected tables."""
    config = transformers.DebertaV2Config(
        **ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4
    )
    return transformers.DebertaV2ForSequenceClassification(config)


@case("transformers/xlnet", masked_text, class_loss, held_out=True)
def xlnet() -> nn.Module:
    """Sequence first inside, einsum throughout."""
    config = transformers.XLNetConfig(
        vocab_size=VOCABULARY, d_model=HIDDEN, n_layer=2, n_head=2, d_inner=32, num_labels=CLASSES
    )
    return transformers.XLNetForSequenceClassification(config)


@case("transformers/fnet", unmasked_text, class_loss, held_out=True)
def fnet() -> nn.Module:
    """Mixes tokens by a Fourier transform, in complex numbers."""
    return transformers.FNetForSequenceClassification(transformers.FNetConfig(**ENCODER))


@case("transformers/big_bird", masked_text, class_loss, held_out=True)
def big_bird() -> nn.Module:
    config = transformers.BigBirdConfig(**ENCODER, attention_type="original_full")
    return transformers.BigBirdForSequenceClassification(config)


# Decoders ----------------------------------------------------------------------------------------


@case("transformers/gpt2", text_to_continue, next_token_loss)
def gpt2() -> nn.Module:
    """Tied head; its linear layers are `Conv1D` with a transposed weight."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=2, n_head=2, n_positions=16
    )
    return transformers.GPT2LMHeadModel(config)


@case("transformers/llama", text_to_continue, next_token_loss)
def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))


def with_adapters(model: nn.Module, target_modules: str | list[str], **options) -> nn.Module:
    """Low-rank adapters that are not zero at the start, so that every factor has a gradient."""
    config = peft.LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.1,
        init_lora_weights=False,
        target_modules=target_modules,
        **options,
    )
    return peft.get_peft_model(model, config)


@case("peft/qwen2_lora", text_to_continue, next_token_loss)
def qwen2_lora() -> nn.Module:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER))
    return with_adapters(model, "all-linear")


@case("peft/llama_dora", text_to_continue, next_token_loss)
def llama_dora() -> nn.Module:
    """The norm of the merged weight divides what the adapter adds."""
    return with_adapters(llama(), ["q_proj", "v_proj"], use_dora=True)


EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}


# Its product of the experts' matrices does not exist in float64.
@case("transformers/mixtral", text_to_continue, next_token_loss, float64_tolerance=None)
def mixtral() -> nn.Module:
    """Tokens of all records, sorted by expert and multiplied by one grouped product."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, **EXPERTS))


def mixtral_loop() -> nn.Module:
    """The same model with a loop over the experts that the batch hits, which are private."""
    config = transformers.MixtralConfig(**DECODER, **EXPERTS, experts_implementation="eager")
    return transformers.MixtralForCausalLM(config)


@case("transformers/opt", text_to_continue, next_token_loss, held_out=True)
def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=16,
        word_embed_proj_dim=8,
        pad_token_id=0,
    )
    return transformers.OPTForCausalLM(config)


@case("transformers/gpt_neox", text_to_continue, next_token_loss, held_out=True)
def gpt_neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(**SIZES, max_position_embeddings=16)
    return transformers.GPTNeoXForCausalLM(config)


# Its norms cast their weight to float32, whatever its dtype is.
@case(
    "transformers/gemma", text_to_continue, next_token_loss, held_out=True, float64_tolerance=1e-6
)
def gemma() -> nn.Module:
    """Scales its embeddings by a constant, and norms by 1 + weight."""
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER, head_dim=8))


@case("transformers/phi", text_to_continue, next_token_loss, held_out=True)
def phi() -> nn.Module:
    config = transformers.PhiConfig(**DECODER, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return transformers.PhiForCausalLM(config)


@case("transformers/falcon", text_to_continue, next_token_loss, held_out=True)
def falcon() -> nn.Module:
    """One fused projection for queries, keys and values."""
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.FalconForCausalLM(config)


@case("transformers/bloom", text_to_continue, next_token_loss, held_out=True)
def bloom() -> nn.Module:
    """Linear biases on the attention scores, from the mask."""
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, n_layer=2, n_head=2
    )
    return transformers.BloomForCausalLM(config)


@case(
    "transformers/mamba",
    unmasked_text_to_continue,
    next_token_loss,
    held_out=True,
    float64_tolerance=1e-6,  # casts its parameters and inputs to float32
)
def mamba() -> nn.Module:
    """A state-space model: a loop over time with a parameter in the exponent."""
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=2, state_size=4
    )
    return transformers.MambaForCausalLM(config)


# Encoder and decoder -----------------------------------------------------------------------------


@case("transformers/t5", text_to_translate, token_loss)
def t5() -> nn.Module:
    """Relative positions from a table that all layers share."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


@case("transformers/bart", text_to_translate, token_loss, held_out=True)
def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    return transformers.BartForConditionalGeneration(config)
