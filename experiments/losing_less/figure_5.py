"""Figure 5: norms of weights and of pre-activations, CIFAR-10 and Fashion-MNIST, by epoch.

Under both losses. Not private: pre-activations are those of training records.

    python experiments/losing_less/figure_5.py --out figure_5.json --plot figure_5.png
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosed import both_losses, main

from tacit.diagnostics import ActivationNorms, WeightNorms
from tacit.diagnostics.layer_norms import plot_norms

SETTINGS = both_losses("cifar10", "fashion-mnist")
WATCHERS = {"weights": WeightNorms, "pre-activations": ActivationNorms}
DRAWINGS = {"weights": plot_norms, "pre-activations": plot_norms}


def figure_5(arguments: Sequence[str] | None = None) -> dict:
    title = "Figure 5: norms of weights and pre-activations"
    return main(title, SETTINGS, WATCHERS, DRAWINGS, arguments)


if __name__ == "__main__":
    figure_5()
