"""Mini-sets, as `tacit train` is asked for them: how large, and how many a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import typer

from tacit.records import Records
from tacit.sampling.mini_sets import MiniSetSampler

SIZE = typer.Option(None, "--mini-set-size", help="batch-clip: records in a mini-set.")
CHOSEN = typer.Option(None, "--mini-sets", help="batch-clip: mini-sets a step.")
RATE = typer.Option(
    None, "--mini-set-rate", help="batch-clip: draw each mini-set with this probability instead."
)


@dataclass(frozen=True)
class MiniSetDraw:
    """Sets of `size` records: `chosen` of them a step, or each with probability `rate`."""

    size: int
    chosen: int | None
    rate: float | None

    def records_a_step(self, population: int) -> float:
        """How many records a step expects: s·k, or rate·N."""
        if self.chosen is not None:
            return self.size * self.chosen
        assert self.rate is not None
        return self.rate * population

    def sampler(
        self, records: Records, steps: int, physical: int, seed: int | None
    ) -> MiniSetSampler:
        return MiniSetSampler(
            records,
            self.size,
            steps,
            chosen=self.chosen,
            rate=self.rate,
            max_physical_batch=physical,
            seed=seed,
        )


@dataclass(frozen=True)
class MiniSetOptions:
    """What was asked of S, K, the rate and the batch size m = S·K."""

    size: int | None = None
    chosen: int | None = None
    rate: float | None = None
    batch_size: int | None = None

    def resolve(self, population: int, usual_size: int, usual_chosen: int) -> MiniSetDraw:
        """S and K, with what is missing from m = S·K, or else as is usual.

        Where nothing is said of K, at most half of the sets are drawn.
        """
        self._check()
        size = self._size(population, usual_size)
        if self.rate is not None:
            return MiniSetDraw(size, None, self.rate)
        if self.batch_size is not None:
            return MiniSetDraw(size, self.batch_size // size, None)
        half = max(1, math.ceil(population / size) // 2)
        chosen = min(usual_chosen, half) if self.chosen is None else self.chosen
        return MiniSetDraw(size, chosen, None)

    def _size(self, population: int, usual: int) -> int:
        m = self.batch_size
        if self.size is not None:
            size = self.size
        elif m is not None:
            size = min(usual, m) if self.chosen is None else max(1, m // self.chosen)
        else:
            size = min(usual, population)
        if size > population:
            raise ValueError(
                f"--mini-set-size is {size}, and there are {population} private records; "
                "give smaller sets"
            )
        if m is not None and size * (self.chosen or max(1, m // size)) != m:
            sets = f"{self.chosen} mini-sets of" if self.chosen else "mini-sets of"
            raise ValueError(
                f"--batch-size is {m}, which is not made of {sets} {size} records; it is "
                "--mini-set-size times --mini-sets: give two of the three"
            )
        return size

    def _check(self) -> None:
        for name, value in (
            ("--mini-set-size", self.size),
            ("--mini-sets", self.chosen),
            ("--batch-size", self.batch_size),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if self.rate is None:
            return
        for name, value in (("--mini-sets", self.chosen), ("--batch-size", self.batch_size)):
            if value is not None:
                raise ValueError(
                    f"{name} is {value} and --mini-set-rate is {self.rate:g}; the one fixes how "
                    "many sets a step has, with the other it is random: give one of them"
                )
