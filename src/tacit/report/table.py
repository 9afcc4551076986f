"""The table that ends a run."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from tacit.training.evaluate import metric_rows


def summary_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """What a reader must know of a run, in the order they ask."""
    measured = metric_rows(facts)
    if facts["accuracy"] is not None:
        measured = measured[:1]  # the loss of a classifier is in run.json
    rows = [(f"{name} (held out)", value) for name, value in measured]
    rows = rows or [("metrics (held out)", "none")]
    if facts.get("certificate"):
        rows.append(("certified accuracy", _certified(facts["certificate"])))
    rows += [
        ("epsilon (PLD)", f"{facts['epsilon']:.4g}"),
        ("epsilon (RDP, cross-check)", f"{facts['epsilon_rdp']:.4g}"),
        ("delta", f"{facts['delta']:g}"),
        ("neighbouring relation", facts["relation"]),
        ("sampling", facts["sampling"]),
        ("noise multiplier", f"{facts['noise_multiplier']:.5g}"),
        ("steps", _steps(facts)),
        ("seconds", f"{facts['seconds']:.1f}"),
        ("peak memory", f"{facts['peak_memory_bytes'] / 2**20:,.0f} MiB"),
        ("seeded", "yes" if facts["seeded"] else "no, from the operating system"),
    ]
    rows += [("note", note) for note in facts["notes"]]
    return rows


def _certified(certificate: dict[str, Any]) -> str:
    shares = [
        f"{row['share']:.2%} at {row['radius']:g}/255"
        for row in certificate["certified_accuracy"]
        if row["radius"] in (1, 4, 16)
    ]
    return f"{', '.join(shares)} (L2, {certificate['inputs']})"


def _steps(facts: dict[str, Any]) -> str:
    if facts["stopped"] == "plan complete":
        return str(facts["steps"])
    return f"{facts['steps']} of {facts['planned_steps']} planned (ended: {facts['stopped']})"


def summary_table(facts: dict[str, Any]) -> Table:
    table = Table(show_header=False, title="private training run", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary_rows(facts):
        table.add_row(name, value)
    return table


def summary_text(facts: dict[str, Any], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(summary_table(facts))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
