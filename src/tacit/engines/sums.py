"""From per-record gradients to clipped sums, block by block."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.engines.clipping import block_scales, centred_count
from tacit.engines.gradients import RecordGradients, Scale
from tacit.engines.kernels import for_compiler
from tacit.engines.precision import full_precision, wide
from tacit.engines.task import Clipped, Task


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
        norms = norms_of_blocks(task, gradients, num_records, device)
        keep = (norms[0] if len(norms) == 1 else torch.stack(norms).sum(dim=0)).isfinite()
        counted = keep if mask is None else keep & mask
        # A CPU can ask whether a record is left out; a GPU would have to be waited for.
        all_present = device.type == "cpu" and not for_compiler() and bool(counted.all())
        compared, scales = block_scales(norms, task.norms, task.factors, task.rule)
        sums = {}
        for names, scale_B in zip(task.blocks, scales, strict=True):
            if not all_present:
                scale_B = torch.where(counted, scale_B, 0.0)
            scale = Scale(scale_B, all_present)
            for name in names:
                if name in gradients:
                    total = gradients[name].total(scale)
                    sums[name] = total.reshape(task.parameters[name].shape)
        pairs = zip(compared, task.norms, strict=True) if task.counted else ()
        return Clipped(sums, tuple(centred_count(n, c, counted) for n, c in pairs))


def norms_of_blocks(
    task: Task, gradients: dict[str, RecordGradients], num_records: int, device: torch.device
) -> list[Tensor]:
    """‖g_i‖ of each record in each block, from above."""
    squares = {name: wide(g.squares()) for name, g in gradients.items()}
    like = next(iter(squares.values())) if squares else torch.zeros(num_records, device=device)
    each = [[squares[n] for n in names if n in squares] for names in task.blocks]
    return [
        torch.stack(used).sum(dim=0).sqrt() if used else torch.zeros_like(like) for used in each
    ]
