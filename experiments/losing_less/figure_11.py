"""Figure 11: norms of weights, all layers and datasets, by epoch.

Under both losses. Of released weights, so free of privacy.

    python experiments/losing_less/figure_11.py --out figure_11.json --plot figure_11.png
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosed import both_losses, main

from tacit.diagnostics import WeightNorms
from tacit.diagnostics.layer_norms import plot_norms

SETTINGS = both_losses("cifar10", "fashion-mnist", "mnist")
WATCHERS = {"weights": WeightNorms}
DRAWINGS = {"weights": plot_norms}


def figure_11(arguments: Sequence[str] | None = None) -> dict:
    title = "Figure 11: norms of weights"
    return main(title, SETTINGS, WATCHERS, DRAWINGS, arguments)


if __name__ == "__main__":
    figure_11()
