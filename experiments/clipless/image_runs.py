"""One clipless run on images, and what is read off it.

Every run is a whole private run: Poisson sampling, noise calibrated by PLD, the ledger. A seed
fixes it: these are experiments, and no releases.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from dataclasses import asdict, dataclass

import dp_accounting as dpa
import torch
from image_data import about_centre, parts, release_middle, standardised
from image_networks import build, has_certificates, kind_and_sizes
from image_settings import DELTA, Setting, is_certified, loss_of
from torch import nn

import tacit
from tacit import Records
from tacit.certificates import certified_accuracy
from tacit.certificates.certifier import scaler_lipschitz
from tacit.data import PublicScaler
from tacit.data.catalogue import lookup

PIXEL = 1 / 255


@dataclass(frozen=True)
class Job:
    """A run of a task: on held-out training records while searching, else on the test records."""

    task: str
    setting: Setting
    epsilon: float
    seed: int
    held_out: bool

    @property
    def dataset(self) -> str:
        return self.task.partition("/")[0]

    def facts(self) -> dict:
        return {
            "task": self.task,
            "held_out": self.held_out,
            "target_epsilon": self.epsilon,
            "seed": self.seed,
            "setting": asdict(self.setting),
        }


def work(job: Job, device: str, limit: int | None) -> dict:
    """Run it; afterwards its recorded graphs are given back."""
    try:
        return _measured(job, device, limit)
    finally:
        gc.collect()  # a scheduler holds its optimizer in a circle, and with it recorded graphs
        if device != "cpu":
            torch.cuda.empty_cache()


def _measured(job: Job, device: str, limit: int | None) -> dict:
    setting = job.setting
    train, looked_at = parts(job.dataset, setting.features, device, job.held_out, limit)
    prelude: tuple[dpa.DpEvent, ...] = ()
    apart = 10**6 + job.seed  # the run's own noise must not repeat what is released first
    if setting.channels is not None:
        train, looked_at, event = standardised(train, looked_at, setting.channels, apart)
        prelude = (event,)
    if setting.centre is not None:
        train, looked_at, event = about_centre(train, looked_at, setting.centre, apart + 10**6)
        prelude = (*prelude, event)
    model, found = run_once(setting, train, job.epsilon, job.seed, prelude)
    found["accuracy"] = tacit.evaluate(model, looked_at, loss_of(setting)).accuracy
    if has_certificates(setting):
        found["certified"] = certified(model, looked_at, job.dataset)
    found["score"] = found["accuracy"]
    if is_certified(job.task):
        found["score"] = statistics.mean(found["certified"].values())
    return found


def run_once(
    setting: Setting,
    train: Records,
    epsilon: float,
    seed: int,
    prelude: tuple[dpa.DpEvent, ...] = (),
) -> tuple[nn.Module, dict]:
    """Train; the model, and ε by PLD, the noise and the seconds."""
    torch.manual_seed(seed)
    size = train.require_public_size("a sampling rate")
    assert train.num_classes is not None
    model = build(setting, train.shape, train.num_classes).to(train.device)
    if kind_and_sizes(setting.model)[0] == "adapted":
        event = release_middle(model, train, setting.middle_centre, 3 * 10**6 + seed)
        prelude = (*prelude, event)
    clip = setting.gradient_clip(train.num_classes)
    optimizer = _optimizer(setting, model, clip)
    steps = setting.steps
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    z = noise(epsilon, size, setting.batch_size, steps, prelude)
    trainer = tacit.Trainer(
        model,
        loss_of(setting),
        tacit.Clipless(gradient_clip=clip, augmentation=_views(setting, train)),
        tacit.PoissonSampler(
            train,
            expected_batch_size=setting.batch_size,
            steps=steps,
            max_physical_batch=_most_rows(setting, train.shape),
            pad_to=512 if train.device.type == "cuda" else None,
        ),
        optimizer,
        tacit.Budget(epsilon, DELTA),
        noise=tacit.Noise(z, tacit.PerLayerNoise() if setting.per_layer else tacit.GlobalNoise()),
        ledger=tacit.LedgerRun(prelude=prelude),
        scheduler=cosine if setting.cosine else None,
        moving_average=None if setting.ema is None else tacit.MovingAverage(setting.ema),
        callbacks=(),
        seed=seed,
    )
    started = time.perf_counter()
    run = trainer.fit()
    if train.device.type == "cuda":
        torch.cuda.synchronize()
    facts = {
        "epsilon": run.epsilon,
        "noise_multiplier": z,
        "steps": run.steps,
        "stopped": run.stopped,
        "seconds": time.perf_counter() - started,
    }
    return model, facts


def _optimizer(setting: Setting, model: nn.Sequential, clip: float) -> torch.optim.Optimizer:
    *body, head = model
    rate = setting.learning_rate / clip
    groups = [
        {"params": [p for layer in layers for p in layer.parameters()], "lr": rate * share}
        for layers, share in (([head], 1.0), (body, setting.body_rate))
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], momentum=0.9)


@functools.cache
def noise(epsilon: float, size: int, batch: int, steps: int, prelude: tuple = ()) -> float:
    """The least multiplier that keeps the steps, and what is released first, within ε."""
    rate = tacit.sampling.Poisson(batch / size)
    return tacit.calibrate(tacit.Budget(epsilon, DELTA), rate, steps=steps, prelude=prelude)


def certified(model: nn.Module, records: Records, dataset: str) -> dict[str, float]:
    """Shares right and certified within 0, 1, 2, 4, 8, 16 over 255, of pixels in [0, 1]."""
    found = certified_accuracy(model, records, unit=pixel_unit(dataset))
    return {f"{r:g}": share for r, share in zip(found.radii, found.shares, strict=True)}


def pixel_unit(dataset: str) -> float:
    """How far a record may move when its pixels move by 1/255: records are (pixels − mean)/std."""
    known = lookup(dataset)
    assert known.mean is not None
    assert known.std is not None
    return PIXEL * scaler_lipschitz(PublicScaler(known.mean, known.std))


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
