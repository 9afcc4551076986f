"""Gradient ascent against a bound: over inputs, cotangents and feasible weights, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.lipschitz.projection import project


@dataclass
class Points:
    """Rows of points in a ball of `radius`, or on the unit sphere; where ascent may move."""

    rows: Tensor
    radius: float
    sphere: bool
    generator: torch.Generator

    def move(self, uphill: Tensor | None, stride: float, wander: bool) -> None:
        """A normalised step up. On the sphere, straight to where the gradient points.

        Cotangents are on the sphere, and what is maximised is convex in them (the norm of a linear
        image): going to the normalised gradient is power iteration, which only ever rises.
        """
        flat = self.rows.detach().flatten(1)
        up = torch.zeros_like(flat) if uphill is None else uphill.flatten(1).nan_to_num(0.0)
        length = up.norm(dim=1, keepdim=True)
        ahead = torch.where(length > 0, up / length.clamp_min(1e-300), 0.0)
        if self.sphere:
            moved = torch.where(length > 0, ahead, flat)
        else:
            reach = flat.norm(dim=1, keepdim=True) if math.isinf(self.radius) else self.radius
            moved = flat + stride * reach * ahead
            norms = moved.norm(dim=1, keepdim=True).clamp_min(1e-300)
            moved = moved * (self.radius / norms).clamp(max=1.0)
        if wander:
            # Piecewise linear functions have no way up: try another piece.
            fresh = torch.randn(flat.shape, generator=self.generator, dtype=flat.dtype)
            fresh = fresh * flat.norm(dim=1, keepdim=True) / fresh.norm(dim=1, keepdim=True)
            moved = torch.where(length > 0, moved, fresh)
        self.rows = moved.reshape(self.rows.shape)


def start_points(
    shape: Sequence[int], radius: float, rows: int, generator: torch.Generator, sphere: bool = False
) -> Points:
    """Constant, a single number, a chequer of signs, and random: most bounds have one as extreme.

    In a ball one row is well inside and one at 0: functions can be steepest there, or undefined.
    """
    n = math.prod(shape)
    start = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    patterns = (torch.ones(n), torch.arange(n) == n // 2, (-1.0) ** torch.arange(n))
    for row, pattern in zip(start, patterns, strict=False):
        row.copy_(pattern)
    start /= start.norm(dim=1, keepdim=True)
    if not sphere:
        sizes = (1.0, 1.0, 1.0, 1.0, 0.3, 0.0) if math.isfinite(radius) else (1, 10, 0.1, 100)
        scale = torch.tensor([sizes[i % len(sizes)] for i in range(rows)], dtype=torch.float64)
        start *= scale[:, None] * (radius if math.isfinite(radius) else 1.0)
    return Points(start.reshape(rows, *shape), radius, sphere, generator)


def climb(
    values: Callable[..., Tensor], points: Sequence[Points], model: nn.Module, steps: int
) -> float:
    """The largest value reached; NaN or ∞ if one appears.

    `values` gives one number a row. At first all rows climb, at last the best one alone, so that
    the weights, which rows share, serve it. Weights are projected after each of their steps.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    best = 0.0
    for step in range(steps):
        for p in points:
            p.rows.requires_grad_(True)
        found = values(*(p.rows for p in points))
        reached = found.detach()
        if not reached.isfinite().all():
            return float(reached[~reached.isfinite()][0])
        best = max(best, float(reached.max()))
        goal = found.sum() if 2 * step < steps else found.max()
        uphill = _gradients(goal, [*(p.rows for p in points), *weights])
        stride = 1 - step / steps
        for p, up in zip(points, uphill, strict=False):
            p.move(up, stride, wander=3 * step < steps)
        if weights and step % 2:
            _move_weights(model, weights, uphill[len(points) :], stride)
    return best


def _gradients(goal: Tensor, of: list[Tensor]) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(goal, of, allow_unused=True)
    except RuntimeError:
        # Not differentiable once more: a constant, or a backward pass of its own. Points wander.
        return [None] * len(of)


def _move_weights(
    model: nn.Module, weights: list[nn.Parameter], uphill: Sequence[Tensor | None], stride: float
) -> None:
    with torch.no_grad():
        for weight, up in zip(weights, uphill, strict=True):
            length = 0.0 if up is None else float(up.norm())
            if up is not None and 0 < length < math.inf:
                weight.add_(up * weight.norm().clamp_min(0.1), alpha=stride / length)
    project(model)


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Other feasible weights: large random ones, projected."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.copy_(10 * torch.randn(weight.shape, generator=generator))
    project(model)
