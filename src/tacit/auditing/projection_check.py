"""Are the weights of a Lipschitz network where its bounds assume them to be, after projecting?

A bound holds for weights in their sets, and a projection certifies that they are there. A
certificate from below, such as a few steps of power iteration, does not: weights exist for which it
sees much too small a norm. Here layers get such weights and are projected; then their true gain is
measured. It is measured from below as well, so what is found above a claim is above it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tacit.auditing.replay import few
from tacit.auditing.verdicts import Verdict, largest_of, ratio_of
from tacit.lipschitz.bounds import Bound
from tacit.lipschitz.projection import constraints_of, enforce, project
from tacit.lipschitz.sets import SLACK, FrobeniusBall
from tacit.pytrees import call_model
from tacit.records import as_records

_STEPS, _STARTS = 150, 4


def check_projection(model: nn.Module, records: object, *, seed: int = 0) -> Verdict:
    """Attack the sets of constrained weights: fill, project, and measure what a layer can do.

    Weights are filled with random numbers, with one strong direction that is orthogonal to the
    present ones and to constants, and with singular values that lie close together. Then come
    `tacit.project`, or what a query does by itself (`enforce`). Works on a copy in float64.

    `ratios` have the measured gain of each layer over its claimed Lipschitz constant, and the norms
    of biases over theirs.

        check_projection(model, train).require()
    """
    some = few(as_records(records), 2)
    twin = copy.deepcopy(model).to("cpu", torch.float64).eval()
    some = some.to("cpu", torch.float64)
    shapes = dict(_input_shapes(twin, some.inputs))
    generator = torch.Generator().manual_seed(seed)
    ratios: dict[str, float] = {}
    worst: dict[str, str] = {}
    tried = 0
    for words, fill in _FILLS.items():
        for apply in (project, enforce):
            with torch.no_grad():
                for constraint in constraints_of(twin):
                    fill(constraint.parameter, generator)
            apply(twin)
            tried += 1
            for name, reached, claimed in _gains(twin, shapes, generator):
                ratio = ratio_of(reached, claimed)
                if ratio > max(1 + 1e-6, ratios.get(name, 0.0)):
                    worst[name] = (
                        f"after tacit.lipschitz.{apply.__name__}, weights {words} give {name} "
                        f"{reached:.6g}, {ratio:.4g} times the {claimed:.6g} that its bounds "
                        "assume; certify norms from above (tacit.lipschitz.sets)"
                    )
                ratios = largest_of([*ratios.items(), (name, ratio)])
    compared = f"{len(shapes)} layers with {tried} weights each, measured gain / claimed constant"
    return Verdict("projection", compared, ratios, tuple(worst.values()))


def _input_shapes(model: nn.Module, inputs: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shape of one record where it enters each constrained layer."""
    found: dict[str, tuple[int, ...]] = {}
    hooks = []
    for name, layer in model.named_modules():
        if hasattr(type(layer), "constraints") and hasattr(layer, "lipschitz"):

            def note(_: nn.Module, given: Any, name: str = name) -> None:
                found.setdefault(name, tuple(given[0].shape[1:]))

            hooks.append(layer.register_forward_pre_hook(note))
    with torch.no_grad():
        call_model(model, inputs)
    for hook in hooks:
        hook.remove()
    yield from found.items()


def _gains(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], generator: torch.Generator
) -> Iterator[tuple[str, float, float]]:
    for name, shape in shapes.items():
        layer: Any = model.get_submodule(name)
        claimed = float(layer.lipschitz(Bound(1.0, shape)))
        yield f"layer {name!r} a gain of", _gain(layer, shape, generator), claimed
    for constraint in constraints_of(model):
        if isinstance(constraint.within, FrobeniusBall):
            limit = constraint.within.max_norm * (1 + SLACK)
            norm = float(constraint.parameter.detach().norm())
            yield "a bias or weight a norm of", norm, limit


def _gain(layer: nn.Module, shape: tuple[int, ...], generator: torch.Generator) -> float:
    """‖J‖ from below: power iteration on JᵀJ from several points, through the layer itself."""
    x = torch.randn(_STARTS, *shape, generator=generator, dtype=torch.float64)
    zero = torch.zeros_like(x)
    best = 0.0
    for _ in range(_STEPS):
        lengths = x.flatten(1).norm(dim=1).clamp_min(1e-300)
        x = (x / lengths.view(-1, *(1 for _ in shape))).requires_grad_(True)
        moved = layer(x) - layer(zero).detach()
        gains = moved.flatten(1).norm(dim=1)
        best = max(best, float(gains.detach().max()))
        (x,) = torch.autograd.grad(moved.square().sum() / 2, x)
    return best


def _random(weight: Tensor, generator: torch.Generator) -> None:
    weight.copy_(10 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))


def _one_direction(weight: Tensor, generator: torch.Generator) -> None:
    """Nearly rank one; the direction has mean zero and is orthogonal to the present weight's."""
    matrix = weight.reshape(len(weight), -1)
    right = torch.randn(matrix.shape[1], generator=generator, dtype=torch.float64)
    if len(right) > 2:
        known = torch.linalg.svd(matrix, full_matrices=False)[2][:1]
        span = torch.linalg.qr(torch.cat([torch.ones(1, len(right)).to(right), known]).T)[0]
        right = right - span @ (span.T @ right)
    left = torch.randn(len(weight), generator=generator, dtype=torch.float64)
    spike = torch.outer(left / left.norm(), right / right.norm().clamp_min(1e-300))
    weight.copy_((5 * spike + 0.01 * matrix).reshape(weight.shape))


def _crowded(weight: Tensor, generator: torch.Generator) -> None:
    """Singular values from 2.9 to 3: power iteration takes hundreds of steps to the largest."""
    drawn = torch.randn(len(weight), weight[0].numel(), generator=generator, dtype=torch.float64)
    u, values, v = torch.linalg.svd(drawn, full_matrices=False)
    values = torch.linspace(2.9, 3.0, len(values), dtype=torch.float64)
    weight.copy_((u * values @ v).reshape(weight.shape))


_FILLS: dict[str, Callable[[Tensor, torch.Generator], None]] = {
    "at random": _random,
    "with one strong direction": _one_direction,
    "with singular values close together": _crowded,
}
