"""Figure 3: accuracy against ε, end to end: cross-entropy (CE-T-CNN) and tailored (O-T-CNN).

MNIST, Fashion-MNIST and CIFAR-10, each with the paper's noise and with the noise that PLD allows.
Published, at ε < 3: 98.2 / 86.9 / 59.8 with cross-entropy, 63.2 on CIFAR-10 with the tailored loss;
at ε < 1.5 on CIFAR-10 45.9 and 55.4.

    python experiments/losing_less/figure_3.py --seeds 0 1 2 3 4 --workers 3 --out figure_3.json
"""

from __future__ import annotations

from figure import main
from recipes import NAMES, SIZES
from runs import Setting, paper_setting

# The same networks by SGD without privacy.
PLAIN = {
    f"{NAMES[dataset]}, without privacy": Setting(
        dataset, batch_size=256, steps=20 * SIZES[dataset] // 256, learning_rate=0.05, cosine=True,
        private=False,
    )
    for dataset in SIZES
}  # fmt: skip
SETTINGS = {
    f"{NAMES[dataset]}, {loss}, {noise} noise": paper_setting(dataset, "pixels", loss, noise)
    for dataset in SIZES
    for loss in ("cross-entropy", "tailored")
    for noise in ("paper", "pld")
} | PLAIN

if __name__ == "__main__":
    main("Figure 3: accuracy against epsilon, end to end", SETTINGS)
