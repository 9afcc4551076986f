"""What a mini-set proposes: its mean gradient, or a local run of an optimizer over its records."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import typer

from tacit.queries.set_gradients import LocalRun, MeanGradient, SetGradient


class LocalName(enum.StrEnum):
    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"


LOCAL = typer.Option(
    None, help="batch-clip: run this optimizer over each mini-set and clip where it went."
)
LOCAL_RATE = typer.Option(None, "--local-lr", help="Its learning rate.")
LOCAL_BATCH = typer.Option(None, help="Records in each of its steps; 1 by default.")


@dataclass(frozen=True)
class LocalOptions:
    name: LocalName | None = None
    learning_rate: float | None = None
    batch: int | None = None

    def rows(self, set_size: int) -> int:
        """How many records go through the network together."""
        return set_size if self.name is None else min(self.batch or 1, set_size)

    def gradient(self) -> SetGradient:
        if self.name is None:
            given = {"--local-lr": self.learning_rate, "--local-batch": self.batch}
            for option, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"{option} is {value}, and no local run was asked for; give --local sgd, "
                        "momentum or adam"
                    )
            return MeanGradient()
        rate = self.learning_rate
        if rate is None or not (math.isfinite(rate) and rate > 0):
            raise ValueError(
                f"--local {self.name} needs a learning rate of its own, and --local-lr is {rate}; "
                "give a number above 0"
            )
        return LocalRun(partial(_OPTIMIZERS[self.name], lr=rate), at_once=self.batch or 1)


_OPTIMIZERS: dict[LocalName, Any] = {
    LocalName.SGD: torch.optim.SGD,
    LocalName.MOMENTUM: partial(torch.optim.SGD, momentum=0.9),
    LocalName.ADAM: torch.optim.Adam,
}
