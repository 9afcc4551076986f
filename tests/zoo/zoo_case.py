"""One case of the zoo: a model that others wrote, records for it, and a loss for each record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.pytrees import map_tensors, take_rows

VOCABULARY, LENGTH, CLASSES, HIDDEN = 50, 7, 3, 16
MOST_RECORDS = LENGTH  # so that one batch has as many records as a sequence has tokens

# A tensor, or tuples, lists and mappings of them.
Tree = Any
MakeBatch = Callable[[torch.Generator], tuple[Tree, Tree]]
Loss = Callable[[Any, Tree], Tensor]


@dataclass(frozen=True)
class Case:
    """A model with its records.

    `make_batch` draws MOST_RECORDS records as (inputs, targets); smaller batches are its first
    rows, so that a record is the same in each of them. `held_out` cases are those that no design
    document lists. `tolerance` is relative, in float32. `float64_tolerance` is looser where
    gradients pass through float32 whatever the weights are, and None where float64 cannot run.
    """

    name: str
    build: Callable[[], nn.Module]
    make_batch: MakeBatch
    loss: Loss
    held_out: bool = False
    tolerance: float = 1e-5
    float64_tolerance: float | None = 1e-10

    def model(self) -> nn.Module:
        """A new model in training mode, with the same weights every time."""
        torch.manual_seed(0)
        return self.build().train()

    def batch(self, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tree, Tree]:
        """The first `count` records, as (inputs, targets)."""
        records = self.make_batch(torch.Generator().manual_seed(1))
        rows = take_rows(records, slice(count))
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, rows)


CASES: dict[str, Case] = {}


def case(name: str, make_batch: MakeBatch, loss: Loss, **options: Any) -> Callable:
    """Register a builder function as a case of the zoo."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        assert name not in CASES, f"two cases are called {name!r}"
        CASES[name] = Case(name, build, make_batch, loss, **options)
        return build

    return register


# Records -----------------------------------------------------------------------------------------


def random_labels(generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (MOST_RECORDS,), generator=generator)


def random_tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids and their mask. Records 0 and 3 are shorter and padded with 0."""
    ids = torch.randint(3, VOCABULARY, (MOST_RECORDS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    mask[3, -3:] = 0
    return ids * mask, mask


def masked_text(generator: torch.Generator) -> tuple[Tree, Tree]:
    """Token ids and mask, with one class for each record."""
    ids, mask = random_tokens(generator)
    return {"input_ids": ids, "attention_mask": mask}, random_labels(generator)


def masked_text_with_types(generator: torch.Generator) -> tuple[Tree, Tree]:
    inputs, labels = masked_text(generator)
    types = torch.randint(2, (MOST_RECORDS, LENGTH), generator=generator)
    return {**inputs, "token_type_ids": types * inputs["attention_mask"]}, labels


def unmasked_text(generator: torch.Generator) -> tuple[Tree, Tree]:
    """Token ids alone, as keywords."""
    inputs, labels = masked_text(generator)
    return {"input_ids": inputs["input_ids"]}, labels


def token_ids(generator: torch.Generator) -> tuple[Tree, Tree]:
    """Token ids alone, as one tensor."""
    inputs, labels = masked_text(generator)
    return inputs["input_ids"], labels


def text_to_continue(generator: torch.Generator) -> tuple[Tree, Tree]:
    """Token ids and mask; the targets are the next tokens, and which of them count."""
    ids, mask = random_tokens(generator)
    targets = {"tokens": ids[:, 1:], "counted": mask[:, 1:]}
    return {"input_ids": ids, "attention_mask": mask}, targets


def unmasked_text_to_continue(generator: torch.Generator) -> tuple[Tree, Tree]:
    inputs, targets = text_to_continue(generator)
    return {"input_ids": inputs["input_ids"]}, targets


def text_to_translate(generator: torch.Generator) -> tuple[Tree, Tree]:
    """A source with its mask, and a target text that the decoder is given shifted by one."""
    source, mask = random_tokens(generator)
    target = torch.randint(3, VOCABULARY, (MOST_RECORDS, LENGTH), generator=generator)
    given = F.pad(target[:, :-1], (1, 0), value=1)
    inputs = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": given}
    return inputs, {"tokens": target, "counted": torch.ones_like(target)}


def random_images(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(MOST_RECORDS, *shape, generator=generator)


def floats(*shape: int) -> MakeBatch:
    """Records of normal numbers in one tensor, with a class each."""

    def make(generator: torch.Generator) -> tuple[Tree, Tree]:
        return random_images(generator, *shape), random_labels(generator)

    return make


def pixels(size: int = 32) -> MakeBatch:
    """Images under the keyword of Hugging Face models."""

    def make(generator: torch.Generator) -> tuple[Tree, Tree]:
        images = random_images(generator, 3, size, size)
        return {"pixel_values": images}, random_labels(generator)

    return make


# Losses, one number per record -------------------------------------------------------------------


def class_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Cross-entropy, of logits or of a Hugging Face output that holds them."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits, labels, reduction="none")


def _mean_over_tokens(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), targets["tokens"], reduction="none")
    counted = targets["counted"]
    return (losses * counted).sum(1) / counted.sum(1)


def next_token_loss(outputs: Any, targets: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of a record's tokens, each predicted from those before it."""
    return _mean_over_tokens(outputs.logits[:, :-1], targets)


def token_loss(outputs: Any, targets: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of a record's tokens, where the decoder's input is already shifted."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return _mean_over_tokens(logits, targets)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).mean(1)
