"""Records of the image experiments: loading, held-out records, features, released statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import dp_accounting as dpa
import torch
from torch import Tensor

import tacit
from tacit import Records
from tacit.data.download import cache_folder
from tacit.data.private_scaling import Centre, release_centre, release_channel_scaler
from tacit.data.scaling import unit_rows
from tacit.data.scattering import scattering_features, usual_size

HELD_OUT = 5_000
ORDERS = (0.7, 1.0, 1.4)
FEATURES = ("pixels", "scattering", "sphere", "raw", "mirrored", "log", "orders", "first")
Map = Callable[[Tensor], Tensor]


def sides(dataset: str, held_out: bool, limit: int | None = None) -> tuple[Records, Records]:
    """Records to train on and records to evaluate on.

    The latter are the test records, or with `held_out` 5,000 of the training records (a fifth of
    few), chosen once: a search never reads the test records.
    """
    train, test = tacit.load(dataset)
    if limit is not None:
        train, test = first(train, limit), first(test, limit)
    if not held_out:
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
    """Features of each record alone: nothing is learnt and nothing is charged.

    pixels; raw: scattering coefficients; mirrored: their mean with those of the mirror image;
    scattering: raw, 27 groups normalised in each record; sphere: the same, scaled to norm 1; log:
    log(S + 0.1) of the raw ones; orders: the same, each order weighted; first: the same of the
    first order alone.
    """
    if features not in FEATURES:
        raise ValueError(f"features is {features!r}; give one of {', '.join(FEATURES)}")
    if features == "pixels":
        return records.to(device)
    made = scattering_features(
        records,
        groups=27 if features in ("scattering", "sphere") else None,
        order=1 if features == "first" else 2,
        mirror=features == "mirrored",
        # A GPU computes features faster than a disk reads them.
        cache=cache_folder() / "scattering" if device == "cpu" else None,
        device=device,
    )
    for part in made.inputs.split(4096):
        if features == "sphere":
            part.copy_(unit_rows(part.flatten(1)).view_as(part))
        elif features in ("log", "orders", "first"):
            part.clamp_(min=0).add_(0.1).log_()
            if features == "orders":
                part.mul_(order_weights(part.shape[1]).to(part))
    return made


def order_weights(channels: int) -> Tensor:
    """(C, 1, 1): constants for the orders of each colour's 81 channels, 1, 16 and 64 of them.

    In any images second-order coefficients vary least and the average of pixels most.
    """
    weights = torch.cat([torch.full((n,), w) for n, w in zip((1, 16, 64), ORDERS, strict=True)])
    return weights.repeat(channels // 81)[:, None, None]


def release_maps(
    train: Records,
    channels: float | None,
    centre: float | None,
    seeds: tuple[int, int],
    each: Callable[[Centre], Map] = lambda centre: centre,
) -> tuple[list[Map], tuple[dpa.DpEvent, ...]]:
    """Maps made from noisy statistics of the training records, and what they cost.

    Args:
        channels: noise multiplier of a mean and a standard deviation per channel, if released.
        centre: noise multiplier of a mean about which records are put on the unit sphere.
        seeds: of the two releases; they must differ from the seed of the run's own noise.
        each: what is made of the released centre.
    """
    maps: list[Map] = []
    events: list[dpa.DpEvent] = []
    inputs, size = train.inputs, train.require_public_size("a released mean")
    if channels is not None:
        scaler, event = release_channel_scaler(
            inputs,
            size_bound=usual_size(train.shape[0]),
            noise_multiplier=channels,
            public_size=size,
            seed=seeds[0],
        )
        inputs = scaler(inputs)
        maps.append(scaler)
        events.append(event)
    if centre is not None:
        released, event = release_centre(
            inputs, noise_multiplier=centre, public_size=size, seed=seeds[1]
        )
        maps.append(each(released))
        events.append(event)
    return maps, tuple(events)


def mapped(records: Records, maps: list[Map]) -> Records:
    for each in maps:
        records = replace(records, inputs=each(records.inputs))
    return records


def evaluation_steps(steps: int, evaluations: int) -> set[int]:
    """Steps after which the model is evaluated: evenly spaced, the last one included."""
    return {round(steps * i / evaluations) for i in range(1, evaluations + 1)} - {0}
