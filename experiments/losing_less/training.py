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
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

import tacit
from experiments.images import (
    cosine_schedule,
    evaluation_steps,
    mapped,
    parts,
    plain_steps,
    release_maps,
    sides,
    train_privately,
)
from experiments.losing_less.features import (
    CentreOfEach,
    CopyViews,
    features_of,
    numbered,
    table_of,
    widths_of,
)
from experiments.losing_less.measures import DIAGNOSTICS, confusion, recorded
from experiments.losing_less.recipes import RECIPES
from experiments.runner import DELTA, Job, least_noise
from tacit import Records
from tacit.accounting.pld import COARSE
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


def paper_setting(dataset: str, features: str, loss: str, noise: str = "pld") -> Setting:
    """Table 5's row and Table 6's cell, with the `paper`'s noise or the least that `pld` allows."""
    recipe = RECIPES[dataset, features]
    numbers = {f.name: getattr(recipe, f.name) for f in fields(recipe) if f.name != "epochs"}
    numbers["noise_multiplier"] = {"paper": recipe.noise_multiplier, "pld": None}[noise]
    return Setting(**numbers, loss=loss, steps=recipe.steps)


def small(setting: Setting) -> Setting:
    """Three steps on a few records, with the noise that those need for the same ε."""
    return replace(setting, batch_size=16, steps=3, noise_multiplier=None)


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
    """

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps
        self.started, self.cpu_started = time.perf_counter(), time.process_time()
        self.points: list[dict[str, float]] = []

    def evaluate_on(self, records: Records, mirrors: Records | None) -> None:
        self.records, self.mirrors = records, mirrors

    def on_step(self, trainer: tacit.Trainer, step: int) -> None:
        if step in self.steps:
            average = trainer.moving_average
            with nullcontext() if average is None else average.applied(trainer.model):
                self.add(trainer.model, step)

    def add(self, model: nn.Module, step: int) -> None:
        point = {"step": step, "accuracy": accuracy(model, self.records, self.mirrors)}
        point["seconds"] = time.perf_counter() - self.started
        point["cpu_seconds"] = time.process_time() - self.cpu_started
        self.points.append(point)


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
    callbacks = {name: DIAGNOSTICS[name]() for name in job.measures if name != "confusion"}
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
        report["measured"] = {name: recorded(diagnostic) for name, diagnostic in callbacks.items()}
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
    train, evaluated = parts(features_of, *place)
    mirrors = mirrors_of(*place) if setting.both_ways else None
    path = AccuracyPath(evaluation_steps(setting.steps, evaluations))
    maps, prelude = release_maps(
        train,
        setting.channels,
        setting.centre,
        (10**6 + seed, seed),
        map_of=lambda centre: _centre_map(setting, centre),
    )
    train, evaluated = mapped(train, maps), mapped(evaluated, maps)
    path.evaluate_on(evaluated, None if mirrors is None else mapped(mirrors, maps))
    torch.manual_seed(seed)
    assert train.num_classes is not None
    model = network(setting, train.shape, train.num_classes).to(device)
    views = _views(setting)
    if setting.copies > 1:
        table = copies_of(*place, setting.copies)
        for apply in maps:
            table = torch.stack([apply(copy.float()).half() for copy in table.unbind(1)], dim=1)
        choice = CopyViews(table, every_copy=setting.views == setting.copies)
        train, views = numbered(train), tacit.data.Augmentation(setting.views, choice)
    if setting.private:
        report = _train_privately(setting, model, train, views, prelude, path, callbacks, seed)
    else:
        report = _train_plainly(setting, model, train, path)
    last = path.points[-1]
    report |= {"path": path.points, "seed": seed}
    report |= {"accuracy": last["accuracy"], "seconds": last["seconds"]}
    if setting.both_ways:
        report["accuracy_one_way"] = accuracy(model, evaluated)
    if inspect is not None:
        report["inspected"] = inspect(model, train)
    return report


def _train_privately(
    setting: Setting,
    model: nn.Module,
    train: Records,
    views: tacit.data.Augmentation | None,
    prelude: tuple,
    path: AccuracyPath,
    callbacks: Iterable[Callback],
    seed: int,
) -> dict:
    """With noise that just fits ε, unless the setting has its own."""
    rate = setting.batch_size / len(train)  # N is public: every record of the set takes part
    started = time.perf_counter()
    z = setting.noise_multiplier
    if z is None:
        z = least_noise(rate, setting.steps, setting.epsilon, prelude)
    calibration = time.perf_counter() - started
    finished = train_privately(
        model,
        loss_of(setting),
        tacit.PerSampleClip(setting.max_norm, augmentation=views),
        _optimizer(setting, model),
        train,
        setting,
        epsilon=setting.epsilon,
        noise=tacit.Noise(z),
        prelude=prelude,
        max_rows=_at_once(setting, train.device.type == "cpu"),
        seed=seed,
        callbacks=[path, *callbacks],
    )
    for point in path.points:
        point["epoch"] = point["step"] * rate
        point["epsilon"] = _epsilon_at(finished.plan, int(point["step"]))
    return {
        "epsilon": finished.epsilon,
        "noise_multiplier": z,
        "steps": finished.steps,
        "stopped": finished.stopped,
        "calibration_seconds": calibration,
        "sampling": finished.plan.scheme.describe(),
    }


@functools.cache
def _epsilon_at(plan: tacit.accounting.Plan, steps: int) -> float:
    return plan.epsilon(steps, DELTA, COARSE)


def _train_plainly(setting: Setting, model: nn.Module, train: Records, path: AccuracyPath) -> dict:
    optimizer = _optimizer(setting, model)
    schedule = cosine_schedule(setting, optimizer)
    loss, size, steps = loss_of(setting), setting.batch_size, setting.steps
    for step in plain_steps(model, loss, optimizer, schedule, train, size, steps):
        if step in path.steps:
            path.add(model, step)
    for point in path.points:
        epoch = point["step"] * min(size, len(train)) / len(train)
        point |= {"epoch": epoch, "epsilon": math.inf}
    return {
        "epsilon": math.inf,
        "noise_multiplier": 0.0,
        "steps": steps,
        "stopped": "plan complete",
        "sampling": "shuffled epochs, not private",
    }


def _optimizer(setting: Setting, model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), setting.learning_rate, setting.momentum)


def _centre_map(setting: Setting, centre: Any) -> Callable[[Tensor], Tensor]:
    """Onto the sphere about the noisy mean of the training records; mixed features kind by kind."""
    if not setting.features.startswith("mixed:"):
        return centre
    image = tacit.load(setting.dataset)[0].shape
    return CentreOfEach(centre, setting.features, widths_of(setting.features, image))


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
