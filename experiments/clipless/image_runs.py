"""Clipless runs on images: settings, their search on held-out training records, and final seeds.

Every run is a whole private run: Poisson sampling, noise calibrated by PLD, the ledger. Settings
are chosen at one ε on 5,000 training records that are held out; the final seeds train on all
training records and look at the test records once. The search is not charged for, as is usual.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

import tacit
from tacit import Records
from tacit.certificates import certified_accuracy
from tacit.data.scattering import scattering_features
from tacit.lipschitz import (
    BoundedInput,
    ClipGradient,
    LayerCentering,
    MaxMin,
    ScaledL2NormPool2d,
    SpectralBall,
    SpectralConv2d,
    SpectralLinear,
)
from tacit.queries import Replayed

DELTA = 1e-5
HELD_OUT = 5_000


@dataclass(frozen=True)
class Setting:
    """What one run is told. `clip` is a share of the loss's own constant, √2·scale."""

    model: str
    batch_size: int
    steps: int
    scale: float
    clip: float
    learning_rate: float
    per_layer: bool = True
    ema: float | None = None

    @property
    def gradient_clip(self) -> float:
        return self.clip * math.sqrt(2) * self.scale


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    """On features of any kind: a sphere and one layer, whose norm is only limited."""
    width = math.prod(shape)
    head = SpectralLinear(width, classes, within=SpectralBall)
    nn.init.zeros_(head.weight)
    return nn.Sequential(nn.Flatten(), BoundedInput(1.0, sphere=True), head)


def one_convolution(
    shape: tuple[int, ...], classes: int, kernel: int, stride: int, filters: int, pool: int
) -> Callable[[float], nn.Module]:
    """A convolution, pooled and put on a sphere again, then a linear layer.

    The second sphere has no Lipschitz constant, so cotangents are clipped before it (at 0.3 of the
    clip on the outputs): bounds hold, certificates are lost.
    """
    channels = shape[0]

    def build(clip: float) -> nn.Module:
        front = nn.Sequential(
            LayerCentering(),
            BoundedInput(1.0, sphere=True),
            SpectralConv2d(channels, filters, kernel, stride=stride),
            MaxMin(),
            ScaledL2NormPool2d(pool) if pool > 1 else nn.Identity(),
            ClipGradient(0.3 * clip),
            BoundedInput(1.0, sphere=True),
            nn.Flatten(),
        )
        width = front(torch.zeros(1, *shape)).shape[1]
        return nn.Sequential(*front, SpectralLinear(width, classes))

    return build


def patches(shape: tuple[int, ...], classes: int, patch: int, width: int) -> nn.Module:
    """Disjoint patches through one square-ish layer, then a linear one: every bound is X·G."""
    tokens = (shape[1] // patch) * (shape[2] // patch)
    return nn.Sequential(
        LayerCentering(),
        BoundedInput(1.0, sphere=True),
        SpectralConv2d(shape[0], width, patch, stride=patch),
        MaxMin(),
        nn.Flatten(),
        SpectralLinear(tokens * width, classes),
    )


def build(setting: Setting, shape: tuple[int, ...], classes: int) -> nn.Module:
    kind, *numbers = setting.model.split(":")
    sizes = [int(number) for number in numbers]
    if kind == "linear":
        return linear(shape, classes)
    if kind == "mlp":
        return tacit.models.lipschitz_mlp(shape, classes, hidden=sizes)
    if kind == "mixer":
        return tacit.models.lipschitz_mixer(shape, classes, *sizes)
    if kind == "patches":
        return patches(shape, classes, *sizes)
    if kind == "convolution":
        return one_convolution(shape, classes, *sizes)(setting.gradient_clip)
    raise ValueError(f"no model is called {kind!r}")


@functools.cache
def noise(epsilon: float, size: int, batch: int, steps: int) -> float:
    budget = tacit.Budget(epsilon, DELTA)
    return tacit.calibrate(budget, tacit.Poisson(batch / size), steps=steps)


def run_once(setting: Setting, train: Records, epsilon: float, seed: int) -> tuple[nn.Module, dict]:
    torch.manual_seed(seed)
    device = train.device
    size = train.public_size
    assert size is not None
    assert train.num_classes is not None
    model = build(setting, train.shape, train.num_classes).to(device)
    loss = tacit.losses.CrossEntropy(1 / setting.scale)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=setting.learning_rate / setting.gradient_clip, momentum=0.9
    )
    steps = setting.steps
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    trainer = tacit.Trainer(
        model,
        loss,
        tacit.Clipless(gradient_clip=setting.gradient_clip, engine=Replayed()),
        tacit.PoissonSampler(
            train, expected_batch_size=setting.batch_size, steps=steps, pad_to=512
        ),
        optimizer,
        tacit.Budget(epsilon, DELTA),
        noise_multiplier=noise(epsilon, size, setting.batch_size, steps),
        allocation=tacit.PerLayerNoise() if setting.per_layer else tacit.GlobalNoise(),
        scheduler=cosine if setting.ema is None else None,
        moving_average=None if setting.ema is None else tacit.MovingAverage(setting.ema),
        progress=False,
    )
    started = time.perf_counter()
    run = trainer.fit()
    if device.type == "cuda":
        torch.cuda.synchronize()
    facts = {"epsilon": run.epsilon, "seconds": time.perf_counter() - started}
    del trainer, run
    gc.collect()  # a scheduler holds its optimizer in a circle, and with it the recorded graphs
    return model, facts


def loaded(
    dataset: str, scattering: bool, device: str, only: int | None = None
) -> tuple[Records, Records]:
    train, test = (part if only is None else first(part, only) for part in tacit.load(dataset))
    if scattering:
        return (
            scattering_features(train, device=device),
            scattering_features(test, device=device),
        )
    return train.to(device), test.to(device)


def first(records: Records, count: int) -> Records:
    return replace(
        records,
        inputs=records.inputs[:count],
        targets=records.targets[:count],
        record_ids=records.record_ids[:count],
        public_size=count,
    )


def held_out(train: Records) -> tuple[Records, Records]:
    """The training records without 5,000 of them (a fifth of few), and those, chosen once."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(7))
    order = order.to(train.device)
    held = min(HELD_OUT, len(train) // 5)
    parts = []
    for rows in (order[held:], order[:held]):
        parts.append(
            Records(
                train.inputs[rows],
                train.targets[rows],
                num_classes=train.num_classes,
                public_size=len(rows),
                name=train.name,
            )
        )
    return parts[0], parts[1]


def search(
    train: Records,
    epsilon: float,
    draw: Callable[[random.Random], Setting],
    *,
    seconds: float,
    trials: int,
    seed: int = 0,
) -> list[tuple[float, Setting]]:
    """Settings and their accuracy on held-out training records, the best first.

    The second half of the trials are drawn near the best so far.
    """
    rng = random.Random(seed)
    kept, held = held_out(train)
    started = time.perf_counter()
    found: list[tuple[float, Setting]] = []
    while len(found) < trials and time.perf_counter() - started < seconds:
        spent = max((time.perf_counter() - started) / seconds, len(found) / trials)
        setting = draw(rng) if spent < 0.5 or not found else near(max(found, key=_first)[1], rng)
        model, _ = run_once(setting, kept, epsilon, seed=rng.randrange(10**6))
        loss = tacit.losses.CrossEntropy(1 / setting.scale)
        found.append((tacit.evaluate(model, held, loss).accuracy, setting))
    return sorted(found, key=_first, reverse=True)


def near(setting: Setting, rng: random.Random) -> Setting:
    return replace(
        setting,
        scale=setting.scale * math.exp(rng.gauss(0, 0.3)),
        clip=min(1.0, setting.clip * math.exp(rng.gauss(0, 0.4))),
        learning_rate=setting.learning_rate * math.exp(rng.gauss(0, 0.4)),
    )


def _first(pair: tuple[float, Setting]) -> float:
    return pair[0]


def final(
    setting: Setting, train: Records, test: Records, epsilon: float, seeds: int, certify: bool
) -> dict:
    """The mean and the spread over seeds on the test records."""
    accuracies, certified, seconds, epsilons = [], [], [], []
    for seed in range(1, seeds + 1):
        model, facts = run_once(setting, train, epsilon, seed)
        loss = tacit.losses.CrossEntropy(1 / setting.scale)
        accuracies.append(tacit.evaluate(model, test, loss).accuracy)
        seconds.append(facts["seconds"])
        epsilons.append(facts["epsilon"])
        if certify:
            certified.append(_certified(model, test))
    shares = {r: [row[r] for row in certified] for r in (certified[0] if certified else {})}
    return {
        "epsilon": epsilon,
        "epsilon_pld": max(epsilons),
        "accuracy": accuracies,
        "mean": statistics.mean(accuracies),
        "std": statistics.stdev(accuracies) if seeds > 1 else 0.0,
        "certified_mean": {r: statistics.mean(s) for r, s in shares.items()},
        "certified_std": {r: statistics.stdev(s) for r, s in shares.items() if len(s) > 1},
        "seconds": statistics.median(seconds),
        "setting": asdict(setting),
        "seeds": seeds,
    }


def _certified(model: nn.Module, test: Records) -> dict[str, float]:
    """In units of pixels in [0, 1]: the network is given standardised images."""
    from tacit.cli.certify import scalers_of
    from tacit.data.catalogue import lookup

    _, pixels = tacit.load(test.name.removesuffix("/test"), scale=None)
    before = scalers_of(lookup(test.name.removesuffix("/test")), unit_norm=False)
    found = certified_accuracy(model, pixels.to(test.device), before=before)
    return {f"{r:g}": share for r, share in zip(found.radii, found.shares, strict=True)}
