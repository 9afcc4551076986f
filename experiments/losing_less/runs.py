"""One run of *Losing Less*: a network on pixels or scattering features, a loss, a recipe.

Every private run is a whole one: Poisson sampling, per-sample clipping, calibrated noise, a ledger
in memory. On a GPU steps are recorded, so batches are padded to a few shapes. Accuracy
on the way is read by a callback, which leaves ε for the end. Seeds are fixed: experiments, and no
releases.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import dp_accounting as dpa
import torch
from feature_copies import DrawnCopy, EveryCopy, numbered, table_of
from feature_mix import CentreOfEach, mixed, widths_of
from recipes import DELTA, RECIPES, least_noise
from torch import Tensor, nn
from watch import Watch, accuracy, looks_of

import tacit
from tacit import Records
from tacit.accounting.pld import COARSE
from tacit.data.download import cache_folder
from tacit.data.private_scaling import release_centre, release_channel_scaler
from tacit.data.scaling import unit_rows
from tacit.data.scattering import scattering_features, usual_size
from tacit.lipschitz import SpectralBall, SpectralLinear
from tacit.losses import Scheduled, watched
from tacit.training import Callback

HELD_OUT = 5_000
ORDERS = (0.7, 1.0, 1.4)
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """What one run is told.

    `features`: pixels, scattering (27 groups of each record normalised), sphere (the same, each
    record scaled to norm 1), log (log(S + 0.1) of the raw features), orders (the same, each order
    with its weight), first (of the first order alone), raw, mirrored (the mean of the raw ones of
    an image and its mirror image), or several side by side (`feature_mix.py`). `channels` is the
    noise multiplier of a mean and a std a channel that are released to standardise by; `centre`
    that of a released mean, about which records are put on the unit sphere. `network`: cnn (the
    paper's for these records), shallow (two convolutions, on features of 32×32 images), linear, or
    ball: linear with its weights kept at a spectral norm of at most 1, which holds noise down;
    neither has a bias. With `copies` V above 1, views are features of V shifted and mirrored copies
    of each image (`feature_copies.py`), each once if there are as many views. With `both_ways` the
    records looked at are seen as they are and mirrored, and their logits added. `loss`:
    cross-entropy, tailored, sse+focal, sse+ce, sse, sae, focal, or huber:β. Without
    `noise_multiplier` the noise is the least that keeps all releases within `epsilon`.
    """

    dataset: str = "cifar10"
    features: str = "pixels"
    centre: float | None = None
    network: str = "cnn"
    loss: str = "cross-entropy"
    temperature: float = 1.0
    threshold_epoch: float = 0.0
    beta: float = 1.0
    gamma: float = 0.0
    batch_size: int = 1024
    steps: int = 1000
    learning_rate: float = 1.0
    momentum: float = 0.9
    max_norm: float = 0.1
    noise_multiplier: float | None = None
    epsilon: float = 3.0
    ema: float | None = None
    views: int = 1
    copies: int = 1
    cosine: bool = False
    private: bool = True
    channels: float | None = None
    both_ways: bool = False


def paper_setting(dataset: str, features: str, loss: str, noise: str = "pld") -> Setting:
    """Table 5's row and Table 6's cell, with the `paper`'s noise or the least that `pld` allows."""
    recipe = RECIPES[dataset, features]
    return Setting(
        dataset=dataset,
        features=features,
        loss=loss,
        threshold_epoch=recipe.threshold_epoch,
        beta=recipe.beta,
        gamma=recipe.gamma,
        batch_size=recipe.batch_size,
        steps=recipe.steps,
        learning_rate=recipe.learning_rate,
        momentum=recipe.momentum,
        max_norm=recipe.max_norm,
        noise_multiplier={"paper": recipe.noise_multiplier, "pld": None}[noise],
    )


@functools.lru_cache(maxsize=9)
def data(dataset: str, features: str, device: str, limit: int | None) -> tuple[Records, Records]:
    """(train, test), scaled by public constants; features of each record alone."""
    sides = []
    for records in tacit.load(dataset):
        side = records if limit is None else rows_of(records, slice(0, limit))
        sides.append(featured(side, features, device))
    return sides[0], sides[1]


def featured(records: Records, features: str, device: str) -> Records:
    if features == "pixels":
        return records.to(device)
    if features.startswith("mixed:"):
        return mixed(records, features, lambda r, kind: featured(r, kind, device))
    # A GPU makes features sooner than a disk reads them.
    cache = cache_folder() / "scattering" if device == "cpu" else None
    order = 1 if features == "first" else 2
    groups = None if features in ("log", "orders", "first", "raw", "mirrored") else 27
    mirror = features == "mirrored"
    found = scattering_features(
        records, groups=groups, order=order, mirror=mirror, cache=cache, device=device
    )
    for part in found.inputs.split(4096):
        if features == "sphere":
            part.copy_(unit_rows(part.flatten(1)).view_as(part))
        elif features in ("log", "orders", "first"):
            part.clamp_(min=0).add_(0.1).log_()
            if features == "orders":
                part.mul_(weights_of_orders(part.shape[1]).to(part))
    return found


def weights_of_orders(channels: int) -> Tensor:
    """(C, 1, 1): constants for the orders of each colour's 81 channels, 1, 16 and 64 of them.

    Second-order coefficients vary least and the average of pixels most, in any images.
    """
    weights = torch.cat([torch.full((n,), w) for n, w in zip((1, 16, 64), ORDERS, strict=True)])
    return weights.repeat(channels // 81)[:, None, None]


@functools.lru_cache(maxsize=2)
def parts(
    dataset: str, features: str, device: str, limit: int | None, held_out: bool
) -> tuple[Records, Records]:
    """Records to train on, and records to look at: the test records, or some held out."""
    train, test = data(dataset, features, device, limit)
    if not held_out:
        return train, test
    order, held = _held(len(train))
    order = order.to(train.device)
    return rows_of(train, order[held:]), rows_of(train, order[:held])


@functools.lru_cache(maxsize=1)
def copies_of(
    dataset: str, features: str, device: str, limit: int | None, held_out: bool, copies: int
) -> Tensor:
    """(N, V, …): features of V copies of each record to train on, in the order of `parts`."""
    kept, _ = _images(dataset, limit, held_out)
    return table_of(kept.to(device), dataset, copies, lambda r: featured(r, features, device))


@functools.lru_cache(maxsize=1)
def mirrors_of(
    dataset: str, features: str, device: str, limit: int | None, held_out: bool
) -> Tensor:
    """Features of the mirror images of the records to look at, in the order of `parts`."""
    _, looked_at = _images(dataset, limit, held_out)
    mirrored = replace(looked_at, inputs=looked_at.inputs.flip(-1))
    return featured(mirrored, features, device).inputs


def _images(dataset: str, limit: int | None, held_out: bool) -> tuple[Records, Records]:
    """What `parts` makes its features of."""
    train, test = tacit.load(dataset)
    if limit is not None:
        train, test = (rows_of(side, slice(0, limit)) for side in (train, test))
    if not held_out:
        return train, test
    order, held = _held(len(train))
    return rows_of(train, order[held:]), rows_of(train, order[:held])


def _held(count: int) -> tuple[Tensor, int]:
    """An order of the training records, and how many of its first are held out."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(7))
    return order, min(HELD_OUT, count // 5)


def rows_of(records: Records, rows: Tensor | slice) -> Records:
    inputs = records.inputs[rows]
    return Records(
        inputs,
        records.targets[rows],
        num_classes=records.num_classes,
        public_size=len(inputs),
        name=records.name,
    )


def network(setting: Setting, shape: tuple[int, ...], classes: int) -> nn.Module:
    if setting.network == "linear":
        head = nn.Linear(math.prod(shape), classes, bias=False)
        nn.init.zeros_(head.weight)  # a convex problem needs no random beginning
        return nn.Sequential(nn.Flatten(), head)
    if setting.network == "ball":
        head = SpectralLinear(math.prod(shape), classes, bias=False, within=SpectralBall)
        nn.init.zeros_(head.weight)
        return nn.Sequential(nn.Flatten(), head)
    if setting.network == "shallow":
        return tacit.models.scattering_cifar_cnn(shape, classes, deep=False)
    if setting.network != "cnn":
        known = "'cnn', 'shallow', 'linear' or 'ball'"
        raise ValueError(f"network is {setting.network!r}; give {known}")
    if setting.features != "pixels":
        build = "scattering_cifar_cnn" if setting.dataset == "cifar10" else "scattering_mnist_cnn"
        return getattr(tacit.models, build)(shape, classes)
    return getattr(tacit.models, "cifar_cnn" if setting.dataset == "cifar10" else "mnist_cnn")()


def loss_of(setting: Setting) -> tacit.losses.RecordLoss:
    kind, _, number = setting.loss.partition(":")
    epoch, beta, gamma = setting.threshold_epoch, setting.beta, setting.gamma
    losses = {
        "cross-entropy": lambda: tacit.losses.CrossEntropy(setting.temperature),
        "tailored": lambda: tacit.losses.TailoredLoss(epoch, beta, gamma),
        "sse+focal": lambda: tacit.losses.TailoredLoss(epoch, None, gamma),
        "sse+ce": lambda: tacit.losses.TailoredLoss(epoch, None, 0.0),
        "sse": tacit.losses.SumSquaredError,
        "sae": tacit.losses.SumAbsoluteError,
        "focal": lambda: tacit.losses.Focal(gamma),
        "huber": lambda: tacit.losses.SumHuber(float(number)),
    }
    if kind not in losses:
        raise ValueError(f"loss is {setting.loss!r}; give one of {', '.join(losses)}")
    return losses[kind]()


def run(
    setting: Setting,
    seed: int,
    device: str,
    evaluations: int = 10,
    limit: int | None = None,
    *,
    held_out: bool = False,
    callbacks: Iterable[Callback] = (),
    look: Callable[[nn.Module, Records], object] | None = None,
) -> dict:
    """Train once: accuracy, ε, the path to both, and the seconds that it took.

    `look` is given the trained model and the training records; what it says is under `seen`.
    """
    place = (setting.dataset, setting.features, device, limit, held_out)
    train, looked_at = parts(*place)
    mirrors = mirrors_of(*place) if setting.both_ways else None
    watch = Watch(looked_at, looks_of(setting.steps, evaluations))
    prelude: tuple[dpa.DpEvent, ...] = ()
    maps: list[Map] = []
    for release in (_channel_scaler, _centre):
        released = release(setting, train, seed)
        if released is not None:
            mapped, event = released
            train = replace(train, inputs=mapped(train.inputs))
            looked_at = replace(looked_at, inputs=mapped(looked_at.inputs))
            mirrors = None if mirrors is None else mapped(mirrors)
            prelude = (*prelude, event)
            maps.append(mapped)
    watch.records, watch.mirrors = looked_at, mirrors
    torch.manual_seed(seed)
    assert train.num_classes is not None
    model = network(setting, train.shape, train.num_classes).to(device)
    views = _views(setting)
    if setting.copies > 1:
        table = copies_of(*place, setting.copies)
        for mapped in maps:
            table = torch.stack([mapped(copy.float()).half() for copy in table.unbind(1)], dim=1)
        each = EveryCopy(table) if setting.views == setting.copies else DrawnCopy(table)
        train, views = numbered(train), tacit.data.Augmentation(setting.views, each)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=setting.learning_rate, momentum=setting.momentum
    )
    if not setting.private:
        plain = _plain_run(setting, seed, model, optimizer, train, looked_at, evaluations)
        return plain if look is None else {**plain, "seen": look(model, train)}
    rate = setting.batch_size / len(train)  # every record of the set takes part: N is published
    z = setting.noise_multiplier
    asked = time.perf_counter()
    if z is None:
        z = least_noise(rate, setting.steps, setting.epsilon, prelude)
    calibration = time.perf_counter() - asked
    trainer = tacit.Trainer(
        model,
        loss_of(setting),
        tacit.PerSampleClip(setting.max_norm, augmentation=views),
        tacit.PoissonSampler(
            train,
            expected_batch_size=setting.batch_size,
            steps=setting.steps,
            max_physical_batch=_at_once(setting, device),
            pad_to=_pad_to(setting, device),
        ),
        optimizer,
        tacit.Budget(setting.epsilon, DELTA),
        noise=tacit.Noise(z),
        ledger=tacit.LedgerRun(prelude=prelude),
        scheduler=_schedule(setting, optimizer),
        moving_average=None if setting.ema is None else tacit.MovingAverage(setting.ema),
        callbacks=[watch, *callbacks],
        seed=seed,
    )
    finished = trainer.fit()
    path = [
        {
            "step": step,
            "epoch": step * rate,
            "epsilon": _epsilon_at(rate, z, step, prelude),
            "accuracy": found,
            "seconds": seconds,
            "cpu_seconds": worked,
        }
        for step, found, seconds, worked in watch.path
    ]
    report = {
        "seed": seed,
        "accuracy": path[-1]["accuracy"],
        "epsilon": finished.epsilon,
        "noise_multiplier": z,
        "steps": finished.steps,
        "stopped": finished.stopped,
        "seconds": path[-1]["seconds"],
        "calibration_seconds": calibration,
        "sampling": finished.plan.scheme.describe(),
        "path": path,
    }
    if setting.both_ways:
        report["accuracy_one_way"] = accuracy(model, looked_at)
    if look is not None:
        report["seen"] = look(model, train)
    del trainer, finished, optimizer
    if device != "cpu":
        gc.collect()  # a scheduler holds its optimizer in a circle, and with it recorded graphs
        torch.cuda.empty_cache()
    return report


@functools.cache
def _epsilon_at(rate: float, noise_multiplier: float, steps: int, prelude: tuple) -> float:
    plan = tacit.accounting.Plan(
        tacit.sampling.Poisson(rate),
        noise_multiplier,
        tacit.Relation.ADD_OR_REMOVE_ONE,
        steps,
        prelude=prelude,
    )
    return plan.epsilon(steps, DELTA, COARSE)


def _channel_scaler(setting: Setting, train: Records, seed: int) -> tuple[Map, dpa.DpEvent] | None:
    """By the noisy mean and std of each channel of the training records."""
    if setting.channels is None:
        return None
    assert train.public_size is not None
    return release_channel_scaler(
        train.inputs,
        size_bound=usual_size(train.shape[0]),
        noise_multiplier=setting.channels,
        public_size=train.public_size,
        seed=10**6 + seed,  # the run's own noise must not repeat this
    )


def _centre(setting: Setting, train: Records, seed: int) -> tuple[Map, dpa.DpEvent] | None:
    """Onto the sphere about the noisy mean of the training records."""
    if setting.centre is None:
        return None
    assert train.public_size is not None
    centre, event = release_centre(
        train.inputs, noise_multiplier=setting.centre, public_size=train.public_size, seed=seed
    )
    if not setting.features.startswith("mixed:"):
        return centre, event
    image = tacit.load(setting.dataset)[0].shape
    widths = widths_of(setting.features, image, lambda r, kind: featured(r, kind, "cpu"))
    return CentreOfEach(centre, setting.features, widths), event


def _at_once(setting: Setting, device: str) -> int | None:
    """Records of a physical batch: convolutions on all of them at once would take gigabytes."""
    if setting.network not in ("cnn", "shallow"):
        return None
    return 512 if device == "cpu" else 4096


def _views(setting: Setting) -> tacit.data.Augmentation | None:
    """Shifts, and mirror images where those are natural; of features, in cells of 4×4 pixels."""
    if setting.views == 1 or setting.copies > 1:
        return None
    reach = 4 if setting.features == "pixels" else 1
    flip = setting.dataset != "mnist" and setting.features == "pixels"
    return tacit.data.Augmentation(setting.views, tacit.RandomCropFlip(reach, flip=flip))


def _pad_to(setting: Setting, device: str) -> int | None:
    """A few shapes to record; on a CPU padding is only work."""
    if device == "cpu":
        return None
    return 32 if setting.batch_size < 4096 else 512


def _schedule(
    setting: Setting, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    if not setting.cosine:
        return None
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)


def _plain_run(
    setting: Setting,
    seed: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Records,
    looked_at: Records,
    evaluations: int,
) -> dict:
    """SGD without privacy, on shuffled epochs."""
    schedule, loss = _schedule(setting, optimizer), loss_of(setting)
    order = torch.empty(0, dtype=torch.long, device=train.device)
    path: list[dict] = []
    size = min(setting.batch_size, len(train))
    started = time.perf_counter()
    for step in range(1, setting.steps + 1):
        if len(order) < size:
            order = torch.randperm(len(train), device=train.device)
        rows, order = order[:size], order[size:]
        if isinstance(loss, Scheduled):
            loss.at((step - 1) * size / len(train))
        optimizer.zero_grad()
        with watched(model, loss):
            loss(model(train.inputs[rows]), train.targets[rows]).mean().backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if step % max(1, setting.steps // evaluations) == 0 or step == setting.steps:
            path.append(
                {
                    "step": step,
                    "epoch": step * size / len(train),
                    "epsilon": math.inf,
                    "accuracy": accuracy(model, looked_at),
                    "seconds": time.perf_counter() - started,
                }
            )
    return {
        "seed": seed,
        "accuracy": path[-1]["accuracy"],
        "epsilon": math.inf,
        "noise_multiplier": 0.0,
        "steps": setting.steps,
        "stopped": "plan complete",
        "seconds": path[-1]["seconds"],
        "sampling": "shuffled epochs, not private",
        "path": path,
    }


def with_budget(setting: Setting, epsilon: float) -> Setting:
    """The same at another ε, with the noise that it asks for."""
    return replace(setting, epsilon=epsilon, noise_multiplier=None)
