"""Norms of the inputs in several colour spaces. Not private: reads raw inputs."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tacit.data.colour import HSV, RGB, YIQ, YUV, Greyscale
from tacit.data.records import Records
from tacit.data.scaling import Scaler

NOT_PRIVATE = "not private: reads raw inputs"
SPACES: tuple[Scaler, ...] = (RGB(), HSV(), YIQ(), YUV(), Greyscale())


@dataclass(frozen=True)
class InputNorms:
    """‖x‖ of each record, under the name of the space that it is in.

    **Not private: reads raw inputs.** The closer together the norms lie, the less of a bound X on
    them is wasted: `spread` is their standard deviation over their mean.
    """

    norms: Mapping[str, Tensor] = field(repr=False)
    notice: str = NOT_PRIVATE

    def spread(self) -> dict[str, float]:
        return {
            name: float(n.std(correction=0) / n.mean().clamp_min(1e-300))
            for name, n in self.norms.items()
        }

    def text(self, width: int = 100) -> str:
        """A table that begins with the notice."""
        columns = ("space", "mean norm", "largest", "spread")
        table = Table(*columns, title=f"input norms; {self.notice}", title_justify="left")
        for name, spread in self.spread().items():
            n = self.norms[name]
            table.add_row(name, f"{n.mean():.4g}", f"{n.max():.4g}", f"{spread:.1%}")
        console = Console(file=io.StringIO(), width=width, force_terminal=False)
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Histograms over one another, as a picture that bears the notice."""
        from tacit.report.input_norms import plot_input_norms

        plot_input_norms(self, path)


def input_norms(
    records: Records, spaces: Sequence[Scaler] = SPACES, *, max_records: int = 10_000
) -> InputNorms:
    """The norms of the first `max_records` inputs, RGB images in [0, 1], in each space.

    **Not private: reads raw inputs.** For the choice of a colour space, on public records
    [Béthune 2024, Fig. 8]. Any scalers may be given in the place of colour spaces.
    """
    if not len(records) or not spaces:
        raise ValueError(f"{len(records)} records in {len(spaces)} spaces; give at least one")
    inputs = records.inputs[:max_records]
    return InputNorms(
        {
            type(space).__name__: torch.linalg.vector_norm(
                space(inputs).flatten(1), dim=1, dtype=torch.float64
            ).cpu()
            for space in spaces
        }
    )
