"""A copy of a network that is known by its weights, not only by the sets they are kept in."""

from __future__ import annotations

import math
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import nn

from tacit.lipschitz.integrity import members
from tacit.lipschitz.layers.clip_gradient import ClipGradient
from tacit.lipschitz.projection import Constrained
from tacit.lipschitz.sets import SLACK
from tacit.lipschitz.snapshot import whole


def certified_copy(module: nn.Module) -> nn.Module:
    """The module in float64 and evaluation mode, each weight's set shrunk or grown to hold it.

    It is a snapshot: what was done to an instance of a layer is refused and takes no part.

    A layer's Lipschitz constant is for all weights in its set {W : norm(W) ≤ max_norm}. A weight
    whose norm is certified to be at most n is in the set with n in the place of max_norm, so the
    same layer's answer for that set holds for it: tighter than for the set it was trained in, and
    true even if nobody projected. A set that cannot be changed must hold its weight as it is.
    """
    made = whole(module)
    for _, layer in members(made):
        layer.training = False
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                layer._parameters[name] = nn.Parameter(parameter.detach().double(), False)
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                own = buffer.detach().clone()
                layer._buffers[name] = own.double() if own.is_floating_point() else own
        if isinstance(layer, ClipGradient):
            layer.max_norm = math.inf  # forwards it is the identity, whatever it does to gradients
        if isinstance(layer, Constrained):
            _fit(layer)
    found: nn.Module = made
    return found


def _fit(layer: Any) -> None:
    own = getattr(layer, "within", None)
    for constraint in layer.constraints():
        with torch.no_grad():
            norm = float(constraint.within.norm_upper(constraint.parameter.detach()[None]))
        if constraint.within is own and is_dataclass(own) and not isinstance(own, type):
            layer.within = replace(own, max_norm=norm / (1 + SLACK))
        elif not norm <= constraint.within.max_norm * (1 + SLACK):
            raise ValueError(
                f"a parameter of a {type(layer).__name__} has norm {norm:.6g} and its set ends at "
                f"{constraint.within.max_norm:g}; call tacit.lipschitz.project(model) first"
            )
