"""The limits that a layer's sets are built with."""

from __future__ import annotations

import math


def require_limits(layer: object, max_norm: float, max_bias: float) -> None:
    """A negative limit would make a bound smaller than what it bounds."""
    kind = type(layer).__name__
    if not 0 < max_norm < math.inf:
        raise ValueError(f"{kind}: max_norm is {max_norm}; give a finite number above 0")
    if not 0 <= max_bias < math.inf:
        raise ValueError(f"{kind}: max_bias is {max_bias}; give a finite number of at least 0")
