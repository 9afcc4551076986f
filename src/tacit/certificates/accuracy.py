"""Certified accuracy: the share of records classified correctly, and still so within a radius."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tacit import canvas
from tacit.certificates.certifier import certifier_for
from tacit.data.scaling import Scaler
from tacit.errors import argument
from tacit.lipschitz.bounds import finite_above_zero
from tacit.records import Records

RADII = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
PIXEL = 1 / 255


@dataclass(frozen=True)
class CertifiedAccuracy:
    """Shares of held-out records that are right and certified at each radius, in units of `unit`.

    `radii_N` holds each record's own radius, below 0 where the decision is wrong. The guarantee of
    private training covers the training records only: these figures are not private.
    """

    radii: tuple[float, ...]
    shares: tuple[float, ...]
    unit: float
    num_records: int
    radii_N: Tensor = field(repr=False, compare=False)

    def at(self, radius: float) -> float:
        """The share that is right under every move of L2 norm at most radius·unit."""
        return share_at(self.radii_N, radius * self.unit)

    def facts(self) -> dict[str, Any]:
        """Everything but the radii of single records, as plain values."""
        return {
            "norm": "L2",
            "unit": self.unit,
            "num_records": self.num_records,
            "certified_accuracy": [
                {"radius": r, "share": s} for r, s in zip(self.radii, self.shares, strict=True)
            ],
            "median_radius_of_right": self.median_radius(),
        }

    def median_radius(self) -> float | None:
        """The median radius of the records that are right, in units of `unit`."""
        right = self.radii_N[self.radii_N >= 0]
        return float(right.median()) / self.unit if len(right) else None

    def table(self) -> Table:
        title = f"certified accuracy, L2, {self.num_records:,} held-out records"
        table = Table(
            "radius", "right and certified", title=title, title_justify="left", min_width=52
        )
        for radius, share in zip(self.radii, self.shares, strict=True):
            name = f"{radius:g}/255" if self.unit == PIXEL else f"{radius * self.unit:g}"
            table.add_row(name, f"{share:.2%}")
        return table

    def text(self, width: int = 100) -> str:
        console = Console(file=io.StringIO(), width=width, force_terminal=False)
        console.print(self.table())
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plot certified accuracy against the radius."""
        plot_certified({"this model": self}, path)


def certified_accuracy(
    model: nn.Module,
    records: Records,
    radii: Sequence[float] = RADII,
    *,
    unit: float = PIXEL,
    before: Scaler | Iterable[Scaler] = (),
    batch_size: int = 2048,
) -> CertifiedAccuracy:
    """The share of held-out records that are right, and certified at each of `radii`·`unit`.

    At radius 0 that is the accuracy. A record counts at r > 0 if its radius exceeds r. With
    `before`, `records` hold inputs before scaling; see `certified_radius`.

        print(tacit.certificates.certified_accuracy(model, test).text())
    """
    if not radii or not all(0 <= radius < math.inf for radius in radii):
        raise ValueError(f"{argument('radii')} are {list(radii)}; give finite numbers from 0")
    chosen = tuple(sorted({float(radius) for radius in radii}))
    finite_above_zero("unit", unit)
    certify = certifier_for(model, records.shape, before)
    device = certify.slopes_KK.device
    parts = [torch.empty(0, dtype=torch.float64)]
    for start in range(0, len(records), batch_size):
        rows = slice(start, start + batch_size)
        certificates = certify(records.inputs[rows])
        right = certificates.right(records.targets[rows].to(device))
        parts.append(torch.where(right, certificates.radii_B, -1.0).cpu())
    radii_N = torch.cat(parts)
    shares = tuple(share_at(radii_N, radius * unit) for radius in chosen)
    return CertifiedAccuracy(chosen, shares, unit, len(records), radii_N)


def share_at(radii_N: Tensor, radius: float) -> float:
    counted = radii_N > radius if radius > 0 else radii_N >= 0
    return float(counted.double().mean()) if len(radii_N) else 0.0


_MOST_STEPS = 400


def plot_certified(results: Mapping[str, CertifiedAccuracy], path: str | os.PathLike[str]) -> None:
    """One curve per model, by name: the share that is right and certified at every radius."""
    figure, panels = canvas.blank()
    axes = panels[0, 0]
    last = max(result.radii[-1] for result in results.values()) or 1.0
    grid = [last * i / _MOST_STEPS for i in range(_MOST_STEPS + 1)]
    for name, result in results.items():
        (line,) = axes.plot(grid, [100 * result.at(r) for r in grid], label=name)
        shares = [100 * share for share in result.shares]
        axes.plot(result.radii, shares, "o", markersize=4, color=line.get_color())
    units = {result.unit for result in results.values()}
    axes.set_xlabel(
        "L2 radius (1/255)" if units == {PIXEL} else "L2 radius (in the results' units)"
    )
    axes.set_ylabel("right and certified (%)")
    axes.set_ylim(0, 102)
    axes.set_xlim(0, last * 1.02)
    axes.grid(alpha=0.3)
    if len(results) > 1:
        axes.legend()
    records = " and ".join(sorted({f"{r.num_records:,}" for r in results.values()}))
    axes.set_title(f"certified accuracy on {records} held-out records")
    canvas.save(figure, path)
