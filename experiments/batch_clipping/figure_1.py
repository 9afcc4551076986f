"""Figure 1: norms of the layers' gradients, resnet-18 trained without privacy for 50 epochs.

Norms of the mean gradient of mini-sets of 64 public records: what batch clipping clips.

    python experiments/batch_clipping/figure_1.py --out figure_1.json --plot figure_1.png
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import figure
from runs import Setting

SETTINGS = {"SGD, m = 64": Setting(clipping="none")}


def plot(found: Mapping, path: Path) -> None:
    """Each layer a line, coloured by what kind of layer it is."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (row,) = found["settings"].values()
    run = row["runs"][0]
    colours = {"conv": "tab:blue", "bn": "tab:orange", "shortcut": "tab:green", "linear": "tab:red"}
    drawn, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    epochs = [epoch for epoch, _ in run["norms"]]
    seen = set()
    for place, name in enumerate(run["layers"]):
        kind = kind_of(name, place, len(run["layers"]))
        label = None if kind in seen else kind
        seen.add(kind)
        values = [norms[place] for _, norms in run["norms"]]
        axes.semilogy(epochs, values, color=colours[kind], label=label, lw=0.8, alpha=0.8)
    axes.set(xlabel="epoch", ylabel="mean norm of the gradient", title=found["title"])
    axes.legend()
    axes.grid(alpha=0.3)
    drawn.savefig(path, dpi=150)
    pyplot.close(drawn)


def kind_of(name: str, place: int, count: int) -> str:
    """The paper's four kinds, from where the tensor is in our resnet-18."""
    if place >= count - 2:
        return "linear"
    if "shortcut" in name:
        return "shortcut"
    index = name.split(".")[-2]
    return "conv" if (name.startswith("0.") or index in ("0", "3")) and "bias" not in name else "bn"


if __name__ == "__main__":
    figure.plot = plot
    figure.main("Figure 1: gradient norms of resnet-18 layers", SETTINGS)
