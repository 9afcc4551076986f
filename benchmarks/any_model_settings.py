"""Models that others wrote, with records, targets and a loss that gives one number per record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tacit

if not torch.cuda.is_available() and not hasattr(torch.ops.torchvision, "nms"):
    # Torchvision's wheel is built for CUDA. Beside a CPU build of PyTorch its compiled part does
    # not load, and its import stops at operators that no model here calls: declarations are
    # enough, as long as they live: a library that is collected takes its operators with it.
    TORCHVISION = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        TORCHVISION.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@dataclass(frozen=True)
class Setting:
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    records: tuple[int, ...]


def _logits(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def classes(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(_logits(outputs), targets, reduction="none")


def next_tokens(outputs: Any, targets: Tensor) -> Tensor:
    logits, wanted = _logits(outputs)[:, :-1], targets[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return losses.view(wanted.shape).mean(1)


def images(size: int, num_classes: int = 10) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(count, 3, size, size, generator=generator)
        return inputs, torch.randint(num_classes, (count,), generator=generator)

    return batch


def tokens(length: int, vocabulary: int, *, causal: bool) -> Callable[[int], tuple[Any, Tensor]]:
    def batch(count: int) -> tuple[Any, Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (count, length), generator=generator)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return inputs, ids if causal else torch.randint(2, (count,), generator=generator)

    return batch


def tokens_and_positions(length: int, vocabulary: int) -> Callable[[int], tuple[Any, Tensor]]:
    """Positions and types for every record: Opacus takes no embedding that records share."""
    make = tokens(length, vocabulary, causal=False)

    def batch(count: int) -> tuple[Any, Tensor]:
        inputs, targets = make(count)
        positions = torch.arange(length).repeat(count, 1)
        return inputs | {"position_ids": positions, "token_type_ids": 0 * positions}, targets

    return batch


def _groups(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(8, channels)


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10, norm_layer=_groups)


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 4, 6, 6, 384, 1536, num_classes=10)


def hf_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32,
        patch_size=4,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
        num_labels=10,
    )
    return ViTForImageClassification(config)


def convnext() -> nn.Module:
    from torchvision.models import convnext_tiny

    return convnext_tiny(num_classes=10)


def swin() -> nn.Module:
    from torchvision.models import swin_t

    return swin_t(num_classes=10)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(num_labels=2))


def bert_tiny() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        vocab_size=30522,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def llama_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
    return get_peft_model(LlamaForCausalLM(config), lora)


def large_llama_lora(hidden: int, feed_forward: int, layers: int, heads: int, groups: int):
    """A Llama shape in bfloat16 with adapters in float32, as peft makes them."""

    def make() -> nn.Module:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            vocab_size=128256 if hidden > 2048 else 32000,
            use_cache=False,
            dtype=torch.bfloat16,
        )
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                base = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        return get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))

    return make


class LstmClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10000, 128)
        self.lstm = nn.LSTM(128, 256, batch_first=True)
        self.head = nn.Linear(256, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(input_ids))[0].mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def rows(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 1, 28, 28, generator=generator)
    return inputs, torch.randint(10, (count,), generator=generator)


def small_cnn() -> nn.Module:
    """The MNIST network of the Opacus tutorial."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


SETTINGS = {
    "cnn": Setting(tacit.models.cifar_cnn, images(32), classes, (64, 256, 1024)),
    "cnn x2": Setting(
        lambda: tacit.models.cifar_cnn(width=64),
        images(32),
        classes,
        (256, 1024),
    ),
    "resnet18": Setting(resnet18, images(32), classes, (64, 256)),
    "wrn_16_4": Setting(tacit.models.wide_resnet, images(32), classes, (256,)),
    "vit": Setting(vit, images(32), classes, (64, 256)),
    "hf_vit": Setting(hf_vit, images(32), classes, (256,)),
    "convnext": Setting(convnext, images(64), classes, (64,)),
    "swin": Setting(swin, images(64), classes, (64,)),
    "bert": Setting(bert, tokens(128, 30000, causal=False), classes, (32,)),
    "gpt2": Setting(gpt2, tokens(128, 50257, causal=True), next_tokens, (16,)),
    "llama_lora": Setting(llama_lora, tokens(256, 32000, causal=True), next_tokens, (16,)),
    "llama_1b": Setting(
        large_llama_lora(2048, 5632, 22, 32, 4), tokens(512, 32000, causal=True), next_tokens, (8,)
    ),
    "llama_8b": Setting(
        large_llama_lora(4096, 14336, 32, 32, 8),
        tokens(512, 128256, causal=True),
        next_tokens,
        (4,),
    ),
    "lstm": Setting(LstmClassifier, tokens(64, 10000, causal=False), classes, (256,)),
    "mlp": Setting(mlp, rows, classes, (64, 256)),
    "small_cnn": Setting(small_cnn, rows, classes, (64,)),
    "bert_tiny": Setting(bert_tiny, tokens_and_positions(64, 30000), classes, (16,)),
}
