"""One mini-set's vector, clipped: few large operations instead of many small ones."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tacit.engines.clipping import centred_count, clip_scale, wide_dtype
from tacit.engines.task import Clipped, Task


def norms_of_vector(task: Task, vector: dict[str, Tensor]) -> Tensor:
    """‖g_h‖ of each block h, as one tensor, over the entries that are active.

    Added up in float64: PyTorch's float32 norm of 10⁷ equal numbers is too small by a percent.
    """
    names = list(vector)
    wide = [_active(task, n, vector[n]).to(wide_dtype(vector[n].dtype)) for n in names]
    of_names = dict(zip(names, torch._foreach_norm(wide, 2, torch.float64), strict=True))
    norms = [
        of_names[block[0]] if len(block) == 1 else torch.stack([of_names[n] for n in block]).norm()
        for block in task.blocks
    ]
    return torch.stack(norms).to(functools.reduce(torch.promote_types, (w.dtype for w in wide)))


def clipped_vector(task: Task, vector: dict[str, Tensor]) -> Clipped:
    """[g]_C: each block scaled to its C_h, or with factors all by one scale; see `scales.py`.

    A vector whose squared norm is not finite is left out as a whole.
    """
    norms_L = norms_of_vector(task, vector)
    finite = norms_L.square().sum().isfinite()
    compared = norms_L
    if task.factors is not None:
        slack = 1 + 8 * torch.finfo(norms_L.dtype).eps
        factors_L = _stacked(task.factors, norms_L)
        compared = (norms_L * factors_L).square().sum().sqrt().reshape(1) * slack
    dtypes = [tensor.dtype for tensor in vector.values()]
    limits = _stacked(task.norms, norms_L)
    scales = clip_scale(compared, limits, dtypes, task.rule)
    counts: tuple[Tensor, ...] = ()
    if task.counted:
        counts = tuple(
            centred_count(n.reshape(1), c, finite.reshape(1))
            for n, c in zip(compared, limits, strict=True)
        )
    scale_of = scales.expand(len(task.blocks)) if task.factors is not None else scales
    sums = {}
    for block, scale in zip(task.blocks, scale_of, strict=True):
        for name in block:
            scaled = _active(task, name, vector[name]).to(wide_dtype(vector[name].dtype)) * scale
            sums[name] = torch.where(finite, scaled, 0.0)  # 0 · NaN is NaN
    return Clipped(sums, counts)


def _active(task: Task, name: str, tensor: Tensor) -> Tensor:
    mask = task.active.get(name)
    return tensor if mask is None else torch.where(mask, tensor, 0.0)


def _stacked(numbers: tuple[float | Tensor, ...], like: Tensor) -> Tensor:
    """Numbers of Python as a tensor; scalars that are on the device stay there."""
    held = [number for number in numbers if isinstance(number, Tensor)]
    if len(held) == len(numbers):
        return torch.stack(held).to(like.dtype)
    return torch.tensor([float(n) for n in numbers], dtype=like.dtype, device=like.device)
