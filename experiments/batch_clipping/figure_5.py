"""Figure 5: batch clipping of resnet-18 under more noise, ten epochs, m = 64, C = 0.095.

Published: below 40% from σ = 0.2, about 20% at σ = 0.5.

    python experiments/batch_clipping/figure_5.py --seeds 0 1 2 --workers 4 --out figure_5.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

SIGMAS = (0.01875, 0.05, 0.1, 0.2, 0.5, 1.0)
SETTINGS = {f"BC, enhanced, sigma = {s}": Setting(sigma=s, epochs=10) for s in SIGMAS}

if __name__ == "__main__":
    main("Figure 5: noise and accuracy, resnet-18", SETTINGS)
