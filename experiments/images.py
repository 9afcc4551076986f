"""What experiments on images share: records, features, released statistics, SGD without privacy."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting as dpa
import torch
from torch import Tensor, nn

import tacit
from experiments.results import DELTA
from experiments.runner import Job, least_noise, wait_for
from tacit import Records
from tacit.data.download import cache_folder
from tacit.data.private_scaling import Centre, release_centre, release_channel_scaler
from tacit.data.scattering import scattering_features, usual_size
from tacit.losses import RecordLoss, Scheduled, watched
from tacit.queries import GradientQuery
from tacit.training import Callback, Run

HELD_OUT = 5_000
ORDERS = (0.7, 1.0, 1.4)
FEATURES = ("pixels", "scattering", "raw", "mirrored", "log", "orders", "first")
Map = Callable[[Tensor], Tensor]
Features = Callable[[Records, str, str], Records]  # of records, a kind of features and a device


@dataclass(frozen=True)
class Source:
    """Which records a run reads, as which features, and where."""

    dataset: str
    features: str = "pixels"
    device: str = "cpu"
    limit: int | None = None
    held_out: bool = False


def source_of(job: Job, dataset: str, features: str) -> Source:
    return Source(dataset, features, job.device, job.limit, job.held_out)


def sides(source: Source) -> tuple[Records, Records]:
    """Records to train on and records to evaluate on.

    The latter are the test records, or with `held_out` 5,000 of the training records (a fifth of
    few), chosen once: a search never reads the test records.
    """
    train, test = tacit.load(source.dataset)
    if source.limit is not None:
        train, test = first(train, source.limit), first(test, source.limit)
    if not source.held_out:
        return train, test
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(7))
    count = min(HELD_OUT, len(train) // 5)
    return rows_of(train, order[count:]), rows_of(train, order[:count])


def first(records: Records, count: int) -> Records:
    return rows_of(records, torch.arange(min(count, len(records))))


def rows_of(records: Records, rows: Tensor) -> Records:
    rows = rows.to(records.device)
    return Records(
        records.inputs[rows],
        records.targets[rows],
        num_classes=records.num_classes,
        public_size=len(rows),
        name=records.name,
    )


def featured(records: Records, features: str, device: str) -> Records:
    """Features that read each record by itself, so nothing is learnt and nothing is charged.

    pixels; raw: scattering coefficients S; mirrored: their mean with those of the mirror image;
    scattering: raw, 27 groups normalised in each record; log: log(S + 0.1); orders: the same, each
    order weighted; first: log(S + 0.1) up to the first order.
    """
    if features not in FEATURES:
        raise ValueError(f"features is {features!r}; give one of {', '.join(FEATURES)}")
    if features == "pixels":
        return records.to(device)
    scattered = scattering_features(
        records,
        groups=27 if features == "scattering" else None,
        order=1 if features == "first" else 2,
        mirror=features == "mirrored",
        # A GPU computes features faster than a disk reads them.
        cache=cache_folder() / "scattering" if device == "cpu" else None,
        device=device,
    )
    if features in ("log", "orders", "first"):
        scattered.inputs.clamp_(min=0).add_(0.1).log_()
    if features == "orders":
        scattered.inputs.mul_(order_weights(scattered.shape[0]).to(scattered.inputs))
    return scattered


@functools.lru_cache(maxsize=4)
def parts(features_of: Features, source: Source) -> tuple[Records, Records]:
    """The records of `sides`, as features."""
    train, evaluated = (features_of(part, source.features, source.device) for part in sides(source))
    return train, evaluated


def order_weights(channels: int) -> Tensor:
    """(C, 1, 1): constants for the orders of each colour's 81 channels, 1, 16 and 64 of them.

    In any images second-order coefficients vary least and the average of pixels most.
    """
    weights = torch.cat([torch.full((n,), w) for n, w in zip((1, 16, 64), ORDERS, strict=True)])
    return weights.repeat(channels // 81)[:, None, None]


def release_maps(
    train: Records,
    setting: Any,
    seeds: tuple[int, int],
    map_of: Callable[[Centre], Map] = lambda centre: centre,
) -> tuple[list[Map], tuple[dpa.DpEvent, ...]]:
    """Maps made from noisy statistics of the training records, and what they cost.

    Args:
        setting: its `channels` is the noise multiplier of a mean and a standard deviation per
            channel, and its `centre` that of a mean about which records are put on the unit sphere;
            without a multiplier nothing is released.
        seeds: of the two releases; they must differ from the seed of the run's own noise.
        map_of: the map for a released centre; by default the centre itself.
    """
    maps: list[Map] = []
    events: list[dpa.DpEvent] = []
    inputs, size = train.inputs, train.require_public_size("a released mean")
    if setting.channels is not None:
        scaler, event = release_channel_scaler(
            inputs,
            size_bound=usual_size(train.shape[0]),
            noise_multiplier=setting.channels,
            public_size=size,
            seed=seeds[0],
        )
        inputs = scaler(inputs)
        maps.append(scaler)
        events.append(event)
    if setting.centre is not None:
        released, event = release_centre(
            inputs, noise_multiplier=setting.centre, public_size=size, seed=seeds[1]
        )
        maps.append(map_of(released))
        events.append(event)
    return maps, tuple(events)


def mapped(records: Records, maps: list[Map]) -> Records:
    for apply in maps:
        records = replace(records, inputs=apply(records.inputs))
    return records


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """Steps after which the model is evaluated: evenly spaced, the last one included."""
    return {round(steps * i / evaluations) for i in range(1, evaluations + 1)} - {0}


def train_privately(
    setting: Any,
    model: nn.Module,
    loss: RecordLoss,
    query: GradientQuery,
    optimizer: torch.optim.Optimizer,
    train: Records,
    *,
    epsilon: float,
    prelude: tuple[dpa.DpEvent, ...],
    seed: int,
    noise: tacit.Noise,
    max_rows: int | None = None,
    callbacks: Iterable[Callback] = (),
) -> tuple[Run, dict[str, Any]]:
    """A whole private run with Poisson sampling and a ledger in memory, and what to report of it.

    `setting` has batch_size, steps, cosine and ema. `noise` without a multiplier gets the least
    that keeps `prelude` and the steps within ε. At most `max_rows` records go through the model at
    once.
    """
    # N is public: every record of the set takes part.
    rate = setting.batch_size / train.require_public_size("a sampling rate")
    began = time.perf_counter()
    if noise.multiplier is None:
        noise = replace(noise, multiplier=least_noise(rate, setting.steps, epsilon, prelude))
    calibrated = time.perf_counter()
    pad_to = None  # on a CPU padding is only work; on a GPU a few shapes are recorded
    if train.device.type == "cuda":
        pad_to = 32 if setting.batch_size < 4096 else 512
    sampler = tacit.PoissonSampler(
        train,
        expected_batch_size=setting.batch_size,
        steps=setting.steps,
        max_physical_batch=max_rows,
        pad_to=pad_to,
    )
    run = tacit.Trainer(
        model,
        loss,
        query,
        sampler,
        optimizer,
        tacit.Budget(epsilon, DELTA),
        noise=noise,
        ledger=tacit.LedgerRun(prelude=prelude),
        scheduler=cosine_schedule(setting, optimizer),
        moving_average=None if setting.ema is None else tacit.MovingAverage(setting.ema),
        callbacks=callbacks,
        seed=seed,
    ).fit()
    wait_for(train.device.type)
    return run, {
        "epsilon": run.epsilon,
        "noise_multiplier": noise.multiplier,
        "steps": run.steps,
        "stopped": run.stopped,
        "calibration_seconds": calibrated - began,
        "seconds": time.perf_counter() - calibrated,
        "sampling": run.plan.scheme.describe(),
    }


def cosine_schedule(
    setting: Any, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    if not setting.cosine:
        return None
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)


# What a run without privacy reports.
NOT_PRIVATE = {"epsilon": math.inf, "sampling": "shuffled epochs, not private"}


def plain_steps(
    model: nn.Module,
    loss: RecordLoss,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    records: Records,
    batch_size: int,
    steps: int,
    evaluated: Container[int],
    transform: Map = lambda inputs: inputs,
) -> Iterator[int]:
    """SGD without privacy on shuffled epochs; yields each step of `evaluated` when it is done."""
    order = torch.empty(0, dtype=torch.long, device=records.device)
    size = min(batch_size, len(records))
    for step in range(1, steps + 1):
        if len(order) < size:
            order = torch.randperm(len(records), device=records.device)
        rows, order = order[:size], order[size:]
        if isinstance(loss, Scheduled):
            loss.at((step - 1) * size / len(records))
        optimizer.zero_grad()
        with watched(model, loss):
            outputs = model(transform(records.inputs[rows]))
            loss(outputs, records.targets[rows]).mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step in evaluated:
            yield step
