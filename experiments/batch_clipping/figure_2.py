"""Figure 2: mini-batch SGD without privacy, resnet-18, by batch size. Published: 90.24% at m = 64.

python experiments/batch_clipping/figure_2.py --seeds 0 1 2 --workers 4 --out figure_2.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

SETTINGS = {
    f"SGD, m = {m}": Setting(clipping="none", batch_size=m) for m in (64, 128, 256, 512, 1024)
}

if __name__ == "__main__":
    main("Figure 2: SGD without privacy, resnet-18", SETTINGS)
