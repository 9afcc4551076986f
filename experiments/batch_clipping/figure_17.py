"""Figure 17: resnet-18 without BatchNorm, individual clipping, the four schedules of Table 3.

Published: 18 to 22%.

    python experiments/batch_clipping/figure_17.py --seeds 0 1 2 --workers 4 --out figure_17.json
"""

from __future__ import annotations

from figure import main
from runs import four_schedules

SETTINGS = four_schedules("resnet18", "individual")

if __name__ == "__main__":
    main("Figure 17: IC with adaptive layerwise clipping, resnet-18 without BatchNorm", SETTINGS)
