"""Per-sample clipping by `torch.func`: right rather than fast, for anything `vmap` can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tacit.batch import Batch
from tacit.queries.blocks import Blocks, all_together, check_cover
from tacit.queries.bounded_gradient import Block, BoundedGradient, Loss, trainable
from tacit.queries.record_mixing import refuse_mixing
from tacit.sampling.schemes import Unit

_LEAST_NORM = 1e-12


class PerSampleClip:
    """Σ_i Π_h(g_i), each record's gradient scaled to norm at most C_h in each block h.

    clip(g) = g·min(1, C/‖g‖)  [Abadi 2016, Alg. 1]. A record adds at most C_h to block h, so that
    is the block's bound. Each record is run through the model alone, so nothing that happens to
    one can change another's share. A record whose squared norm is not finite adds nothing.

    `blocks=None` clips the whole gradient at once; otherwise a function of the model such as
    `by_layer`, or its value. `max_norm` is one constant for every block, or one a block.
    """

    unit = Unit.RECORD

    def __init__(
        self,
        max_norm: float | Sequence[float],
        *,
        blocks: Blocks | Callable[[nn.Module], Blocks] | None = None,
        chunk_size: int | None = None,
    ) -> None:
        self.max_norm = as_norms(max_norm)
        self.blocks = blocks
        self.chunk_size = chunk_size

    def __call__(self, model: nn.Module, loss: Loss, batch: Batch) -> BoundedGradient:
        refuse_mixing(model)
        parameters = trainable(model)
        blocks = self.blocks_of(model)
        norms = self._norm_of_each(blocks)
        sums = {name: _accumulator(p) for name, p in parameters.items()}
        for piece in batch.physical():
            grads = self._gradients(model, loss, parameters, piece)
            squares = {n: _squares(g) for n, g in grads.items()}
            # One record, one verdict: what is not finite in any block counts in none.
            keep = torch.stack(list(squares.values())).sum(dim=0).isfinite()
            if piece.mask is not None:
                keep = keep & piece.mask
            for names, max_norm in zip(blocks, norms, strict=True):
                norms_B = torch.stack([squares[n] for n in names]).sum(dim=0).sqrt()
                scale = clip_scale(norms_B, max_norm, [grads[n].dtype for n in names])
                for name in names:
                    sums[name] += scaled_sum(grads[name], scale, keep)
        return BoundedGradient(
            blocks=tuple(
                Block(
                    names=names,
                    parameters=tuple(parameters[n] for n in names),
                    sums=tuple(sums[n] for n in names),
                    bound=max_norm,
                )
                for names, max_norm in zip(blocks, norms, strict=True)
            ),
            divisor=batch.divisor,
        )

    def blocks_of(self, model: nn.Module) -> Blocks:
        make = self.blocks or all_together
        blocks = make(model) if callable(make) else make
        check_cover(blocks, model)
        return blocks

    def _norm_of_each(self, blocks: Blocks) -> tuple[float, ...]:
        if isinstance(self.max_norm, float):
            return (self.max_norm,) * len(blocks)
        if len(self.max_norm) != len(blocks):
            raise ValueError(
                f"{len(self.max_norm)} values of max_norm for {len(blocks)} blocks; "
                "give one a block"
            )
        return self.max_norm

    def _gradients(
        self, model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], piece: Batch
    ) -> dict[str, Tensor]:
        """Each record's gradient, as a row of each parameter's stack."""
        fixed = {n: p.detach() for n, p in model.named_parameters() if n not in parameters}
        fixed |= {n: b for n, b in model.named_buffers()}
        inputs, targets = piece.inputs, piece.targets

        def loss_of_one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            outputs = functional_call(model, {**weights, **fixed}, (x.unsqueeze(0),))
            # A loss may give a mean, a sum, or one number a record: of one record all are one.
            return loss(outputs, y.unsqueeze(0)).sum()

        weights = {n: p.detach() for n, p in parameters.items()}
        per_record = vmap(
            grad(loss_of_one),
            in_dims=(None, 0, 0),
            randomness="different",
            chunk_size=self.chunk_size,
        )
        return per_record(weights, inputs, targets)


def as_norms(max_norm: float | Sequence[float]) -> float | tuple[float, ...]:
    """One constant, or one a block, as floats that clipping can keep to.

    Squares of float32 numbers below 4e-23 vanish, so a gradient of a billion entries may have a
    norm of 1e-18 that nobody sees; the least constant is far above that.
    """
    one = isinstance(max_norm, int | float) or getattr(max_norm, "ndim", None) == 0
    norms = (float(max_norm),) if one else tuple(float(norm) for norm in max_norm)  # type: ignore[arg-type, union-attr]
    if not norms or not all(_LEAST_NORM <= norm < float("inf") for norm in norms):
        raise ValueError(f"max_norm is {max_norm}; give finite numbers of at least {_LEAST_NORM}")
    return norms[0] if one else norms


def clip_scale(norms_B: Tensor, max_norm: float, dtypes: Sequence[torch.dtype]) -> Tensor:
    """min(1, C/‖g_i‖) for each of B records.

    Scaling in floating point can overshoot C by a few roundings, so C is first lowered by as
    much: the bound holds for the numbers that are really added.
    """
    rounding = max(torch.finfo(_wide_dtype(dtype)).eps for dtype in dtypes)
    least = torch.finfo(norms_B.dtype).tiny
    return (max_norm * (1 - 16 * rounding) / norms_B.clamp_min(least)).clamp(max=1.0)


def scaled_sum(grad_B: Tensor, scale_B: Tensor, keep_B: Tensor) -> Tensor:
    """Σ_i scale_i·g_i over the records to keep."""
    row = (len(grad_B),) + (1,) * (grad_B.dim() - 1)
    scaled = grad_B.to(_wide_dtype(grad_B.dtype)) * scale_B.view(row)
    # 0 · NaN is NaN: what must not count is replaced, not scaled.
    return torch.where(keep_B.view(row), scaled, 0.0).sum(dim=0)


def _squares(grad_B: Tensor) -> Tensor:
    return grad_B.to(_wide_dtype(grad_B.dtype)).reshape(len(grad_B), -1).square().sum(dim=1)


def _accumulator(parameter: Tensor) -> Tensor:
    """Zeros to sum into, in float64: in float32 the roundings of a long sum pass the bound."""
    dtype = torch.float32 if parameter.device.type == "mps" else torch.float64
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms are taken, and records scaled, in at least float32."""
    return torch.promote_types(dtype, torch.float32)
