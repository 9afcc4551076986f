"""Figure 11: BN-LeNet-5 on MNIST, the master constant at σ = 0.5, m = 64, 50 epochs.

Published: 84.80% at C = 0.2.

    python experiments/batch_clipping/figure_11.py --seeds 0 1 2 --workers 4 --out figure_11.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

MASTERS = (0.02, 0.1, 0.2, 0.4, 0.8)
SETTINGS = {f"C = {c}": Setting("lenet5", master=c, sigma=0.5) for c in MASTERS}

if __name__ == "__main__":
    main("Figure 11: BN-LeNet-5, master constant, sigma = 0.5", SETTINGS)
