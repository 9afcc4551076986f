"""Per-record gradients by a plain loop of autograd: slow, simple, and what engines must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from zoo_case import Loss, Tree

from tacit.pytrees import call_model, num_rows, take_rows


class Start:
    """The state from which a step begins: buffers as they are now, and a seed.

    Spectral normalisation moves its buffers in every pass. To compare two passes, both must begin
    from the same ones.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    def go_back(self) -> None:
        self.restore_buffers()
        torch.manual_seed(self.seed)

    def restore_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])


def record_losses(model: nn.Module, loss: Loss, inputs: Tree, targets: Tree) -> Tensor:
    """One loss per record, from one pass over all of them.

    Compiled models run eagerly here: what they compute must not depend on being compiled.
    """
    with torch.compiler.set_stance("force_eager"):
        return loss(call_model(model, inputs), targets)


@dataclass(frozen=True)
class RecordGradients:
    """The gradient of every record as a list of tensors; their norms are in float64.

    B = records, P = parameters.
    """

    parameters: tuple[nn.Parameter, ...]
    rows: tuple[tuple[Tensor | None, ...], ...]
    norms_BP: Tensor

    @property
    def norms(self) -> Tensor:
        return self.norms_BP.norm(dim=1)

    def scales(self, max_norm: float) -> Tensor:
        """min(1, C/‖g_i‖) for each record."""
        return (max_norm / self.norms.clamp_min(1e-300)).clamp(max=1.0)

    def clipped_sums(self, max_norm: float) -> list[Tensor]:
        """Σ_i g_i·min(1, C/‖g_i‖) for each parameter, in float64."""
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in self.parameters]
        for row, scale in zip(self.rows, self.scales(max_norm).tolist(), strict=True):
            for total, gradient in zip(sums, row, strict=True):
                if gradient is not None:
                    total.add_(gradient, alpha=scale)
        return sums

    def clipped_sizes(self, max_norm: float) -> list[float]:
        """Σ_i ‖g_i‖·min(1, C/‖g_i‖) for each parameter: what an error in its sum is measured by."""
        return (self.scales(max_norm) @ self.norms_BP).tolist()


def record_gradients(
    model: nn.Module,
    loss: Loss,
    inputs: Tree,
    targets: Tree,
    *,
    start: Start,
    piece: int | None = None,
) -> RecordGradients:
    """One forward pass, then one backward pass for each record's loss.

    All backward passes share the forward pass, so they share its dropout masks. With `piece`,
    records go through the model so many at a time, one piece after the other, and each piece
    begins from the same buffers: how many pieces there are is private.
    """
    parameters = tuple(p for p in model.parameters() if p.requires_grad)
    rows: list[tuple[Tensor | None, ...]] = []
    size = num_rows(inputs)
    start.go_back()
    for first in range(0, size, piece or size):
        part = slice(first, first + (piece or size))
        start.restore_buffers()
        losses_B = record_losses(model, loss, take_rows(inputs, part), take_rows(targets, part))
        rows += [_gradient(loss_i, parameters) for loss_i in losses_B]
    norms = [[_norm(gradient) for gradient in row] for row in rows]
    return RecordGradients(parameters, tuple(rows), torch.tensor(norms, dtype=torch.float64))


def _norm(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def _gradient(loss: Tensor, parameters: Sequence[nn.Parameter]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
