"""One run of the batch-clipping paper: its networks, its clipping, its noise.

The paper's noise is N(0, (2·C_h·σ)²) on block h, so with L blocks the joint multiplier is σ/√L, and
σ where the whole gradient is clipped at once. A tenth of the training records is public: it gives
the layers' constants and, for evaluations, BatchNorm's statistics. Batches are mini-sets of m
records (batch clipping), k mini-sets (general), or m records drawn alone (individual clipping).

Every run is a whole one by `tacit.Trainer`, with a budget so large that the noise is the paper's. A
seed fixes it: these are experiments, not releases.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

import tacit
from experiments.images import NOT_PRIVATE, evaluation_steps, first, plain_steps
from experiments.results import DELTA
from experiments.runner import Job
from tacit import Records
from tacit.models import group_norm
from tacit.queries import Decaying, LayerFactors, LayerwiseNorms, group_by_norm
from tacit.sampling import Sampler
from tacit.sampling.scheme import Unit
from tacit.training import HeldOut

PUBLIC_SHARE, ESTIMATED_FROM = 0.1, 256
# Public constants that the paper gives, of pixels between 0 and 1.
SCALES = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "mnist": ((0.1307,), (0.3081,)),
}
DATA = {"resnet18": "cifar10", "convnet": "cifar10", "lenet5": "mnist"}
LOSS = tacit.losses.CrossEntropy()
CROP = tacit.RandomCropFlip(padding=4, reflect=False)
# σ is the paper's, and ε follows from it.
UNLIMITED = tacit.Budget(1e12, DELTA, tacit.Relation.REPLACE_ONE)


@dataclass(frozen=True)
class Setting:
    """One run.

    `clipping`: none, batch, individual, or general (of `sets` mini-sets).
    `constants`: enhanced, original, full (one constant), factors, or grouped:G.
    `norm`: batch, none, or group. BatchNorm under individual clipping sees one record, which is
    InstanceNorm, and is built as that.
    """

    network: str = "resnet18"
    norm: str = "batch"
    clipping: str = "batch"
    constants: str = "enhanced"
    batch_size: int = 64
    sets: int = 1
    master: float = 0.095
    sigma: float = 0.01875
    noise_multiplier: float | None = None
    epochs: float = 50
    learning_rate: float = 0.025
    rate_decay: float = 0.9
    master_decay: float = 1.0
    momentum: float = 0.0
    augment: bool = True
    cosine: bool = False

    @property
    def sets_per_step(self) -> int:
        return self.sets if self.clipping == "general" else 1

    @property
    def set_size(self) -> int:
        return 1 if self.clipping == "individual" else self.batch_size // self.sets_per_step

    @property
    def unit(self) -> Unit:
        return Unit.RECORD if self.clipping == "individual" else Unit.MINI_SET


def small(setting: Setting) -> Setting:
    """Two epochs of a few small batches."""
    return replace(setting, epochs=2, batch_size=32, sets=min(setting.sets, 2))


class Data(NamedTuple):
    public: Records
    private: Records
    test: Records


@functools.cache
def data(name: str, device: str, limit: int | None) -> Data:
    """The records of a dataset, normalised by the paper's constants."""
    mean, std = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in SCALES[name])
    sides = []
    for records in tacit.load(name):
        records = records if limit is None else first(records, limit)
        sides.append(replace(records, inputs=(records.inputs - mean) / std).to(device))
    public, private = tacit.split_public(sides[0], PUBLIC_SHARE)
    return Data(public, private, sides[1])


def network(setting: Setting) -> nn.Module:
    norms: dict[str, Callable[[int], nn.Module] | None] = {
        "batch": nn.BatchNorm2d,
        "group": group_norm(),
        "none": None,
    }
    norm = norms[setting.norm]
    if setting.norm == "batch" and setting.clipping == "individual":
        norm = functools.partial(nn.InstanceNorm2d, affine=True)
    return getattr(tacit.models, setting.network)(norm=norm)


def layers(setting: Setting) -> Callable[[nn.Module], tuple[tuple[str, ...], ...]]:
    """Blocks as the paper counts them: 62 tensors of resnet-18, 8 layers of BN-LeNet-5."""
    return tacit.by_parameter if setting.network == "resnet18" else tacit.by_layer


def whole_batches(private: Records, size: int) -> Records:
    """As many private records as fill whole batches, by their ids."""
    count = len(private) // size * size
    kept = private.take(private.record_ids < count)
    return replace(kept, public_size=count, num_ids=count)


def sampler_of(setting: Setting, private: Records, steps: int) -> Sampler:
    if setting.clipping == "individual":
        return tacit.FixedSizeSampler(private, setting.batch_size, steps)
    return tacit.MiniSetSampler(private, setting.set_size, steps, chosen=setting.sets_per_step)


def query_of(
    setting: Setting, model: nn.Module, public: Records, steps_per_epoch: int
) -> tacit.BatchClip | tacit.PerSampleClip:
    """The paper's clipping; constants are estimated once per epoch."""
    options = {"augmentation": tacit.data.Augmentation(1, CROP) if setting.augment else None}
    if setting.clipping == "individual":
        query = functools.partial(tacit.PerSampleClip, **options)
    else:
        query = functools.partial(tacit.BatchClip, mini_set_size=setting.set_size, **options)
    if setting.constants == "full":
        return query(setting.master)
    master: object = setting.master
    if setting.master_decay != 1:
        master = Decaying(setting.master, setting.master_decay, steps_per_epoch)
    estimates = {"every": steps_per_epoch, "records": ESTIMATED_FROM}
    constants, blocks = LayerwiseNorms(public, master, **estimates), layers(setting)
    if setting.constants == "factors":
        constants = LayerFactors(public, master, **estimates)
    elif setting.constants == "original":
        constants = LayerwiseNorms(public, **estimates)
    elif setting.constants.startswith("grouped:"):
        # Groups are fixed before the first step, from public records at the initial weights.
        norms = norms_of_means(setting, model, public)
        blocks = group_by_norm(blocks(model), norms, int(setting.constants[8:]))
    return query(constants, blocks=blocks)


def norms_of_means(setting: Setting, model: nn.Module, public: Records) -> list[float]:
    """For each layer, the expected norm of the mean gradient of 64 public records."""
    probe = tacit.BatchClip(1.0, min(64, len(public)), blocks=layers(setting))
    return probe.expected_norms(model, LOSS, public.take(slice(ESTIMATED_FROM)))


def joint_multiplier(setting: Setting, num_blocks: int) -> float:
    """σ/√L for L blocks with noise of their own each, σ where the whole gradient is clipped."""
    if setting.noise_multiplier is not None:
        return setting.noise_multiplier
    together = setting.constants in ("full", "factors")
    return setting.sigma if together else setting.sigma / math.sqrt(num_blocks)


def work(job: Job) -> dict:
    """Train once: accuracy by epoch, ε, and what was used."""
    setting: Setting = job.setting
    # The same shapes come tens of thousands of times.
    torch.backends.cudnn.benchmark = job.device != "cpu"
    records = data(DATA[setting.network], job.device, job.limit)
    torch.manual_seed(job.seed)
    model = network(setting).to(job.device)
    if job.device != "cpu":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train = _train_plainly if setting.clipping == "none" else _train_privately
    started = time.perf_counter()
    report = train(job, model, records)
    report |= {"seed": job.seed, "accuracy": report["path"][-1][1]}
    return report | {"seconds": time.perf_counter() - started}


def _train_privately(job: Job, model: nn.Module, records: Data) -> dict:
    setting = job.setting
    public, private = records.public, whole_batches(records.private, setting.batch_size)
    per_epoch = len(private) // setting.batch_size
    steps = max(1, round(setting.epochs * per_epoch))
    query = query_of(setting, model, public, per_epoch)
    num_blocks = len(query.blocks_of(model))
    optimizer, scheduler = _optimizer(setting, model, steps, per_epoch)
    has_batch_norm = any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    finished = tacit.Trainer(
        model,
        LOSS,
        query,
        sampler_of(setting, private, steps),
        optimizer,
        UNLIMITED,
        noise=tacit.Noise(joint_multiplier(setting, num_blocks), tacit.PerLayerNoise()),
        scheduler=scheduler,
        statistics=(
            tacit.PublicStatistics(public, min(64, len(public))) if has_batch_norm else None
        ),
        evaluate_on=HeldOut(records.test, every=math.ceil(steps / job.evaluations)),
        callbacks=(),
        seed=job.seed,
    ).fit()
    unused = public.take(slice(min(ESTIMATED_FROM, len(public) // 2), None))
    return {
        # Of public records that gave no constants: what settings may be chosen by.
        "public_accuracy": tacit.evaluate(model, unused, LOSS).accuracy,
        "path": [(e.step / per_epoch, e.accuracy) for e in finished.history],
        "epsilon": finished.epsilon,
        "noise_multiplier": finished.plan.noise_multiplier,
        "blocks": num_blocks,
        "steps": finished.steps,
        "sampling": finished.plan.scheme.describe(),
        "records": {"private": len(private), "public": len(public)},
    }


def _train_plainly(job: Job, model: nn.Module, records: Data) -> dict:
    """SGD without privacy on the same records, and the norms of the layers' gradients."""
    setting = job.setting
    public, private, test = records
    per_epoch = math.ceil(len(private) / setting.batch_size)
    steps = max(1, round(setting.epochs * per_epoch))
    optimizer, scheduler = _optimizer(setting, model, steps, per_epoch)
    path, norms, evaluated = [], [], evaluation_steps(steps, job.evaluations)
    size = setting.batch_size
    for step in plain_steps(
        model, LOSS, optimizer, scheduler, private, size, steps, evaluated, CROP
    ):
        epoch = step / per_epoch
        path.append((epoch, tacit.evaluate(model, test, LOSS).accuracy))
        norms.append((epoch, norms_of_means(setting, model, public)))
    return {
        **NOT_PRIVATE,
        "path": path,
        "layers": ["+".join(block) for block in layers(setting)(model)],
        "norms": norms,
        "steps": steps,
    }


def _optimizer(
    setting: Setting, model: nn.Module, steps: int, per_epoch: int
) -> tuple[torch.optim.SGD, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD(
        model.parameters(), lr=setting.learning_rate, momentum=setting.momentum
    )
    if setting.cosine:
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, per_epoch, setting.rate_decay)
