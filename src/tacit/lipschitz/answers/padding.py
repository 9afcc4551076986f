"""Padding with a constant."""

from __future__ import annotations

import math

import torch
from torch import nn

from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.lipschitz.refused import Refused


class ConstantPadAnswers(Parameterless):
    """x and m numbers of value v beside it: ‖y‖² ≤ ‖x‖² + m·v², Lipschitz 1.

    m·v² is the squared norm of what becomes of a record of zeros. Negative padding only cuts. On a
    record of fewer axes than are padded, the first of them would be the batch's.
    """

    exact = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def output_norm(self, x: Bound) -> float:
        padded = len(self.module.padding) // 2  # type: ignore[arg-type]
        if padded > len(x.shape):
            raise Refused(
                f"pads {padded} axes of a record of shape {x.shape}, and would reach the batch's; "
                "use one that pads no more axes than a record has"
            )
        at_zero = self.module.forward(torch.zeros(1, *x.shape, dtype=torch.float64))
        return math.hypot(x.norm, float(torch.linalg.vector_norm(at_zero)))
