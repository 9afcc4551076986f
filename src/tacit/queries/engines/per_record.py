"""The reference engine: every record alone through the model, by `torch.func`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from tacit.batch import Batch
from tacit.queries.adaptive_norm import centred_count
from tacit.queries.clipping import clip_scale, wide_dtype
from tacit.queries.engines.task import Clipped, Task
from tacit.queries.engines.views import mask_of_records


class PerRecord:
    """Right rather than fast, for any module that `vmap` can take.

    Records cannot mix: each is a batch of its own, and so is each view of a record. `chunk_size`
    bounds how many records run at once.
    """

    def __init__(self, chunk_size: int | None = None) -> None:
        self.chunk_size = chunk_size

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped:
        grads = self._gradients(task, piece)
        squares = {n: _squares(g) for n, g in grads.items()}
        # One record, one verdict: what is not finite in any block counts in none.
        keep = torch.stack(list(squares.values())).sum(dim=0).isfinite()
        mask = mask_of_records(piece, task.views)
        if mask is not None:
            keep = keep & mask
        sums, counts = {}, []
        for names, max_norm in zip(task.blocks, task.norms, strict=True):
            norms_B = torch.stack([squares[n] for n in names]).sum(dim=0).sqrt()
            scale = clip_scale(norms_B, max_norm, [grads[n].dtype for n in names], task.rule)
            if task.counted:
                counts.append(centred_count(norms_B, max_norm, keep))
            for name in names:
                sums[name] = _scaled_sum(grads[name], scale, keep)
        return Clipped(sums, tuple(counts))

    def _gradients(self, task: Task, piece: Batch) -> dict[str, Tensor]:
        """Each record's gradient, as a row of each parameter's stack."""
        model, loss, parameters = task.model, task.loss, task.parameters
        fixed = {n: p.detach() for n, p in model.named_parameters() if n not in parameters}
        fixed |= {n: b for n, b in model.named_buffers()}
        inputs, targets = piece.inputs, piece.targets

        def loss_of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = functional_call(model, {**weights, **fixed}, (x.unsqueeze(0),))
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


def _scaled_sum(grad_B: Tensor, scale_B: Tensor, keep_B: Tensor) -> Tensor:
    """Σ_i scale_i·g_i over the records to keep."""
    row = (len(grad_B),) + (1,) * (grad_B.dim() - 1)
    scaled = grad_B.to(wide_dtype(grad_B.dtype)) * scale_B.view(row)
    # 0 · NaN is NaN: what must not count is replaced, not scaled.
    return torch.where(keep_B.view(row), scaled, 0.0).sum(dim=0)


def _squares(grad_B: Tensor) -> Tensor:
    return grad_B.to(wide_dtype(grad_B.dtype)).reshape(len(grad_B), -1).square().sum(dim=1)
