"""Models that people write with PyTorch alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from zoo_case import (
    CLASSES,
    HIDDEN,
    LENGTH,
    MOST_RECORDS,
    VOCABULARY,
    Tree,
    case,
    class_loss,
    floats,
    random_images,
    random_labels,
    random_tokens,
    token_ids,
    token_loss,
)


class RecurrentClassifier(nn.Module):
    """Two recurrent layers in both directions, with dropout between them."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.recurrent = layer(
            8, 12, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1
        )
        self.classify = nn.Linear(24, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embed(ids))
        return self.classify(states.mean(1))


@case("torch/lstm", token_ids, class_loss)
def lstm() -> nn.Module:
    return RecurrentClassifier(nn.LSTM)


@case("torch/gru", token_ids, class_loss)
def gru() -> nn.Module:
    return RecurrentClassifier(nn.GRU)


class SequenceFirstEncoder(nn.Module):
    """Records are in the second dimension inside, which is PyTorch's default."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN))
        layer = nn.TransformerEncoderLayer(HIDDEN, nhead=2, dim_feedforward=32)
        self.encode = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.classify = nn.Linear(HIDDEN, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.embed(ids) + self.positions
        return self.classify(self.encode(tokens.transpose(0, 1)).mean(0))


@case("torch/transformer_encoder", token_ids, class_loss)
def transformer_encoder() -> nn.Module:
    return SequenceFirstEncoder()


class NormalisedCnn(nn.Module):
    """A CNN whose weights are functions of its parameters."""

    def __init__(self, normalise) -> None:
        super().__init__()
        self.wide = normalise(nn.Conv2d(3, 8, 3, padding=1))
        self.grouped = normalise(nn.Conv2d(8, 8, 3, stride=2, groups=2))
        self.classify = normalise(nn.Linear(8, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.wide(images), inplace=True)
        features = F.relu(self.grouped(features))
        return self.classify(features.mean((2, 3)))


@case("torch/weight_norm", floats(3, 9, 9), class_loss)
def weight_norm() -> nn.Module:
    return NormalisedCnn(parametrizations.weight_norm)


@case("torch/spectral_norm", floats(3, 9, 9), class_loss)
def spectral_norm() -> nn.Module:
    """Each pass in training mode does one step of the power iteration, on the weights alone."""
    return NormalisedCnn(parametrizations.spectral_norm)


class GatheringExperts(nn.Module):
    """A mixture of experts that gathers the tokens of all records for each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, HIDDEN)
        self.route = nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
            for _ in range(3)
        )
        self.classify = nn.Linear(HIDDEN, CLASSES)

    def forward(self, sequences: Tensor) -> Tensor:
        tokens = self.embed(sequences).flatten(0, 1)
        weights = self.route(tokens).softmax(-1)
        chosen = weights.argmax(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            answers = expert(tokens[rows]) * weights[rows, number : number + 1]
            mixed = mixed.index_add(0, rows, answers)
        states = (tokens + mixed).unflatten(0, sequences.shape[:2])
        return self.classify(states.mean(1))


@case("torch/mixture_of_experts", floats(LENGTH, 5), class_loss)
def mixture_of_experts() -> nn.Module:
    return GatheringExperts()


def graphs(generator: torch.Generator) -> tuple[Tree, Tree]:
    """Dense adjacency matrices with the features of the nodes."""
    adjacency = torch.rand(MOST_RECORDS, LENGTH, LENGTH, generator=generator)
    return (adjacency, random_images(generator, LENGTH, 5)), random_labels(generator)


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, HIDDEN, bias=False)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.own_share = nn.Parameter(torch.zeros(1))
        self.classify = nn.Linear(HIDDEN, CLASSES)

    def forward(self, adjacency: Tensor, nodes: Tensor) -> Tensor:
        adjacency = adjacency / adjacency.sum(-1, keepdim=True)
        nodes = torch.relu(adjacency @ self.first(nodes) + self.bias)
        nodes = torch.relu(adjacency @ self.second(nodes) + (1 + self.own_share) * nodes)
        return self.classify(nodes.mean(1))


@case("torch/graph_convolution", graphs, class_loss)
def graph_convolution() -> nn.Module:
    return GraphConvolution()


def table_rows(generator: torch.Generator) -> tuple[Tree, Tree]:
    """Three category codes and four numbers for each record."""
    codes = torch.randint(5, (MOST_RECORDS, 3), generator=generator)
    return (codes, random_images(generator, 4)), random_labels(generator)


class TabularNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5, 3) for _ in range(3))
        self.numbers = nn.Linear(4, 8)
        self.classify = nn.Sequential(
            nn.Linear(17, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES)
        )

    def forward(self, codes: Tensor, numbers: Tensor) -> Tensor:
        parts = [table(codes[:, column]) for column, table in enumerate(self.tables)]
        return self.classify(torch.cat([*parts, self.numbers(numbers)], dim=1))


@case("torch/tabular", table_rows, class_loss)
def tabular() -> nn.Module:
    return TabularNetwork()


class EinsumAttention(nn.Module):
    """Attention as JAX code writes it: einsum, a tied head, a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.query = nn.Parameter(torch.randn(HIDDEN, 2, 8) / 4)
        self.key_and_value = nn.ParameterList([torch.randn(HIDDEN, 2, 8) / 4 for _ in range(2)])
        self.out = nn.Parameter(torch.randn(2, 8, HIDDEN) / 4)
        self.temperature = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.embed(ids)
        joined = torch.cat(list(self.key_and_value), dim=2)
        query = torch.einsum("btd,dhk->bhtk", tokens, self.query)
        key, value = torch.einsum("btd,dhk->bhtk", tokens, joined).chunk(2, dim=-1)
        attention = (query @ key.mT * self.temperature.exp()).softmax(-1)
        tokens = tokens + torch.einsum("bhtk,hkd->btd", attention @ value, self.out)
        return tokens @ self.embed.weight.T


def text_to_repeat(generator: torch.Generator) -> tuple[Tree, Tree]:
    ids, mask = random_tokens(generator)
    return ids, {"tokens": ids, "counted": mask}


@case("torch/einsum_attention", text_to_repeat, token_loss)
def einsum_attention() -> nn.Module:
    return EinsumAttention()
