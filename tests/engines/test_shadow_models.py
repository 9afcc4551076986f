"""Models that nobody here wrote: no rule is missing, and records meet in weight gradients only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.engines.shadow import Shadow
from tacit.engines.shadow_labels import layout

# torchvision's compiled operators are missing beside a CPU build of torch; its Python part only
# needs them to be declared, and only when transformers or timm import it.
_TORCHVISION = torch.library.Library("torchvision", "FRAGMENT")
for _operator in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _operator):
        _TORCHVISION.define(f"{_operator}(Tensor dets, Tensor scores, float threshold) -> Tensor")

transformers = pytest.importorskip("transformers")

B, V, T = 6, 40, 6  # the batch is as long as a sequence, which must not confuse anything
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, V, (B, T), generator=generator)
    mask = torch.ones(B, T, dtype=torch.long)
    mask[0, 4:] = 0
    return ids, mask, torch.randint(0, 3, (B,), generator=generator)


def images() -> Tensor:
    return torch.rand(B, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def token_losses(logits: Tensor, target: Tensor) -> Tensor:
    flat = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return flat.view(target.shape).mean(1)


def group_norm(channels: int, **options: Any) -> nn.Module:
    return nn.GroupNorm(4, channels)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, 8)
        self.layer = kind(8, 6, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(12, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(ids))[0].mean(1))


def build(name: str) -> tuple[nn.Module, list[Tensor], Callable[..., Tensor]]:
    tf: Any = transformers
    ids, mask, target = tokens()
    kind = name.split()[0]
    if name == "bert":
        config = tf.BertConfig(vocab_size=V, max_position_embeddings=16, num_labels=3, **SMALL)
        return tf.BertForSequenceClassification(config), [ids, mask, target], text_losses
    if name == "gpt2":
        config = tf.GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        return tf.GPT2LMHeadModel(config), [ids, mask], language_losses
    if name == "t5":
        config = tf.T5Config(
            vocab_size=V,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        )
        return (
            tf.T5ForConditionalGeneration(config),
            [ids, mask, ids.flip(1), ids.clone()],
            t5_losses,
        )
    if name == "whisper":
        config = tf.WhisperConfig(
            vocab_size=V,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
        model = tf.WhisperForConditionalGeneration(config)
        return model, [torch.rand(B, 8, 20), ids, ids.flip(1)], whisper_losses
    if name == "vit":
        config = tf.ViTConfig(image_size=32, patch_size=8, num_labels=3, **SMALL)
        return tf.ViTForImageClassification(config), [images(), target], image_losses
    if name == "swin":
        config = tf.SwinConfig(
            image_size=32,
            patch_size=4,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
            num_labels=3,
        )
        return tf.SwinForImageClassification(config), [images(), target], image_losses
    if name == "convnext":
        config = tf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3)
        return tf.ConvNextForImageClassification(config), [images(), target], image_losses
    if kind == "timm":
        timm = pytest.importorskip("timm")
        options = {} if "resnet" not in name else {"norm_layer": group_norm}
        if "vit" in name:
            options = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 16, "num_heads": 2}
        model = timm.create_model(name.split()[1], num_classes=3, **options)
        return model, [images(), target], image_losses
    return Recurrent(getattr(nn, name.upper())), [ids, target], image_losses


def text_losses(model: nn.Module, ids: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits
    return F.cross_entropy(logits, target, reduction="none")


def language_losses(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return token_losses(model(input_ids=ids, attention_mask=mask).logits[:, :-1], ids[:, 1:])


def t5_losses(model: nn.Module, ids: Tensor, mask: Tensor, before: Tensor, after: Tensor) -> Tensor:
    output = model(input_ids=ids, attention_mask=mask, decoder_input_ids=before)
    return token_losses(output.logits, after)


def whisper_losses(model: nn.Module, sound: Tensor, before: Tensor, after: Tensor) -> Tensor:
    return token_losses(model(input_features=sound, decoder_input_ids=before).logits, after)


def image_losses(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    output = model(inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits, target, reduction="none")


MODELS = ["bert", "gpt2", "t5", "whisper", "vit", "swin", "convnext", "lstm", "gru"]
MODELS += ["timm resnet18", "timm vit_tiny_patch16_224"]


@pytest.mark.parametrize("name", MODELS)
def test_records_meet_in_weight_gradients_only(name: str) -> None:
    torch.manual_seed(0)
    model, batch, losses_of = build(name)
    shadow = Shadow(B)
    for tensor in batch:
        shadow.mark(tensor)
    with shadow:
        losses = losses_of(model, *batch)
    # transformers asks whether the mask of the whole batch is full, and nothing else.
    assert all("masking_utils.py" in event.where for event in shadow.meetings + shadow.looks)
    assert bool(shadow.looks) == (name in ("bert", "gpt2", "t5"))
    found = layout(shadow.labels(losses), B)
    assert (found.kind, found.dim, found.outer, found.inner) == ("blocks", 0, 1, 1)

    forward_looks = shadow.looks
    ones = torch.ones(B)
    shadow.mark(ones)
    shadow.phase = "backward"
    parameters = [p for p in model.parameters() if p.requires_grad]
    with shadow:
        gradients = torch.autograd.grad(losses, parameters, ones, allow_unused=True)
    assert shadow.unknown == []
    assert shadow.selections == []
    assert shadow.looks == forward_looks
    assert all(bool((shadow.labels(g) == -1).any()) for g in gradients if g is not None)
