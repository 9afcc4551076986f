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


class PerSampleClip:
    """Σ_i Π_h(g_i), each record's gradient scaled to norm at most C_h in each block h.

    clip(g) = g·min(1, C/‖g‖)  [Abadi 2016, Alg. 1]. A record adds at most C_h to block h, so that
    is the block's bound. Each record is run through the model alone, so nothing that happens to
    one can change another's share. A record whose gradient is not finite adds nothing.

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
        norms = (max_norm,) if isinstance(max_norm, int | float) else tuple(max_norm)
        if not norms or not all(0 < norm < float("inf") for norm in norms):
            raise ValueError(f"max_norm is {max_norm}; give finite numbers above 0")
        self.max_norm = max_norm
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
            for names, max_norm in zip(blocks, norms, strict=True):
                add_clipped(sums, {n: grads[n] for n in names}, max_norm, piece.mask)
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
        if isinstance(self.max_norm, int | float):
            return (float(self.max_norm),) * len(blocks)
        if len(self.max_norm) != len(blocks):
            raise ValueError(
                f"{len(self.max_norm)} values of max_norm for {len(blocks)} blocks; "
                "give one a block"
            )
        return tuple(float(norm) for norm in self.max_norm)

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


def add_clipped(
    sums: dict[str, Tensor], grads_B: dict[str, Tensor], max_norm: float, mask_B: Tensor | None
) -> None:
    """Add Σ_i g_i·min(1, C/‖g_i‖) to `sums`; B = records. Padding and non-finite rows add 0.

    Scaling in floating point can overshoot C by a few roundings, so C is first lowered by as
    much: the bound holds for the numbers that are really added.
    """
    if not grads_B:
        return
    some = next(iter(grads_B.values()))
    squares = [_wide(g).reshape(len(g), -1).square().sum(dim=1) for g in grads_B.values()]
    norms_B = torch.stack(squares).sum(dim=0).sqrt()
    keep_B = torch.isfinite(norms_B)
    if mask_B is not None:
        keep_B = keep_B & mask_B
    safe_norm = max_norm * (1 - 16 * torch.finfo(norms_B.dtype).eps)
    scale_B = (safe_norm / norms_B.clamp_min(torch.finfo(norms_B.dtype).tiny)).clamp(max=1.0)
    for name, grad_B in grads_B.items():
        row = (len(some),) + (1,) * (grad_B.dim() - 1)
        # 0 · NaN is NaN: what must not count is replaced, not scaled.
        kept = torch.where(keep_B.view(row), _wide(grad_B) * scale_B.view(row), 0.0)
        sums[name] += kept.sum(dim=0)


def _accumulator(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=_wide_dtype(parameter.dtype), requires_grad=False)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_dtype(tensor.dtype))


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms and sums are kept in at least float32."""
    return torch.promote_types(dtype, torch.float32)
