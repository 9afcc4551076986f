"""How a trial is scored on private held-out records: a noisy sum of one number per record."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tacit.budget import Relation
from tacit.losses.record_loss import losses_of
from tacit.pytrees import call_model, logits_of
from tacit.randomness import Stream
from tacit.records import Records
from tacit.statistics.tracking import evaluating
from tacit.training.evaluation import pieces_of


class Score(Protocol):
    """One number of [0, 1] per record, from that record alone; larger is better."""

    def __call__(self, outputs: Any, targets: Any, loss: Any) -> Tensor: ...


@dataclass(frozen=True)
class RightAnswers:
    """1 for a record whose class is right, 0 for any other: the sum counts right answers."""

    def __call__(self, outputs: Any, targets: Any, loss: Any) -> Tensor:
        h, y = logits_of(outputs), targets
        if isinstance(h, Tensor) and isinstance(y, Tensor):
            if h.dim() == 2 and h.shape[1] > 1 and y.dim() == 1 and not y.is_floating_point():
                return h.argmax(dim=1) == y
            if h.numel() == len(h) == y.numel() and not loss_is_of_numbers(loss):
                return (h.reshape(-1) > 0) == (y.reshape(-1) > 0)
        raise ValueError(
            "right answers are counted where each record has one class; give "
            "score=tacit.search.BoundedLoss(most=...) for other tasks"
        )


@dataclass(frozen=True)
class BoundedLoss:
    """1 − min(ℓ, `most`) / `most`, with the record's own loss ℓ.

    For rare classes, where nearly all answers are right, and for regression. `most` is a public
    number, such as the loss of a constant answer.
    """

    most: float

    def __post_init__(self) -> None:
        if not 0 < self.most < float("inf"):
            raise ValueError(f"most is {self.most!r}; give a finite number above 0")

    def __call__(self, outputs: Any, targets: Any, loss: Any) -> Tensor:
        return 1 - losses_of(loss, outputs, targets) / self.most


def loss_is_of_numbers(loss: object) -> bool:
    return str(getattr(loss, "task", None)) == "regression"


@torch.no_grad()
def score_sum(
    model: nn.Module, records: Records, loss: Any, score: Score, batch_size: int = 2048
) -> float:
    """Σ score over the records, *without* noise. One record moves it by at most 1.

    Each term is brought into [0, 1], and what is no number counts as 0, so the bound holds for any
    model, score and record, under both neighbouring relations, as long as the model keeps records
    apart. The terms are rounded to multiples of 2^-20, so that their sum is exact.
    """
    total = 0
    with evaluating(model):
        for piece in pieces_of(records, batch_size, model):
            values = score(call_model(model, piece.inputs), piece.targets, loss).double()
            bounded = values.reshape(len(piece)).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 1.0)
            total += int((bounded * _UNITS).floor().long().sum())
    return total / _UNITS


_UNITS = 1 << 20


def noisy_score(
    model: nn.Module,
    records: Records,
    loss: Any,
    score: Score,
    noise_multiplier: float,
    stream: Stream,
) -> float:
    """The sum of the scores with N(0, z²) added, over the declared number of records.

    A Gaussian mechanism of sensitivity 1 and multiplier z.
    """
    noise = float(stream.normals([1], torch.device("cpu"))[0][0])
    size = records.require_public_size("a score per record")
    return (score_sum(model, records, loss, score) + noise_multiplier * noise) / size


def split_for_scores(records: Records, share: float, relation: Relation) -> tuple[Records, Records]:
    """(trained on, scored on): each record goes to one side, whoever else is there.

    Under add-or-remove-one a hash of the record alone decides, as in `tacit.data` for files: to
    add or remove a record changes one side by that record and leaves the other side alone. Under
    replace-one a hash of its id decides, which the record in its place keeps: the same side has
    one record replaced. Both sides' declared sizes are the declared size times their shares.
    """
    if not 0 < share < 1:
        raise ValueError(f"score_share is {share}; give a number between 0 and 1, such as 0.1")
    size = records.require_public_size("a share of the records")
    scored_size = max(1, round(share * size))
    if scored_size >= size:
        raise ValueError(f"score_share is {share}, which leaves none of {size} records to train on")
    threshold = round(share * 2**64)
    if relation is Relation.REPLACE_ONE:
        parts = [np.ascontiguousarray(records.record_ids.cpu().numpy())]
    else:
        values = records.read() if records.is_lazy else records
        if not isinstance(values.inputs, Tensor) or not isinstance(values.targets, Tensor):
            raise ValueError(
                "records are split by their content under add-or-remove-one, and these are not "
                "one tensor of inputs and one of targets; give Budget(relation=replace-one)"
            )
        tensors = values.inputs, values.targets
        parts = [_bytes(tensor) for tensor in tensors]
    is_scored = torch.from_numpy(_hashes(parts) < np.uint64(threshold)).to(records.device)
    trained = replace(
        records.take(~is_scored), public_size=size - scored_size, num_ids=_ids(records)
    )
    scored = replace(
        records.take(is_scored),
        public_size=scored_size,
        num_ids=_ids(records),
        name=f"{records.name}, scored share",
    )
    return trained, scored


def _bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of each row: NumPy has no bfloat16."""
    rows = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    return np.ascontiguousarray(rows.view(torch.uint8).numpy())


def _ids(records: Records) -> int | None:
    return records.num_ids or records.public_size


def _hashes(parts: list[np.ndarray]) -> np.ndarray:
    """64 bits of BLAKE2b of each row of all parts."""
    rows = [part.reshape(len(part), -1) for part in parts]
    found = np.empty(len(rows[0]), dtype=np.uint64)
    for i in range(len(found)):
        digest = hashlib.blake2b(digest_size=8, person=b"tacit-scores")
        for part in rows:
            digest.update(part[i].tobytes())
        found[i] = int.from_bytes(digest.digest(), "little")
    return found
