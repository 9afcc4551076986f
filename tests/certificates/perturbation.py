"""Attacks on certified decisions: gradient ascent on a rival class within an L2 ball."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def flipped(
    f: Callable[[Tensor], Tensor], inputs: Tensor, radii_B: Tensor, steps: int = 40, seed: int = 0
) -> Tensor:
    """Which records some δ with ‖δ‖ ≤ radius moves to another class; f must be in float64.

    Every class is the rival in turn. Steps go straight up the gap's gradient, and after each the
    point is put back into the ball; half of the starts are random points of it.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        decided = decide(f(inputs))
        num_outputs = scores(f(inputs)).shape[1]
    found = torch.zeros(len(inputs), dtype=torch.bool)
    rivals = [-1] if num_outputs == 1 else list(range(num_outputs))
    for rival in rivals:
        for start in (0.0, 1.0):
            noise = torch.randn(inputs.shape, generator=generator, dtype=torch.float64)
            delta = into_ball(start * noise, radii_B)
            for step in range(steps):
                delta.requires_grad_(True)
                z = scores(f(inputs + delta))
                gap = (
                    z.squeeze(1) * (1 - 2 * decided) if rival < 0 else z[:, rival] - own(z, decided)
                )
                (uphill,) = torch.autograd.grad(gap.sum(), delta)
                norms = uphill.flatten(1).norm(dim=1).clamp_min(1e-300)
                ahead = uphill / rows(norms, uphill) * rows(radii_B, uphill)
                size = 2.0 if step == 0 and not start else 1.0 / (1 + step / 4)
                delta = into_ball((delta + size * ahead).detach(), radii_B)
                with torch.no_grad():
                    found |= decide(f(inputs + delta)) != decided
    return found


def scores(outputs: Tensor) -> Tensor:
    return outputs.unsqueeze(1) if outputs.dim() == 1 else outputs


def decide(outputs: Tensor) -> Tensor:
    z = scores(outputs)
    return (z[:, 0] > 0).long() if z.shape[1] == 1 else z.argmax(dim=1)


def own(z: Tensor, decided: Tensor) -> Tensor:
    return z.gather(1, decided[:, None]).squeeze(1)


def rows(values_B: Tensor, like: Tensor) -> Tensor:
    return values_B.reshape((-1,) + (1,) * (like.dim() - 1))


def into_ball(delta: Tensor, radii_B: Tensor) -> Tensor:
    norms = delta.flatten(1).norm(dim=1)
    scale = (radii_B / norms.clamp_min(1e-300)).clamp(max=1.0)
    return (delta * rows(scale, delta)).detach()
