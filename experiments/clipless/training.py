"""One clipless run on images, and what is measured of it.

Every run is a whole private run: Poisson sampling, noise calibrated by PLD, the ledger. A seed
fixes it: these are experiments, not releases.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting as dpa
import torch
from torch import nn

import tacit
from experiments import images
from experiments.clipless.networks import (
    Moved,
    Setting,
    build,
    fixed_filters,
    has_certificates,
    is_certified,
    kind_and_sizes,
    loss_of,
)
from experiments.runner import Job
from tacit import Records
from tacit.certificates import certified_accuracy
from tacit.certificates.certifier import scaler_lipschitz
from tacit.data import PublicScaler
from tacit.data.catalogue import lookup
from tacit.data.private_scaling import release_centre

PIXEL = 1 / 255


@dataclass(frozen=True)
class Trial:
    """A setting for a task ("cifar10/pixels") at one ε."""

    task: str
    setting: Setting
    epsilon: float

    @property
    def dataset(self) -> str:
        return self.task.partition("/")[0]


def trial_of(line: Mapping[str, Any]) -> Trial:
    """The trial of a results line; the records of 2026-11 hold its parts side by side."""
    facts = line["setting"] if "setting" in line["setting"] else {
        "task": line["task"], "setting": line["setting"], "epsilon": line["target_epsilon"]
    }  # fmt: skip
    return Trial(facts["task"], Setting(**facts["setting"]), facts["epsilon"])


def small(trial: Trial) -> Trial:
    """Three steps on a few records."""
    return replace(trial, setting=replace(trial.setting, batch_size=50, steps=3))


def group_of(task: str) -> str:
    """Tasks on the same records: pixels serve certified ones too."""
    dataset, kind = task.split("/")
    return f"{dataset}/{'scattering' if kind == 'scattering' else 'pixels'}"


def features_of(records: Records, features: str, device: str) -> Records:
    if not features.startswith("filters:"):
        return images.featured(records, features, device)
    filters = fixed_filters(features, records.shape).to(device)
    outputs = [filters(chunk.to(device)) for chunk in records.inputs.split(1024)]
    return replace(records.to(device), inputs=torch.cat(outputs))


def work(job: Job) -> dict:
    """One run with its accuracy, certified accuracy, and the score that a search maximises."""
    trial: Trial = job.setting
    setting = trial.setting
    train, evaluated = images.parts(
        features_of, images.source_of(job, trial.dataset, setting.features)
    )
    # The run's own noise must not repeat that of the releases.
    seeds = 10**6 + job.seed, 2 * 10**6 + job.seed
    maps, prelude = images.release_maps(train, setting, seeds)
    train, evaluated = images.mapped(train, maps), images.mapped(evaluated, maps)
    model, report = run_once(setting, train, trial.epsilon, job.seed, prelude)
    report["accuracy"] = tacit.evaluate(model, evaluated, loss_of(setting)).accuracy
    if has_certificates(setting):
        report["certified"] = certified(model, evaluated, trial.dataset)
    report["score"] = report["accuracy"]
    if is_certified(trial.task):
        report["score"] = statistics.mean(report["certified"].values())
    return report


def release_middle(
    model: nn.Sequential, train: Records, noise_multiplier: float, seed: int
) -> dpa.DpEvent:
    """Release the mean, on the sphere, of the inputs of `Moved` as the filters are; its cost."""
    at = next(i for i, layer in enumerate(model) if isinstance(layer, Moved))
    with torch.no_grad():
        inputs = torch.cat([model[:at](chunk) for chunk in train.inputs.split(2048)])
    size = train.require_public_size("a released mean")
    released, event = release_centre(
        inputs, noise_multiplier=noise_multiplier, public_size=size, seed=seed
    )
    model[at].centre.copy_(released.centre)
    return event


def run_once(
    setting: Setting,
    train: Records,
    epsilon: float,
    seed: int,
    prelude: tuple[dpa.DpEvent, ...] = (),
) -> tuple[nn.Module, dict]:
    """Train; the model, and ε by PLD, the noise and the seconds."""
    torch.manual_seed(seed)
    assert train.num_classes is not None
    model = build(setting, train.shape, train.num_classes).to(train.device)
    if kind_and_sizes(setting.model)[0] == "adapted":
        event = release_middle(model, train, setting.middle_centre, 3 * 10**6 + seed)
        prelude = (*prelude, event)
    clip = setting.gradient_clip(train.num_classes)
    allocation = tacit.PerLayerNoise() if setting.per_layer else tacit.GlobalNoise()
    _, facts = images.train_privately(
        setting,
        model,
        loss_of(setting),
        tacit.Clipless(gradient_clip=clip, augmentation=_views(setting, train)),
        optimizer_of(setting, model, clip),
        train,
        epsilon=epsilon,
        noise=tacit.Noise(None, allocation),
        prelude=prelude,
        max_rows=_most_rows(setting, train.shape),
        seed=seed,
    )
    return model, facts


def optimizer_of(setting: Setting, model: nn.Sequential, clip: float) -> torch.optim.Optimizer:
    *body, head = model
    rate = setting.learning_rate / clip
    groups = [
        {"params": [p for layer in layers for p in layer.parameters()], "lr": rate * share}
        for layers, share in (([head], 1.0), (body, setting.body_rate))
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], momentum=0.9)


def certified(model: nn.Module, records: Records, dataset: str) -> dict[str, float]:
    """Shares right and certified within 0, 1, 2, 4, 8, 16 over 255, of pixels in [0, 1]."""
    accuracy = certified_accuracy(model, records, unit=pixel_unit(dataset))
    return {f"{r:g}": share for r, share in zip(accuracy.radii, accuracy.shares, strict=True)}


def pixel_unit(dataset: str) -> float:
    """How far a record may move when its pixels move by 1/255: records are (pixels − mean)/std."""
    return PIXEL * scaler_lipschitz(public_scaler(dataset))


def public_scaler(dataset: str) -> PublicScaler:
    known = lookup(dataset)
    assert known.mean is not None
    assert known.std is not None
    return PublicScaler(known.mean, known.std)


def _views(setting: Setting, train: Records) -> tacit.data.Augmentation | None:
    """Shifts by up to two pixels in digits and clothes; by four, and mirrored, in photographs."""
    if setting.views == 1:
        return None
    colour = train.shape[0] == 3
    return tacit.data.Augmentation(
        setting.views, tacit.RandomCropFlip(4 if colour else 2, flip=colour)
    )


def _most_rows(setting: Setting, shape: tuple[int, ...]) -> int | None:
    """How many records go through filters at once: those whose outputs take a gigabyte, 8,192."""
    kind, sizes = kind_and_sizes(setting.model)
    if kind in ("pooled", "convolution", "adapted"):
        kernel, stride, filters, _ = sizes
        positions = ((shape[1] - kernel) // stride + 1) * ((shape[2] - kernel) // stride + 1)
        fits = int(math.log2(2**28 / (positions * filters)))
        return min(8192, 2**fits)
    return None if kind in ("linear", "centred", "mlp") and setting.views == 1 else 8192
