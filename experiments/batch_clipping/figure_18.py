"""Figure 18: adaptive layerwise against full gradient clipping, resnet-18, m = 64, C = 0.095.

(a) under one σ, where the layerwise run has √62 times less privacy; (b) with σ/√62 for the full
gradient, which is one guarantee. Published: 66.66% against 46.35%.

    python experiments/batch_clipping/figure_18.py --seeds 0 1 2 --workers 4 --out figure_18.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

SIGMA = 0.01875
SETTINGS = {
    "layerwise": Setting(sigma=SIGMA),
    "(a) full gradient, sigma": Setting(constants="full", sigma=SIGMA),
    "(b) full gradient, sigma/sqrt(62)": Setting(constants="full", sigma=SIGMA / 62**0.5),
    "factors, sigma/sqrt(62)": Setting(constants="factors", master=0.3, sigma=SIGMA / 62**0.5),
}

if __name__ == "__main__":
    main("Figure 18: layerwise and full gradient clipping, resnet-18", SETTINGS)
