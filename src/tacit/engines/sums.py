"""From per-record gradients to clipped sums, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.engines.clipping import scales_and_counts
from tacit.engines.gradients import RecordGradients
from tacit.engines.precision import full_precision, wide
from tacit.engines.task import Clipped, Task


def squares_of(gradients: dict[str, RecordGradients]) -> dict[str, Tensor]:
    return {name: wide(g.squares()) for name, g in gradients.items()}


def clipped(
    task: Task,
    gradients: dict[str, RecordGradients],
    num_records: int,
    device: torch.device,
    mask: Tensor | None,
) -> Clipped:
    """Σ_i s_i·g_i in each block. Scales come from upper bounds of the norms, counts from the same.

    A record whose squared norm is not finite has a scale of zero in every block and so adds
    nothing, whatever it holds; nor does a row outside `mask`.
    """
    with full_precision(device), torch.no_grad():
        squares = squares_of(gradients)
        nothing = torch.zeros(num_records, device=device)
        keep = torch.stack([nothing, *squares.values()]).sum(dim=0).isfinite()
        counted = keep if mask is None else keep & mask
        norms = norms_of_blocks(task, squares, num_records, device)
        scales, counts = scales_and_counts(
            norms, task.norms, task.factors, task.rule, counted, [n.dtype for n in norms]
        )
        sums = {}
        for names, scale_B in zip(task.blocks, scales, strict=True):
            scale = torch.where(counted, scale_B, 0.0)
            for name in names:
                if name in gradients:
                    total = gradients[name].total(scale)
                    sums[name] = total.reshape(task.parameters[name].shape)
        return Clipped(sums, counts if task.counted else ())


def norms_of_blocks(
    task: Task, squares: dict[str, Tensor], num_records: int, device: torch.device
) -> list[Tensor]:
    norms = []
    for names in task.blocks:
        used = [squares[n] for n in names if n in squares]
        norms.append(torch.stack(used).sum(dim=0).sqrt() if used else None)
    nothing = torch.zeros(num_records, device=device)
    like = next((norm for norm in norms if norm is not None), nothing)
    return [torch.zeros_like(like) if norm is None else norm for norm in norms]
