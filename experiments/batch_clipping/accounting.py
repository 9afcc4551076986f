"""What the settings of the batch-clipping paper cost: exact ε beside the CLT figure.

One mini-set of 64 records a step, 50 epochs, noise 2·σ·C on each of L blocks: under replace-one
C_{64/N}(G_{√L/σ})^{⊗T}, T = 50·⌈N/64⌉, at δ = 1e-5.

    python -m experiments.batch_clipping accounting --out accounting.json --plot accounting.png
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.results import DELTA, write
from experiments.runner import Paper, command, some_of
from tacit import Relation, by_layer, by_parameter, epsilon, models, trade_off
from tacit.accounting import GaussianDpEstimate, TradeOff, gaussian_dp_mu, layerwise_multiplier
from tacit.accounting.f_dp import plot_trade_offs
from tacit.accounting.gaussian_dp import NO_PRIVACY, no_privacy
from tacit.report.run_folder import source
from tacit.sampling import MiniSets
from tacit.sampling.scheme import Unit

SET_SIZE, EPOCHS, TYPE_ONE = 64, 50, 0.05
_DRAWN = 10.0  # a limit curve beyond this is the frame of the picture


class Published(NamedTuple):
    """A network with BatchNorm, its private records, and the paper's σ and accuracy (%)."""

    network: str
    sigma: float
    records: int
    published: float


# Nine tenths of MNIST's and of CIFAR-10's training records; the rest is the public set.
SETTINGS = (
    Published("lenet5", 2.5, 54_000, 50.4),
    Published("lenet5", 1.5, 54_000, 67.0),
    Published("lenet5", 0.5, 54_000, 84.8),
    Published("convnet", 0.5, 45_000, 43.4),
    Published("resnet18", 0.01875, 45_000, 67.0),
)
# L as the paper's text has it: it counts lenet5's layers, and resnet18's parameter tensors.
STATED = {"lenet5": 8, "resnet18": 62}
NETWORKS = ("lenet5", "convnet", "resnet18")


def counted(network: str) -> dict[str, int]:
    """How many blocks our network really has, by either way to count."""
    model = getattr(models, network)()
    return {"by layer": len(by_layer(model)), "by parameter": len(by_parameter(model))}


def row(
    setting: Published, count: str, blocks: int, epochs: int
) -> tuple[dict, TradeOff, GaussianDpEstimate]:
    """One line of the table, its exact curve and its CLT figure."""
    scheme = MiniSets(math.ceil(setting.records / SET_SIZE), SET_SIZE, chosen=1)
    steps = epochs * scheme.num_sets
    z = layerwise_multiplier(setting.sigma, blocks)
    spent = epsilon(
        z, scheme, steps, delta=DELTA, relation=Relation.REPLACE_ONE, unit=Unit.MINI_SET
    )
    curve = trade_off(z, scheme, steps, relation=Relation.REPLACE_ONE, unit=Unit.MINI_SET)
    limit = gaussian_dp_mu(z, scheme, steps, unit=Unit.MINI_SET)
    facts = {
        "network": setting.network,
        "sigma": setting.sigma,
        "records": setting.records,
        "blocks": blocks,
        "counted": count,
        "stated_in_the_paper": STATED.get(setting.network) == blocks,
        "published_accuracy": setting.published,
        "noise_multiplier": z,
        "steps": steps,
        "epsilon": spent,
        "delta": DELTA,
        "relation": Relation.REPLACE_ONE.value,
        "advantage": curve.advantage,
        "type_one": TYPE_ONE,
        "type_two": float(curve(TYPE_ONE)[0]),
        "clt_mu": limit.mu,
        "clt_epsilon": limit.epsilon(DELTA),
        # μ = √2·h(σ/√L)·√(E·m/N), the form in which the paper gives it.
        "clt_h": limit.mu / math.sqrt(2 * epochs / scheme.num_sets),
        "no_privacy": no_privacy(spent, DELTA),
    }
    return facts, curve, limit


def show(rows: Sequence[dict]) -> None:
    print("network   σ        L                  ε (exact)   β at α=0.05  CLT μ      CLT ε")
    for facts in rows:
        blocks = f"{facts['blocks']} {facts['counted']}"
        words = f"   {NO_PRIVACY}" if facts["no_privacy"] else ""
        stated = "*" if facts["stated_in_the_paper"] else " "
        print(
            f"{facts['network']:9} {facts['sigma']:<8g} {blocks:16} {stated} "
            f"{facts['epsilon']:<11.4g} {facts['type_two']:<12.3g} {facts['clt_mu']:<10.4g} "
            f"{facts['clt_epsilon']:.4g}{words}"
        )
    print(f"* L as in the paper's text; δ = {DELTA:g}, replace-one; the CLT is not a guarantee")


@command(
    {
        "--networks": some_of(NETWORKS),
        "--epochs": {"type": int, "default": EPOCHS},
        "--out": {"type": Path, "help": "write the table as JSON"},
        "--plot": {"type": Path, "help": "draw the curves with the paper's L"},
    }
)
def main(paper: Paper, args: argparse.Namespace) -> list[dict]:
    """Exact ε of the paper's settings beside its CLT figures."""
    if args.epochs < 1:
        raise SystemExit(f"--epochs is {args.epochs}; give at least 1")
    rows, curves, limits = [], {}, {}
    for setting in SETTINGS:
        if setting.network not in args.networks:
            continue
        for count, blocks in counted(setting.network).items():
            facts, curve, limit = row(setting, count, blocks, args.epochs)
            rows.append(facts)
            if STATED.get(setting.network, blocks) != blocks:
                continue
            name = f"{setting.network}, σ = {setting.sigma:g}, L = {blocks}"
            name += ": no privacy" if facts["no_privacy"] else ""
            curves[name] = curve
            if limit.mu < _DRAWN:
                limits[name] = limit
    show(rows)
    write(args.out, {"rows": rows, "source": source()})
    if args.plot:
        plot_trade_offs(curves, args.plot, limits, "the batch-clipping paper's settings")
    return rows
