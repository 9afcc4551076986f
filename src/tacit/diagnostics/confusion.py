"""Which class is taken for which, by epoch.  [Losing Less, Figs. 8 and 13]"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from tacit.canvas import blank
from tacit.diagnostics.diagnostic import Diagnostic, save_runs, shown_points
from tacit.pytrees import call_model, logits_of, take_rows, tensors_of
from tacit.records import Records
from tacit.statistics.tracking import evaluating
from tacit.training.evaluation import two_classes

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
            f"{int(true.min())} to {int(true.max())}; give one class below {K} per record"
        )
    return torch.bincount(true * K + predicted, minlength=K * K).reshape(K, K).cpu()


def plot_confusion(
    runs: Mapping[str, Diagnostic[Tensor]],
    path: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
) -> None:
    """A row per run, a column for up to four measurements, the first and the last among them.

    Each row of a matrix is divided by its sum, in percent: the diagonal is the accuracy by class.
    """
    shown = shown_points(min(len(run.points) for run in runs.values()))
    figure, axes = blank(len(runs), len(shown), (3.3 * len(shown) + 0.4, 3.4 * len(runs) + 0.5))
    figure.set_layout_engine("compressed")  # panels of a fixed shape would overlap otherwise
    for row, (label, run) in zip(axes, runs.items(), strict=True):
        for panel, place in zip(row, shown, strict=True):
            point = run.points[place]
            counts = point.value.double()
            shares = (100 * counts / counts.sum(dim=1, keepdim=True).clamp_min(1)).numpy()
            panel.imshow(shares, vmin=0, vmax=100, cmap="Blues")
            for (i, j), share in np.ndenumerate(shares):
                if share >= 0.5:
                    colour = "white" if share > 55 else "black"
                    panel.text(
                        j, i, f"{share:.0f}", ha="center", va="center", fontsize=6, color=colour
                    )
            right = float(counts.diagonal().sum() / counts.sum().clamp_min(1))
            name = f"{label}, " if label else ""
            panel.set_title(f"{name}epoch {point.epoch:.3g}: {right:.1%}", fontsize=9)
            names = classes or [str(k) for k in range(len(shares))]
            panel.set_xticks(range(len(shares)), names, fontsize=7, rotation=90 if classes else 0)
            panel.set_yticks(range(len(shares)), names, fontsize=7)
        row[0].set_ylabel("true class")
    for panel in axes[-1]:
        panel.set_xlabel("taken for")
    save_runs(figure, path, runs)


class ConfusionHistory(Diagnostic[Tensor]):
    """`confusion_matrix` by epoch. **Not private: reads predictions.**"""

    reads = "predictions"
    draw = staticmethod(plot_confusion)

    def __init__(
        self, records: Records | None = None, *, every: int | None = None, max_records: int = 10_000
    ) -> None:
        super().__init__(records, every=every, max_records=max_records)

    def measure(self, trainer: Trainer, records: Records) -> Tensor:
        return confusion_matrix(trainer.model, records)
