"""What is trained: models with records, targets and a loss of their own. Random data throughout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import tacit


class NextToken(nn.Module):
    """`next_token_loss` with a reduction that can be switched, as Opacus' ghost clipping does."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses_B = tacit.models.next_token_loss(outputs, targets)
        return losses_B if self.reduction == "none" else losses_B.mean()


@dataclass(frozen=True)
class Setting:
    """`width` is that of `cifar_cnn`, where the model is one: JAX has a twin of it."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    criterion: Callable[[], nn.Module]
    batch_sizes: tuple[int, ...]
    width: int | None = None


def images(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 3, 32, 32, generator=generator)
    return inputs, torch.randint(10, (count,), generator=generator)


def texts(vocabulary: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Records that are their own targets."""

    def batch(count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary, (count, length), generator=generator)
        return tokens, tokens.clone()

    return batch


def cifar_cnn(width: int) -> Setting:
    return Setting(
        lambda: tacit.models.cifar_cnn(width=width),
        images,
        nn.CrossEntropyLoss,
        (64, 256, 1024, 4096),
        width,
    )


def wide_resnet(width: int) -> Setting:
    return Setting(
        lambda: tacit.models.wide_resnet(16, width), images, nn.CrossEntropyLoss, (64, 256, 1024)
    )


def gpt(*, tied: bool) -> Setting:
    """GPT-2 small on 256 tokens: 124 M parameters, 163 M where the head has a table of its own."""
    return Setting(
        lambda: tacit.models.gpt(50257, context=256, tied=tied),
        texts(50257, 256),
        NextToken,
        (8, 16, 32),
    )


MODELS = {
    "cifar_cnn": cifar_cnn(32),
    "cifar_cnn_wide": cifar_cnn(64),
    "wrn_16_4": wide_resnet(4),
    "gpt": gpt(tied=True),
    "gpt_untied": gpt(tied=False),
}


def tiny(name: str) -> Setting:
    """The same kind of model, small enough to see in a minute that every kind of step runs."""
    setting = {
        "cifar_cnn": cifar_cnn(4),
        "cifar_cnn_wide": cifar_cnn(8),
        "wrn_16_4": wide_resnet(1),
    }.get(name)
    if setting is None:
        tied = name == "gpt"
        setting = replace(
            gpt(tied=tied),
            model=lambda: tacit.models.gpt(50, 2, 16, 2, context=8, tied=tied),
            batch=texts(50, 8),
        )
    return replace(setting, batch_sizes=(4, 8))
