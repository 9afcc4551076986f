"""The reference engine: every record alone through the model, by `torch.func`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from tacit.batch import Batch
from tacit.queries.clipping import sum_dtype, wide_dtype
from tacit.queries.engines.called_with import called_with
from tacit.queries.engines.scales import scales_and_counts
from tacit.queries.engines.task import Clipped, Task
from tacit.queries.engines.views import mask_of_records


class PerRecord:
    """Right rather than fast, for any module that `vmap` can take.

    Records cannot mix: each is a batch of its own, and so is each view of a record. `chunk_size`
    bounds how many records run at once.
    """

    one_by_one = True  # so that records stay apart by construction

    def __init__(self, chunk_size: int | None = None) -> None:
        self.chunk_size = chunk_size

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped:
        grads = self._gradients(task, piece)
        return clipped_rows(task, grads, mask_of_records(piece, task.views))

    def block_norms(self, task: Task, piece: Batch) -> list[Tensor]:
        return norms_of_blocks(task, self._gradients(task, piece))

    def _gradients(self, task: Task, piece: Batch) -> dict[str, Tensor]:
        """Each record's gradient, as a row of each parameter's stack."""
        model, loss, parameters = task.model, task.loss, task.parameters
        fixed = {n: p.detach() for n, p in model.named_parameters() if n not in parameters}
        fixed |= {n: b for n, b in model.named_buffers()}
        inputs, targets = piece.inputs, piece.targets

        def loss_of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = called_with(model, {**weights, **fixed}, (x.unsqueeze(0),))
            # A loss may give a mean, a sum, or one number a record: of one record all are one.
            return loss(outputs, y.unsqueeze(0)).sum()

        def loss_of_views(weights: dict[str, Tensor], x_K: Tensor, y_K: Tensor) -> Tensor:
            each = vmap(loss_of_one, in_dims=(None, 0, 0), randomness="different")
            return each(weights, x_K, y_K).mean()

        if task.views > 1:
            inputs, targets = (t.unflatten(0, (-1, task.views)) for t in (inputs, targets))
        weights = {n: p.detach() for n, p in parameters.items()}
        per_record = vmap(
            grad(loss_of_views if task.views > 1 else loss_of_one),
            in_dims=(None, 0, 0),
            randomness="different",
            chunk_size=self.chunk_size,
        )
        return per_record(weights, inputs, targets)


def clipped_rows(task: Task, grads: dict[str, Tensor], mask: Tensor | None = None) -> Clipped:
    """Σ_i clip(g_i) from stacks of gradients, one row a unit; a unit outside `mask` is left out."""
    norms = norms_of_blocks(task, grads)
    # One record, one verdict: what is not finite in any block counts in none.
    keep = torch.stack(norms).square().sum(dim=0).isfinite()
    if mask is not None:
        keep = keep & mask
    scales, counts = scales_and_counts(norms, task, keep, [g.dtype for g in grads.values()])
    sums = {
        name: _scaled_sum(_active(task, name, grads[name]), scale, keep)
        for names, scale in zip(task.blocks, scales, strict=True)
        for name in names
    }
    return Clipped(sums, counts)


def norms_of_blocks(task: Task, grads: dict[str, Tensor]) -> list[Tensor]:
    """‖g_i‖ of each block h and unit i, over the entries that are active."""
    squares = {n: _squares(_active(task, n, g)) for n, g in grads.items()}
    return [torch.stack([squares[n] for n in names]).sum(dim=0).sqrt() for names in task.blocks]


def _active(task: Task, name: str, grad_B: Tensor) -> Tensor:
    mask = task.active.get(name)
    return grad_B if mask is None else torch.where(mask, grad_B, 0.0)


def _scaled_sum(grad_B: Tensor, scale_B: Tensor, keep_B: Tensor) -> Tensor:
    """Σ_i scale_i·g_i over the records to keep, added up in float64 where the device has it."""
    row = (len(grad_B),) + (1,) * (grad_B.dim() - 1)
    scaled = grad_B.to(wide_dtype(grad_B.dtype)) * scale_B.view(row)
    # 0 · NaN is NaN: what must not count is replaced, not scaled.
    kept = torch.where(keep_B.view(row), scaled, 0.0)
    return kept.sum(dim=0, dtype=sum_dtype(kept.device))


def _squares(grad_B: Tensor) -> Tensor:
    return grad_B.to(wide_dtype(grad_B.dtype)).reshape(len(grad_B), -1).square().sum(dim=1)
