"""A linear layer whose weight is bounded in the Frobenius norm."""

from __future__ import annotations

import math

import torch

from tacit.lipschitz.layers.linear import SpectralLinear
from tacit.lipschitz.sets import FrobeniusBall


class FrobeniusLinear(SpectralLinear):
    """y = Wx + c on the last axis, with ‖W‖_F ≤ max_norm and ‖c‖ ≤ max_bias.

    ‖W‖₂ ≤ ‖W‖_F, so all of `SpectralLinear`'s bounds hold. The certificate is one sum of squares,
    and for one output the two norms are the same: the layer for a single logit. For many outputs
    the ball is much smaller, since all singular values share one budget.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        max_norm: float = 1.0,
        max_bias: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            max_norm=max_norm,
            max_bias=max_bias,
            within=FrobeniusBall,
            device=device,
            dtype=dtype,
        )
        with torch.no_grad():
            # Orthogonal so far: min(m, n) singular values of max_norm.
            self.weight /= math.sqrt(min(in_features, out_features))
