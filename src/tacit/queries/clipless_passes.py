"""The forward and the backward pass of the clipless query, as they are or as one CUDA graph.

The loss's gradient in the outputs is taken first, one row a record, and limited if so asked; then
it is sent back through the network in one pass: Σ_i J_iᵀ g_i, with J_i the Jacobian of record i's
outputs in the parameters. That is plain training's own work.

All of it runs in float32 or wider (`in_wide_precision`): see `tacit.lipschitz.precision`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tacit.batch import Batch
from tacit.engines.automatic import padded, rows_for
from tacit.engines.clipping import centred_count
from tacit.engines.precision import in_wide_precision, wide
from tacit.engines.recorder import Outputs, Recorder
from tacit.engines.torch_internals import swapped
from tacit.lipschitz.layers.clip_gradient import limit_rows
from tacit.losses.record_losses import losses_of
from tacit.queries.bounded_gradient import Loss


@dataclass(frozen=True)
class Passes:
    """What is asked: whose gradients of which loss, and what they are limited to in the outputs.

    `limit` is the bound that is accounted for: the clip, or the loss's own constant, which a loss
    that keeps to it does not feel. `below` asks for the centred count of the records whose output
    gradient is below it. `views` is how many rows a record has. A record with an entry above
    `largest` in size adds nothing, since it may overflow on its way.
    """

    model: nn.Module
    loss: Loss
    parameters: dict[str, nn.Parameter]
    limit: float | Tensor
    below: float | Tensor | None = None
    views: int = 1
    largest: float = math.inf


@dataclass(frozen=True)
class Sums:
    """Σ_i of the records' gradients, by parameter; the count, where it was asked for."""

    gradients: dict[str, Tensor]
    count: Tensor | None


def sums_of(asked: Passes, inputs: Tensor, targets: Tensor, mask: Tensor | None) -> Sums:
    with in_wide_precision(asked.model, inputs.device) as copies:
        weights = [copies.get(id(p), p) for p in asked.parameters.values()]
        return _sums(asked, weights, wide(inputs), wide(targets), mask)


def _sums(
    asked: Passes, weights: list[Tensor], inputs: Tensor, targets: Tensor, mask: Tensor | None
) -> Sums:
    """`weights` are the tensors that the pass runs with: parameters, or float32 copies of them."""
    keep = _finite(inputs) & _finite(targets)
    if asked.largest < math.inf:
        keep = keep & (inputs.abs() <= asked.largest).reshape(len(inputs), -1).all(dim=1)
    if mask is not None:
        keep = keep & mask
    # 0 · NaN is NaN: what must not count is replaced before it enters. Whether anything is must
    # not be asked, as a recording would keep the answer.
    inputs = torch.where(_as_rows(keep, inputs), inputs, 0)
    targets = torch.where(_as_rows(keep, targets), targets, 0)
    with torch.enable_grad():
        outputs = asked.model(inputs)
        leaf = outputs.detach().requires_grad_()
        losses = losses_of(asked.loss, leaf, targets)
        (cotangent,) = torch.autograd.grad(losses.sum(), leaf)
    with torch.no_grad():
        # Who does not count, counts for nothing in the count as well.
        cotangent = torch.where(_as_rows(keep, cotangent), cotangent, 0)
        limited, norms, finite = limit_rows(cotangent, asked.limit)
        keep = keep & finite
        count = None
        if asked.below is not None:
            count = centred_count(norms, asked.below, keep) / asked.views
    # Views are averaged after the way back: a layer that limits cotangents limits each view's, and
    # K views of which each was divided by K would pass it whole.
    found = torch.autograd.grad(outputs, weights, limited, allow_unused=True)
    named = {n: g for n, g in zip(asked.parameters, found, strict=True) if g is not None}
    if asked.views > 1:
        named = {name: g / asked.views for name, g in named.items()}
    return Sums(named, count)


class RecordedPasses:
    """Runs the passes through a recorder: as they are, as one CUDA graph, or compiled."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder or Recorder()

    def run(self, asked: Passes, piece: Batch) -> Sums:
        if len(piece) == 0:
            return sums_of(asked, piece.inputs, piece.targets, piece.mask)
        if piece.mask is None and self.recorder.records(piece.indices.device):
            piece = padded(piece, rows_for(piece, asked.views))
        step = _Step(asked, piece.mask is not None)
        found = self.recorder(step, step.batch(piece))
        count = found.pop(_COUNT, None) if _COUNT in found else None
        return Sums({name: found[name] for name in asked.parameters if name in found}, count)

    def forget(self) -> None:
        """Give the recordings' memory back; later steps record anew."""
        self.recorder.forget()


_COUNT = "#count"


@dataclass
class _Step:
    """The passes as a function of records, mask, limits and weights."""

    asked: Passes
    masked: bool

    @property
    def model(self) -> nn.Module:
        return self.asked.model

    @property
    def key(self) -> Hashable:
        asked = self.asked
        what = (id(asked.loss), tuple(asked.parameters), asked.below is None)
        return what, asked.views, asked.largest, self.masked

    def batch(self, piece: Batch) -> list[Tensor]:
        """Everything that changes from step to step: a Python number would be recorded for good."""
        numbers = [float(self.asked.limit), float(self.asked.below or 0.0)]
        limits = torch.tensor(numbers, dtype=torch.float64)
        if piece.indices.is_cuda:
            limits = limits.pin_memory().to(piece.indices.device, non_blocking=True)
        mask = [piece.mask] if piece.mask is not None else []
        return [piece.inputs, piece.targets, *mask, limits]

    def run(self, batch: Sequence[Tensor]) -> Outputs:
        return self._run(self.asked, batch)

    def run_with(self, weights: dict[str, Tensor], batch: Sequence[Tensor]) -> Outputs:
        own = {id(p): name for name, p in self.model.named_parameters()}  # a program's own names
        parameters: Any = {n: weights[own[id(p)]] for n, p in self.asked.parameters.items()}
        with swapped(self.model, weights):
            return self._run(replace(self.asked, parameters=parameters), batch)

    def _run(self, asked: Passes, batch: Sequence[Tensor]) -> Outputs:
        inputs, targets, *mask, limits = batch
        below = None if asked.below is None else limits[1]
        asked = replace(asked, limit=limits[0], below=below)
        found = sums_of(asked, inputs, targets, mask[0] if self.masked else None)
        return found.gradients | ({} if found.count is None else {_COUNT: found.count})


def _finite(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).isfinite().all(dim=1)


def _as_rows(keep: Tensor, like: Tensor) -> Tensor:
    return keep.view((len(like),) + (1,) * (like.dim() - 1))
