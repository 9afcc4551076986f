"""The forward and the backward pass of the clipless query, as they are or as one CUDA graph.

The loss's gradient in the outputs is taken first, one row a record, and limited if so asked; then
it is sent back through the network in one pass: Σ_i J_iᵀ g_i, with J_i the Jacobian of record i's
outputs in the parameters. That is plain training's own work.

All of it runs in float32 or wider (`in_wide_precision`): see `tacit.lipschitz.precision`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tacit.batch import Batch
from tacit.cuda_graph import CaptureFailed, capture, state_of
from tacit.lipschitz.layers.clip_gradient import limit_rows
from tacit.queries.adaptive_norm import centred_count
from tacit.queries.bounded_gradient import Loss
from tacit.queries.engines.precision import in_wide_precision, wide
from tacit.queries.engines.record_losses import losses_of
from tacit.queries.engines.when_to_record import WhenToRecord


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


class PassEngine(Protocol):
    def run(self, asked: Passes, piece: Batch) -> Sums: ...


class Eager:
    """One pass after another, as PyTorch runs them."""

    def run(self, asked: Passes, piece: Batch) -> Sums:
        return sums_of(asked, piece.inputs, piece.targets, piece.mask)


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
    # 0 · NaN is NaN: what must not count is replaced before it enters. Off a GPU nobody waits for
    # an answer, and where all count nothing is copied.
    if inputs.device.type != "cpu" or not bool(keep.all()):
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


@dataclass
class _Recording:
    """A graph, the tensors it reads and those it writes. It holds its task, so that ids last."""

    asked: Passes
    graph: Any
    inputs: Tensor
    targets: Tensor
    mask: Tensor | None
    limit: Tensor
    below: Tensor | None
    sums: Sums


class Replayed:
    """Records the passes for each batch shape and replays them; off a GPU it is `Eager`.

    The sums are the same. Give it few shapes: `PoissonSampler(..., pad_to=32)` or `padded=True`. A
    shape is recorded when it has come `after` times before; see `Replay`.
    """

    def __init__(self, after: int = 0) -> None:
        self.after = after
        self._met: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    def run(self, asked: Passes, piece: Batch) -> Sums:
        if not piece.indices.is_cuda or len(piece) == 0:
            return Eager().run(asked, piece)
        key = _key(asked, piece)
        recording = self._recordings.get(key)
        if recording is None:
            found = Eager().run(_reading(asked, piece.indices), piece)  # also compiles kernels
            if self._met[key] >= self.after:
                self._recordings[key] = self._record(asked, piece)
            self._met[key] += 1
            return found
        recording.inputs.copy_(piece.inputs)
        recording.targets.copy_(piece.targets)
        if recording.mask is not None and piece.mask is not None:
            recording.mask.copy_(piece.mask)
        recording.limit.fill_(float(asked.limit))
        if recording.below is not None and asked.below is not None:
            recording.below.fill_(float(asked.below))
        recording.graph.replay()
        # The next replay overwrites its sums; the caller adds them up before that.
        return recording.sums

    def forget(self) -> None:
        """Give the recordings' memory back; the next step records anew."""
        self._recordings.clear()
        self._met.clear()
        self._pool = None

    def _record(self, asked: Passes, piece: Batch) -> _Recording:
        inputs, targets = piece.inputs.clone(), piece.targets.clone()
        mask = None if piece.mask is None else piece.mask.clone()
        still = _reading(asked, inputs)
        limit, below = still.limit, still.below
        assert isinstance(limit, Tensor)
        assert below is None or isinstance(below, Tensor)
        graph, sums = capture(lambda: sums_of(still, inputs, targets, mask), pool=self._pool)
        self._pool = graph.pool()  # recordings take turns, so they may share their memory
        return _Recording(asked, graph, inputs, targets, mask, limit, below, sums)


class AutomaticPasses:
    """`Replayed` on a GPU where a step can surely be recorded, else `Eager`: the same sums."""

    def __init__(self) -> None:
        self._replayed = Replayed(after=1)
        self._when = WhenToRecord()

    def run(self, asked: Passes, piece: Batch) -> Sums:
        shaped = self._when.shaped(asked.model, asked.loss, piece, asked.views)
        if shaped is not None:
            try:
                return self._replayed.run(asked, shaped)
            except CaptureFailed as error:
                self._when.failed(asked.model, error)
        return Eager().run(asked, piece)

    def forget(self) -> None:
        """Give the recordings' memory back; later steps record anew."""
        self._replayed.forget()
        self._when.forget()


def _key(asked: Passes, piece: Batch) -> Hashable:
    shape = (len(piece), piece.records.shape, piece.records.inputs.dtype, piece.mask is None)
    what = (
        id(asked.loss),
        tuple(asked.parameters),
        asked.below is None,
        asked.views,
        asked.largest,
    )
    return what, shape, state_of(asked.model)


def _reading(asked: Passes, like: Tensor) -> Passes:
    """The same, with its numbers read from the device, as a recording reads them."""
    below = None if asked.below is None else _on_device(asked.below, like)
    return replace(asked, limit=_on_device(asked.limit, like), below=below)


def _on_device(number: float | Tensor, like: Tensor) -> Tensor:
    return torch.full((), float(number), dtype=torch.float64, device=like.device)


def _finite(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).isfinite().all(dim=1)


def _as_rows(keep: Tensor, like: Tensor) -> Tensor:
    return keep.view((len(like),) + (1,) * (like.dim() - 1))
