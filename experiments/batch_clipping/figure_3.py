"""Figure 3: batch clipping with adaptive layerwise constants, resnet-18, by batch size.

σ = 0.01875, 50 epochs. Published at m = 64: 60% after 20 epochs, 67% after 50. SGD beside it.

    python experiments/batch_clipping/figure_3.py --seeds 0 1 2 --workers 4 --out figure_3.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

SETTINGS = {
    **{f"BC, enhanced, m = {m}": Setting(batch_size=m) for m in (64, 128, 256, 512, 1024)},
    "SGD, m = 64": Setting(clipping="none"),
}

if __name__ == "__main__":
    main("Figure 3: BC with adaptive layerwise clipping, resnet-18", SETTINGS)
