"""Figure 15: convnet without BatchNorm, individual clipping, the four schedules of Table 3.

Published: 21.12% at best.

    python experiments/batch_clipping/figure_15.py --seeds 0 1 2 --workers 4 --out figure_15.json
"""

from __future__ import annotations

from figure import main

from runs import Setting

SETTINGS = {
    f"{step} step size, {master} C": Setting(
        "convnet",
        norm="none",
        clipping="individual",
        rate_decay=0.9 if step == "diminishing" else 1.0,
        master_decay=0.9 if master == "diminishing" else 1.0,
    )
    for step in ("constant", "diminishing")
    for master in ("constant", "diminishing")
}

if __name__ == "__main__":
    main("Figure 15: IC with adaptive layerwise clipping, convnet without BatchNorm", SETTINGS)
