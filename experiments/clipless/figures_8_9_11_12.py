"""Figures 8, 9, 11 and 12: norms of inputs, and of gradients beside their bounds.

Not private: it reads raw records and raw gradients, of CIFAR-10.

    python experiments/clipless/figures_8_9_11_12.py --out figures/
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from image_runs import Setting, first, loaded, run_once

import tacit
from tacit.diagnostics import gradient_histogram, input_norms

SETTING = Setting("mixer:4:64", 512, 30, scale=40.0, clip=0.2, learning_rate=1.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dataset", default="cifar10", choices=["mnist", "fashion-mnist", "cifar10"]
    )
    parser.add_argument("--records", type=int, default=4_000, help="to train on")
    parser.add_argument("--looked-at", type=int, default=256, help="records whose norms are shown")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train, _ = loaded(options.dataset, False, options.device, options.records)
    shown = first(train, options.looked_at)
    pixels, _ = tacit.load(options.dataset, scale=None)
    input_norms(pixels).plot(options.out / "figure_8_input_norms.png")
    loss = tacit.losses.CrossEntropy(1 / SETTING.scale)
    torch.manual_seed(0)
    fresh = tacit.models.lipschitz_mixer(train.shape, 10, patch=4, width=64).to(train.device)
    trained, facts = run_once(SETTING, train, epsilon=8.0, seed=0)
    tightness = {}
    for name, model in (("first", fresh), ("last", trained)):
        found = gradient_histogram(model, loss, shown)
        print(f"{name} step\n{found.text()}")
        found.plot(options.out / f"figures_9_11_12_{name}.png")
        tightness[name] = found.tightness()
    report = {"tightness": tightness, "epsilon": facts["epsilon"]}
    (options.out / "tightness.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
