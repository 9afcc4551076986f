"""Figure 16: resnet-18 without BatchNorm, batch clipping, the four schedules of Table 3.

Published: 30 to 40%.

    python experiments/batch_clipping/figure_16.py --seeds 0 1 2 --workers 4 --out figure_16.json
"""

from __future__ import annotations

from figure import main
from runs import four_schedules

SETTINGS = four_schedules("resnet18", "batch")

if __name__ == "__main__":
    main("Figure 16: BC with adaptive layerwise clipping, resnet-18 without BatchNorm", SETTINGS)
