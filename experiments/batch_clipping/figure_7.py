"""Figure 7: convnet, the master constant at much noise: σ = 0.5, m = 1024, 50 epochs.

Published: 40.58% at C = 0.1.

    python experiments/batch_clipping/figure_7.py --seeds 0 1 2 --workers 4 --out figure_7.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

MASTERS = (0.01, 0.05, 0.1, 0.2, 0.5, 0.9)
SETTINGS = {f"C = {c}": Setting("convnet", master=c, sigma=0.5, batch_size=1024) for c in MASTERS}

if __name__ == "__main__":
    main("Figure 7: convnet, master constant, sigma = 0.5", SETTINGS)
