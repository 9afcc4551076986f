"""A layer that is the identity forwards and clips each record's cotangent backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tacit.lipschitz.bounds import Parameterless


class ClipGradient(nn.Module, Parameterless):
    """f(x) = x forwards; backwards each record's cotangent g becomes g·min(1, C/‖g‖).

    The layers before it get cotangents of norm at most C, whatever the layers after it and the
    loss are  [clipless paper, §3.3]. It clips records apart only if the loss is summed over
    records, as `Clipless` does.
    """

    exact = True

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        if not 0 < max_norm < float("inf"):
            raise ValueError(f"max_norm is {max_norm}; give a finite number above 0")
        self.max_norm = float(max_norm)

    @property
    def cotangent_limit(self) -> float:
        return self.max_norm

    def forward(self, x: Tensor) -> Tensor:
        return clip_cotangent(x, self.max_norm)

    def extra_repr(self) -> str:
        return f"{self.max_norm}"


def clip_cotangent(x: Tensor, max_norm: float | Tensor) -> Tensor:
    clipped: Tensor = _Clip.apply(x, max_norm)
    return clipped


class _Clip(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, max_norm: float | Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.max_norm = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        limited, _, _ = limit_rows(gradient, ctx.max_norm)
        return limited, None


def limit_rows(rows: Tensor, max_norm: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row scaled to norm at most C: g·min(1, C/‖g‖); the norms before, and which are finite.

    A row that is not finite becomes zero. C is first lowered by a few roundings, so that the
    computed row keeps to the bound. Half precision is scaled in float32 and rounded at the end.
    """
    flat = rows.flatten(1)
    finite = flat.isfinite().all(dim=1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    flat = torch.where(finite[:, None], flat, 0).to(wide)
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    reach = max_norm * (1 - 16 * torch.finfo(wide).eps - torch.finfo(rows.dtype).eps)
    scale = (reach / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    limited = (flat * scale[:, None].to(wide)).to(rows.dtype).reshape(rows.shape)
    return limited, norms, finite
