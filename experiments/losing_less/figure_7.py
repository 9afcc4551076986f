"""Figure 7: cosine between clipped and unclipped gradients in the first epoch.

Batch by batch, under both losses, on all three datasets. Not private: reads raw gradients.

    python experiments/losing_less/figure_7.py --out figure_7.json --plot figure_7.png
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosed import both_losses, main

from tacit.diagnostics import ClippingAlignment
from tacit.diagnostics.alignment import plot_alignment

SETTINGS = both_losses("cifar10", "fashion-mnist", "mnist", epochs=1)
WATCHERS = {"alignment": lambda: ClippingAlignment(every=5)}
DRAWINGS = {"alignment": plot_alignment}


def figure_7(arguments: Sequence[str] | None = None) -> dict:
    title = "Figure 7: alignment in the first epoch"
    return main(title, SETTINGS, WATCHERS, DRAWINGS, arguments)


if __name__ == "__main__":
    figure_7()
