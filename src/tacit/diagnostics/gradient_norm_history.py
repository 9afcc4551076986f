"""Norms of whole gradients of single records, by epoch.  [Losing Less, Figs. 6 and 14]"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tacit.data.records import Records
from tacit.diagnostics.diagnostic import Diagnostic
from tacit.diagnostics.gradient_norms import GradientNorms, gradient_histogram

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer


class GradientNormHistory(Diagnostic[GradientNorms]):
    """`gradient_histogram` by epoch. **Not private: reads raw gradients.**"""

    reads = "raw gradients"

    def measure(self, trainer: Trainer, records: Records) -> GradientNorms:
        return gradient_histogram(trainer.model, trainer.loss, records, max_records=len(records))

    def plot(self, path: str | os.PathLike[str], *, max_norm: float | None = None) -> None:
        """A histogram of ‖g_i‖ for each epoch; `max_norm` marks the clipping constant."""
        from tacit.report.gradient_norm_histograms import plot_gradient_norm_histograms

        plot_gradient_norm_histograms({"": self}, path, max_norm=max_norm)


def whole_norms(found: GradientNorms) -> Tensor:
    """‖g_i‖ of each record over all parameters."""
    return torch.stack(list(found.norms.values())).square().sum(dim=0).sqrt()
