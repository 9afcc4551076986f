"""What is measured of trained networks: certificates under attack, and norms beside their bounds.

**Attacked** trains the network that a search has chosen, then moves every test record uphill in
pixel space (projected gradient ascent on the margin, within an L2 ball): what is still right bounds
the true robust accuracy from above, certified accuracy bounds it from below. It ends with an error
if a certified record falls.

**Norms** are those of inputs, and of gradients beside their bounds. Not private: they are of raw
records and raw gradients.

    python -m experiments.clipless attacked --chosen search.jsonl --out attacked.json
    python -m experiments.clipless norms --dataset cifar10 --out figures/
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import tacit
from experiments.clipless.figure_3b import KNOWN, TASKS
from experiments.clipless.networks import Setting, build, default_epsilon, is_certified, loss_of
from experiments.clipless.training import (
    PIXEL,
    Trial,
    features_of,
    pixel_unit,
    public_scaler,
    run_once,
)
from experiments.images import first, parts, source_of
from experiments.results import plain, read_lines, write
from experiments.runner import Paper, command, job_of, shared
from tacit import Records
from tacit.canvas import blank, save
from tacit.certificates import certified_radius
from tacit.data.catalogue import lookup
from tacit.diagnostics import GradientNorms, InputNorms, gradient_histogram, input_norms
from tacit.report.run_folder import environment, source

RADII = (1, 2, 4, 8, 16, 36)


def attacked(
    model: nn.Module, x: Tensor, y: Tensor, radius: float, std: Tensor, steps: int
) -> Tensor:
    """Whether each record keeps its class y against `steps` of ascent within `radius` of pixels.

    A move δ of the pixels is a move δ/std of the record. Steps are a fifth of the radius long,
    along the gradient of max_{j≠y} f_j − f_y, from the record itself and from a random point.
    """
    right = model(x).argmax(1) == y
    for begin in (0.0, radius):
        move = torch.randn_like(x)
        move *= begin / _norms(move)
        for _ in range(steps):
            move.requires_grad_(True)
            margins = _margins(model(x + move / std), y)
            (slope,) = torch.autograd.grad(margins.sum(), move)
            with torch.no_grad():
                right &= margins < 0
                move = move + 0.2 * radius * slope / _norms(slope)
                move = move * (radius / _norms(move)).clamp(max=1.0)
        with torch.no_grad():
            right &= _margins(model(x + move / std), y) < 0
    return right


def _margins(outputs: Tensor, y: Tensor) -> Tensor:
    own = outputs.gather(1, y[:, None]).squeeze(1)
    others = outputs.scatter(1, y[:, None], -torch.inf)
    return others.amax(1) - own


def _norms(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1).clamp(min=1e-30).view(-1, 1, 1, 1)


def rows(model: nn.Module, test: Records, dataset: str, steps: int) -> list[dict]:
    """For each radius over 255: certified, right under attack, and certified records that fell."""
    std = torch.tensor(lookup(dataset).std, device=test.device).view(1, -1, 1, 1)
    table = []
    for over_255 in RADII:
        radius = over_255 * PIXEL
        counts = torch.zeros(3, dtype=torch.long)
        for x, y in zip(test.inputs.split(2000), test.targets.split(2000), strict=True):
            safe = certified_radius(model, x, y) > over_255 * pixel_unit(dataset)
            kept = attacked(model, x, y, radius, std, steps)
            counts += torch.stack([safe.sum(), kept.sum(), (safe & ~kept).sum()]).cpu()
        certified, right, fell = counts.tolist()
        table.append(
            {
                "radius_over_255": over_255,
                "certified": certified / len(test),
                "under_attack": right / len(test),
                "certified_that_fell": fell,
            }
        )
        print(table[-1], flush=True)
    return table


@command(
    {
        **shared("--small", "--seeds", "--device"),
        "--task": {"choices": list(filter(is_certified, KNOWN)), "default": "cifar10/certified"},
        "--chosen": {"type": Path, "help": "a search's file; else what is known to work"},
        "--epsilon": {"type": float, "help": "else that of the task's search"},
        "--steps": {"type": int, "default": 20, "help": "of ascent, from each start"},
        "--out": {"type": Path, "help": "JSON"},
    }
)
def under_attack(paper: Paper, args: argparse.Namespace) -> dict:
    """Certificates under attack: no certified record may change its class within its radius."""
    setting = KNOWN[args.task][0]
    if args.chosen is not None:
        setting = TASKS.chosen(read_lines(args.chosen))[args.task]
    trial = Trial(args.task, setting, args.epsilon or default_epsilon(args.task))
    job = job_of(paper, args, "attacked", args.task, trial, (args.seeds or [0])[0])
    trial = job.setting
    train, test = parts(features_of, source_of(job, trial.dataset, setting.features))
    model, facts = run_once(trial.setting, train, trial.epsilon, job.seed)
    report = {
        "task": trial.task,
        "seed": job.seed,
        "setting": vars(trial.setting),
        **facts,
        "steps_of_ascent": 2 * args.steps,
        "rows": rows(model.eval(), test, trial.dataset, args.steps),
        "environment": environment(),
    }
    write(args.out, report)
    if any(row["certified_that_fell"] for row in report["rows"]):
        raise SystemExit("a certified record fell: its certificate is wrong")
    return plain(report)


# --- norms --------------------------------------------------------------------------------------

SETTING = Setting("mlp:256", 1024, 60, scale=40.0, clip=0.2, learning_rate=1.5)
MODELS = ["mlp:256", "mixer:4:64", "pooled:6:3:64:2"]


@command(
    {
        **shared("--device"),
        "--dataset": {"default": "cifar10", "choices": ["mnist", "fashion-mnist", "cifar10"]},
        "--models": {"nargs": "+", "default": MODELS},
        "--records": {"type": int, "default": 10_000, "help": "to train on"},
        "--steps": {"type": int, "default": SETTING.steps},
        "--epsilon": {"type": float, "default": 8.0},
        "--shown": {"type": int, "default": 256, "help": "records whose norms are shown"},
        "--out": {"type": Path, "required": True},
    }
)
def norms(paper: Paper, args: argparse.Namespace) -> dict:
    """Figures 8, 9, 11 and 12: norms of inputs, and of gradients beside their bounds."""
    args.out.mkdir(parents=True, exist_ok=True)
    inputs = norms_of_inputs(args.dataset)
    print(inputs.text())
    inputs.plot(args.out / f"figure_8_{args.dataset}.png")
    report: dict = {"dataset": args.dataset, "input_spread": inputs.spread(), "models": {}}
    train = first(tacit.load(args.dataset)[0], args.records).to(args.device)
    shown = first(train, args.shown)
    batch = min(SETTING.batch_size, args.records // 4)
    for model in args.models:
        setting = replace(SETTING, model=model, batch_size=batch, steps=args.steps)
        loss = loss_of(setting)
        torch.manual_seed(0)
        fresh = build(setting, train.shape, 10).to(train.device)
        trained, facts = run_once(setting, train, args.epsilon, seed=0)
        by_moment = {
            "before the first step": gradient_histogram(fresh, loss, shown),
            f"after {args.steps} steps": gradient_histogram(trained, loss, shown),
        }
        name = model.replace(":", "-")
        plot(by_moment, trained, args.out / f"figures_9_11_12_{args.dataset}_{name}.png")
        report["models"][model] = {"epsilon": facts["epsilon"], "norms": shares(by_moment, trained)}
    write(args.out / f"norms_{args.dataset}.json", {**report, "source": source()})
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
