"""Figure 17: resnet-18 without BatchNorm, individual clipping, the four schedules of Table 3.

Published: 18 to 22%.

    python experiments/batch_clipping/figure_17.py --seeds 0 1 2 --workers 4 --out figure_17.json
"""

from __future__ import annotations

from figure import main

from runs import Setting

SETTINGS = {
    f"{step} step size, {master} C": Setting(
        "resnet18",
        norm="none",
        clipping="individual",
        rate_decay=0.9 if step == "diminishing" else 1.0,
        master_decay=0.9 if master == "diminishing" else 1.0,
    )
    for step in ("constant", "diminishing")
    for master in ("constant", "diminishing")
}

if __name__ == "__main__":
    main("Figure 17: IC with adaptive layerwise clipping, resnet-18 without BatchNorm", SETTINGS)
