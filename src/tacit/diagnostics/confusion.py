"""Which class is taken for which, by epoch.  [Losing Less, Figs. 8 and 13]"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tacit.data.records import Records
from tacit.diagnostics.diagnostic import Diagnostic
from tacit.pytrees import call_model, logits_of, take_rows, tensors_of
from tacit.statistics.modes import evaluating
from tacit.training.evaluate import two_classes

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer


@torch.no_grad()
def confusion_matrix(model: nn.Module, records: Records, *, batch_size: int = 2048) -> Tensor:
    """How many records of class i (row) were taken for class j (column), in evaluation mode.

    **Not private: reads predictions.** One output stands for two classes, by its sign.
    """
    with evaluating(model):
        parts = [
            logits_of(
                call_model(model, take_rows(records.inputs, slice(start, start + batch_size)))
            )
            for start in range(0, len(records), batch_size)
        ]
    found = tensors_of(records.targets)
    logits = [part for part in parts if part is not None]
    if len(found) != 1 or len(logits) != len(parts):
        raise ValueError(
            "a confusion matrix needs one tensor of logits and one of targets; give a model that "
            "returns the scores of one set of classes, and records with one class each"
        )
    (targets,) = found
    outputs = torch.cat([part.reshape(len(part), -1) for part in logits])
    if outputs.shape[1] == 1:
        if not two_classes(targets):
            raise ValueError(
                "one output per record, and targets other than 0 and 1 or −1 and +1: a regression "
                "has no classes to confuse; give records with classes"
            )
        predicted, true = (outputs[:, 0] > 0).long(), (targets.flatten() > 0).long()
    else:
        predicted, true = outputs.argmax(dim=1), targets.long().flatten()
    K = max(outputs.shape[1], 2)
    if len(true) != len(predicted) or (
        len(true) and not 0 <= int(true.min()) <= int(true.max()) < K
    ):
        raise ValueError(
            f"{len(predicted)} records of {K} classes, with {len(true)} targets from "
            f"{int(true.min())} to {int(true.max())}; give one class below {K} a record"
        )
    return torch.bincount(true * K + predicted, minlength=K * K).reshape(K, K).cpu()


class ConfusionHistory(Diagnostic[Tensor]):
    """`confusion_matrix` by epoch. **Not private: reads predictions.**"""

    reads = "predictions"

    def __init__(
        self, records: Records | None = None, *, every: int | None = None, max_records: int = 10_000
    ) -> None:
        super().__init__(records, every=every, max_records=max_records)

    def measure(self, trainer: Trainer, records: Records) -> Tensor:
        return confusion_matrix(trainer.model, records)

    def plot(self, path: str | os.PathLike[str]) -> None:
        from tacit.report.confusion import plot_confusion

        plot_confusion({"": self}, path)
