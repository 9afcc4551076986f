"""Skip connections around a module f of the same input and output shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tacit.lipschitz.bounds import Bound, Pullback, Walk
from tacit.lipschitz.cotangents import clips_cotangents
from tacit.lipschitz.projection import Constraint
from tacit.lipschitz.refused import Refused
from tacit.lipschitz.sets import SLACK, FrobeniusBall


class Residual(nn.Module):
    """y = x + f(x). F and B are what f makes of the norm X and of the cotangent G.

    ‖y‖ ≤ X + F;  ‖(I + J_f)ᵀg‖ ≤ G + B;  f gets the cotangent G. For an L-Lipschitz f that is a
    Lipschitz constant of 1 + L, which doubles with each block: see `AverageResidual`.
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        _require_same(x.shape, y.shape, self)
        return x + y

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        y, back = walk("f", x)
        _require_same(x.shape, y.shape, self)
        return Bound(x.norm + y.norm, x.shape), lambda cotangent: cotangent + back(cotangent)


class AverageResidual(nn.Module):
    """y = ½(x + f(x)): ‖y‖ ≤ ½(X + F), and f gets the cotangent ½G.

    ½‖(I + J_f)ᵀg‖ ≤ ½G + B(½G): 1-Lipschitz where f is, at any depth.
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        _require_same(x.shape, y.shape, self)
        return 0.5 * (x + y)

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        y, back = walk("f", x)
        _require_same(x.shape, y.shape, self)
        norm = 0.5 * (x.norm + y.norm)
        return Bound(norm, x.shape), lambda cotangent: 0.5 * cotangent + back(0.5 * cotangent)


class ConvexResidual(nn.Module):
    """y = a·x + (1 − a)·f(x) with a learnt share a between 0 and 1, at first ½.

    Trained is the lean b = a − ½, |b| ≤ ½, a ball around 0 like every other set:
    y = ½(x + f(x)) + b·(x − f(x)).

      output   a·X + (1 − a)·F ≤ max(X, F)
      input    a·G + B((1 − a)·G) ≤ max(G, B(G)), B being linear; if f clips cotangents it is only
               increasing, and G + B(G) is all that holds
      lean     |⟨g, x − f(x)⟩| ≤ (X + F)·G

    |b| may pass ½ by the slack of a projection, and a + |1 − a| then 1 by as much.
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.mixture = _Lean()

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        _require_same(x.shape, y.shape, self)
        mixed: Tensor = 0.5 * (x + y) + self.mixture(x - y)
        return mixed

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        y, back = walk("f", x)
        _require_same(x.shape, y.shape, self)
        _, note_lean = walk("mixture", Bound(x.norm + y.norm, x.shape))
        shared_out = clips_cotangents(self.f)

        def pull(cotangent: float) -> float:
            note_lean(cotangent)
            most = cotangent * (1 + SLACK)
            through = back(most)
            return most + through if shared_out else (1 + SLACK) * max(cotangent, through)

        return Bound(max(x.norm, y.norm) * (1 + SLACK), x.shape), pull


class _Lean(nn.Module):
    """d ↦ b·d with one number b, |b| ≤ ½; its gradient is |⟨g, d⟩| ≤ G·‖d‖."""

    def __init__(self) -> None:
        super().__init__()
        self.lean = nn.Parameter(torch.zeros(1))

    def forward(self, difference: Tensor) -> Tensor:
        return self.lean * difference

    def constraints(self) -> list[Constraint]:
        return [Constraint(self.lean, FrobeniusBall(0.5))]

    def output_norm(self, x: Bound) -> float:
        return self.lipschitz(x) * x.norm

    def lipschitz(self, x: Bound) -> float:
        return 0.5 * (1 + SLACK)

    def gradient_norms(self, x: Bound, cotangent: float) -> Mapping[str, float]:
        return {"lean": x.norm * cotangent}


def _require_same(before: tuple[int, ...], after: tuple[int, ...], layer: nn.Module) -> None:
    # Broadcasting would copy numbers, and no norm would be what it seems.
    if tuple(before) != tuple(after):
        raise Refused(
            f"{type(layer).__name__} adds its input of shape {tuple(before)} to f's output of "
            f"shape {tuple(after)}; give f the same shape on both sides"
        )
