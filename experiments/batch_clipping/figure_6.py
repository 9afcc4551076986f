"""Figure 6: convnet, the master constant at little noise: σ = 0.01875, m = 1024, 50 epochs.

Published: 59.02% at C = 0.9, little change from 0.2 on.

    python experiments/batch_clipping/figure_6.py --seeds 0 1 2 --workers 4 --out figure_6.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

MASTERS = (0.02, 0.05, 0.1, 0.2, 0.5, 0.9, 1.5)
SETTINGS = {f"C = {c}": Setting("convnet", master=c, batch_size=1024) for c in MASTERS}

if __name__ == "__main__":
    main("Figure 6: convnet, master constant, sigma = 0.01875", SETTINGS)
