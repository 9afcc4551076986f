"""Programs in which records meet or are kept, each beside a harmless twin.

Lines at which a program goes wrong end with the comment `# here`. A refusal must name one of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, WIDTH, CLASSES, RECORDS = 5, 8, 3, 6

Change = Callable[[Tensor], Tensor]


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


class Network(nn.Module):
    """Two layers, with a change to the hidden states of all records between them."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.change = change

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.change(self.first(rows))
        return self.last(torch.relu(hidden))


@dataclass(frozen=True)
class Refusal:
    """A program that must be refused, and the twin that must pass.

    `names` is a regular expression for the operator or module that a refusal names. `source` holds
    the lines that are marked with `# here`; None where no line can be named: a module is named by
    its path, and what Python computes from the number of records has no operator.
    """

    name: str
    build: Callable[[], nn.Module]
    twin: Callable[[], nn.Module]
    names: str
    source: Any = None
    loss: Callable[[Tensor, Tensor], Tensor] = class_loss
    twin_loss: Callable[[Tensor, Tensor], Tensor] = class_loss

    def places(self) -> tuple[str, list[int]] | None:
        """File and numbers of the lines that go wrong."""
        if self.source is None:
            return None
        lines, first = inspect.getsourcelines(self.source)
        marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
        assert marked, f"no line of {self.name!r} is marked"
        return Path(inspect.getsourcefile(self.source)).name, marked


REFUSALS: dict[str, Refusal] = {}


def refused(name: str, names: str, twin: Change) -> Callable[[Change], Change]:
    """Register a change of hidden states that mixes records, with its harmless twin."""

    def register(change: Change) -> Change:
        REFUSALS[name] = Refusal(
            name, lambda: Network(change), lambda: Network(twin), names, source=change
        )
        return change

    return register


# Records meet in the forward pass ----------------------------------------------------------------


@refused("a detached batch mean", r"mean", twin=lambda z: z - z.detach().mean(1, keepdim=True))
def detached_batch_mean(hidden: Tensor) -> Tensor:
    return hidden - hidden.detach().mean(0)  # here


@refused("a mixture of a billionth", r"roll", twin=lambda z: z + 1e-9 * z.roll(1, 1))
def tiny_mixture(hidden: Tensor) -> Tensor:
    return hidden + 1e-9 * hidden.roll(1, 0)  # here


@refused("a closed gate", r"mean", twin=lambda z: z + 0.0 * z.mean(1, keepdim=True))
def closed_gate(hidden: Tensor) -> Tensor:
    """No probe sees this: the mixture is multiplied by zero, until a later version is not."""
    return hidden + 0.0 * hidden.mean(0)  # here


@refused("a write across records", r"copy_|fill|index_put|select|add", twin=lambda z: z.clone())
def write_across(hidden: Tensor) -> Tensor:
    hidden = hidden.clone()
    hidden[0] = hidden[1] + hidden[0]  # here
    return hidden


@refused("softmax over the batch", r"softmax", twin=lambda z: z * z.softmax(1))
def softmax_over_batch(hidden: Tensor) -> Tensor:
    return hidden * hidden.softmax(0)  # here


def similarities_of_features(hidden: Tensor) -> Tensor:
    """Each record's features with each other."""
    return hidden + torch.einsum("bi,bj->bij", hidden, hidden).mean(1)


@refused("all records with all", r"mm|matmul", twin=similarities_of_features)
def all_with_all(hidden: Tensor) -> Tensor:
    similarities = hidden @ hidden.T  # here
    return hidden + similarities.mean(1, keepdim=True)


@refused("mixing in large batches only", r"mean", twin=lambda z: z - z.mean(1, keepdim=True))
def mix_in_large_batches(hidden: Tensor) -> Tensor:
    if len(hidden) > 4:
        hidden = hidden - hidden.mean(0)  # here
    return hidden


@refused("a third of the batch on", r"roll", twin=lambda z: z + z.roll(z.shape[1] // 3, 1))
def a_third_on(hidden: Tensor) -> Tensor:
    return hidden + hidden.roll(len(hidden) // 3, 0)  # here


@refused("sorted by a private value", r"sort|index", twin=lambda z: z.sort(dim=1).values)
def sorted_by_private_value(hidden: Tensor) -> Tensor:
    return hidden[hidden[:, 0].argsort()]  # here


@refused("a running sum over records", r"cumsum", twin=lambda z: z.cumsum(1))
def running_sum(hidden: Tensor) -> Tensor:
    return hidden.cumsum(0)  # here


def divide_by_count(hidden: Tensor) -> Tensor:
    """How many records there are is private: one more of them would change all others."""
    return hidden / len(hidden)


def divide_by_constant(hidden: Tensor) -> Tensor:
    return hidden / RECORDS


REFUSALS["divided by the number of records"] = Refusal(
    "divided by the number of records",
    build=lambda: Network(divide_by_count),
    twin=lambda: Network(divide_by_constant),
    names=r"Network|divide_by_count",
)


# Python looks at private values ------------------------------------------------------------------

TEMPERATURE = torch.tensor(2.0)


def branch_on_public(hidden: Tensor) -> Tensor:
    return hidden * 2 if TEMPERATURE > 1 else hidden


@refused("a branch on the batch", r"max|bool|item|branch|scalar|value", twin=branch_on_public)
def branch_on_batch(hidden: Tensor) -> Tensor:
    return hidden * 2 if hidden.max() > 1 else hidden  # here


class Padded(nn.Module):
    """Cuts the hidden states to a length: the longest record's, or a fixed one."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.fixed = fixed

    def forward(self, rows: Tensor) -> Tensor:
        longest = FEATURES
        if not self.fixed:
            longest = int((rows != 0).sum(1).max())  # here
        hidden = self.first(rows)[:, :longest]
        return self.last(F.pad(hidden, (0, WIDTH - longest)))


REFUSALS["padding to the longest"] = Refusal(
    "padding to the longest",
    build=lambda: Padded(fixed=False),
    twin=lambda: Padded(fixed=True),
    names=r"max|int|item|scalar|value",
    source=Padded,
)


@refused("item()", r"item|scalar|value", twin=lambda z: z / z.detach().abs().amax(1, keepdim=True))
def looks_by_item(hidden: Tensor) -> Tensor:
    return hidden / hidden.detach().abs().max().item()  # here


@refused("tolist()", r"tolist|item|scalar|value", twin=lambda z: z - z.detach()[:, :1])
def looks_by_tolist(hidden: Tensor) -> Tensor:
    first = hidden[0].tolist()  # here
    return hidden - torch.tensor(first, dtype=hidden.dtype)


@refused("numpy()", r"numpy|item|scalar|value", twin=lambda z: z - z.detach().sort(dim=1).values)
def looks_by_numpy(hidden: Tensor) -> Tensor:
    middle = np.median(hidden.detach().numpy(), axis=0)  # here
    return hidden - torch.from_numpy(middle)


@refused("torch.tensor() of scalars", r"tensor", twin=lambda z: z - z.new_tensor([1.0] * WIDTH))
def looks_by_tensor(hidden: Tensor) -> Tensor:
    columns = [hidden[:, k].detach().mean() for k in range(WIDTH)]
    return hidden - torch.tensor(columns, dtype=hidden.dtype)  # here


@refused("an error that is caught", r"error of .*cholesky|linalg", twin=torch.tanh)
def looks_by_error(hidden: Tensor) -> Tensor:
    try:
        torch.linalg.cholesky(-hidden.detach().T @ hidden.detach())  # here
    except RuntimeError:
        return torch.tanh(hidden)
    return hidden


# Something is kept -------------------------------------------------------------------------------


class RunningMean(nn.Module):
    """A buffer that follows the records, or one that stays."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("memory", torch.zeros(WIDTH))
        self.follows = follows

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        if self.follows:
            self.memory = 0.9 * self.memory + 0.1 * hidden.detach().mean(0)  # here
        return self.last(hidden - self.memory)  # here


REFUSALS["a buffer that remembers"] = Refusal(
    "a buffer that remembers",
    build=lambda: RunningMean(follows=True),
    twin=lambda: RunningMean(follows=False),
    names=r"memory|mean",
    source=RunningMean,
)


class KeepsInList(nn.Module):
    """Shifts by what an earlier batch left in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.earlier: list[Tensor] = []

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        shift = self.earlier[-1] if self.earlier else torch.zeros(WIDTH)
        self.earlier.append(hidden.detach()[0])
        return self.last(hidden - shift)


def keeps_in_closure() -> nn.Module:
    earlier: list[Tensor] = []

    def change(hidden: Tensor) -> Tensor:
        shift = earlier[-1] if earlier else torch.zeros(WIDTH)
        earlier.append(hidden.detach()[0])
        return hidden - shift

    return Network(change)


EARLIER: list[Tensor] = []


def keeps_in_global() -> nn.Module:
    EARLIER.clear()

    def change(hidden: Tensor) -> Tensor:
        shift = EARLIER[-1] if EARLIER else torch.zeros(WIDTH)
        EARLIER.append(hidden.detach()[0])
        return hidden - shift

    return Network(change)


def counts_passes() -> nn.Module:
    """Keeps something that no record has touched."""
    passes: list[int] = []

    def change(hidden: Tensor) -> Tensor:
        passes.append(1)
        return hidden

    return Network(change)


KEEPS = r"kept|keep|remember|stateful|earlier|state"
for keeps_name, keeps_build in {
    "activations in a list attribute": KeepsInList,
    "activations in a closure": keeps_in_closure,
    "activations in a global": keeps_in_global,
}.items():
    REFUSALS[keeps_name] = Refusal(keeps_name, build=keeps_build, twin=counts_passes, names=KEEPS)


# Records meet on the way back --------------------------------------------------------------------


class SharedCotangent(torch.autograd.Function):
    """The identity, whose backward pass gives every record the mean of all cotangents."""

    @staticmethod
    def forward(ctx, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx, cotangent: Tensor) -> Tensor:
        return cotangent.mean(0, keepdim=True).expand_as(cotangent)  # here


class HalvedCotangent(torch.autograd.Function):
    """The identity, whose backward pass halves each cotangent."""

    @staticmethod
    def forward(ctx, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx, cotangent: Tensor) -> Tensor:
        return cotangent / 2


REFUSALS["records meet in a backward pass"] = Refusal(
    "records meet in a backward pass",
    build=lambda: Network(SharedCotangent.apply),
    twin=lambda: Network(HalvedCotangent.apply),
    names=r"mean|SharedCotangent",
    source=SharedCotangent,
)


# Records meet in the loss ------------------------------------------------------------------------


def contrastive_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Each record must be more like itself than like the others."""
    similarities = logits @ logits.T  # here
    return F.cross_entropy(similarities, torch.arange(len(logits)), reduction="none")


REFUSALS["a contrastive loss"] = Refusal(
    "a contrastive loss",
    build=lambda: Network(torch.tanh),
    twin=lambda: Network(torch.tanh),
    names=r"mm|matmul",
    source=contrastive_loss,
    loss=contrastive_loss,
)


def balanced_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Weighs a record by how many others have its class."""
    counts = F.one_hot(labels, CLASSES).sum(0)  # here
    return class_loss(logits, labels) / counts[labels]  # here


def publicly_balanced_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Weighs a record by how common its class is said to be."""
    shares = torch.tensor([0.5, 0.3, 0.2], dtype=logits.dtype)
    return class_loss(logits, labels) / shares[labels]


REFUSALS["a loss balanced by the batch"] = Refusal(
    "a loss balanced by the batch",
    build=lambda: Network(torch.tanh),
    twin=lambda: Network(torch.tanh),
    names=r"sum|index|div",
    source=balanced_loss,
    loss=balanced_loss,
    twin_loss=publicly_balanced_loss,
)


# Modules that are known to mix -------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm = norm

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(rows))))


REFUSALS["BatchNorm in training"] = Refusal(
    "BatchNorm in training",
    build=lambda: Normalised(nn.BatchNorm1d(WIDTH)),
    twin=lambda: Normalised(nn.BatchNorm1d(WIDTH).eval()),
    names=r"'norm' \(BatchNorm1d\)",
)


class NormalisedByFunction(nn.Module):
    """BatchNorm without its module, which a list of modules does not see."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.by_batch = by_batch

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        if self.by_batch:
            hidden = F.batch_norm(hidden, None, None, training=True)  # here
        else:
            hidden = F.batch_norm(hidden, torch.zeros(WIDTH), torch.ones(WIDTH))
        return self.last(hidden)


REFUSALS["batch_norm as a function"] = Refusal(
    "batch_norm as a function",
    build=lambda: NormalisedByFunction(by_batch=True),
    twin=lambda: NormalisedByFunction(by_batch=False),
    names=r"batch_norm",
    source=NormalisedByFunction,
)
