"""Records of the clipless runs on images: pixels or features, held out or not, about a centre."""

from __future__ import annotations

import functools
from dataclasses import replace

import dp_accounting as dpa
import torch
from image_networks import Moved, fixed_filters
from torch import Tensor, nn

import tacit
from tacit import Records
from tacit.data.download import cache_folder
from tacit.data.private_scaling import release_centre, release_channel_scaler
from tacit.data.scattering import scattering_features, usual_size

HELD_OUT = 5_000


@functools.lru_cache(maxsize=2)
def parts(
    dataset: str, features: str, device: str, held_out: bool, limit: int | None = None
) -> tuple[Records, Records]:
    """Records to train on and records to look at: some held out of the former, or the test's.

    A search is never given the test records.
    """
    train, test = tacit.load(dataset)
    if limit is not None:
        train, test = first(train, limit), first(test, limit)
    if held_out:
        kept, held = split(train)
        return featured(kept, features, device), featured(held, features, device)
    return featured(train, features, device), featured(test, features, device)


def featured(records: Records, features: str, device: str) -> Records:
    """Of each record alone: nothing is learnt, nothing is charged."""
    if features == "pixels":
        return records.to(device)
    if features in ("scattering", "raw", "mirrored"):
        groups = 27 if features == "scattering" else None
        mirror = features == "mirrored"
        cache = cache_folder() / "scattering" if device == "cpu" else None
        return scattering_features(
            records, groups=groups, mirror=mirror, cache=cache, device=device
        )
    if features.startswith("filters:"):
        filters = fixed_filters(features, records.shape).to(device)
        made = [filters(chunk.to(device)) for chunk in records.inputs.split(1024)]
        return replace(records.to(device), inputs=torch.cat(made))
    if features != "log":
        known = "'pixels', 'scattering', 'raw', 'mirrored', 'log' or 'filters:k:s:f:p'"
        raise ValueError(f"features is {features!r}; give {known}")
    found = scattering_features(records, groups=None, device=device)
    for chunk in found.inputs.split(4096):
        chunk.clamp_(min=0).add_(0.1).log_()
    return found


def standardised(
    train: Records, looked_at: Records, noise_multiplier: float, seed: int
) -> tuple[Records, Records, dpa.DpEvent]:
    """Both by the training records' noisy mean and std of each channel, and what that costs."""
    scaler, event = release_channel_scaler(
        train.inputs,
        size_bound=usual_size(train.shape[0]),
        noise_multiplier=noise_multiplier,
        public_size=train.require_public_size("a released mean"),
        seed=seed,
    )
    scaled = (replace(side, inputs=scaler(side.inputs)) for side in (train, looked_at))
    return next(scaled), next(scaled), event


def about_centre(
    train: Records, looked_at: Records, noise_multiplier: float, seed: int
) -> tuple[Records, Records, dpa.DpEvent]:
    """Both on the unit sphere about the training records' noisy mean, and what that costs."""
    size = train.require_public_size("a released mean")
    centre, event = release_centre(
        train.inputs, noise_multiplier=noise_multiplier, public_size=size, seed=seed
    )
    moved = (replace(side, inputs=centre(side.inputs)) for side in (train, looked_at))
    return next(moved), next(moved), event


def release_middle(
    model: nn.Sequential, train: Records, noise_multiplier: float, seed: int
) -> dpa.DpEvent:
    """The mean, on the sphere, of what comes to `Moved` as the filters are now; what it costs."""
    at = next(i for i, layer in enumerate(model) if isinstance(layer, Moved))
    with torch.no_grad():
        coming = torch.cat([model[:at](chunk) for chunk in train.inputs.split(2048)])
    size = train.require_public_size("a released mean")
    released, event = release_centre(
        coming, noise_multiplier=noise_multiplier, public_size=size, seed=seed
    )
    model[at].centre.copy_(released.centre)
    return event


def split(train: Records) -> tuple[Records, Records]:
    """The training records without 5,000 of them (a fifth of few), and those, chosen once."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(7))
    held = min(HELD_OUT, len(train) // 5)
    return chosen(train, order[held:]), chosen(train, order[:held])


def first(records: Records, count: int) -> Records:
    return chosen(records, torch.arange(min(count, len(records))))


def chosen(records: Records, rows: Tensor) -> Records:
    rows = rows.to(records.device)
    return Records(
        records.inputs[rows],
        records.targets[rows],
        num_classes=records.num_classes,
        public_size=len(rows),
        name=records.name,
    )
