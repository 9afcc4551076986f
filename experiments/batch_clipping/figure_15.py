"""Figure 15: convnet without BatchNorm, individual clipping, the four schedules of Table 3.

Published: 21.12% at best.

    python experiments/batch_clipping/figure_15.py --seeds 0 1 2 --workers 4 --out figure_15.json
"""

from __future__ import annotations

from figure import main
from runs import four_schedules

SETTINGS = four_schedules("convnet", "individual")

if __name__ == "__main__":
    main("Figure 15: IC with adaptive layerwise clipping, convnet without BatchNorm", SETTINGS)
