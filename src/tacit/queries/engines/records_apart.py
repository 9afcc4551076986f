"""Do records meet inside a model? Some of a batch are exchanged, and the others watched.

What a record does alone cannot depend on who is beside it. So one batch is run several times with
half of its records replaced: by copies of one record, by zeros, by the largest value of the batch,
and where inputs are plainly no indices by themselves times 10⁴. The losses of the other half, and
those losses' gradients in their inputs, must stay. A mixture too weak to be seen among roundings is
seen once it is ten thousand times as strong.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tacit.batch import Batch
from tacit.queries.bounded_gradient import Loss
from tacit.queries.engines.record_losses import losses_of
from tacit.queries.remembers import Pass, remembers

_MOST_RECORDS = 256
_LOUD = 1e4
Exchange = Callable[[Tensor, Tensor], Tensor]


def records_meet(model: nn.Module, loss: Loss, piece: Batch) -> bool:
    """Whether records of this batch that stay see others come and go.

    False too where the same batch, run twice, is not the same (a model that draws from a generator
    of its own): then nothing can be told this way.
    """
    some = piece.first(_MOST_RECORDS)
    x, y = some.inputs, some.targets
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    stay, go = order[: (len(x) + 1) // 2], order[(len(x) + 1) // 2 :]
    expected = _seen(model, loss, x, y, stay)
    if not all(map(_alike, expected, _seen(model, loss, x, y, stay))):
        return False
    for exchange in _exchanges(x):
        changed = x.clone()
        changed[go] = exchange(x[stay[:1]], x[go])
        if not all(map(_alike, expected, _seen(model, loss, changed, y, stay))):
            return True
    return False


def remembers_records(model: nn.Module, loss: Loss, piece: Batch) -> bool:
    """Whether what some records give depends on those that the model saw before."""
    some = piece.first(_MOST_RECORDS)
    half = (len(some) + 1) // 2
    rows = torch.arange(len(some), device=some.inputs.device)

    def of(rows: Tensor) -> Pass:
        def one(model: nn.Module) -> dict[str, Tensor]:
            x, y = some.inputs[rows], some.targets[rows]
            seen = _seen(model, loss, x, y, torch.arange(len(x), device=x.device))
            return {str(place): tensor for place, tensor in enumerate(seen)}

        return one

    return remembers(model, of(rows[:half]), of(rows[half:]), some.inputs.device)


def _exchanges(x: Tensor) -> list[Exchange]:
    """What the records that go are replaced by, from (one that stays, those that go)."""
    largest = x.max() if x.numel() else x.new_zeros(())
    found: list[Exchange] = [
        lambda one, gone: one.expand_as(gone),
        lambda one, gone: torch.zeros_like(gone),
        lambda one, gone: largest.expand_as(gone),
    ]
    # Whole numbers may be rows of a table, which has no row 10,000 times as far.
    if x.is_floating_point() and bool((x != x.round()).any()):
        found.append(lambda one, gone: _LOUD * gone)
    return found


def _seen(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, stay: Tensor) -> list[Tensor]:
    """Losses of those that stay, and the gradients in their inputs; the generator is set back."""
    x = x.detach()
    real = x.is_floating_point()
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        x = x.clone().requires_grad_(real)
        losses_B = losses_of(loss, model(x), y)
        seen = [losses_B.detach()[stay]]
        if real and losses_B.requires_grad:
            (gradient,) = torch.autograd.grad(losses_B.sum(), x, allow_unused=True)
            seen += [] if gradient is None else [gradient[stay]]
    return seen


def _alike(a: Tensor, b: Tensor) -> bool:
    """To roundings, row by row; what is not finite must be so in both."""
    if a.shape != b.shape:
        return False
    tolerance = 1e-9 if a.dtype is torch.float64 else 1e-3 if a.dtype is torch.float32 else 5e-2
    a_BP, b_BP = (t.double().reshape(len(t), -1) for t in (a, b))
    both = a_BP.isfinite() & b_BP.isfinite()
    size_B1 = torch.where(both, a_BP, 0.0).abs().sum(dim=1, keepdim=True)
    near = (a_BP - b_BP).abs() <= tolerance * size_B1
    return bool(torch.where(both, near, a_BP.isfinite() == b_BP.isfinite()).all())
