"""Where the statistics of BatchNorm come from, as `tacit train` is told."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
import typer
from torch import nn

from tacit.queries.set_gradients import too_small_is_nothing
from tacit.records import Records
from tacit.statistics.public_statistics import PublicStatistics
from tacit.statistics.released_statistics import ReleasedStatistics
from tacit.statistics.tracking import unfrozen_norms, without_running_statistics


class StatisticsName(enum.StrEnum):
    PUBLIC = "public"
    RELEASED = "released"
    CONVERT = "convert"


STATISTICS = typer.Option(
    None,
    help="batch-clip: BatchNorm's statistics from public records, released with noise, or none: "
    "convert it to GroupNorm.",
)
NOISE = typer.Option(
    None, "--statistics-noise", help="The noise multiplier of released statistics; it is charged."
)


@dataclass(frozen=True)
class StatisticsOptions:
    name: StatisticsName | None = None
    noise: float | None = None

    @property
    def needs_public(self) -> bool:
        return self.name is StatisticsName.PUBLIC

    @property
    def converts(self) -> bool:
        return self.name is StatisticsName.CONVERT

    def check(self) -> None:
        released = self.name is StatisticsName.RELEASED
        if released and self.noise is None:
            raise ValueError(
                "--statistics released needs --statistics-noise: a noise multiplier such as 10, "
                "which is charged before the first step"
            )
        if not released and self.noise is not None:
            raise ValueError(
                f"--statistics-noise is {self.noise:g}, and no statistics are released; give "
                "--statistics released, or leave it out"
            )

    def build(
        self, model: nn.Module, public: Records | None, private: Records, set_size: int
    ) -> PublicStatistics | ReleasedStatistics | None:
        """None for a network without BatchNorm. Not told, they are public where others are."""
        norms = unfrozen_norms(model)
        if self.converts:
            return None
        if not norms:
            if self.name is not None:
                raise ValueError(
                    f"--statistics is {self.name}, and this network has no BatchNorm; leave it out"
                )
            return None
        if self.name is StatisticsName.RELEASED:
            assert self.noise is not None
            return ReleasedStatistics(private, self.noise)
        if public is None:
            name, norm = next(iter(norms.items()))
            raise ValueError(
                f"layer {name!r} ({type(norm).__name__}) needs statistics to be evaluated with, "
                "and private training keeps none; give --statistics public (a --public-share of "
                "the records is given up), --statistics released (with --statistics-noise), or "
                "--statistics convert (GroupNorm)"
            )
        if len(public) < set_size:
            raise ValueError(
                f"{len(public)} public records do not fill one mini-set of {set_size}, and "
                "BatchNorm's statistics are taken from such; give a larger --public-share, or "
                "smaller mini-sets"
            )
        return PublicStatistics(public, set_size)


@torch.no_grad()
def require_rows_enough(model: nn.Module, shape: tuple[int, ...], rows: int, option: str) -> None:
    """Raise if BatchNorm cannot normalise `rows` records: such a run would release mere noise.

    A pass of zeros is asked, which are nobody's data.
    """
    with without_running_statistics(model), too_small_is_nothing():
        model(torch.zeros(rows, *shape))
        return
    raise ValueError(
        f"{option} {rows} gives a BatchNorm of this network one value a channel, which has no "
        "variance, so that every gradient would be zero; give at least 2, or --statistics convert"
    )
