"""Figures 8, 9, 11 and 12: norms of inputs, and of gradients beside their bounds.

Not private: it reads raw records and raw gradients.

    python -m experiments.clipless norms --dataset cifar10 --out figures/
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tacit
from experiments.clipless.networks import Setting, build, loss_of
from experiments.clipless.training import public_scaler, run_once
from experiments.images import first
from experiments.runner import Paper
from tacit.canvas import blank, save
from tacit.diagnostics import GradientNorms, InputNorms, gradient_histogram, input_norms
from tacit.report.run_folder import source

SETTING = Setting("mlp:256", 1024, 60, scale=40.0, clip=0.2, learning_rate=1.5)
MODELS = ["mlp:256", "mixer:4:64", "pooled:6:3:64:2"]


def main(paper: Paper, arguments: Sequence[str]) -> dict:
    """Figures 8, 9, 11 and 12: norms of inputs, and of gradients beside their bounds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "--dataset", default="cifar10", choices=["mnist", "fashion-mnist", "cifar10"]
    )
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--records", type=int, default=10_000, help="to train on")
    parser.add_argument("--steps", type=int, default=SETTING.steps)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--shown", type=int, default=256, help="records whose norms are shown")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    inputs = norms_of_inputs(args.dataset)
    print(inputs.text())
    inputs.plot(args.out / f"figure_8_{args.dataset}.png")
    report: dict = {"dataset": args.dataset, "input_spread": inputs.spread(), "models": {}}
    train = first(tacit.load(args.dataset)[0], args.records).to(args.device)
    shown = first(train, args.shown)
    for model in args.models:
        batch = min(SETTING.batch_size, args.records // 4)
        setting = replace(SETTING, model=model, batch_size=batch, steps=args.steps)
        torch.manual_seed(0)
        fresh = build(setting, train.shape, 10).to(train.device)
        trained, facts = run_once(setting, train, args.epsilon, seed=0)
        loss = loss_of(setting)
        norms = {
            "before the first step": gradient_histogram(fresh, loss, shown),
            f"after {args.steps} steps": gradient_histogram(trained, loss, shown),
        }
        name = model.replace(":", "-")
        plot(norms, trained, args.out / f"figures_9_11_12_{args.dataset}_{name}.png")
        report["models"][model] = {"epsilon": facts["epsilon"], "norms": shares(norms, trained)}
    path = args.out / f"norms_{args.dataset}.json"
    path.write_text(json.dumps({**report, "source": source()}, indent=2) + "\n", encoding="utf-8")
    return report


def norms_of_inputs(dataset: str) -> InputNorms:
    """In several colour spaces; grey images as they are trained on."""
    pixels, _ = tacit.load(dataset, scale=None)
    if pixels.shape[0] == 3:
        return input_norms(pixels)
    return input_norms(pixels, [public_scaler(dataset)])


def shares(by_moment: Mapping[str, GradientNorms], model: nn.Module) -> dict:
    """The median and the largest norm over the bound, by moment and layer."""
    return {
        moment: {
            layer: {
                "median": float(norms.norms[name].median()) / norms.bounds[name],
                "largest": norms.tightness()[name],
            }
            for name, layer in layers_of(model).items()
        }
        for moment, norms in by_moment.items()
    }


def plot(by_moment: Mapping[str, GradientNorms], model: nn.Module, path: Path) -> None:
    """A panel per layer: histograms of norm over bound, which is 1 at the red bar."""
    layers = layers_of(model)
    relative = {
        (moment, name): norms.norms[name].numpy() / norms.bounds[name]
        for moment, norms in by_moment.items()
        for name in layers
    }
    least = min(float(values[values > 0].min(initial=1.0)) for values in relative.values())
    bins = np.geomspace(10 ** math.floor(math.log10(least)), 1.1, 61)
    figure, axes = blank(1, len(layers), (3.0 * len(layers) + 0.4, 3.2))
    for panel, (name, layer) in zip(axes.flat, layers.items(), strict=True):
        for moment in by_moment:
            values = relative[moment, name].clip(min=bins[0])
            panel.hist(values, bins=bins, histtype="stepfilled", alpha=0.5, label=moment)
        panel.axvline(1.0, color="tab:red", linewidth=1.5)
        panel.set_xscale("log")
        panel.set_title(layer, fontsize=9)
        panel.set_xlabel("gradient norm over its bound")
        panel.grid(alpha=0.3)
    axes.flat[0].set_ylabel("records")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    save(figure, path, next(iter(by_moment.values())).notice)


def layers_of(model: nn.Module) -> dict[str, str]:
    """A name to read for each weight: which layer, of what kind and shape."""
    names = {}
    for number, (name, weight) in enumerate(model.named_parameters(), start=1):
        layer = type(model.get_submodule(name.rpartition(".")[0])).__name__
        names[name] = f"{number}. {layer} {'×'.join(map(str, weight.shape))}"
    return names
