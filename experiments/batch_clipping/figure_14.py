"""Figure 14: convnet with and without BatchNorm, batch clipping, σ = 0.5, C = 0.14, m = 64.

Published: about 5 points more with BatchNorm.

    python experiments/batch_clipping/figure_14.py --seeds 0 1 2 --workers 4 --out figure_14.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

SETTINGS = {
    "with BatchNorm": Setting("convnet", master=0.14, sigma=0.5),
    "without BatchNorm": Setting("convnet", master=0.14, sigma=0.5, norm="none"),
}

if __name__ == "__main__":
    main(
        "Figure 14: BC with adaptive layerwise clipping, convnet with and without BatchNorm",
        SETTINGS,
    )
