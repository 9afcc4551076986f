"""Figure 15: squared, absolute and Huber errors (β = 0.1 to 1), summed over outputs, end to end.

python experiments/losing_less/figure_15.py --seeds 0 1 2 3 4 --workers 3 --out figure_15.json
"""

from __future__ import annotations

from figure import main
from recipes import NAMES, SIZES
from runs import paper_setting

LOSSES = ("sse", "sae", *(f"huber:{tenth / 10:g}" for tenth in range(1, 11)))
SETTINGS = {
    f"{NAMES[dataset]}, {loss}": paper_setting(dataset, "pixels", loss)
    for dataset in SIZES
    for loss in LOSSES
}

if __name__ == "__main__":
    main("Figure 15: squared, absolute and Huber errors", SETTINGS)
