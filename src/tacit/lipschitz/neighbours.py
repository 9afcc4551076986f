"""Does a module treat each record by itself? Asked by adding, removing and replacing records."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

RECORDS = 6
SIZES = (1, 2, 3, 7)
_ROUNDING = 1e-9


def same_draws(module: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    """module(x) with the same random numbers each time, and the caller's left as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # A copy: a module may write into its input.
        found: Tensor = module(x.clone())
    return found


def find_faults(
    module: nn.Module, records: Tensor, replacement: Tensor, backwards: bool = True
) -> list[str]:
    """In words, every way in which one record was seen to touch another.

    `records` are distinct; `replacement` is one record unlike them. Values and cotangents of the
    others must stay, buffers must too, and the gradient of a sum must be the sum of gradients.
    Cotangents of the inputs need not be finite unless `backwards`.
    """
    found: list[str] = []
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    random = _differ(same_draws(module, records, 1), same_draws(module, records, 2))
    changes = {"replacing": torch.cat((records[:-1], replacement))}
    # Another size of batch draws other random numbers, so that nothing can be compared.
    if not random:
        changes |= {"removing": records[:-1], "adding": torch.cat((records, replacement))}
    values, cotangents = _pass(module, records)
    if not values.isfinite().all():
        found.append("a finite record has an output that is not finite")
    if backwards and not cotangents.isfinite().all():
        found.append("a finite record has a cotangent that is not finite")
    for verb, changed in changes.items():
        kept = len(records) if verb == "adding" else len(records) - 1
        new_values, new_cotangents = _pass(module, changed)
        if _differ(new_values[:kept], values[:kept]):
            found.append(f"{verb} a record changes the outputs of the others")
        if _differ(new_cotangents[:kept], cotangents[:kept]):
            found.append(f"{verb} a record changes the cotangents of the others")
    if not random:
        found += _faults_by_size(module, torch.cat((records, replacement)))
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, before[name]):
            found.append(f"buffer {name!r} remembers the records it saw, which releases them")
    if _lengthens_its_input(module, records):
        found.append("it writes something longer over its input, which others may read")
    return found


def _faults_by_size(module: nn.Module, rows: Tensor) -> list[str]:
    """A forward may look at the number of records: 1, 2, 3 and 7 of the same ones are alike."""
    found: list[str] = []
    values, cotangents = _pass(module, rows)
    alone = [_parameter_gradient(module, row.unsqueeze(0)) for row in rows]
    for size in SIZES:
        some_values, some_cotangents = _pass(module, rows[:size])
        if _differ(some_values, values[:size]):
            found.append(f"{size} records have other outputs than the same among {len(rows)}")
        if _differ(some_cotangents, cotangents[:size]):
            found.append(f"{size} records have other cotangents than the same among {len(rows)}")
        expected = torch.stack(alone[:size]).sum(dim=0)
        if _differ(_parameter_gradient(module, rows[:size]), expected):
            found.append(f"the gradient of {size} records is not the sum of their gradients")
    return found


def find_differences(module: nn.Module, program: nn.Module, rows: Tensor) -> list[str]:
    """In words, where a module is not the program that was compiled from it.

    The program is what is bounded and trained. A module that computes something else is not what
    was trained, once it is used.
    """
    found = []
    for size in SIZES:
        some = rows[:size]
        pairs = [*zip(_pass(module, some), _pass(program, some), strict=True)]
        parameters = [p for p in module.parameters() if p.requires_grad]
        gradients = [_parameter_gradient(m, some, parameters) for m in (module, program)]
        if any(_differ(one, other) for one, other in [*pairs, gradients]):
            found.append(f"for {size} records its forward is not the program that is bounded")
    return found


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
    """Of Σ_i ⟨g, y_i⟩, for all trainable parameters end to end."""
    chosen = (
        [p for p in module.parameters() if p.requires_grad] if parameters is None else parameters
    )
    total = _weighted(same_draws(module, rows))
    if not (chosen and total.requires_grad):
        return torch.zeros(1)
    found = torch.autograd.grad(total, chosen, allow_unused=True)
    each = zip(found, chosen, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in each])


def _lengthens_its_input(module: nn.Module, records: Tensor) -> bool:
    given = records.clone()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        module(given)
    after, before = (rows.flatten(1).norm(dim=1) for rows in (given, records))
    return bool((after > before * (1 + _ROUNDING) + _ROUNDING).any())


def _differ(a: Tensor, b: Tensor) -> bool:
    """By more than rounding; what is not finite is another fault."""
    if a.shape != b.shape:
        return True
    a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
    size = torch.maximum(a.abs(), b.abs()).max() if a.numel() else torch.zeros(())
    return bool(((a - b).abs() > _ROUNDING * size).any())
