"""Figure 9: convnet, m = 64: (a) the master constant at σ = 0.5, (b) noise at C = 0.14.

Published: 43.42% at σ = 0.5 and C = 0.14.

    python experiments/batch_clipping/figure_9.py --seeds 0 1 2 --workers 4 --out figure_9.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

MASTERS = (0.02, 0.08, 0.14, 0.2, 0.3)
SIGMAS = (0.01, 0.1, 0.2, 0.4, 0.6)
SETTINGS = {
    **{f"(a) C = {c}": Setting("convnet", master=c, sigma=0.5) for c in MASTERS},
    **{f"(b) sigma = {s}": Setting("convnet", master=0.14, sigma=s) for s in SIGMAS},
}

if __name__ == "__main__":
    main("Figure 9: convnet, master constant and noise at m = 64", SETTINGS)
