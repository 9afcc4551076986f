"""Figure 6: histograms of per-record gradient norms on CIFAR-10, under both losses.

Not private: reads raw gradients.

    python experiments/losing_less/figure_6.py --out figure_6.json --plot figure_6.png
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosed import both_losses, main

from tacit.diagnostics import GradientNormHistory
from tacit.diagnostics.gradient_norms import plot_gradient_norm_histograms

SETTINGS = both_losses("cifar10")
WATCHERS = {"gradients": lambda: GradientNormHistory(max_records=128)}
DRAWINGS = {"gradients": lambda seen, path: plot_gradient_norm_histograms(seen, path, max_norm=0.1)}


def figure_6(arguments: Sequence[str] | None = None) -> dict:
    title = "Figure 6: per-record gradient norms, CIFAR-10"
    return main(title, SETTINGS, WATCHERS, DRAWINGS, arguments)


if __name__ == "__main__":
    figure_6()
