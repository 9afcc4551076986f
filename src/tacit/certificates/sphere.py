"""Moves of a record that is then put on a sphere."""

from __future__ import annotations

import math

from torch import Tensor


def radius_before_sphere(allowed_B: Tensor, norms_B: Tensor, sphere_norm: float) -> Tensor:
    """How far u may move while X·u/‖u‖ moves by less than `allowed`.

    Let u move by δ with r = ‖δ‖ < ‖u‖. The angle between u and u + δ is at most arcsin(r/‖u‖):
    among the points at distance r, the one where the line from 0 touches the circle is the
    furthest round. Directions an angle θ apart are 2X·sin(θ/2) apart on the sphere, which grows
    with θ up to π. So the angle may be θ = 2·arcsin(min(1, allowed/2X)), and then
        r < ‖u‖·sin(min(θ, π/2)).
    Beyond π/2 the limit is ‖u‖ itself, where u + δ may be 0 and have no direction.
    """
    half = (allowed_B / (2 * sphere_norm)).clamp(max=1.0)
    angle = (2 * half.asin()).clamp(max=math.pi / 2)
    return norms_B * angle.sin()
