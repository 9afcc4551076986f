"""Modules that hide several linear layers, run in the open so that each of these can be seen.

A fused attention or recurrence does not tell the gradients inside it. Written out, its parameters
act through products y = x Wᵀ + c alone, whose per-record gradients are those of a linear layer:
∂/∂W = Σ_t δ_t x_tᵀ and ∂/∂c = Σ_t δ_t, with δ the gradient at y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.queries.engines.linear import outer_products
from tacit.queries.engines.precision import wide
from tacit.queries.engines.rows import RecordGradients, Stacked


@dataclass
class _Product:
    """One y = x Wᵀ + c, by the names of W and c and the part of their rows that it uses."""

    weight: str
    bias: str
    weight_rows: slice
    bias_rows: slice
    uses: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Products:
    """The products of one call of a module, as it runs; x has three dimensions, records first."""

    def __init__(self, module: nn.Module, made_differentiable: Callable[[Tensor], Tensor]) -> None:
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.made_differentiable = made_differentiable
        self._products: dict[tuple[object, ...], _Product] = {}
        self._constants: list[tuple[str, Tensor]] = []

    def __call__(
        self,
        x_BTD: Tensor,
        weight: str,
        bias: str,
        weight_rows: slice = slice(None),
        bias_rows: slice = slice(None),
    ) -> Tensor:
        """x Wᵀ + c; of some rows of W and c only, where they are several layers' in one."""
        w, c = self.parameters[weight][weight_rows], self.parameters.get(bias)
        y = self.made_differentiable(F.linear(x_BTD, w, None if c is None else c[bias_rows]))
        key = (weight, bias, weight_rows.start, bias_rows.start)
        product = self._products.setdefault(key, _Product(weight, bias, weight_rows, bias_rows))
        product.uses.append((x_BTD.detach(), y))
        return y

    def constant(self, name: str, batch: int) -> Tensor:
        """A parameter of shape (1, …) as it is, once a record."""
        parameter = self.parameters[name]
        expanded = self.made_differentiable(parameter.expand(batch, *parameter.shape[1:]))
        self._constants.append((name, expanded))
        return expanded

    def inputs(self) -> list[Tensor]:
        return [x for product in self._products.values() for x, _ in product.uses]

    def places(self) -> list[Tensor]:
        """Where gradients must arrive: at every product and constant, in a fixed order."""
        made = [y for product in self._products.values() for _, y in product.uses]
        return made + [tensor for _, tensor in self._constants]

    def gradients(
        self, arrived: list[Tensor | None], wanted: set[str]
    ) -> dict[str, RecordGradients]:
        """∂/∂W and ∂/∂c of each product, from the gradients that arrived at `places`."""
        deltas = iter(
            torch.zeros_like(place) if delta is None else delta
            for place, delta in zip(self.places(), arrived, strict=True)
        )
        parts: dict[str, list[tuple[int, RecordGradients]]] = {}
        for product in self._products.values():
            a_BTD = torch.cat([wide(x) for x, _ in product.uses], dim=1)
            b_BTP = torch.cat([wide(next(deltas)) for _ in product.uses], dim=1)
            if product.weight in wanted:
                place = product.weight_rows.start or 0
                parts.setdefault(product.weight, []).append((place, outer_products(a_BTD, b_BTP)))
            if product.bias in wanted:
                place = product.bias_rows.start or 0
                parts.setdefault(product.bias, []).append((place, Stacked(b_BTP.sum(dim=1))))
        for name, _ in self._constants:
            rows = wide(next(deltas)).unsqueeze(1)
            if name in wanted:
                parts[name] = [(0, Stacked(rows))]
        return {name: _joined(found) for name, found in parts.items()}


@dataclass
class Joined:
    """Gradients of a parameter whose first dimension is cut into parts."""

    parts: list[RecordGradients]

    def squares(self) -> Tensor:
        return torch.stack([part.squares() for part in self.parts]).sum(dim=0)

    def total(self, scale_B: Tensor) -> Tensor:
        return torch.cat([part.total(scale_B) for part in self.parts])

    def rows(self) -> Tensor:
        return torch.cat([part.rows() for part in self.parts], dim=1)


def _joined(found: list[tuple[int, RecordGradients]]) -> RecordGradients:
    ordered = [part for _, part in sorted(found, key=lambda pair: pair[0])]
    return ordered[0] if len(ordered) == 1 else Joined(ordered)
