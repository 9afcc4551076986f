"""Per-sample clipping as a Python loop over records and views: what every engine must equal."""

from __future__ import annotations

import torch
from torch import nn

from tacit import Batch, PerSampleClip
from tacit.queries.bounded_gradient import trainable


def clip(norm: float, max_norm: float) -> float:
    return min(1.0, max_norm / norm) if norm > 0 else 1.0


def normalise(stability: float):
    def scale(norm: float, max_norm: float) -> float:
        return max_norm / (norm + stability) if norm > 0 else 0.0

    return scale


def below(norm: float, max_norm: float) -> float:
    """½ below the constant, −½ above it, and a line in between."""
    return min(max((1 - norm / max_norm) / 0.1, -0.5), 0.5)


def gradient_of(model, loss, views, y) -> dict[str, torch.Tensor]:
    """The mean of the views' gradients, by autograd, one view at a time."""
    parameters = trainable(model)
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for x in views:
        value = loss(model(x.unsqueeze(0)), y.unsqueeze(0)).sum()
        grads = torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)
        for name, grad in zip(parameters, grads, strict=True):
            total[name] += grad / len(views)
    return total


def loop(
    model: nn.Module, loss, batch: Batch, max_norms, grouping=None, scale=clip, views=None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Σ_i Π_h(g_i) and the centred counts; `views` gives the views of one record's input."""
    blocks = PerSampleClip(1.0, blocks=grouping).blocks_of(model)
    sums = {name: torch.zeros_like(p) for name, p in trainable(model).items()}
    counts = [0.0] * len(blocks)
    for i, (x, y) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        grads = gradient_of(model, loss, views(x) if views else x[None], y)
        whole = torch.cat([g.reshape(-1) for g in grads.values()])
        padding = batch.mask is not None and not batch.mask[i]
        if padding or not whole.isfinite().all():
            continue
        for h, names in enumerate(blocks):
            norm = float(torch.cat([grads[n].reshape(-1) for n in names]).norm())
            counts[h] += below(norm, max_norms[h])
            for name in names:
                sums[name] += scale(norm, max_norms[h]) * grads[name]
    return sums, counts


def assert_equal_to_loop(bounded, sums, counts=None, tolerance=1e-10) -> None:
    for block in bounded.blocks:
        for name, total in zip(block.names, block.sums, strict=True):
            torch.testing.assert_close(total, sums[name], rtol=tolerance, atol=tolerance)
    if counts is not None:
        found = torch.stack([s.value for s in bounded.statistics])
        wanted = torch.tensor(counts, dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=10 * tolerance)
