"""Figure 2: the largest singular value of the Hessian on MNIST, under both losses, by epoch.

By Lanczos on Hessian-vector products over 256 training records. Not private.

    python experiments/losing_less/figure_2.py --out figure_2.json --plot figure_2.png
"""

from __future__ import annotations

from collections.abc import Sequence

from diagnosed import both_losses, main

from tacit.diagnostics import Curvature
from tacit.diagnostics.curvature import plot_curvature

SETTINGS = both_losses("mnist", epochs=10)
WATCHERS = {"curvature": Curvature}
DRAWINGS = {"curvature": plot_curvature}


def figure_2(arguments: Sequence[str] | None = None) -> dict:
    title = "Figure 2: curvature under both losses"
    return main(title, SETTINGS, WATCHERS, DRAWINGS, arguments)


if __name__ == "__main__":
    figure_2()
