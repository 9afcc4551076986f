"""Statistics from public records: equal to a hand computation, and for the network in use."""

import pytest
import torch
from norm_cases import buffers, image_net, images, same
from torch import nn

from tacit.statistics import PublicStatistics, declare_public, refuse_private_statistics


def by_hand(model, sets):
    """Layer by layer, each norm by the set's own statistics, written out."""
    found = {1: [], 4: []}
    for x in sets:
        for place, layer in enumerate(model):
            if place in found:
                n = x.numel() / x.shape[1]
                mean = x.sum((0, 2, 3)) / n
                squares = (x - mean[:, None, None]).square().sum((0, 2, 3))
                found[place].append((mean, squares / (n - 1)))
                scale = layer.weight / (squares / n + layer.eps).sqrt()
                shift = layer.bias - mean * scale
                x = x * scale[:, None, None] + shift[:, None, None]
            else:
                x = layer(x)
    return {
        place: [torch.stack(each).mean(0) for each in zip(*pairs, strict=True)]
        for place, pairs in found.items()
    }


def test_they_equal_a_hand_computation():
    model, public = image_net().double(), images(26)
    public = type(public)(public.inputs.double() * 3 + 1, public.targets)
    PublicStatistics(public, 8).apply(model)
    with torch.no_grad():
        want = by_hand(model, public.inputs[:24].split(8))  # the last two do not fill a set
    for place, (mean, variance) in want.items():
        assert torch.allclose(model[place].running_mean, mean, rtol=1e-9)
        assert torch.allclose(model[place].running_var, variance, rtol=1e-9)
        assert model[place].num_batches_tracked == 3
    refuse_private_statistics(model)


def test_they_equal_pytorchs_cumulative_average():
    model, public = image_net(), images(24)
    PublicStatistics(public, 8).apply(model)
    other = image_net()
    for norm in (other[1], other[4]):
        norm.momentum = None
    for x in public.inputs.split(8):
        other(x)
    for name, buffer in buffers(other).items():
        assert torch.allclose(buffers(model)[name], buffer, rtol=1e-5)


def test_applied_twice_is_applied_once():
    model, statistics = image_net(), PublicStatistics(images(), 8)
    statistics.apply(model)
    once = buffers(model)
    statistics.apply(model)
    assert same(buffers(model), once)


def test_modes_hooks_weights_and_the_generator_are_left_as_they_were():
    model = nn.Sequential(nn.Dropout(0.5), image_net()).train()
    model[1][4].eval()
    modes = [module.training for module in model.modules()]
    weights = [p.clone() for p in model.parameters()]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    PublicStatistics(images(), 8).apply(model)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)  # dropout is off: it would have drawn
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_frozen_norms_stay_frozen():
    model = image_net().train()
    model[1].running_mean.fill_(0.5)
    declare_public(model[1].eval())
    before = buffers(model[1])
    PublicStatistics(images(), 8).apply(model)
    assert same(buffers(model[1]), before)
    assert model[4].num_batches_tracked == 3
    refuse_private_statistics(model)


def test_instance_norm_gets_the_mean_of_each_records_own():
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.InstanceNorm2d(3, track_running_stats=True))
    PublicStatistics(images(16), 8).apply(model)
    x = model[0](images(16).inputs).detach().flatten(2)
    assert torch.allclose(model[1].running_mean, x.mean((0, 2)), atol=1e-6)
    assert torch.allclose(model[1].running_var, x.var(2).mean(0), rtol=1e-5)


def test_a_set_that_cannot_be_filled_and_one_that_is_not_finite():
    with pytest.raises(ValueError, match="do not fill one mini-set of 30"):
        PublicStatistics(images(24), 30)
    with pytest.raises(ValueError, match="set_size at least 1"):
        PublicStatistics(images(24), 0)
    public = images(24)
    public.inputs[3] = torch.nan
    model = image_net()
    before = buffers(model)
    with pytest.raises(ValueError, match="not finite on the public records"):
        PublicStatistics(public, 8).apply(model)
    assert same(buffers(model), before)
