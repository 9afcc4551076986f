"""Networks of residual blocks: for small images, with the normalisations to choose from, and GPT-2.

`Norm` is a function from a number of channels to a module. The decoder like GPT-2  [Radford 2019]
is made of modules that engines have rules for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.torch_internals import convolve

Norm = Callable[[int], nn.Module]


def group_norm(groups: int = 16, least: int = 2) -> Norm:
    """GroupNorm in `groups` groups, or the largest smaller number that divides the channels.

    Each group is normalised by one record's own mean and variance  [Wu 2018], so records stay
    apart. Groups have at least `least` channels where possible: on inputs without positions a
    channel is one number, and one number less its own mean is zero.
    """
    if groups < 1 or least < 1:
        raise ValueError(f"groups is {groups} and least is {least}; give numbers of at least 1")

    def norm(channels: int) -> nn.GroupNorm:
        fitting = (g for g in range(2, groups + 1) if channels % g == 0 and channels >= g * least)
        return nn.GroupNorm(max(fitting, default=1), channels)

    return norm


def normalised(layer: nn.Module, norm: Norm | None, channels: int) -> list[nn.Module]:
    """The layer, followed by its normalisation if there is one."""
    return [layer] if norm is None else [layer, norm(channels)]


class WeightStandardisedConv2d(nn.Conv2d):
    """Convolves with Ŵ_o = (W_o − mean W_o) / √(n·var W_o + ε), n numbers in each filter o.

    [Qiao 2019], scaled by n as in [Brock 2021] so that outputs are no larger than inputs. Ŵ is
    computed from weights alone, so records stay apart. Filters have no gain of their own: the
    normalisation that follows has one.
    """

    eps = 1e-5

    def standardised(self) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        size = self.weight[0].numel()
        return (self.weight - mean) * (size * variance + self.eps).rsqrt()

    def forward(self, input: Tensor) -> Tensor:
        return convolve(self, input, self.standardised())


@dataclass(frozen=True)
class WeightStandardised:
    """For `make_trainable`: this norm, and standardised convolutions before it."""

    norm: Norm = field(default_factory=group_norm)


class BasicBlock(nn.Module):
    """relu(f(x) + s(x)): f two 3×3 convolutions, s the identity or a 1×1 convolution."""

    def __init__(self, before: int, filters: int, stride: int, norm: Norm | None) -> None:
        super().__init__()
        first = nn.Conv2d(before, filters, 3, stride, padding=1, bias=False)
        second = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.body = nn.Sequential(
            *normalised(first, norm, filters), nn.ReLU(), *normalised(second, norm, filters)
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or before != filters:
            project = nn.Conv2d(before, filters, 1, stride, bias=False)
            self.shortcut = nn.Sequential(*normalised(project, norm, filters))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(
    num_classes: int = 10,
    channels: int = 3,
    blocks: Sequence[int] = (1, 1, 1),
    width: int = 32,
    norm: Norm | None = nn.BatchNorm2d,
) -> nn.Sequential:
    """Stages of `width`, 2·`width`, … filters; each but the first halves the sides  [He 2016].

    It begins with a 3×3 convolution and pools only at the end. The default, eight layers deep, has
    the blocks and the width of the small residual networks that DP-SGD Without Clipping searches
    over. `norm=None` leaves normalisation out.
    """
    stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    layers = [*normalised(stem, norm, width), nn.ReLU()]
    before = width
    for stage, count in enumerate(blocks):
        filters = width * 2**stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(BasicBlock(before, filters, stride, norm))
            before = filters
    head = nn.Linear(before, num_classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


def resnet18(
    num_classes: int = 10, channels: int = 3, norm: Norm | None = nn.BatchNorm2d
) -> nn.Sequential:
    """The resnet-18 of Batch Clipping: four stages of two blocks, 64 to 512 filters.

    With BatchNorm it has 62 parameter tensors, the L of the paper's layerwise clipping.
    """
    return resnet(num_classes, channels, blocks=(2, 2, 2, 2), width=64, norm=norm)


# The stem's 16 channels are 16 groups, as published.
SIXTEEN_GROUPS = group_norm(16, least=1)


class _Block(nn.Module):
    """f(x) + s(x): f is ReLU, norm, 3×3 convolution, twice; s the identity or the same with 1×1."""

    def __init__(self, skip: nn.Module, *body: nn.Module) -> None:
        super().__init__()
        self.skip = skip
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.skip(x)


def wide_resnet(
    depth: int = 16,
    width: int = 4,
    num_classes: int = 10,
    channels: int = 3,
    norm: Norm | None = SIXTEEN_GROUPS,
    conv: type[nn.Conv2d] = nn.Conv2d,
) -> nn.Sequential:
    """WRN-16-4: three stages of (depth − 4)/6 blocks with 16w, 32w and 64w filters.

    A wide residual network [Zagoruyko 2016] as DP-SGD trains it [De 2022], with the activation
    before the norm. They train `conv=WeightStandardisedConv2d`; the ordinary convolution has a
    faster rule in the book-keeping engine.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth is {depth}; a wide_resnet has 6·n + 4 layers: 10, 16, 22, 28, …")

    def activated(before: int, *then: nn.Module) -> list[nn.Module]:
        return [nn.ReLU(), *([] if norm is None else [norm(before)]), *then]

    layers: list[nn.Module] = [conv(channels, 16, 3, padding=1)]
    before = 16
    for stage in range(3):
        filters = 16 * width * 2**stage
        for block in range((depth - 4) // 6):
            first = block == 0
            stride = 2 if first and stage > 0 else 1
            skip = activated(before, conv(before, filters, 1, stride)) if first else []
            body = activated(before, conv(before, filters, 3, stride, padding=1))
            body += activated(filters, conv(filters, filters, 3, padding=1))
            layers.append(_Block(nn.Sequential(*skip), *body))
            before = filters
    layers += activated(before, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(before, num_classes))


# ---- a decoder -----------------------------------------------------------------------------------


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + f(norm(x)), f two layers with GELU between them.

    B records, T positions, D the width, H heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._attention(self.norm1(x_BTD))
        return x_BTD + self.narrow(F.gelu(self.wide(self.norm2(x_BTD)), approximate="tanh"))

    def _attention(self, x_BTD: Tensor) -> Tensor:
        """softmax(Q Kᵀ/√(D/H)) V in each head, over the positions up to one's own."""
        qkv = self.project_in(x_BTD).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q_BHTE, k_BHTE, v_BHTE = qkv.unbind()
        mixed = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        return self.project_out(mixed.transpose(1, 2).flatten(2))


class Gpt(nn.Module):
    """Tokens (B, T) to the logits of the next token at each position (B, T, vocabulary)."""

    def __init__(
        self, vocabulary: int, layers: int, width: int, heads: int, context: int, tied: bool
    ) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise()
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        if length > self.context:
            raise ValueError(
                f"a record has {length} tokens and this model {self.context} positions"
            )
        # Engines need records as the first dimension, so every record reads its own positions.
        places = torch.arange(length, device=tokens_BT.device).expand(len(tokens_BT), -1)
        x_BTD = self.tokens(tokens_BT) + self.positions(places)
        return self.head(self.norm(self.blocks(x_BTD)))

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # The two branches of each block add up, and each gets its share of the variance.
        share = 0.02 / math.sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if name.endswith(("project_out.weight", "narrow.weight")):
                nn.init.normal_(parameter, std=share)


def gpt(
    vocabulary: int,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    context: int = 256,
    tied: bool = True,
) -> Gpt:
    """GPT-2 small: 124,439,808 parameters with its 50,257 tokens and a context of 1,024.

    With `tied`, the head is the table of tokens, as in GPT-2. The book-keeping engine keeps one row
    per record of a table that is used twice (154 MB at that size); with `tied=False` it does not.
    """
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of {heads} heads; choose one that is")
    return Gpt(vocabulary, layers, width, heads, context, tied)


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(outputs_t)_{targets_(t+1)}, the mean over positions: one number per record.

    The targets are the records' own tokens (B, T), so a text is its own target.
    """
    logits_BVT = outputs[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits_BVT, targets[:, 1:], reduction="none").mean(dim=1)
