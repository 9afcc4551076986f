"""The loss that `tacit train` is asked for, and its numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import typer

from tacit.cli.networks import QueryName
from tacit.losses import (
    CrossEntropy,
    Focal,
    RecordLoss,
    SumAbsoluteError,
    SumHuber,
    SumSquaredError,
    TailoredLoss,
)


class LossName(enum.StrEnum):
    CROSS_ENTROPY = "cross-entropy"
    TAILORED = "tailored"
    FOCAL = "focal"
    SUM_SQUARED = "sum-squared"
    SUM_ABSOLUTE = "sum-absolute"
    SUM_HUBER = "sum-huber"


LOSS: LossName = typer.Option(LossName.CROSS_ENTROPY, help="What is made small.")
THRESHOLD_EPOCH: float | None = typer.Option(
    None, help="tailored: the epoch at which squared error and focal loss weigh the same."
)
BETA: float | None = typer.Option(
    None, help="tailored: how little pre-activations count; sum-huber: where it turns linear."
)
GAMMA: float | None = typer.Option(
    None, help="tailored, focal: how much to turn away from what is learnt."
)

_SCOPE = {
    "temperature": (LossName.CROSS_ENTROPY,),
    "threshold_epoch": (LossName.TAILORED,),
    "beta": (LossName.TAILORED, LossName.SUM_HUBER),
    "gamma": (LossName.TAILORED, LossName.FOCAL),
}


@dataclass(frozen=True)
class Tailored:
    """Threshold epoch, β and γ of the tailored loss."""

    threshold_epoch: float
    beta: float
    gamma: float


@dataclass(frozen=True)
class LossOptions:
    """What was asked; None is for the recipe, or for the loss's usual number."""

    name: LossName = LossName.CROSS_ENTROPY
    temperature: float | None = None
    threshold_epoch: float | None = None
    beta: float | None = None
    gamma: float | None = None

    def check(self, query: QueryName) -> None:
        """Raise if a number was given that this loss does not have, or if it cannot be bounded."""
        if self.name is LossName.TAILORED and query is QueryName.CLIPLESS:
            raise ValueError(
                "--loss tailored has a penalty on pre-activations, and --query clipless bounds the "
                "gradient in the outputs alone; use --query clip"
            )
        for number, losses in _SCOPE.items():
            value = getattr(self, number)
            if value is None or self.name in losses:
                continue
            option = "--" + number.replace("_", "-")
            others = " or ".join(f"--loss {other.value}" for other in losses)
            raise ValueError(
                f"{option} is {value:g}, and --loss is {self.name.value}; it goes with {others}: "
                f"give that, or leave {option} out"
            )

    def build(self, temperature: float, tailored: Tailored) -> RecordLoss:
        """The loss, with the recipe's numbers where none were given."""
        if self.name is LossName.TAILORED:
            return TailoredLoss(
                _or(self.threshold_epoch, tailored.threshold_epoch),
                _or(self.beta, tailored.beta),
                _or(self.gamma, tailored.gamma),
            )
        if self.name is LossName.FOCAL:
            return Focal(_or(self.gamma, tailored.gamma))
        if self.name is LossName.SUM_HUBER:
            return SumHuber(_or(self.beta, 1.0))
        if self.name is LossName.SUM_SQUARED:
            return SumSquaredError()
        if self.name is LossName.SUM_ABSOLUTE:
            return SumAbsoluteError()
        return CrossEntropy(_or(self.temperature, temperature))


def _or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given
