"""The loss that `tacit train` is asked for, by its registered name, and its numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import typer

from tacit.cli.networks import QueryName
from tacit.losses.pre_activations import needs_pre_activations
from tacit.losses.record_loss import Task
from tacit.losses.registry import loss_named, numbers_of, registered_losses

CROSS_ENTROPY = "cross-entropy"

LOSS: str = typer.Option(
    CROSS_ENTROPY,
    help="Loss to minimise: cross-entropy, tailored, focal, sum-squared, …, or a registered one of "
    "your own (tacit --plugin FILE train).",
)
TEMPERATURE: float | None = typer.Option(
    None, help="Temperature of the loss, such as cross-entropy's."
)
THRESHOLD_EPOCH: float | None = typer.Option(
    None, help="tailored: the epoch at which squared error and focal loss weigh the same."
)
BETA: float | None = typer.Option(
    None, help="tailored: how little pre-activations count; sum-huber: where it turns linear."
)
GAMMA: float | None = typer.Option(
    None, help="tailored, focal: how much to turn away from records that are learnt."
)


@dataclass(frozen=True)
class Tailored:
    """Threshold epoch, β and γ of the tailored loss."""

    threshold_epoch: float
    beta: float
    gamma: float


@dataclass(frozen=True)
class LossOptions:
    """What was asked; None is for the recipe, or for the loss's own default."""

    name: str = CROSS_ENTROPY
    temperature: float | None = None
    threshold_epoch: float | None = None
    beta: float | None = None
    gamma: float | None = None

    def check(self) -> None:
        """Raise if no loss has this name, or if a number was given that this loss does not take."""
        taken = numbers_of(self.name)
        for number, value in self._given().items():
            if number in taken:
                continue
            option = "--" + number.replace("_", "-")
            others = [f"--loss {o}" for o in registered_losses() if number in numbers_of(o)]
            raise ValueError(
                f"{option} is {value:g}, and --loss is {self.name}; it goes with "
                f"{' or '.join(others)}: give that, or leave {option} out"
            )

    def numbers(self, temperature: float, tailored: Tailored) -> dict[str, float]:
        """The numbers to make the loss with: those given, else the recipe's."""
        recipe: dict[str, dict[str, float]] = {
            CROSS_ENTROPY: {"temperature": temperature},
            "tailored": asdict(tailored),
            "focal": {"gamma": tailored.gamma},
        }
        found = recipe.get(self.name, {}) | self._given()
        for number, has_default in numbers_of(self.name).items():
            if number not in found and not has_default:
                raise ValueError(
                    f"--loss {self.name} needs a number {number!r}, which no option gives; give "
                    "it a default where the loss is registered"
                )
        return found

    def build(self, temperature: float, tailored: Tailored, query: QueryName) -> Any:
        """The loss, with the recipe's numbers where none were given."""
        loss = loss_named(self.name, **self.numbers(temperature, tailored))
        task = getattr(loss, "task", None)
        if task is not None and task is not Task.CLASSIFICATION:
            raise ValueError(
                f"--loss {self.name} is for {Task(task).value}, and tacit train trains networks "
                "with one output per class; use a loss for classification, or train in Python"
            )
        if query is QueryName.CLIPLESS and needs_pre_activations(loss):
            raise ValueError(
                f"--loss {self.name} has a penalty on pre-activations, and --query clipless bounds "
                "the gradient in the outputs alone; use --query clip"
            )
        return loss

    def _given(self) -> dict[str, float]:
        return {n: v for n, v in asdict(self).items() if n != "name" and v is not None}
