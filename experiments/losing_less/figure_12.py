"""Figure 12: norms of pre-activations, all layers and datasets, by epoch.

Under both losses. Not private: of training records.

    python experiments/losing_less/figure_12.py --out figure_12.json --plot figure_12.png
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosed import both_losses, main

from tacit.diagnostics import ActivationNorms
from tacit.diagnostics.layer_norms import plot_norms

SETTINGS = both_losses("cifar10", "fashion-mnist", "mnist")
WATCHERS = {"pre-activations": ActivationNorms}
DRAWINGS = {"pre-activations": plot_norms}


def figure_12(arguments: Sequence[str] | None = None) -> dict:
    title = "Figure 12: norms of pre-activations"
    return main(title, SETTINGS, WATCHERS, DRAWINGS, arguments)


if __name__ == "__main__":
    figure_12()
