"""Downsampling that loses nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tacit.lipschitz.bounds import Parameterless
from tacit.lipschitz.refused import Refused


class SpaceToDepth(nn.Module, Parameterless):
    """Blocks of s₁ × … × s_r pixels become channels: a permutation, so every norm is kept.

    (B, C, n₁, …) to (B, C·s₁⋯s_r, n₁/s₁, …), in the order of `torch.nn.PixelUnshuffle`
    [Jacobsen 2018]. Downsamples without losing anything, where pooling and strides do.
    """

    exact = True

    def __init__(self, block: int | Sequence[int], dims: int = 2) -> None:
        super().__init__()
        self.block = (block,) * dims if isinstance(block, int) else tuple(block)

    def forward(self, x: Tensor) -> Tensor:
        sizes = x.shape[2:]
        if any(n % s for n, s in zip(sizes, self.block, strict=True)):
            raise Refused(
                f"SpaceToDepth({self.block}) is given {tuple(sizes)} pixels; pad or crop them to a "
                "multiple of the block"
            )
        split = [n for size, s in zip(sizes, self.block, strict=True) for n in (size // s, s)]
        outer = range(2, 2 + 2 * len(sizes), 2)
        order = (0, 1, *(axis + 1 for axis in outer), *outer)
        parts = x.reshape(*x.shape[:2], *split).permute(order)
        return parts.flatten(1, 1 + len(sizes))

    def extra_repr(self) -> str:
        return f"{self.block}"
