"""Dropout."""

from __future__ import annotations

from torch import nn

from tacit.lipschitz.bounds import Bound, Parameterless
from tacit.lipschitz.refused import Refused


class DropoutAnswers(Parameterless):
    """Training: y = m·x/(1 − p) with a mask m of zeros and ones, drawn without looking at x.

    For every mask, 1/(1 − p)-Lipschitz and 0 at 0; p = 1 leaves nothing. The others' masks have
    the same distribution whether or not a record is there, so what holds for every mask holds for
    the mixture (joint convexity). Evaluation: the identity.
    """

    def __init__(self, module: nn.Module) -> None:
        self.share = float(module.p) if module.training else 0.0  # type: ignore[arg-type]
        self.exact = self.share in (0.0, 1.0)
        if getattr(module, "inplace", False) and 0 < self.share < 1:
            raise Refused(
                "writes into its input, which others may read; build it with inplace=False"
            )

    def output_norm(self, x: Bound) -> float:
        return 0.0 if self.share == 1 else self.lipschitz(x) * x.norm

    def lipschitz(self, x: Bound) -> float:
        return 0.0 if self.share == 1 else 1 / (1 - self.share)
