"""Figure 10: batch clipping of convnet by batch size, C = 0.14, σ = 0.5; SGD beside it.

Published: about 40%.

    python experiments/batch_clipping/figure_10.py --seeds 0 1 2 --workers 4 --out figure_10.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

SETTINGS = {
    **{
        f"BC, enhanced, m = {m}": Setting("convnet", master=0.14, sigma=0.5, batch_size=m)
        for m in (64, 128, 256, 512, 1024)
    },
    "SGD, m = 64": Setting("convnet", clipping="none"),
}

if __name__ == "__main__":
    main("Figure 10: BC with adaptive layerwise clipping, convnet", SETTINGS)
