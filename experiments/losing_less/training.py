"""One run of *Losing Less*: a network on pixels or scattering features, a loss, a recipe.

Every private run is a whole one: Poisson sampling, per-sample clipping, calibrated noise, a ledger
in memory. On a GPU steps are recorded, so batches are padded to a few shapes. A callback measures
accuracy along the way; ε is computed at the end. Seeds are fixed: experiments, not releases.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import tacit
from experiments import images
from experiments.images import NOT_PRIVATE, Source, mapped, sides
from experiments.losing_less import features
from experiments.losing_less.measures import DIAGNOSTICS, confusion, recorded
from experiments.results import DELTA
from experiments.runner import Job
from tacit import Records
from tacit.accounting.composition import COARSE
from tacit.lipschitz import SpectralBall, SpectralLinear
from tacit.statistics.tracking import evaluating
from tacit.training import Callback

AT_ONCE = 5_000


@dataclass(frozen=True)
class Setting:
    """One run.

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


def small(setting: Setting) -> Setting:
    """Three steps on a few records, with the noise that those need for the same ε."""
    return replace(setting, batch_size=16, steps=3, noise_multiplier=None)


@functools.lru_cache(maxsize=1)
def copies_of(source: Source, copies: int) -> Tensor:
    """(N, V, …): features of V copies of each record to train on, in the order of `parts`."""
    train = sides(source)[0].to(source.device)
    make = functools.partial(features.features_of, features=source.features, device=source.device)
    return features.table_of(train, source.dataset, copies, make)


@functools.lru_cache(maxsize=1)
def mirrors_of(source: Source) -> Records:
    """The mirror images of the records to evaluate on, in the order of `parts`."""
    _, evaluated = sides(source)
    turned = replace(evaluated, inputs=evaluated.inputs.flip(-1))
    return features.features_of(turned, source.features, source.device)


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
        raise ValueError(f"network is {setting.network!r}; give cnn, shallow, linear or ball")
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


class AccuracyPath(Callback):
    """Accuracy after the given steps, of the moving average where there is one, and seconds.

    Its clocks run from when it is made: one on the wall, one of all the process's threads.
    `versions` of the records are set before the first step.
    """

    versions: Sequence[Records]

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps
        self.started, self.cpu_started = time.perf_counter(), time.process_time()
        self.points: list[dict[str, float]] = []

    def on_step(self, trainer: tacit.Trainer, step: int) -> None:
        if step in self.steps:
            average = trainer.moving_average
            with nullcontext() if average is None else average.applied(trainer.model):
                self.add(trainer.model, step)

    def add(self, model: nn.Module, step: int) -> None:
        point = {"step": step, "accuracy": accuracy(model, *self.versions)}
        point["seconds"] = time.perf_counter() - self.started
        point["cpu_seconds"] = time.process_time() - self.cpu_started
        self.points.append(point)


@torch.no_grad()
def accuracy(model: nn.Module, records: Records, *versions: Records) -> float:
    """Of the records, by the sum of their logits and those of their other versions."""
    right = torch.zeros((), dtype=torch.long, device=records.device)
    with evaluating(model):
        for start in range(0, len(records), AT_ONCE):
            rows = slice(start, start + AT_ONCE)
            logits = sum(model(version.inputs[rows]) for version in (records, *versions))
            right += (logits.argmax(1) == records.targets[rows]).sum()
    return int(right) / len(records)


def work(job: Job) -> dict:
    return run(job)[0]


def run(job: Job) -> tuple[dict, nn.Module, Records]:
    """Train once: accuracy, ε, the path to both, seconds and what the job measures.

    Then come the model and the training records, as it has read them.
    """
    setting, seed = job.setting, job.seed
    source = images.source_of(job, setting.dataset, setting.features)
    train, *versions = images.parts(features.features_of, source)
    if setting.both_ways:
        versions.append(mirrors_of(source))
    path = AccuracyPath(images.evaluation_steps(setting.steps, job.evaluations))
    map_of = functools.partial(_centre_map, setting)
    maps, prelude = images.release_maps(train, setting, (10**6 + seed, seed), map_of)
    train = mapped(train, maps)
    path.versions = [mapped(records, maps) for records in versions]
    torch.manual_seed(seed)
    assert train.num_classes is not None
    model = network(setting, train.shape, train.num_classes).to(job.device)
    views = _views(setting)
    if setting.copies > 1:
        table = copies_of(source, setting.copies)
        for apply in maps:
            table = torch.stack([apply(copy.float()).half() for copy in table.unbind(1)], dim=1)
        choice = features.CopyViews(table, every_copy=setting.views == setting.copies)
        train, views = features.numbered(train), tacit.data.Augmentation(setting.views, choice)
    diagnostics = {name: DIAGNOSTICS[name]() for name in job.measures if name != "confusion"}
    optimizer = torch.optim.SGD(model.parameters(), setting.learning_rate, setting.momentum)
    if setting.private:
        finished, report = images.train_privately(
            setting,
            model,
            loss_of(setting),
            tacit.PerSampleClip(setting.max_norm, augmentation=views),
            optimizer,
            train,
            epsilon=setting.epsilon,
            noise=tacit.Noise(setting.noise_multiplier),
            prelude=prelude,
            max_rows=_at_once(setting, train.device.type == "cpu"),
            seed=seed,
            callbacks=[path, *diagnostics.values()],
        )
        for point in path.points:
            point["epoch"] = point["step"] * (setting.batch_size / len(train))
            point["epsilon"] = _epsilon_at(finished.plan, int(point["step"]))
    else:
        report = _train_plainly(setting, model, optimizer, train, path)
    last = path.points[-1]
    report |= {"path": path.points, "seed": seed}
    report |= {"accuracy": last["accuracy"], "seconds": last["seconds"]}
    if setting.both_ways:
        report["accuracy_one_way"] = accuracy(model, path.versions[0])
    measured = {name: recorded(diagnostic) for name, diagnostic in diagnostics.items()}
    if "confusion" in job.measures:
        point = {"step": last["step"], "epoch": last["epoch"], "value": confusion(model, train)}
        measured["confusion"] = [point]
    return report | ({"measured": measured} if measured else {}), model, train


@functools.cache
def _epsilon_at(plan: tacit.accounting.Plan, steps: int) -> float:
    return plan.epsilon(steps, DELTA, COARSE)


def _train_plainly(
    setting: Setting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Records,
    path: AccuracyPath,
) -> dict:
    schedule = images.cosine_schedule(setting, optimizer)
    loss, steps = loss_of(setting), setting.steps
    size = min(setting.batch_size, len(train))
    for step in images.plain_steps(
        model, loss, optimizer, schedule, train, size, steps, path.steps
    ):
        path.add(model, step)
        path.points[-1] |= {"epoch": step * size / len(train), "epsilon": math.inf}
    return {**NOT_PRIVATE, "noise_multiplier": 0.0, "steps": steps, "stopped": "plan complete"}


def _centre_map(setting: Setting, centre: Any) -> Callable[[Tensor], Tensor]:
    """Onto the sphere about the noisy mean of the training records; mixed features kind by kind."""
    if not setting.features.startswith("mixed:"):
        return centre
    image = tacit.load(setting.dataset)[0].shape
    return features.CentreOfEach(
        centre, setting.features, features.widths_of(setting.features, image)
    )


def _at_once(setting: Setting, on_cpu: bool) -> int | None:
    """Records of a physical batch: convolutions on all of them at once would take gigabytes."""
    if setting.network not in ("cnn", "shallow"):
        return None
    return 512 if on_cpu else 4096


def _views(setting: Setting) -> tacit.data.Augmentation | None:
    """Shifts, and mirror images where those are natural; of features, in cells of 4×4 pixels."""
    if setting.views == 1 or setting.copies > 1:
        return None
    reach = 4 if setting.features == "pixels" else 1
    flip = setting.dataset != "mnist" and setting.features == "pixels"
    return tacit.data.Augmentation(setting.views, tacit.RandomCropFlip(reach, flip=flip))
