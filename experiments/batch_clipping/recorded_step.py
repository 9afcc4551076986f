"""A whole private step as one CUDA graph: batch, views, gradient, clipping, noise, SGD.

The arithmetic is that of `BatchClip` and `PerSampleClip`, by the library's own functions; what is
recorded saves Python's time, which is most of the time of 35,000 steps of a small network. Off a
GPU the same function simply runs. A test compares it with the library's own step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tacit
from tacit import Records
from tacit.engines import BookKeeping, ClipTask
from tacit.engines.book_keeping import record_gradients, run_program
from tacit.engines.clipping import clip_and_sum
from tacit.engines.recorder import capture
from tacit.queries import MeanGradient
from tacit.queries.bounded_gradient import trainable
from tacit.queries.set_gradients import clipped_vector
from tacit.queries.thresholds import Constants
from tacit.statistics import without_running_statistics
from tacit.torch_internals import Graph


class RecordedStep:
    """Called once per step. `fill` sets an epoch's rows, `set_constants` the norms to clip to.

    Noise on block h is N(0, (z·√L·2C_h)²) on the sum over sets (records), which is divided by
    their number; with factors N(0, (z·2C/m_h)²). On a GPU forward and backward pass of resnet-18
    are in bfloat16 (autocast); norms, clipping, noise and weights are in float32.
    """

    def __init__(
        self,
        setting: Any,
        model: nn.Module,
        private: Records,
        blocks: tuple[tuple[str, ...], ...],
        noise_multiplier: float,
        per_epoch: int,
    ) -> None:
        self.setting, self.model, self.private, self.blocks = setting, model, private, blocks
        self.z = noise_multiplier
        self.device = private.inputs.device
        self.parameters = trainable(model)
        self.sizes = [p.numel() for p in self.parameters.values()]
        like = {"device": self.device, "dtype": torch.float32}
        self.rate = torch.zeros((), **like)
        self.norms = torch.ones(
            1 if setting.constants in ("full", "factors") else len(blocks), **like
        )
        self.factors = torch.ones(len(blocks), **like)
        self.std = torch.zeros(sum(self.sizes), **like)
        self.momentum = torch.zeros(sum(self.sizes), **like)
        self.table = torch.zeros(
            per_epoch, setting.batch_size, dtype=torch.long, device=self.device
        )
        self.place = torch.zeros(1, dtype=torch.long, device=self.device)
        crop = tacit.RandomCropFlip(padding=4, reflect=False)
        self.crop = crop if setting.augment else None
        self.count = setting.batch_size // setting.set_size
        self.half = setting.network == "resnet18" and self.device.type == "cuda"
        self.task = ClipTask(
            model,
            tacit.losses.CrossEntropy(),
            self.parameters,
            blocks,
            tuple(self.norms.unbind()),
            factors=tuple(self.factors.unbind()) if setting.constants == "factors" else None,
        )
        self.engine = BookKeeping()
        self._graph: Any = None

    def fill(self, rows: Tensor) -> None:
        self.table.copy_(rows)
        self.place.zero_()

    def set_constants(self, found: Constants) -> None:
        """Public constants of the next steps, and the noise that goes with them."""
        self.norms.copy_(torch.tensor(found.norms))
        factors = found.factors or (1.0,) * len(self.blocks)
        self.factors.copy_(torch.tensor(factors))
        bounds = [2 * norm for norm in found.norms]
        stds = tacit.PerLayerNoise()(bounds, [1] * len(bounds), self.z)
        of_block = stds if len(stds) == len(self.blocks) else stds * len(self.blocks)
        std_of = {
            name: std / factor
            for names, std, factor in zip(self.blocks, of_block, factors, strict=True)
            for name in names
        }
        each = torch.tensor([std_of[n] for n in self.parameters], device=self.device)
        sizes = torch.tensor(self.sizes, device=self.device)
        self.std.copy_(each.repeat_interleave(sizes))

    def __call__(self) -> None:
        if self.device.type != "cuda":
            self._step()
            return
        if self._graph is None:
            self._record()
        self._graph.replay()

    def _record(self) -> None:
        """Warming up takes real steps, so weights, momentum and place are put back."""
        held = [p.detach().clone() for p in self.parameters.values()]
        momentum = self.momentum.clone()
        self._graph, _ = capture(self._step)
        with torch.no_grad():
            for p, before in zip(self.parameters.values(), held, strict=True):
                p.copy_(before)
        self.momentum.copy_(momentum)
        self.place.zero_()

    def _step(self) -> None:
        rows = self.table.index_select(0, self.place).squeeze(0)
        x, y = self.private.inputs[rows], self.private.targets[rows]
        if self.crop is not None:
            x = self.crop(x)
        sums = self._individual(x, y) if self.setting.clipping == "individual" else self._sets(x, y)
        with torch.no_grad():
            flat = torch.cat([sums[name].reshape(-1).float() for name in self.parameters])
            noisy = (flat + torch.randn_like(flat) * self.std) / self.count
            if self.setting.momentum:
                noisy = self.momentum.mul_(self.setting.momentum).add_(noisy)
            moved = (noisy * self.rate).split(self.sizes)
            shaped = [m.view(p.shape) for m, p in zip(moved, self.parameters.values(), strict=True)]
            torch._foreach_sub_(list(self.parameters.values()), shaped)
            self.place.add_(1)

    def _sets(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        size = self.setting.set_size
        with without_running_statistics(self.model):
            for start in range(0, len(x), size):
                part = slice(start, start + size)
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                    vector = MeanGradient()(
                        self.model, self.task.loss, self.parameters, x[part], y[part]
                    )
                found = clipped_vector(self.task, vector).sums
                total = {n: total[n] + s if n in total else s for n, s in found.items()}
        return total

    def _individual(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        plan = self.engine.single_plan(self.task, x, y)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            if plan is None:  # the first step, which is not recorded
                found = self.engine.clipped_sums_of(self.task, x, y, None)
            else:
                losses = run_program(self.model, self.task.loss, x, y)
                gradients = record_gradients(plan, Graph(losses), losses, self.task)
                found = clip_and_sum(self.task, gradients, len(x), self.device, None)
        return {
            n: found.sums.get(n, torch.zeros_like(p, requires_grad=False))
            for n, p in self.parameters.items()
        }
