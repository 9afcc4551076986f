"""Figure 12: BN-LeNet-5 on MNIST, C = 0.2: (a) batch sizes at σ = 2.5, (b) noise at m = 64.

Published: 50.38% to 45.11% from m = 64 to 1024; about 67% at σ = 1.5.

    python experiments/batch_clipping/figure_12.py --seeds 0 1 2 --workers 4 --out figure_12.json
"""

from __future__ import annotations

from figure import main
from runs import Setting

SETTINGS = {
    **{
        f"(a) m = {m}": Setting("lenet5", master=0.2, sigma=2.5, batch_size=m)
        for m in (64, 128, 256, 512, 1024)
    },
    **{f"(b) sigma = {s}": Setting("lenet5", master=0.2, sigma=s) for s in (0.5, 1.0, 1.5, 2.0)},
}

if __name__ == "__main__":
    main("Figure 12: BN-LeNet-5, batch size and noise", SETTINGS)
