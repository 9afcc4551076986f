"""A decoder like GPT-2  [Radford 2019], made of modules that engines have rules for."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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
