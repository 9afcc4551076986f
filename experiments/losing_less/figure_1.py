"""Figure 1: CIFAR-10 under both losses: logits, last weights, gradient norms, alignment.

Logit and weight norms by epoch, histograms of per-record gradient norms in the first epoch, and the
cosine between clipped and unclipped gradients. Not private: reads raw gradients.

    python experiments/losing_less/figure_1.py --out figure_1.json --plot figure_1.png
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosed import both_losses, main

from tacit.diagnostics import ActivationNorms, ClippingAlignment, GradientNormHistory, WeightNorms
from tacit.diagnostics.alignment import plot_alignment
from tacit.diagnostics.gradient_norms import plot_gradient_norm_histograms
from tacit.diagnostics.layer_norms import plot_norms

SETTINGS = both_losses("cifar10", epochs=5)
WATCHERS = {
    "logits": ActivationNorms,
    "weights": WeightNorms,
    "gradients": lambda: GradientNormHistory(max_records=128),
    "alignment": ClippingAlignment,
}
DRAWINGS = {
    "logits": plot_norms,
    "weights": plot_norms,
    "gradients": lambda seen, path: plot_gradient_norm_histograms(seen, path, max_norm=0.1),
    "alignment": plot_alignment,
}


def figure_1(arguments: Sequence[str] | None = None) -> dict:
    title = "Figure 1: what each loss does to logits, weights and gradients"
    return main(title, SETTINGS, WATCHERS, DRAWINGS, arguments)


if __name__ == "__main__":
    figure_1()
