"""A model with private running statistics is not let out; one without raises no alarm."""

import copy
import types

import pytest
import torch
from norm_cases import image_net, images
from torch import nn

from tacit.errors import PrivateStatistics
from tacit.report import save_run
from tacit.statistics import (
    PublicStatistics,
    declare_public,
    refuse_private_statistics,
    without_running_statistics,
)

X = torch.randn(8, 2, 4, 4)


def test_one_forward_pass_outside_the_context_makes_saving_fail(tmp_path):
    model = image_net()
    with without_running_statistics(model):
        model(X)
    refuse_private_statistics(model)
    model(X)
    # Were the refusal late, this run, which has nothing but a model, would fail in another way.
    with pytest.raises(PrivateStatistics, match=r"module '1' .BatchNorm2d."):
        save_run(types.SimpleNamespace(model=model), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.GroupNorm(1, 2),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.BatchNorm2d(2, affine=False),
        nn.InstanceNorm2d(2, track_running_stats=True),
        nn.LazyBatchNorm2d(),
        image_net().half(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_no_false_alarm(model):
    refuse_private_statistics(model)


def test_no_false_alarm_after_training_without_statistics():
    model = nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.GroupNorm(1, 2))
    model(X)
    refuse_private_statistics(model)
    model = image_net()
    model(X)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    refuse_private_statistics(model)


def test_what_is_declared_public_is_let_out_until_it_changes():
    model = image_net()
    model(X)  # somebody's pretraining
    declare_public(model)
    refuse_private_statistics(model)
    refuse_private_statistics(copy.deepcopy(model))
    model.eval()(X)
    refuse_private_statistics(model)
    model.train()(X)
    with pytest.raises(PrivateStatistics, match="declared public, and have changed since"):
        refuse_private_statistics(model)


@pytest.mark.parametrize("name", ["running_mean", "running_var", "num_batches_tracked"])
def test_the_mark_is_tied_to_every_bit_of_every_buffer(name):
    model = image_net()
    model(X)
    declare_public(model)
    buffer = model[4].get_buffer(name)
    if buffer.is_floating_point():
        buffer[-1] = torch.nextafter(buffer[-1], buffer[-1] + 1)
    else:
        buffer += 1
    with pytest.raises(PrivateStatistics, match="'4'"):
        refuse_private_statistics(model)


def test_a_mark_does_not_travel_with_other_values():
    public, private = image_net(), image_net()
    PublicStatistics(images(), 8).apply(public)
    private(X)
    public.load_state_dict(private.state_dict())
    with pytest.raises(PrivateStatistics, match="from the public records"):
        refuse_private_statistics(public)


class OwnNorm(nn.Module):
    """Not derived from PyTorch's: known by the names of its buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))

    def forward(self, x):
        self.running_mean += x.mean((0, 2, 3))
        return x


def test_norms_of_other_makes_are_seen_too():
    model = nn.Sequential(OwnNorm())
    refuse_private_statistics(model)
    model(X)
    with pytest.raises(PrivateStatistics, match="OwnNorm"):
        refuse_private_statistics(model)


def test_a_mark_survives_a_move_and_not_a_change_of_type():
    model = image_net().double()
    model(X.double())
    declare_public(model)
    model.to("cpu")
    refuse_private_statistics(model)
    with pytest.raises(PrivateStatistics):
        refuse_private_statistics(model.half())
