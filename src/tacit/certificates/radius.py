"""The L2 radius around a record within which a Lipschitz network's decision cannot change."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tacit.certificates.certifier import certifier_for
from tacit.data.scaling import Scaler


def certified_radius(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor | None = None,
    *,
    before: Scaler | Iterable[Scaler] = (),
) -> Tensor:
    """r(x) such that every x + δ with ‖δ‖₂ < r(x) is given the class of x; one number a record.

    With an L-Lipschitz network, z_y − z_k moves by at most √2·L·‖δ‖, so
        r = min_{k≠y} (z_y − z_k) / (√2·L),
    with L·‖w_y − w_k‖ in the place of √2·L where the network ends in a linear layer, and |z|/L for
    one output  [Tsuzuku 2018, Prop. 1]. L is that of the weights as they are, from above.
    A `BoundedInput` that clips is 1-Lipschitz; one that puts inputs on a sphere has no constant
    and is allowed for by angles. Where `targets` are given, the radius is 0 for a wrong decision.

    `before` are the scalers that the network's inputs went through. Then `inputs` are those
    *before* scaling, and so is the radius: pixels, say, and not deviations from a mean.
    """
    found = certifier_for(model, inputs.shape[1:], before)(inputs)
    if targets is None:
        return found.radii_B
    return torch.where(found.right(targets.to(found.radii_B.device)), found.radii_B, 0.0)
