"""Figure 13: as Figure 8 for CIFAR-10, Fashion-MNIST and MNIST, at more epochs.

python experiments/losing_less/figure_13.py --out figure_13.json --plot figure_13.png
"""

from __future__ import annotations

from confusions import main

DATASETS, EPOCHS = ("cifar10", "fashion-mnist", "mnist"), (2, 10, 20, 30)

if __name__ == "__main__":
    main("Figure 13: confusion on three datasets", DATASETS, EPOCHS)
