"""Skip connections, and modules side by side on one input.

F and B(G) stand for the norm of a branch's output and of the cotangent that it sends back for G.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from tacit.errors import Refused
from tacit.lipschitz.bounds import Bound, Layer, Pullback, Walk, clips_cotangents, own_axis
from tacit.lipschitz.projection import Constraint
from tacit.lipschitz.sets import SLACK, FrobeniusBall


class _Branches(nn.Module):
    def __init__(self, branches: Iterable[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        if not len(self.branches):
            kind = type(self).__name__
            raise ValueError(f"{kind} of no branches; give it at least one module")

    def _walk_branches(self, x: Bound, walk: Walk) -> tuple[list[Bound], list[Pullback]]:
        walked = [walk(f"branches.{i}", x) for i in range(len(self.branches))]
        return [y for y, _ in walked], [back for _, back in walked]


class Sum(_Branches):
    """y = Σ_b f_b(x): ‖y‖ ≤ Σ_b F_b; each branch gets the cotangent G; the input Σ_b B_b(G)."""

    def forward(self, x: Tensor) -> Tensor:
        return functools.reduce(torch.add, [branch(x) for branch in self.branches])

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        outputs, backs = self._walk_branches(x, walk)
        for y in outputs:
            require_one_shape(outputs[0], y)

        def pull(cotangent: float) -> float:
            return math.fsum(back(cotangent) for back in backs)

        return Bound(math.fsum(y.norm for y in outputs), outputs[0].shape), pull


class Concatenate(_Branches):
    """y = (f_1(x), f_2(x), …) along one axis, by default that of the channels.

      output   ‖y‖² = Σ_b ‖f_b(x)‖² ≤ Σ_b F_b²
      branch   the cotangent splits in the same way, Σ_b ‖g_b‖² ≤ G², so each gets at most G
      input    Σ_b B_b(‖g_b‖) = Σ_b L_b‖g_b‖ ≤ (Σ_b L_b²)^(1/2)·G = (Σ_b B_b(G)²)^(1/2)

    The last line takes B_b to be linear. A branch that clips cotangents at C ≪ G can send back
    all of B_b(G) for a small share of G, every such branch at once; then Σ_b B_b(G).
    """

    def __init__(self, branches: Iterable[nn.Module], axis: int = 1) -> None:
        super().__init__(branches)
        self.axis = int(axis)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [branch(x) for branch in self.branches]
        return torch.cat(outputs, dim=own_axis(self.axis, outputs[0].dim(), "Concatenate"))

    def extra_repr(self) -> str:
        return f"axis={self.axis}"

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        outputs, backs = self._walk_branches(x, walk)
        clips = clips_cotangents(self.branches)

        def pull(cotangent: float) -> float:
            parts = [back(cotangent) for back in backs]
            return math.fsum(parts) if clips else math.hypot(*parts)

        return concatenated(outputs, self.axis), pull


def concatenated(bounds: Sequence[Bound], axis: int) -> Bound:
    """One record's tensors along `axis`, the batch being axis 0: the squares of norms add up."""
    shapes = [bound.shape for bound in bounds]
    own = own_axis(axis, len(shapes[0]) + 1, "concatenation") - 1
    around = {(*shape[:own], *shape[own + 1 :]) for shape in shapes}
    if len(around) != 1 or len({len(shape) for shape in shapes}) != 1:
        raise Refused(f"shapes {shapes} cannot be concatenated along axis {own + 1}")
    total = sum(shape[own] for shape in shapes)
    shape = (*shapes[0][:own], total, *shapes[0][own + 1 :])
    return Bound(math.hypot(*(bound.norm for bound in bounds)), shape)


def require_one_shape(a: Bound, b: Bound) -> None:
    """Broadcasting would copy numbers, and the norms would be others."""
    if a.shape != b.shape:
        raise Refused(
            f"it adds records of shapes {a.shape} and {b.shape}; broadcasting copies numbers and "
            "is not followed, so give both the same shape"
        )


class _Skip(nn.Module):
    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def _walk_branch(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        y, back = walk("f", x)
        require_one_shape(x, y)
        return y, back


class Residual(_Skip):
    """y = x + f(x): ‖y‖ ≤ X + F, f gets the cotangent G, and ‖(I + J_f)ᵀg‖ ≤ G + B(G).

    For an L-Lipschitz f that is a Lipschitz constant of 1 + L, which doubles with each block: see
    `AverageResidual`.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        y, back = self._walk_branch(x, walk)
        return Bound(x.norm + y.norm, x.shape), lambda cotangent: cotangent + back(cotangent)


class AverageResidual(_Skip):
    """y = ½(x + f(x)): ‖y‖ ≤ ½(X + F), and f gets the cotangent ½G.

    ½‖(I + J_f)ᵀg‖ ≤ ½G + B(½G): 1-Lipschitz where f is, at any depth.
    """

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (x + self.f(x))

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        y, back = self._walk_branch(x, walk)
        norm = 0.5 * (x.norm + y.norm)
        return Bound(norm, x.shape), lambda cotangent: 0.5 * cotangent + back(0.5 * cotangent)


class ConvexResidual(_Skip):
    """y = a·x + (1 − a)·f(x) with a learnt share a between 0 and 1, initially ½.

    The parameter is b = a − ½, |b| ≤ ½, a ball around 0 like every other set:
    y = ½(x + f(x)) + b·(x − f(x)).

      output   a·X + (1 − a)·F ≤ max(X, F)
      input    a·G + B((1 − a)·G) ≤ max(G, B(G)), B being linear; if f clips cotangents it is only
               increasing, and G + B(G) is all that holds
      b        |⟨g, x − f(x)⟩| ≤ (X + F)·G

    |b| may pass ½ by the slack of a projection, and a + |1 − a| then 1 by as much.
    """

    def __init__(self, f: nn.Module) -> None:
        super().__init__(f)
        self.mixture = _Lean()

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        mixed: Tensor = 0.5 * (x + y) + self.mixture(x - y)
        return mixed

    def walk_bounds(self, x: Bound, walk: Walk) -> tuple[Bound, Pullback]:
        # The bounds are for a share between 0 and 1, which no other module in its place is.
        if getattr(self.mixture, "kind", type(self.mixture)) is not _Lean:
            raise Refused("its mixture was replaced; build a new ConvexResidual")
        y, back = self._walk_branch(x, walk)
        _, back_to_lean = walk("mixture", Bound(x.norm + y.norm, x.shape))
        clips = clips_cotangents(self.f)

        def pull(cotangent: float) -> float:
            back_to_lean(cotangent)
            most = cotangent * (1 + SLACK)
            through = back(most)
            return most + through if clips else (1 + SLACK) * max(cotangent, through)

        return Bound(max(x.norm, y.norm) * (1 + SLACK), x.shape), pull


class _Lean(Layer):
    """d ↦ b·d with one number b, |b| ≤ ½; its gradient is |⟨g, d⟩| ≤ G·‖d‖."""

    def __init__(self) -> None:
        super().__init__()
        self.lean = nn.Parameter(torch.zeros(1))

    def forward(self, difference: Tensor) -> Tensor:
        return self.lean * difference

    def constraints(self) -> list[Constraint]:
        return [Constraint(self.lean, FrobeniusBall(0.5))]

    def lipschitz(self, x: Bound) -> float:
        if self.lean.numel() != 1:
            raise Refused(f"its lean has {self.lean.numel()} numbers; its bounds are for one")
        return 0.5 * (1 + SLACK)

    def gradient_norms(self, x: Bound, cotangent: float) -> dict[str, float]:
        return {"lean": x.norm * cotangent}
