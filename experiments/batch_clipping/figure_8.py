"""Figure 8: mini-batch SGD without privacy, convnet. Published: 80.55% (m = 64), 61.19% (1024).

python experiments/batch_clipping/figure_8.py --seeds 0 1 2 --workers 4 --out figure_8.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

SETTINGS = {
    f"SGD, m = {m}": Setting("convnet", clipping="none", batch_size=m)
    for m in (64, 128, 256, 512, 1024)
}

if __name__ == "__main__":
    main("Figure 8: SGD without privacy, convnet", SETTINGS)
