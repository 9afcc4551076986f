"""Where a Lipschitz network's noise comes from, layer by layer."""

from __future__ import annotations

import math

from rich.table import Table

from tacit.lipschitz.propagate import Sensitivities


def sensitivity_table(found: Sensitivities) -> Table:
    """One row a layer: bounds on its input and cotangent, its constant, its gradients' bounds.

    The share is Δ²/Σ Δ²: how much of the noise that all blocks get (`GlobalNoise`) is there for
    this layer's sake.
    """
    table = Table(title="bounds for one record", title_justify="left")
    for name in ("layer", "kind"):
        table.add_column(name)
    for name in ("input ≤", "Lipschitz", "cotangent ≤", "gradient ≤", "share of noise"):
        table.add_column(name, justify="right")
    total = found.total() ** 2
    for row in found.layers:
        gradient = math.sqrt(math.fsum(v * v for v in row.gradient_norms.values()))
        share = gradient**2 / total if total else 0.0
        table.add_row(
            row.name,
            row.kind,
            f"{row.input_norm:.4g}",
            f"{row.lipschitz:.4g}",
            f"{row.cotangent:.4g}",
            f"{gradient:.4g}" if row.gradient_norms else "–",
            f"{share:.1%}" if row.gradient_norms else "–",
        )
    table.caption = (
        f"outputs ≤ {found.output.norm:.4g}; all gradients together ≤ {found.total():.4g}"
    )
    return table
