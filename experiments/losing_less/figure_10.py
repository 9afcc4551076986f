"""Figure 10: accuracy of O-T-CNN by each number of the loss, the others as in Table 6.

python experiments/losing_less/figure_10.py --seeds 0 1 2 --workers 3 --out figure_10.json
"""

from __future__ import annotations

from dataclasses import replace

from figure import main
from recipes import NAMES, SIZES
from runs import paper_setting

# Table 7 has e_t = 0 … 10 and β = 1, 11, … 191; γ's values are those that Table 6 chose from.
VALUES = {
    "threshold_epoch": (0, 2, 4, 7, 10),
    "beta": (1, 11, 51, 101, 191),
    "gamma": (0, 2, 5, 10),
}
SETTINGS = {
    f"{NAMES[dataset]}, {number} {value}": replace(
        paper_setting(dataset, "pixels", "tailored"), **{number: value}
    )
    for dataset in SIZES
    for number, values in VALUES.items()
    for value in values
}

if __name__ == "__main__":
    main("Figure 10: accuracy by the loss's numbers", SETTINGS)
