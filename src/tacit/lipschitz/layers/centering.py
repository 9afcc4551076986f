"""Centring over a record's own numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tacit.lipschitz.axes import own_axes
from tacit.lipschitz.bounds import Parameterless


class LayerCentering(nn.Module, Parameterless):
    """x − mean(x) over some of a record's own axes, all of them by default.

    I − 11ᵀ/n is symmetric and its own square: an orthogonal projection, of norm 1  [clipless
    paper, Prop. 4]. Over the batch axis it would be no layer of one record at all, and one record
    would move everyone's gradient; that is refused.
    """

    def __init__(self, axes: int | Sequence[int] | None = None) -> None:
        super().__init__()
        chosen = (axes,) if isinstance(axes, int) else axes
        self.axes = None if chosen is None else tuple(chosen)
        if self.axes is not None and 0 in self.axes:
            own_axes(self.axes, 2, "LayerCentering")  # refuses in words

    def forward(self, x: Tensor) -> Tensor:
        chosen = range(1, x.dim()) if self.axes is None else self.axes
        axes = own_axes(chosen, x.dim(), "LayerCentering")
        return x - x.mean(dim=axes, keepdim=True) if axes else x

    def extra_repr(self) -> str:
        return "all axes" if self.axes is None else f"{self.axes}"
