"""Small set-ups for the audits, and a query such as a user writes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import tacit
from tacit import Records
from tacit.lipschitz import BoundedInput, MaxMin, SpectralLinear
from tacit.queries import Block, BoundedGradient
from tacit.sampling import Unit

LOSS = tacit.losses.CrossEntropy()
POISSON = partial(tacit.PoissonSampler, expected_batch_size=12)


def records(n: int = 48) -> Records:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 4, generator=generator)
    return Records(inputs, torch.arange(n) % 2, num_classes=2, public_size=n)


def mlp(hidden: int = 24) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def lipschitz_mlp(hidden: int = 6) -> nn.Module:
    torch.manual_seed(0)
    front, head = SpectralLinear(4, hidden, bias=True), SpectralLinear(hidden, 2)
    return nn.Sequential(BoundedInput(1.0), front, MaxMin(), head)


class PlainClip:
    """Per-sample clipping as a user may write it: one block, float64, every row by `vmap`."""

    unit = Unit.RECORD
    max_norm = 0.1

    def __call__(self, model, loss, batch) -> BoundedGradient:
        parameters = dict(model.named_parameters())
        sizes = [p.numel() for p in parameters.values()]
        rows = torch.zeros(0, sum(sizes), dtype=torch.float64)
        if len(batch):
            rows = self.gradients(model, loss, parameters, batch)
        if batch.mask is not None:
            rows = rows[batch.mask]
        total = self.total(self.clipped(rows))
        sums = [s.view_as(p) for s, p in zip(total.split(sizes), parameters.values(), strict=True)]
        block = Block(tuple(parameters), tuple(parameters.values()), tuple(sums), self.max_norm)
        return BoundedGradient((block,), divisor=batch.divisor)

    def gradients(self, model, loss, parameters, batch) -> Tensor:
        def of_one(values, x, y):
            return loss(functional_call(model, values, (x[None],)), y[None]).sum()

        values = {name: p.detach().double() for name, p in parameters.items()}
        rows = vmap(grad(of_one), (None, 0, 0))(values, batch.inputs.double(), batch.targets)
        return torch.cat([rows[name].flatten(1) for name in parameters], dim=1)

    def clipped(self, rows: Tensor) -> Tensor:
        norms = rows.norm(dim=1, keepdim=True)
        scaled = rows * (self.max_norm / norms.clamp_min(1e-12)).clamp(max=1.0)
        return torch.where(norms.isfinite(), scaled, 0.0)

    def total(self, rows: Tensor) -> Tensor:
        return rows.sum(dim=0)
