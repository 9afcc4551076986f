"""One run of *Losing Less*: a network on pixels or scattering features, a loss, a recipe.

Every private run is a whole one: Poisson sampling, per-sample clipping, calibrated noise, a ledger
in memory. On a GPU steps are recorded, so batches are padded to a few shapes. A callback measures
accuracy along the way; ε is computed at the end. Seeds are fixed: experiments, not releases.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tacit
from experiments.images import evaluation_steps, mapped, release_maps, sides
from experiments.losing_less.features import (
    CentreOfEach,
    CopyViews,
    features_of,
    numbered,
    table_of,
    widths_of,
)
from experiments.losing_less.measures import DIAGNOSTICS, confusion, recorded
from experiments.losing_less.recipes import DELTA, RECIPES, least_noise
from experiments.runner import Job, Paper
from tacit import Records
from tacit.accounting.pld import COARSE
from tacit.diagnostics import plot_accuracy_against_epsilon
from tacit.lipschitz import SpectralBall, SpectralLinear
from tacit.losses import Scheduled, watched
from tacit.statistics.tracking import evaluating
from tacit.training import Callback

AT_ONCE = 5_000


@dataclass(frozen=True)
class Setting:
    """What one run is told.

    `features` are one kind of `images.featured`, or several side by side (`features.py`).
    `channels` is the noise multiplier of a mean and a std per channel that are released to
    standardise by; `centre` that of a released mean, about which records are put on the unit
    sphere. `network`: cnn (the paper's for these records), shallow (two convolutions, on features
    of 32×32 images), linear, or ball: linear with weights of spectral norm at most 1, which holds
    noise down; neither has a bias. With `copies` V above 1, views are features of V shifted and
    mirrored copies of each image, each once if there are as many views. With `both_ways` the
    model is evaluated on each image and its mirror image, and their logits are added. `loss`:
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


def small(setting: Setting) -> Setting:
    """Three steps on a few records, with the noise that those need for the same ε."""
    return replace(setting, batch_size=16, steps=3, noise_multiplier=None)


@functools.lru_cache(maxsize=4)
def parts(
    dataset: str, features: str, device: str, limit: int | None, held_out: bool
) -> tuple[Records, Records]:
    """Records to train on and records to evaluate on, as features."""
    train, evaluated = sides(dataset, held_out, limit)
    return features_of(train, features, device), features_of(evaluated, features, device)


@functools.lru_cache(maxsize=1)
def copies_of(
    dataset: str, features: str, device: str, limit: int | None, held_out: bool, copies: int
) -> Tensor:
    """(N, V, …): features of V copies of each record to train on, in the order of `parts`."""
    train, _ = sides(dataset, held_out, limit)
    return table_of(train.to(device), dataset, copies, lambda r: features_of(r, features, device))


@functools.lru_cache(maxsize=1)
def mirrors_of(
    dataset: str, features: str, device: str, limit: int | None, held_out: bool
) -> Records:
    """The mirror images of the records to evaluate on, in the order of `parts`."""
    _, evaluated = sides(dataset, held_out, limit)
    return features_of(replace(evaluated, inputs=evaluated.inputs.flip(-1)), features, device)


def network(setting: Setting, shape: tuple[int, ...], classes: int) -> nn.Module:
    if setting.network in ("linear", "ball"):
        ball: dict[str, Any] = {"within": SpectralBall} if setting.network == "ball" else {}
        layer = SpectralLinear if ball else nn.Linear
        head = layer(math.prod(shape), classes, bias=False, **ball)
        nn.init.zeros_(head.weight)  # a convex problem needs no random start
        return nn.Sequential(nn.Flatten(), head)
    if setting.network == "shallow":
        return tacit.models.scattering_cifar_cnn(shape, classes, deep=False)
    if setting.network != "cnn":
        known = "'cnn', 'shallow', 'linear' or 'ball'"
        raise ValueError(f"network is {setting.network!r}; give {known}")
    name = "cifar_cnn" if setting.dataset == "cifar10" else "mnist_cnn"
    if setting.features == "pixels":
        return getattr(tacit.models, name)()
    return getattr(tacit.models, f"scattering_{name}")(shape, classes)


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


class AccuracyCallback(Callback):
    """Accuracy after the given steps, of the moving average where there is one, and seconds.

    Its clocks run from when it is made: one on the wall, one of all the process's threads.
    """

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps
        self.records: Records | None = None
        self.mirrors: Records | None = None
        self.started, self.cpu_started = time.perf_counter(), time.process_time()
        self.path: list[dict[str, float]] = []

    def on_step(self, trainer: tacit.Trainer, step: int) -> None:
        if step not in self.steps:
            return
        assert self.records is not None
        average = trainer.moving_average
        if average is not None:
            average.swap(trainer.model)
        share = accuracy(trainer.model, self.records, self.mirrors)
        if average is not None:
            average.swap(trainer.model)
        self.path.append(
            {
                "step": step,
                "accuracy": share,
                "seconds": time.perf_counter() - self.started,
                "cpu_seconds": time.process_time() - self.cpu_started,
            }
        )


@torch.no_grad()
def accuracy(model: nn.Module, records: Records, mirrors: Records | None = None) -> float:
    """Of the records; with `mirrors`, of the sum of their logits and their mirror images'."""
    right = torch.zeros((), dtype=torch.long, device=records.device)
    with evaluating(model):
        for start in range(0, len(records), AT_ONCE):
            rows = slice(start, start + AT_ONCE)
            logits = model(records.inputs[rows])
            if mirrors is not None:
                logits = logits + model(mirrors.inputs[rows])
            right += (logits.argmax(1) == records.targets[rows]).sum()
    return int(right) / len(records)


def work(job: Job) -> dict:
    """One run with its measurements, under `measured`."""
    callbacks = {name: DIAGNOSTICS[name]() for name in job.measures if name in DIAGNOSTICS}
    inspect = confusion if "confusion" in job.measures else None
    report = run(
        job.setting,
        job.seed,
        job.device,
        job.evaluations,
        job.limit,
        held_out=job.held_out,
        callbacks=callbacks.values(),
        inspect=inspect,
    )
    if callbacks:
        report["measured"] = {name: recorded(each) for name, each in callbacks.items()}
    if inspect is not None:
        last = {key: report["path"][-1][key] for key in ("step", "epoch")}
        report["measured"] = {"confusion": [{**last, "value": report.pop("inspected")}]}
    return report


def run(
    setting: Setting,
    seed: int,
    device: str,
    evaluations: int = 10,
    limit: int | None = None,
    *,
    held_out: bool = False,
    callbacks: Iterable[Callback] = (),
    inspect: Callable[[nn.Module, Records], object] | None = None,
) -> dict:
    """Train once: accuracy, ε, the path to both, and the seconds that it took.

    `inspect` is given the trained model and the training records; its answer is `inspected`.
    """
    place = (setting.dataset, setting.features, device, limit, held_out)
    train, evaluated = parts(*place)
    mirrors = mirrors_of(*place) if setting.both_ways else None
    watch = AccuracyCallback(evaluation_steps(setting.steps, evaluations))
    maps, prelude = release_maps(
        train,
        setting.channels,
        setting.centre,
        (10**6 + seed, seed),
        each=lambda centre: _centre_map(setting, centre),
    )
    train, evaluated = mapped(train, maps), mapped(evaluated, maps)
    mirrors = None if mirrors is None else mapped(mirrors, maps)
    watch.records, watch.mirrors = evaluated, mirrors
    torch.manual_seed(seed)
    assert train.num_classes is not None
    model = network(setting, train.shape, train.num_classes).to(device)
    views = _views(setting)
    if setting.copies > 1:
        table = copies_of(*place, setting.copies)
        for each in maps:
            table = torch.stack([each(copy.float()).half() for copy in table.unbind(1)], dim=1)
        choice = CopyViews(table, each=setting.views == setting.copies)
        train, views = numbered(train), tacit.data.Augmentation(setting.views, choice)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=setting.learning_rate, momentum=setting.momentum
    )
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setting.steps)
    if not setting.private:
        report = _plain_run(setting, model, optimizer, cosine, train, evaluated, evaluations)
    else:
        rate = setting.batch_size / len(train)  # N is public: every record of the set takes part
        started = time.perf_counter()
        z = setting.noise_multiplier
        if z is None:
            z = least_noise(rate, setting.steps, setting.epsilon, prelude)
        calibration = time.perf_counter() - started
        trainer = tacit.Trainer(
            model,
            loss_of(setting),
            tacit.PerSampleClip(setting.max_norm, augmentation=views),
            tacit.PoissonSampler(
                train,
                expected_batch_size=setting.batch_size,
                steps=setting.steps,
                max_physical_batch=_at_once(setting, device),
                # A few shapes to record; on a CPU padding is only work.
                pad_to=None if device == "cpu" else 32 if setting.batch_size < 4096 else 512,
            ),
            optimizer,
            tacit.Budget(setting.epsilon, DELTA),
            noise=tacit.Noise(z),
            ledger=tacit.LedgerRun(prelude=prelude),
            scheduler=cosine if setting.cosine else None,
            moving_average=None if setting.ema is None else tacit.MovingAverage(setting.ema),
            callbacks=[watch, *callbacks],
            seed=seed,
        )
        finished = trainer.fit()
        for point in watch.path:
            point["epoch"] = point["step"] * rate
            point["epsilon"] = _epsilon_at(rate, z, int(point["step"]), prelude)
        report = {
            "epsilon": finished.epsilon,
            "noise_multiplier": z,
            "steps": finished.steps,
            "stopped": finished.stopped,
            "calibration_seconds": calibration,
            "sampling": finished.plan.scheme.describe(),
            "path": watch.path,
        }
    last = report["path"][-1]
    report |= {"seed": seed, "accuracy": last["accuracy"], "seconds": last["seconds"]}
    if setting.both_ways:
        report["accuracy_one_way"] = accuracy(model, evaluated)
    if inspect is not None:
        report["inspected"] = inspect(model, train)
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


def _centre_map(setting: Setting, centre: Any) -> Callable[[Tensor], Tensor]:
    """Onto the sphere about the noisy mean of the training records; mixed features kind by kind."""
    if not setting.features.startswith("mixed:"):
        return centre
    image = tacit.load(setting.dataset)[0].shape
    return CentreOfEach(centre, setting.features, widths_of(setting.features, image))


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


def _plain_run(
    setting: Setting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cosine: torch.optim.lr_scheduler.LRScheduler,
    train: Records,
    evaluated: Records,
    evaluations: int,
) -> dict:
    """SGD without privacy, on shuffled epochs."""
    loss, path = loss_of(setting), []
    order = torch.empty(0, dtype=torch.long, device=train.device)
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
        if setting.cosine:
            cosine.step()
        if step % max(1, setting.steps // evaluations) == 0 or step == setting.steps:
            path.append(
                {
                    "step": step,
                    "epoch": step * size / len(train),
                    "epsilon": math.inf,
                    "accuracy": accuracy(model, evaluated),
                    "seconds": time.perf_counter() - started,
                }
            )
    return {
        "epsilon": math.inf,
        "noise_multiplier": 0.0,
        "steps": setting.steps,
        "stopped": "plan complete",
        "sampling": "shuffled epochs, not private",
        "path": path,
    }


def draw_curves(report: dict, path: Path) -> None:
    """Accuracy against ε: a median line, and a band from the least to the largest."""
    groups = {
        name: [{"history": run["path"]} for run in row["runs"]]
        for name, row in report["settings"].items()
        if float(row["epsilon"]) != math.inf
    }
    if groups:
        plot_accuracy_against_epsilon(groups, path, title=report["title"])


PAPER = Paper("Losing Less", {}, work, small, draw_curves)
