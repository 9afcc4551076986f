"""Figure 8: which class is taken for which on CIFAR-10's training records, epochs 2 and 20.

O-T-CNN, CE-T-CNN and SGD without privacy. Not private: reads predictions on training records.

    python experiments/losing_less/figure_8.py --out figure_8.json --plot figure_8.png
"""

from __future__ import annotations

from confusions import main

DATASETS, EPOCHS = ("cifar10",), (2, 20)

if __name__ == "__main__":
    main("Figure 8: confusion on CIFAR-10", DATASETS, EPOCHS)
