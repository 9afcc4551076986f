"""Small operations of a traced forward, as modules with the three answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tacit.lipschitz.axes import own_axes, own_axis
from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.lipschitz.refused import Refused


class Mean(nn.Module, Parameterless):
    """The mean of m of a record's own numbers: |mean| ≤ ‖·‖/√m by Cauchy–Schwarz, so 1/√m."""

    def __init__(self, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> None:
        super().__init__()
        if dim is None or (not isinstance(dim, int) and not len(dim)):
            raise Refused("a mean over everything mixes records; name a record's own axes")
        self.axes = (dim,) if isinstance(dim, int) else tuple(dim)
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=own_axes(self.axes, x.dim(), "a mean"), keepdim=self.keepdim)

    def lipschitz(self, x: Bound) -> float:
        axes = own_axes(self.axes, len(x.shape) + 1, "a mean")
        return 1 / math.sqrt(math.prod(x.shape[axis - 1] for axis in axes))


class AddNumber(nn.Module, Parameterless):
    """x + c, one number c on all n: X + |c|·√n, 1-Lipschitz."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = float(by)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by

    def output_norm(self, x: Bound) -> float:
        return x.norm + abs(self.by) * math.sqrt(math.prod(x.shape))


class Part(nn.Module, Parameterless):
    """x[:, …] with numbers and slices: a part of each record, no number twice."""

    exact = True

    def __init__(self, index: Any) -> None:
        super().__init__()
        self.index = index if isinstance(index, tuple) else (index,)
        if self.index[0] != slice(None) or not all(map(_is_basic, self.index)):
            raise Refused(
                f"x[{index}] chooses among records, or by a tensor; begin with a full slice, "
                "x[:, …], and go on with numbers and slices"
            )

    def forward(self, x: Tensor) -> Tensor:
        return x[self.index]


class Exchange(nn.Module, Parameterless):
    """Two of a record's own axes change places."""

    exact = True

    def __init__(self, dim0: int, dim1: int) -> None:
        super().__init__()
        self.axes = (dim0, dim1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (own_axis(axis, x.dim(), "a transposition") for axis in self.axes)
        return x.transpose(first, second)


class Total(nn.Module, Parameterless):
    """A sum that was bounded already, on its way to be rounded."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _is_basic(index: Any) -> bool:
    if isinstance(index, slice):
        return all(end is None or type(end) is int for end in (index.start, index.stop, index.step))
    # A bool is an int to Python and a mask to PyTorch.
    return index is None or index is Ellipsis or type(index) is int
