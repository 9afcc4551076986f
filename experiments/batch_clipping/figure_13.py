"""Figure 13: convnet with and without BatchNorm, SGD without privacy, m = 64.

python experiments/batch_clipping/figure_13.py --seeds 0 1 2 --workers 4 --out figure_13.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

SETTINGS = {
    "with BatchNorm": Setting("convnet", clipping="none"),
    "without BatchNorm": Setting("convnet", clipping="none", norm="none"),
}

if __name__ == "__main__":
    main("Figure 13: SGD without privacy, convnet with and without BatchNorm", SETTINGS)
