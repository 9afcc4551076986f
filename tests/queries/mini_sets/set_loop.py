"""Batch clipping as a loop that anybody can read, and models to try it on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit import Batch, MiniSetSampler, Records
from tacit.queries.bounded_gradient import trainable


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)).double()


def batch_norm_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    ).double()


def some_records(n: int = 13, shape: tuple[int, ...] = (4,), seed: int = 0) -> Records:
    torch.manual_seed(seed)
    return Records(
        torch.randn(n, *shape, dtype=torch.float64), torch.randint(0, 2, (n,)), public_size=n
    )


def a_batch(records: Records, size: int, chosen: int = 3, seed: int = 5) -> Batch:
    return MiniSetSampler(records, size, chosen=chosen, seed=seed).next_batch()


def sets_by_hand(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    groups = batch.groups.tolist()
    rows = {g: [i for i, other in enumerate(groups) if other == g] for g in sorted(set(groups))}
    return [(batch.inputs[r], batch.targets[r]) for r in rows.values()]


def mean_gradient(model: nn.Module, loss, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = False
    parameters = trainable(model)
    value = sum(loss(o.unsqueeze(0), t.reshape(1)).sum() for o, t in zip(model(x), y, strict=True))
    grads = torch.autograd.grad(value / len(x), list(parameters.values()), allow_unused=True)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.track_running_stats = True
    return {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(parameters.items(), grads, strict=True)
    }


def norm(tensors) -> Tensor:
    return torch.sqrt(sum(t.square().sum() for t in tensors))


def loop(model, loss, batch, blocks, norms, gradient=mean_gradient) -> dict[str, Tensor]:
    """Σ_j [g(w; S_j)]_(C_1 … C_L), set by set and block by block."""
    total = {n: torch.zeros_like(p) for n, p in trainable(model).items()}
    for x, y in sets_by_hand(batch):
        found = gradient(model, loss, x, y)
        for names, limit in zip(blocks, norms, strict=True):
            scale = torch.clamp(limit / norm(found[n] for n in names), max=1.0)
            for name in names:
                total[name] += scale * found[name]
    return total


def sums_of(bounded) -> dict[str, Tensor]:
    return {n: s for b in bounded.blocks for n, s in zip(b.names, b.sums, strict=True)}
