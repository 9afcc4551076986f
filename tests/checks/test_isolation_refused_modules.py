"""Modules that mix records are refused by name, however they are disguised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tacit import PerSampleClip
from tacit.errors import MixesRecords
from tacit.sampling import Poisson, batch_of

IMAGE, VOLUME = (4, 6, 6), (4, 3, 3, 3)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class OwnNorm(nn.BatchNorm2d):
    """A subclass under another name."""


# name: (module, shape of one record)
MIXING = {
    "BatchNorm1d": (nn.BatchNorm1d(4), (4, 6)),
    "BatchNorm2d": (nn.BatchNorm2d(4), IMAGE),
    "BatchNorm3d": (nn.BatchNorm3d(4), VOLUME),
    "SyncBatchNorm": (nn.SyncBatchNorm(4), IMAGE),
    "frozen": (frozen(nn.BatchNorm2d(4)), IMAGE),
    "not affine": (nn.BatchNorm2d(4, affine=False), IMAGE),
    "no running statistics": (nn.BatchNorm2d(4, track_running_stats=False), IMAGE),
    "no momentum": (nn.BatchNorm2d(4, momentum=None), IMAGE),
    "LazyBatchNorm2d": (nn.LazyBatchNorm2d(), IMAGE),
    "a subclass": (OwnNorm(4), IMAGE),
    "InstanceNorm with running statistics": (nn.InstanceNorm2d(4, track_running_stats=True), IMAGE),
    "no statistics to fall back on in evaluation": (
        nn.BatchNorm2d(4, track_running_stats=False).eval(),
        IMAGE,
    ),
}


class Inner(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.before = nn.Identity()
        self.deep = nn.ModuleDict({"norm": nn.Sequential(nn.Identity(), module)})

    def forward(self, x):
        return self.deep["norm"](self.before(x))


def nested(module: nn.Module) -> nn.Module:
    pool = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2))
    return nn.Sequential(Inner(module), nn.Flatten(2), pool)


def run(model: nn.Module, shape: tuple[int, ...]):
    batch = batch_of(
        torch.randn(5, *shape), torch.zeros(5).long(), divisor=5.0, scheme=Poisson(0.5)
    )
    return PerSampleClip(1.0)(model, nn.CrossEntropyLoss(), batch)


@pytest.mark.parametrize(("module", "shape"), MIXING.values(), ids=MIXING.keys())
def test_refused_with_its_path(module, shape):
    with pytest.raises(MixesRecords, match=r"'0\.deep\.norm\.1' \(\w+\)"):
        run(nested(module), shape)


def test_refused_as_the_model_itself():
    with pytest.raises(MixesRecords, match=r"the model itself \(BatchNorm1d\)"):
        run(nn.BatchNorm1d(2), (2,))


def test_refused_when_only_the_statistics_are_in_training_mode():
    model = nested(nn.BatchNorm2d(4)).eval()
    model[0].deep["norm"][1].train()
    with pytest.raises(MixesRecords):
        run(model, IMAGE)


def test_refused_before_an_empty_batch_too():
    batch = batch_of(torch.randn(0, 2), torch.zeros(0).long(), divisor=5.0, scheme=Poisson(0.5))
    with pytest.raises(MixesRecords):
        PerSampleClip(1.0)(nn.BatchNorm1d(2), nn.CrossEntropyLoss(), batch)


KEEPING_APART = {
    "BatchNorm2d in evaluation": nn.BatchNorm2d(4).eval(),
    "GroupNorm": nn.GroupNorm(2, 4),
    "InstanceNorm": nn.InstanceNorm2d(4, affine=True),
    "InstanceNorm in evaluation": nn.InstanceNorm2d(4, track_running_stats=True).eval(),
    "LayerNorm": nn.LayerNorm(IMAGE),
}


@pytest.mark.parametrize("module", KEEPING_APART.values(), ids=KEEPING_APART.keys())
def test_modules_that_keep_records_apart_are_accepted(module):
    bounded = run(nested(module), IMAGE)
    assert all(torch.isfinite(s).all() for block in bounded.blocks for s in block.sums)


def test_statistics_of_a_batch_norm_in_evaluation_stay():
    norm = nn.BatchNorm2d(4).eval()
    run(nested(norm), IMAGE)
    assert norm.num_batches_tracked == 0
    assert not norm.running_mean.any()
