"""Ways to run a model: lower precision, recomputed activations, own functions, compiled code."""

from __future__ import annotations

import torch
import torchvision_models
import transformers_text
from torch import Tensor, nn
from torchvision import models
from zoo_case import (
    CLASSES,
    HIDDEN,
    case,
    class_loss,
    floats,
    masked_text,
    masked_text_with_types,
    next_token_loss,
    text_to_continue,
)


class Autocast(nn.Module):
    """Runs a model in bfloat16 where PyTorch thinks it safe, and answers in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = self.model(*inputs, **named)
        return (outputs if isinstance(outputs, Tensor) else outputs.logits).float()


# A gradient that autograd rounds to bfloat16 has 8 bits.
BFLOAT16 = {"tolerance": 2e-2, "float64_tolerance": None}


@case("modes/autocast_bert", masked_text_with_types, class_loss, **BFLOAT16)
def autocast_bert() -> nn.Module:
    return Autocast(transformers_text.bert())


@case("modes/autocast_convnext", floats(3, 32, 32), class_loss, **BFLOAT16)
def autocast_convnext() -> nn.Module:
    return Autocast(torchvision_models.convnext())


@case("modes/checkpointed_llama", text_to_continue, next_token_loss)
def checkpointed_llama() -> nn.Module:
    model = transformers_text.llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@case("modes/checkpointed_roberta", masked_text, class_loss, held_out=True)
def checkpointed_roberta() -> nn.Module:
    """With dropout, which the second pass must repeat."""
    model = transformers_text.roberta()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class OwnProduct(torch.autograd.Function):
    """A matrix product with its gradients written by hand."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows @ weight

    @staticmethod
    def backward(ctx, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return cotangent @ weight.T, rows.flatten(0, -2).T @ cotangent.flatten(0, -2)


class OwnLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 8))
        self.second = nn.Parameter(torch.randn(8, CLASSES))

    def forward(self, sequences: Tensor) -> Tensor:
        hidden = torch.tanh(OwnProduct.apply(sequences, self.first))
        return OwnProduct.apply(hidden, self.second).mean(1)


@case("modes/own_function", floats(4, 5), class_loss)
def own_function() -> nn.Module:
    return OwnLayer()


@case("modes/compiled_vit", floats(3, 32, 32), class_loss)
def compiled_vit() -> nn.Module:
    """Without dropout: compiled code may draw in another order than the same code run eagerly."""
    model = models.VisionTransformer(32, 16, 1, 2, HIDDEN, 32, num_classes=CLASSES)
    return torch.compile(model, backend="aot_eager")


@case("modes/compiled_block", floats(6), class_loss, held_out=True)
def compiled_block() -> nn.Module:
    """One block of an eager model, compiled in place."""
    block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())
    block.compile(backend="eager")
    return nn.Sequential(nn.Linear(6, 8), block, nn.Linear(8, CLASSES))
