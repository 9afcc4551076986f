"""Models in which records meet, a little, late or only backwards, are refused at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

import tacit
from tacit import PerSampleClip
from tacit.engines import BookKeeping, PerRecord
from tacit.errors import MixesRecords
from tacit.sampling import batch_of

D = 6


class Around(nn.Module):
    """A linear layer with something done to its input."""

    def __init__(self, what) -> None:
        super().__init__()
        self.what, self.layer = what, nn.Linear(D, 3)

    def forward(self, x):
        return self.layer(self.what(x, self.training))


class NormalisedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class BackwardsTogether(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(NormalisedBack.apply(self.first(x)))


def by_the_batch(x, training):
    return (x - x.mean(0)) / (x.std(0) + 0.1) if training else x


MEETING = {
    "a hundredth of the mean": lambda x, t: x - 0.01 * x.mean(dim=0),
    "a millionth of the mean": lambda x, t: x - 1e-6 * x.mean(dim=0),
    "the batch's largest, above ten": lambda x, t: x / x.abs().max().clamp(min=10),
    "two places on": lambda x, t: x + x.roll(2, 0),
    "half a batch on": lambda x, t: x + x.roll(len(x) // 2, 0),
    "sixteen places": lambda x, t: x * ((x[:, :1] > 0).cumsum(0) < 16),
}


def batch(n=24, dtype=torch.float32):
    torch.manual_seed(0)
    return batch_of(
        torch.randn(n, D, dtype=dtype),
        torch.randint(3, (n,)),
        divisor=n,
        scheme=tacit.sampling.Poisson(0.5),
    )


@pytest.mark.parametrize("what", MEETING)
def test_records_that_meet_are_refused(what):
    model = Around(MEETING[what])
    with pytest.raises(MixesRecords, match="meet"):
        PerSampleClip(1.0, engine=BookKeeping())(model, F.cross_entropy, batch())
    PerSampleClip(1.0, engine=BookKeeping())(Around(lambda x, t: 2 * x), F.cross_entropy, batch())


def test_records_that_meet_on_the_way_back_are_refused():
    with pytest.raises(MixesRecords, match="meet"):
        PerSampleClip(1.0)(BackwardsTogether(), F.cross_entropy, batch())


def test_another_mode_is_asked_again():
    """In evaluation mode this norm keeps records apart; in training it is looked at again."""
    model, query = Around(by_the_batch).eval(), PerSampleClip(1.0)
    query(model, F.cross_entropy, batch())
    with pytest.raises(MixesRecords, match="meet"):
        query(model.train(), F.cross_entropy, batch())


def test_a_hook_of_all_modules_is_seen_although_the_model_had_been_looked_at():
    model, query = Around(lambda x, t: 2 * x), PerSampleClip(1.0)
    query(model, F.cross_entropy, batch())
    handle = register_module_forward_pre_hook(lambda m, args: (args[0] - 0.01 * args[0].mean(0),))
    try:
        with pytest.raises(MixesRecords, match="meet"):
            query(model, F.cross_entropy, batch())
    finally:
        handle.remove()
    query(model, F.cross_entropy, batch())


@pytest.mark.parametrize("size", [1e17, 1e19, 1e20, 1e30])
def test_one_huge_record_stops_nothing(size):
    """Whether a run goes on must not depend on one record that is finite."""
    for place in range(3):
        given = batch()
        given.records.inputs[place] = size
        found = PerSampleClip(1.0)(nn.Linear(D, 3), F.cross_entropy, given)
        assert all(t.isfinite().all() for block in found.blocks for t in block.sums)


def mixing(module, args):
    return (args[0] - 0.01 * args[0].mean(0),)


@pytest.mark.parametrize(
    "register",
    [register_module_forward_pre_hook, lambda hook: MODEL.layer.register_forward_pre_hook(hook)],
)
def test_a_hook_in_the_place_of_another_is_seen(register):
    """Functions come and go at one address in memory, and as many hooks as before are there."""
    for _ in range(6):
        query = PerSampleClip(1.0, engine=BookKeeping())
        handle = register(lambda module, args: None)
        query(MODEL, F.cross_entropy, batch())
        handle.remove()
        handle = register(lambda module, args: mixing(module, args))
        try:
            with pytest.raises(MixesRecords, match="meet"):
                query(MODEL, F.cross_entropy, batch())
        finally:
            handle.remove()


def test_a_hook_on_the_way_back_is_seen_after_the_first_step():
    model, query = nn.Sequential(nn.Linear(D, 4), nn.Linear(4, 3)), PerSampleClip(1.0)
    query(model, F.cross_entropy, batch())
    model[1].register_full_backward_hook(lambda m, gi, go: (gi[0] + gi[0].mean(0),))
    with pytest.raises(MixesRecords, match="meet"):
        query(model, F.cross_entropy, batch())


MODEL = Around(lambda x, t: 2 * x)


@pytest.mark.parametrize("times", [1.0, 1e-5, 1e-9])
def test_small_gradients_are_compared_as_well(times):
    def loss(outputs, targets):
        return times * F.cross_entropy(outputs, targets)

    with pytest.raises(MixesRecords):
        PerSampleClip(1e-6)(Around(by_the_batch), loss, batch())
    PerSampleClip(1e-6)(Around(lambda x, t: x), loss, batch())


def test_each_record_alone_does_not_meet():
    model = Around(MEETING["a hundredth of the mean"])
    found = PerSampleClip(1.0, engine=PerRecord())(model, F.cross_entropy, batch())
    assert all(t.isfinite().all() for block in found.blocks for t in block.sums)


class Scaled(nn.Module):
    """A hook of the user's own makes the gradient a tenth."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, 3)

    def forward(self, x):
        outputs = self.layer(x)
        outputs.register_hook(lambda gradient: 0.1 * gradient)
        return outputs


class Aside(nn.Module):
    """A small layer that is used without being called, beside a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(D, 3), nn.Linear(D, 3, bias=False)

    def forward(self, x):
        return self.large(x) + 0.01 * F.linear(x, self.small.weight)


@pytest.mark.parametrize("make", [Scaled, Aside])
def test_what_a_layers_hook_would_miss_is_counted(make):
    """A clip that every record feels shows in the norms."""
    model, given = make(), batch()
    for max_norm in (1e-3, 1e6):
        found = [
            PerSampleClip(max_norm, engine=engine)(model, F.cross_entropy, given).blocks[0].sums
            for engine in (BookKeeping(), PerRecord())
        ]
        for one, alone in zip(*found, strict=True):
            torch.testing.assert_close(one, alone, rtol=1e-4, atol=1e-6)


def test_half_precision_is_taken():
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 3)).half()
    PerSampleClip(1.0)(model, F.cross_entropy, batch(dtype=torch.float16))


def test_whole_numbers_are_not_made_louder():
    """They may be rows of a table."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(7, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.table(x.long()).mean(dim=1))

    numbers = torch.randint(7, (12, 5)).float()
    some = batch_of(numbers, torch.zeros(12).long(), divisor=12, scheme=tacit.sampling.Poisson(0.5))
    PerSampleClip(1.0)(Rows(), F.cross_entropy, some)
