"""Figure 14: histograms of per-record gradient norms on all three datasets.

Under both losses. Not private: reads raw gradients.

    python experiments/losing_less/figure_14.py --out figure_14.json --plot figure_14.png
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosed import both_losses, main

from tacit.diagnostics import GradientNormHistory
from tacit.diagnostics.gradient_norms import plot_gradient_norm_histograms

SETTINGS = both_losses("cifar10", "fashion-mnist", "mnist")
WATCHERS = {"gradients": lambda: GradientNormHistory(max_records=128)}
DRAWINGS = {"gradients": lambda seen, path: plot_gradient_norm_histograms(seen, path, max_norm=0.1)}


def figure_14(arguments: Sequence[str] | None = None) -> dict:
    title = "Figure 14: per-record gradient norms"
    return main(title, SETTINGS, WATCHERS, DRAWINGS, arguments)


if __name__ == "__main__":
    figure_14()
