"""Short programs that use parameters in ways in which no layer does, as functions of their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from zoo_case import CLASSES, VOCABULARY, MakeBatch, case, class_loss, floats, token_ids

WIDTH = 6


class Program(nn.Module):
    """Parameters and layers by name, and a function of them and of the rows."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], parts: dict[str, Any]) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            is_module = isinstance(part, nn.Module)
            setattr(self, name, part if is_module else nn.Parameter(0.4 * torch.randn(part)))

    def forward(self, rows: Tensor) -> Tensor:
        return self.run(self, rows)


def program(name: str, records: MakeBatch, **parts: Callable[[], Any]) -> Callable:
    """Register a function as a case; parts are layers, or the shapes of parameters."""

    def register(run: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
        def build() -> nn.Module:
            return Program(run, {key: make() for key, make in parts.items()})

        case(f"torch/{name}", records, class_loss, held_out=True)(build)
        return run

    return register


@program("distances", floats(8), weight=lambda: (8, 8))
def distances(self, rows: Tensor) -> Tensor:
    """One matrix in both operands of an operator that has no rule."""
    return -torch.cdist(F.linear(rows, self.weight), self.weight)[:, :CLASSES]


@program(
    "scaled_cotangents",
    floats(WIDTH),
    first=lambda: nn.Linear(WIDTH, 8),
    middle=lambda: nn.Linear(8, 8),
    last=lambda: nn.Linear(8, CLASSES),
)
def scaled_cotangents(self, rows: Tensor) -> Tensor:
    """Hooks on tensors, one of them directly behind a layer."""
    hidden = self.middle(self.first(rows).tanh())
    hidden.register_hook(lambda cotangent: 0.5 * cotangent)
    hidden = hidden.tanh()
    hidden.register_hook(lambda cotangent: cotangent.clamp(-0.1, 0.1))
    return self.last(hidden)


@program(
    "filled", floats(WIDTH), first=lambda: nn.Linear(WIDTH, 8), last=lambda: nn.Linear(8, CLASSES)
)
def filled(self, rows: Tensor) -> Tensor:
    """A number is written where a mask of the records says so."""
    hidden = self.first(rows)
    hidden[hidden.detach() > 0.3] = 0.0
    return self.last(hidden.tanh())


@program("scaled_weight", floats(WIDTH), weight=lambda: (WIDTH, CLASSES))
def scaled_weight(self, rows: Tensor) -> Tensor:
    weight = 2 * self.weight
    weight.register_hook(lambda gradient: 0.5 * gradient)
    return rows @ weight


@program(
    "packed_sequences",
    floats(5, 4),
    layer=lambda: nn.GRU(4, WIDTH, batch_first=True, bidirectional=True),
    last=lambda: nn.Linear(2 * WIDTH, CLASSES),
)
def packed_sequences(self, rows: Tensor) -> Tensor:
    """Of a length that is not private."""
    packed = pack_padded_sequence(rows, torch.full((len(rows),), 4), batch_first=True)
    return self.last(self.layer(packed)[1].transpose(0, 1).flatten(1))


@program(
    "reparametrised_normal",
    floats(WIDTH),
    mean=lambda: nn.Linear(WIDTH, 4),
    spread=lambda: nn.Linear(WIDTH, 4),
    last=lambda: nn.Linear(4, CLASSES),
)
def reparametrised_normal(self, rows: Tensor) -> Tensor:
    spread = F.softplus(self.spread(rows)) + 0.1
    return self.last(torch.distributions.Normal(self.mean(rows), spread).rsample())


@program("loop_over_records", floats(WIDTH), layer=lambda: nn.Linear(WIDTH, CLASSES))
def loop_over_records(self, rows: Tensor) -> Tensor:
    return torch.stack([self.layer(row) for row in rows]) + self.layer(rows.flip(1))


@program(
    "spectral_filter",
    floats(8),
    filter=lambda: (5, 2),
    gain=lambda: (5,),
    last=lambda: nn.Linear(8, CLASSES),
)
def spectral_filter(self, rows: Tensor) -> Tensor:
    """Complex and real factors of a spectrum."""
    spectrum = torch.fft.rfft(rows) * torch.view_as_complex(self.filter) * self.gain
    return self.last(torch.fft.irfft(spectrum, n=8))


@program(
    "bags_of_words",
    token_ids,
    sums=lambda: nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum"),
    means=lambda: nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean"),
    last=lambda: nn.Linear(4 * WIDTH, CLASSES),
)
def bags_of_words(self, ids: Tensor) -> Tensor:
    """One bag per record, and three of other sizes, one of which is empty."""
    length = ids.shape[1]
    starts = torch.tensor([0, 2, 2]) + length * torch.arange(len(ids))[:, None]
    means = self.means(ids.flatten(), starts.flatten()).view(len(ids), -1)
    return self.last(torch.cat([self.sums(ids), means], dim=1))


@program(
    "tables",
    token_ids,
    pairs=lambda: (VOCABULARY, VOCABULARY),
    rows=lambda: (VOCABULARY, WIDTH),
    last=lambda: nn.Linear(WIDTH, CLASSES),
)
def tables(self, ids: Tensor) -> Tensor:
    """Looked up by two indices, and after a normalisation of the whole table."""
    pairs = self.pairs[ids[:, :-1], -1 - ids[:, 1:]]
    return self.last(pairs + F.normalize(self.rows)[ids].mean(1))
