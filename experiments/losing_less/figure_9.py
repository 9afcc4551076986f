"""Figure 9: what each part of the loss adds, end to end and on scattering features.

Cross-entropy, SSE, SSE + cross-entropy, SSE + focal, and all three parts, with PLD's noise. The
parts keep Table 6's e_t, β and γ; the paper searched again for two of the sums.

    python experiments/losing_less/figure_9.py --seeds 0 1 2 3 4 --workers 3 --out figure_9.json
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from figure import main
from recipes import NAMES, SIZES
from runs import paper_setting

from tacit.diagnostics.accuracy_curve import plot_ablation

LOSSES = ("cross-entropy", "sse", "sse+ce", "sse+focal", "tailored")
SETTINGS = {
    f"{NAMES[dataset]}, {features}, {loss}": paper_setting(dataset, features, loss)
    for features in ("pixels", "scattering")
    for dataset in SIZES
    for loss in LOSSES
}


def draw(found: Mapping, path: Path) -> None:
    """Bars for each dataset and kind of features: NAME_DATASET_FEATURES.png."""
    groups: dict[str, dict[str, list[float]]] = {}
    for name, row in found["settings"].items():
        group, _, loss = name.rpartition(", ")
        groups.setdefault(group, {})[loss] = [r["accuracy"] for r in row["runs"]]
    for group, accuracies in groups.items():
        file = path.with_stem(f"{path.stem}_{group.replace(', ', '_')}")
        plot_ablation(accuracies, file, title=group)


if __name__ == "__main__":
    main("Figure 9: ablation", SETTINGS, draw=draw)
