"""One run of the batch-clipping paper: its networks, its clipping, its noise.

The paper's noise is N(0, (2·C_h·σ)²) on block h, so with L blocks the joint multiplier is σ/√L, and
σ where the whole gradient is clipped at once. A tenth of the training records is public: it gives
the layers' constants and, at the end, BatchNorm's statistics. Batches are mini-sets of m records
(batch clipping), k mini-sets (general), or m records drawn alone (individual clipping).

Experiments, not releases: steps are recorded (`recorded_step.py`), seeds are fixed, and ε is what
the plan of the run costs by the accountant.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import tacit
from experiments.batch_clipping.recorded_step import RecordedStep
from experiments.images import evaluation_steps
from experiments.runner import DELTA, Job, Paper
from tacit import Records
from tacit.canvas import blank, save
from tacit.models.residual import group_norm
from tacit.queries.thresholds import Constants
from tacit.randomness import Randomness
from tacit.sampling.scheme import Scheme, Unit
from tacit.statistics import PublicStatistics

PUBLIC_SHARE, ESTIMATED_FROM = 0.1, 256
# Public constants that the paper gives, of pixels between 0 and 1.
SCALES = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "mnist": ((0.1307,), (0.3081,)),
}
DATA = {"resnet18": "cifar10", "convnet": "cifar10", "lenet5": "mnist"}


@dataclass(frozen=True)
class Setting:
    """What one run is told.

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
    def set_size(self) -> int:
        if self.clipping == "individual":
            return 1
        return self.batch_size // (self.sets if self.clipping == "general" else 1)


def small(setting: Setting) -> Setting:
    """Two epochs of a few small batches."""
    return replace(setting, epochs=2, batch_size=32, sets=min(setting.sets, 2))


@functools.cache
def data(name: str, device: str, limit: int | None) -> tuple[Records, Records, Records]:
    """(public, private, test), normalised by the paper's constants."""
    mean, std = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in SCALES[name])
    sides = []
    for records in tacit.load(name):
        if limit is not None:
            records = counted(rows_of(records, slice(limit)))
        sides.append(replace(records, inputs=(records.inputs - mean) / std).to(device))
    public, private = tacit.split_public(sides[0], PUBLIC_SHARE)
    return public, private, sides[1]


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


def blocks_and_norms(
    setting: Setting, model: nn.Module, public: Records, steps_per_epoch: int
) -> tuple[object, object]:
    """Where the constants come from, and the blocks that they are for."""
    master: object = setting.master
    if setting.master_decay != 1:
        master = tacit.queries.Decaying(setting.master, setting.master_decay, steps_per_epoch)
    how = {"every": steps_per_epoch, "records": ESTIMATED_FROM}
    if setting.constants == "full":
        return master, None
    if setting.constants == "original":
        return tacit.queries.LayerwiseNorms(public, **how), layers(setting)
    if setting.constants == "factors":
        return tacit.queries.LayerFactors(public, master, **how), layers(setting)
    blocks: object = layers(setting)
    if setting.constants.startswith("grouped:"):
        # Groups are fixed before the first step, from public records at the initial weights.
        probe = tacit.BatchClip(1.0, min(64, len(public)), blocks=blocks)
        found = probe.expected_norms(model, tacit.losses.CrossEntropy(), _some(public))
        blocks = tacit.queries.group_by_norm(
            layers(setting)(model), found, int(setting.constants[8:])
        )
    return tacit.queries.LayerwiseNorms(public, master, **how), blocks


def probe_of(setting: Setting, model: nn.Module, blocks: object) -> tacit.BatchClip:
    """Asks for norms of what is clipped, on public records."""
    return tacit.BatchClip(1.0, setting.set_size, blocks=blocks)  # type: ignore[arg-type]


def joint_multiplier(setting: Setting, count: int) -> float:
    """σ/√L for L blocks with a noise of their own each, σ where there is one."""
    if setting.noise_multiplier is not None:
        return setting.noise_multiplier
    one = setting.constants in ("full", "factors")
    return setting.sigma if one else setting.sigma / math.sqrt(count)


def scheme_of(setting: Setting, private: Records) -> tuple[Scheme, int]:
    """How batches are drawn, and how many make an epoch."""
    if setting.clipping == "individual":
        scheme: Scheme = tacit.sampling.WithoutReplacement(len(private), setting.batch_size)
        return scheme, len(private) // setting.batch_size
    chosen = setting.sets if setting.clipping == "general" else 1
    num_sets = len(private) // setting.set_size
    return tacit.sampling.MiniSets(num_sets, setting.set_size, chosen=chosen), max(
        1, num_sets // chosen
    )


def run(
    setting: Setting, seed: int, device: str, evaluations: int = 10, limit: int | None = None
) -> dict:
    """Train once and report accuracy by epoch, ε, and what was used."""
    torch.backends.cudnn.benchmark = device != "cpu"  # the same shapes, tens of thousands of times
    if setting.clipping == "none":
        return _plain_run(setting, seed, device, evaluations, limit)
    public, private, test = data(DATA[setting.network], device, limit)
    private = _whole_sets(private, setting.batch_size)
    scheme, per_epoch = scheme_of(setting, private)
    steps = max(1, round(setting.epochs * per_epoch))
    torch.manual_seed(seed)
    model = _placed(network(setting), device)
    source, wanted = blocks_and_norms(setting, model, public, per_epoch)
    probe = probe_of(setting, model, wanted)
    blocks = probe.blocks_of(model)
    z = joint_multiplier(setting, len(blocks))
    unit = Unit.RECORD if setting.clipping == "individual" else Unit.MINI_SET
    plan = tacit.accounting.Plan(scheme, z, tacit.Relation.REPLACE_ONE, steps, unit)
    step = RecordedStep(setting, model, private, blocks, z, per_epoch)
    has_batch_norm = any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    statistics = PublicStatistics(public, min(64, len(public))) if has_batch_norm else None
    some, loss = _some(public), tacit.losses.CrossEntropy()
    draws = Randomness(seed)
    path: list[tuple[float, float]] = []
    evaluated = evaluation_steps(steps, evaluations)
    started = time.perf_counter()
    for t in range(steps):
        if t % per_epoch == 0:
            epoch = t // per_epoch
            if isinstance(source, tacit.queries.LayerwiseNorms | tacit.queries.LayerFactors):
                step.set_constants(source.constants(probe.expected_norms(model, loss, some), t))
            elif t == 0 or setting.master_decay != 1:
                norm = source(t) if callable(source) else source
                step.set_constants(Constants((float(norm),)))  # type: ignore[arg-type]
            step.fill(_drawn(scheme, draws, t, per_epoch))
            if not setting.cosine:
                step.rate.fill_(setting.learning_rate * setting.rate_decay**epoch)
        if setting.cosine:
            step.rate.fill_(setting.learning_rate * 0.5 * (1 + math.cos(math.pi * t / steps)))
        step()
        if t + 1 in evaluated:
            if statistics is not None:
                statistics.apply(model)
            path.append(((t + 1) / per_epoch, tacit.evaluate(model, test, loss).accuracy))
    return {
        "seed": seed,
        "accuracy": path[-1][1],
        # Of public records that gave no constants: what settings may be chosen by.
        "public_accuracy": tacit.evaluate(model, _rest(public), loss).accuracy,
        "path": path,
        "epsilon": plan.epsilon(steps, DELTA),
        "noise_multiplier": z,
        "blocks": len(blocks),
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "sampling": scheme.describe(),
        "records": {"private": len(private), "public": len(public)},
    }


def _drawn(scheme: Scheme, draws: Randomness, first: int, count: int) -> Tensor:
    """The rows of `count` batches. Sets are runs of rows: records were shuffled when split."""
    streams = [draws.stream("sampling", first + i) for i in range(count)]
    if isinstance(scheme, tacit.sampling.MiniSets):
        assert scheme.chosen is not None
        sets = [stream.subset(scheme.num_sets, scheme.chosen) for stream in streams]
        places = np.stack(sets)[:, :, None] * scheme.set_size + np.arange(scheme.set_size)
        return torch.from_numpy(places.reshape(count, -1))
    assert isinstance(scheme, tacit.sampling.WithoutReplacement)
    rows = [stream.subset(scheme.population, scheme.sample_size) for stream in streams]
    return torch.from_numpy(np.stack(rows))


def _whole_sets(private: Records, size: int) -> Records:
    """Private records in the order of their ids, and as many as fill whole batches."""
    count = len(private) // size * size
    return counted(rows_of(private, torch.argsort(private.record_ids)[:count]))


def counted(records: Records) -> Records:
    """The same records, whose number is public."""
    return replace(records, public_size=len(records), num_ids=len(records))


def rows_of(records: Records, rows: slice | Tensor) -> Records:
    return replace(
        records,
        inputs=records.inputs[rows],
        targets=records.targets[rows],
        record_ids=records.record_ids[rows],
    )


def _some(public: Records) -> Records:
    return rows_of(public, slice(ESTIMATED_FROM))


def _rest(public: Records) -> Records:
    return rows_of(public, slice(min(ESTIMATED_FROM, len(public) // 2), None))


def _plain_run(
    setting: Setting, seed: int, device: str, evaluations: int, limit: int | None
) -> dict:
    """Mini-batch SGD without privacy, on the same records; and the layers' gradient norms."""
    public, private, test = data(DATA[setting.network], device, limit)
    torch.manual_seed(seed)
    model = _placed(network(setting), device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=setting.learning_rate, momentum=setting.momentum
    )
    per_epoch = math.ceil(len(private) / setting.batch_size)
    steps = max(1, round(setting.epochs * per_epoch))
    schedule: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.StepLR(
        optimizer, per_epoch, setting.rate_decay
    )
    if setting.cosine:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    crop = tacit.RandomCropFlip(padding=4, reflect=False)
    probe = tacit.BatchClip(1.0, min(64, len(public)), blocks=layers(setting))
    loss = tacit.losses.CrossEntropy()
    path, norms, evaluated = [], [], evaluation_steps(steps, evaluations)
    started = time.perf_counter()
    order = torch.empty(0, dtype=torch.long, device=device)
    for step in range(steps):
        if len(order) < setting.batch_size:
            order = torch.randperm(len(private), device=device)
        rows, order = order[: setting.batch_size], order[setting.batch_size :]
        x: Tensor = private.inputs[rows]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(crop(x)), private.targets[rows]).backward()
        optimizer.step()
        schedule.step()
        if step + 1 in evaluated:
            epoch = (step + 1) / per_epoch
            path.append((epoch, tacit.evaluate(model, test, loss).accuracy))
            norms.append((epoch, probe.expected_norms(model, loss, _some(public))))
    names = ["+".join(block) for block in layers(setting)(model)]
    return {
        "seed": seed,
        "accuracy": path[-1][1],
        "path": path,
        "epsilon": math.inf,
        "layers": names,
        "norms": norms,
        "steps": steps,
        "seconds": time.perf_counter() - started,
        "sampling": "shuffled epochs, not private",
    }


def _placed(model: nn.Module, device: str) -> nn.Module:
    moved = model.to(device)
    if device == "cpu":
        return moved
    return moved.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def work(job: Job) -> dict:
    return run(job.setting, job.seed, job.device, job.evaluations, job.limit)


def draw_curves(report: Mapping, path: Path) -> None:
    """Test accuracy against epochs: the mean over seeds, and a band from least to largest."""
    figure, axes = blank(size=(9, 4.5))
    panel = axes[0, 0]
    for name, row in report["settings"].items():
        paths = [run["path"] for run in row["runs"]]
        epochs = [epoch for epoch, _ in paths[0]]
        shares = 100 * np.array([[share for _, share in path] for path in paths])
        (line,) = panel.plot(epochs, shares.mean(0), label=name)
        panel.fill_between(epochs, shares.min(0), shares.max(0), color=line.get_color(), alpha=0.15)
    panel.set(xlabel="epoch", ylabel="test accuracy (%)", title=report["title"])
    panel.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    save(figure, path)


PAPER = Paper(
    "Batch Clipping and Adaptive Layerwise Clipping",
    {},
    work,
    small,
    draw_curves,
    small_records=640,
    evaluations=10,
)
