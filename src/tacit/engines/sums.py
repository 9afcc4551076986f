"""From per-record gradients to clipped sums, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.engines.clipping import block_scales, centred_count
from tacit.engines.gradients import RecordGradients, Scale, Stacked
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
        blocks = [_joined(names, gradients) for names in task.blocks]
        norms = _norms(blocks, num_records, device)
        keep = (norms[0] if len(norms) == 1 else torch.stack(norms).sum(dim=0)).isfinite()
        counted = keep if mask is None else keep & mask
        # A CPU can ask whether a record is left out; a GPU would have to be waited for.
        all_present = device.type == "cpu" and not for_compiler() and bool(counted.all())
        compared, scales = block_scales(norms, task.norms, task.factors, task.rule)
        sums: dict[str, Tensor] = {}
        for members, scale_B in zip(blocks, scales, strict=True):
            if not all_present:
                scale_B = torch.where(counted, scale_B, 0.0)
            scale = Scale(scale_B, all_present)
            for names, each in members:
                shapes = [task.parameters[name].shape for name in names]
                total = each.total(scale).reshape(-1)
                parts = total.split([shape.numel() for shape in shapes])
                sums |= {n: t.view(s) for n, t, s in zip(names, parts, shapes, strict=True)}
        pairs = zip(compared, task.norms, strict=True) if task.counted else ()
        return Clipped(sums, tuple(centred_count(n, c, counted) for n, c in pairs))


def norms_of_blocks(
    task: Task, gradients: dict[str, RecordGradients], num_records: int, device: torch.device
) -> list[Tensor]:
    """‖g_i‖ of each record in each block, from above."""
    return _norms([_joined(names, gradients) for names in task.blocks], num_records, device)


# Parameters of one block, and their gradients end to end.
_Member = tuple[tuple[str, ...], RecordGradients]


def _joined(names: Sequence[str], gradients: dict[str, RecordGradients]) -> list[_Member]:
    """The gradients of a block, those with short rows as one: biases, scales, small tables.

    One norm and one product for all of them in the place of one each; half of a network's
    parameters are of that kind, and each would take some five kernels of a few microseconds.
    """
    found = {name: gradients[name] for name in names if name in gradients}
    short = {n: g.rows_BP for n, g in found.items() if isinstance(g, Stacked) and g.is_short()}
    if len(short) < 2 or len({rows.dtype for rows in short.values()}) > 1:
        short = {}
    members: list[_Member] = [((n,), g) for n, g in found.items() if n not in short]
    if short:
        rows = [rows.reshape(len(rows), -1) for rows in short.values()]
        members.append((tuple(short), Stacked(torch.cat(rows, dim=1))))
    return members


def _norms(
    blocks: Sequence[Sequence[_Member]], num_records: int, device: torch.device
) -> list[Tensor]:
    squares = [[wide(each.squares()) for _, each in members] for members in blocks]
    like = next((s for those in squares for s in those), None)
    like = torch.zeros(num_records, device=device) if like is None else like
    return [
        torch.stack(those).sum(dim=0).sqrt() if those else torch.zeros_like(like)
        for those in squares
    ]
