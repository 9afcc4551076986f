"""The cosine between clipped and unclipped gradients.  [Losing Less, Figs. 1d and 7]"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tacit.canvas import blank
from tacit.diagnostics.diagnostic import Diagnostic, losses_on, save_runs
from tacit.queries.bounded_gradient import GradientQuery, Loss, trainable
from tacit.records import Records
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import Batch, batch_of

if TYPE_CHECKING:
    from tacit.training.trainer import Trainer


def clipping_alignment(
    model: nn.Module, loss: Loss, records: Records, query: GradientQuery, *, batch_size: int = 64
) -> Tensor:
    """cos(Σ_i clip(g_i), Σ_i g_i) of each batch of `batch_size` records, without noise.

    **Not private: reads raw gradients.** 1 where clipping only shortens the sum, 0 where nothing
    of its direction is left; NaN for a sum that is zero. `query` clips.
    """
    cosines, parameters = [], trainable(model)
    for start in range(0, len(records), batch_size):
        some = records.take(slice(start, start + batch_size))
        piece = batch_of(some.inputs, some.targets, divisor=1.0, scheme=Poisson(1.0))
        clipped = _clipped(model, loss, piece, query)
        total = losses_on(model, loss, some).sum()
        sums = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True)
        plain = dict(zip(parameters, sums, strict=True))
        names = sorted(plain)
        a, b = (torch.cat([g[n].double().flatten() for n in names]) for g in (clipped, plain))
        cosines.append(float(a @ b / (a.norm() * b.norm())))
    return torch.tensor(cosines, dtype=torch.float64)


def _clipped(model: nn.Module, loss: Loss, piece: Batch, query: GradientQuery) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for block in query(model, loss, piece).blocks:
        factors = block.factors or (1.0,) * len(block.names)
        for name, total, factor in zip(block.names, block.sums, factors, strict=True):
            sums[name] = total / factor
    return sums


def plot_alignment(runs: Mapping[str, Diagnostic[Tensor]], path: str | os.PathLike[str]) -> None:
    """The median over batches, a line per run, within a band from the least to the largest."""
    figure, axes = blank()
    panel = axes[0, 0]
    for label, run in runs.items():
        epochs = [p.epoch for p in run.points]
        values = [p.value.nan_to_num(0.0) for p in run.points]
        least, middle, most = (
            [float(f(v)) for v in values] for f in (torch.min, torch.median, torch.max)
        )
        (line,) = panel.plot(epochs, middle, marker=".", label=label)
        panel.fill_between(epochs, least, most, alpha=0.2, color=line.get_color())
    panel.set_xlabel("epoch")
    panel.set_ylabel("cosine of clipped and unclipped sum")
    panel.set_ylim(top=1.02)
    panel.grid(alpha=0.3)
    if any(runs):
        panel.legend(fontsize=8)
    save_runs(figure, path, runs)


class ClippingAlignment(Diagnostic[Tensor]):
    """`clipping_alignment` by epoch, of `query` or of the run's own query.

    **Not private: reads raw gradients.**
    """

    reads = "raw gradients"
    draw = staticmethod(plot_alignment)

    def __init__(
        self,
        records: Records | None = None,
        *,
        query: GradientQuery | None = None,
        batch_size: int = 64,
        every: int | None = None,
        max_records: int = 256,
    ) -> None:
        super().__init__(records, every=every, max_records=max_records)
        self.query = query
        self.batch_size = batch_size

    def measure(self, trainer: Trainer, records: Records) -> Tensor:
        query = self.query or trainer.mechanism.query
        return clipping_alignment(
            trainer.model, trainer.loss, records, query, batch_size=self.batch_size
        )
