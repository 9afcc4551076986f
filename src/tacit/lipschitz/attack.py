"""Attacks on a module: gradient ascent against a bound, and neighbours against isolation.

Ascent is over inputs, cotangents and feasible weights, in float64. Records are added, removed and
replaced to see whether one of them touches another. `audit` compares the results with claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tacit.lipschitz.projection import project


@dataclass
class Points:
    """Rows of points that ascent moves, in a ball of `radius` or on the unit sphere."""

    rows: Tensor
    radius: float
    sphere: bool
    generator: torch.Generator

    def move(self, uphill: Tensor | None, stride: float, wander: bool) -> None:
        """A normalised step along the gradient; on the sphere, straight to its direction.

        Cotangents are on the sphere, and the value is convex in them (the norm of a linear image):
        moving to the normalised gradient is power iteration, which only ever rises.
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
            # A gradient of 0 is common for piecewise linear functions: try another piece.
            fresh = torch.randn(flat.shape, generator=self.generator, dtype=flat.dtype)
            fresh = fresh * flat.norm(dim=1, keepdim=True) / fresh.norm(dim=1, keepdim=True)
            moved = torch.where(length > 0, moved, fresh)
        self.rows = moved.reshape(self.rows.shape)


def start_points(
    shape: Sequence[int], radius: float, rows: int, generator: torch.Generator, sphere: bool = False
) -> Points:
    """A constant, a single entry, alternating signs, and random rows: typical extreme points.

    In a ball one row is well inside and one at 0, where functions can be steepest or undefined.
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

    `values` gives one number per row. In the first half all rows climb, in the second the best one
    alone, so that the weights, which rows share, serve it. Weights are projected after each step.
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
        # Not differentiable twice: a constant, or a backward pass of its own. The points wander.
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
    """Replace the weights by other feasible ones: large random ones, projected."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.copy_(10 * torch.randn(weight.shape, generator=generator))
    project(model)


RECORDS = 6
SIZES = (1, 2, 3, 7)
_ROUNDING = 1e-9


def same_draws(module: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    """module(x) with the same random numbers each time; the caller's generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # A copy: a module may write into its input.
        output: Tensor = module(x.clone())
    return output


def find_faults(
    module: nn.Module, records: Tensor, replacement: Tensor, backwards: bool = True
) -> list[str]:
    """In words, every way in which one record was seen to touch another.

    `records` are distinct, and `replacement` is one record unlike them. The values and cotangents
    of the others must stay, and so must buffers; the gradient of a sum must be the sum of
    gradients. Cotangents of the inputs need not be finite unless `backwards`.
    """
    faults: list[str] = []
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    random = _differ(same_draws(module, records, 1), same_draws(module, records, 2))
    changes = {"replacing": torch.cat((records[:-1], replacement))}
    # Another batch size draws other random numbers, so nothing can be compared.
    if not random:
        changes |= {"removing": records[:-1], "adding": torch.cat((records, replacement))}
    values, cotangents = _pass(module, records)
    if not values.isfinite().all():
        faults.append("a finite record has an output that is not finite")
    if backwards and not cotangents.isfinite().all():
        faults.append("a finite record has a cotangent that is not finite")
    for verb, changed in changes.items():
        kept = len(records) if verb == "adding" else len(records) - 1
        new_values, new_cotangents = _pass(module, changed)
        if _differ(new_values[:kept], values[:kept]):
            faults.append(f"{verb} a record changes the outputs of the others")
        if _differ(new_cotangents[:kept], cotangents[:kept]):
            faults.append(f"{verb} a record changes the cotangents of the others")
    if not random:
        faults += _faults_by_size(module, torch.cat((records, replacement)))
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, before[name]):
            faults.append(f"buffer {name!r} depends on the records it saw, which releases them")
    if _lengthens_its_input(module, records):
        faults.append("it writes something longer over its input, which others may read")
    return faults


def _faults_by_size(module: nn.Module, rows: Tensor) -> list[str]:
    """A forward may read the number of records: 1, 2, 3 and 7 of the same ones must agree."""
    faults: list[str] = []
    values, cotangents = _pass(module, rows)
    alone = [_parameter_gradient(module, row.unsqueeze(0)) for row in rows]
    for size in SIZES:
        some_values, some_cotangents = _pass(module, rows[:size])
        if _differ(some_values, values[:size]):
            faults.append(f"{size} records have other outputs than the same among {len(rows)}")
        if _differ(some_cotangents, cotangents[:size]):
            faults.append(f"{size} records have other cotangents than the same among {len(rows)}")
        expected = torch.stack(alone[:size]).sum(dim=0)
        if _differ(_parameter_gradient(module, rows[:size]), expected):
            faults.append(f"the gradient of {size} records is not the sum of their gradients")
    return faults


def find_differences(module: nn.Module, program: nn.Module, rows: Tensor) -> list[str]:
    """In words, where a module differs from the program that is bounded and trained."""
    differences = []
    for size in SIZES:
        some = rows[:size]
        pairs = [*zip(_pass(module, some), _pass(program, some), strict=True)]
        parameters = [p for p in module.parameters() if p.requires_grad]
        gradients = [_parameter_gradient(m, some, parameters) for m in (module, program)]
        if any(_differ(one, other) for one, other in [*pairs, gradients]):
            differences.append(f"for {size} records its forward is not the program that is bounded")
    return differences


def _pass(module: nn.Module, records: Tensor) -> tuple[Tensor, Tensor]:
    x = records.clone().requires_grad_(True)
    y = same_draws(module, x)
    if not y.requires_grad:
        return y, torch.zeros_like(x)
    (cotangents,) = torch.autograd.grad(_weighted(y), x, allow_unused=True)
    return y.detach(), torch.zeros_like(x) if cotangents is None else cotangents


def _weighted(y: Tensor) -> Tensor:
    """Σ_i ⟨g, y_i⟩ with the same cotangent g for each record."""
    weights = torch.linspace(-1, 1, max(y[0].numel(), 1), dtype=y.dtype).cos()
    return (y.flatten(1) * weights).sum()


def _parameter_gradient(
    module: nn.Module, rows: Tensor, parameters: Sequence[Tensor] | None = None
) -> Tensor:
    """The gradient of Σ_i ⟨g, y_i⟩ in all trainable parameters, as one vector."""
    chosen = parameters or [p for p in module.parameters() if p.requires_grad]
    total = _weighted(same_draws(module, rows))
    if not (chosen and total.requires_grad):
        return torch.zeros(1)
    each = zip(torch.autograd.grad(total, chosen, allow_unused=True), chosen, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in each])


def _lengthens_its_input(module: nn.Module, records: Tensor) -> bool:
    given = records.clone()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        module(given)
    after, before = (rows.flatten(1).norm(dim=1) for rows in (given, records))
    return bool((after > before * (1 + _ROUNDING) + _ROUNDING).any())


def _differ(a: Tensor, b: Tensor) -> bool:
    """Whether they differ by more than rounding. Values that are not finite are another fault."""
    if a.shape != b.shape:
        return True
    a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
    size = torch.maximum(a.abs(), b.abs()).max() if a.numel() else torch.zeros(())
    return bool(((a - b).abs() > _ROUNDING * size).any())
