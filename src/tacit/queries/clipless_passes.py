"""The forward and the backward pass of the clipless query, as they are or as one CUDA graph.

The loss's gradient in the outputs is taken first, one row a record, and limited if so asked; then
it is sent back through the network in one pass: Σ_i J_iᵀ g_i, with J_i the Jacobian of record i's
outputs in the parameters. That is plain training's own work.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tacit.batch import Batch
from tacit.queries.adaptive_norm import centred_count
from tacit.queries.bounded_gradient import Loss
from tacit.queries.engines.record_losses import losses_of


@dataclass(frozen=True)
class Passes:
    """What is asked: whose gradients of which loss, the clip C on output gradients, views a record.

    `counted` asks for the centred count of the records whose output gradient is below C.
    """

    model: nn.Module
    loss: Loss
    parameters: dict[str, nn.Parameter]
    clip: float | Tensor | None
    views: int = 1
    counted: bool = False


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
    keep = _finite(inputs) & _finite(targets)
    if mask is not None:
        keep = keep & mask
    # 0 · NaN is NaN: what must not count is replaced before it enters.
    inputs = torch.where(_as_rows(keep, inputs), inputs, 0)
    targets = torch.where(_as_rows(keep, targets), targets, 0)
    with torch.enable_grad():
        outputs = asked.model(inputs)
        leaf = outputs.detach().requires_grad_()
        losses = losses_of(asked.loss, leaf, targets)
        (cotangent,) = torch.autograd.grad(losses.sum(), leaf)
    with torch.no_grad():
        limited, norms, keep = limit(cotangent, asked.clip, keep)
        count = None
        if asked.counted:
            assert asked.clip is not None
            count = centred_count(norms, asked.clip, keep) / asked.views
    parameters = list(asked.parameters.values())
    found = torch.autograd.grad(outputs, parameters, limited / asked.views, allow_unused=True)
    named = zip(asked.parameters, found, strict=True)
    return Sums({name: g for name, g in named if g is not None}, count)


def limit(
    cotangent: Tensor, clip: float | Tensor | None, keep: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each kept row scaled to norm at most C, the others zero; the norms before, and who is kept.

    A row that is not finite is not kept.
    """
    flat = cotangent.reshape(len(cotangent), -1)
    keep = keep & flat.isfinite().all(dim=1)
    flat = torch.where(keep[:, None], flat, 0)
    norms = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    if clip is None:
        return flat.reshape(cotangent.shape), norms, keep
    # A few roundings lower, so that the norm of what goes on keeps to the bound.
    reach = clip * (1 - 16 * torch.finfo(flat.dtype).eps)
    scale = (reach / norms.clamp_min(torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    return (flat * scale[:, None].to(flat.dtype)).reshape(cotangent.shape), norms, keep


@dataclass
class _Recording:
    """A graph, the tensors it reads and those it writes. It holds its task, so that ids last."""

    asked: Passes
    graph: Any
    inputs: Tensor
    targets: Tensor
    mask: Tensor | None
    clip: Tensor | None
    sums: Sums


class Replayed:
    """Records the passes for each batch shape and replays them; off a GPU it is `Eager`.

    The sums are the same. Give it few shapes: `PoissonSampler(..., pad_to=32)` or `padded=True`.
    """

    def __init__(self) -> None:
        self._recordings: dict[Hashable, _Recording] = {}
        self._pool: Any = None

    def run(self, asked: Passes, piece: Batch) -> Sums:
        if not piece.indices.is_cuda or len(piece) == 0:
            return Eager().run(asked, piece)
        key = _key(asked, piece)
        recording = self._recordings.get(key)
        if recording is None:
            found = Eager().run(asked, piece)  # the first time also compiles kernels
            self._recordings[key] = self._record(asked, piece)
            return found
        recording.inputs.copy_(piece.inputs)
        recording.targets.copy_(piece.targets)
        if recording.mask is not None and piece.mask is not None:
            recording.mask.copy_(piece.mask)
        if recording.clip is not None and asked.clip is not None:
            recording.clip.fill_(float(asked.clip))
        recording.graph.replay()
        # The next replay overwrites its sums; the caller adds them up before that.
        return recording.sums

    def forget(self) -> None:
        """Give the recordings' memory back; the next step records anew."""
        self._recordings.clear()
        self._pool = None

    def _record(self, asked: Passes, piece: Batch) -> _Recording:
        inputs, targets = piece.inputs.clone(), piece.targets.clone()
        mask = None if piece.mask is None else piece.mask.clone()
        clip = None
        if asked.clip is not None:
            clip = torch.full((), float(asked.clip), dtype=torch.float64, device=inputs.device)
        still = Passes(asked.model, asked.loss, asked.parameters, clip, asked.views, asked.counted)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                sums_of(still, inputs, targets, mask)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            sums = sums_of(still, inputs, targets, mask)
        self._pool = graph.pool()  # recordings take turns, so they may share their memory
        return _Recording(asked, graph, inputs, targets, mask, clip, sums)


def _key(asked: Passes, piece: Batch) -> Hashable:
    shape = (len(piece), piece.records.shape, piece.records.inputs.dtype, piece.mask is None)
    tensors = (*asked.model.parameters(), *asked.model.buffers())
    places = tuple(tensor.data_ptr() for tensor in tensors)
    modes = tuple(module.training for module in asked.model.modules())
    modes += (torch.backends.cudnn.allow_tf32, torch.is_autocast_enabled("cuda"))
    what = (id(asked.model), id(asked.loss), tuple(asked.parameters), asked.clip is None)
    return what, asked.views, asked.counted, shape, places, modes


def _finite(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1).isfinite().all(dim=1)


def _as_rows(keep: Tensor, like: Tensor) -> Tensor:
    return keep.view((len(like),) + (1,) * (like.dim() - 1))
