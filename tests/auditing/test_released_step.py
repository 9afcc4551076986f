"""The released step of every route: what moves, what it is divided by, and its noise."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from setups import LOSS, POISSON, PlainClip, lipschitz_mlp, mlp, records
from torch import nn

import tacit
from tacit import (
    AdaptiveNorm,
    BatchClip,
    Clipless,
    FixedSizeSampler,
    Mechanism,
    MiniSetSampler,
    PerLayerNoise,
    PerSampleClip,
    Relation,
    auditing,
)
from tacit.auditing.noise_check import FALSE_ALARM

SETS = partial(MiniSetSampler, set_size=3, chosen=4)
FIXED = partial(FixedSizeSampler, batch_size=12)
REPLACE, ADD = Relation.REPLACE_ONE, Relation.ADD_OR_REMOVE_ONE
ROUTES = {
    "per sample": (PerSampleClip(0.1), mlp, POISSON, ADD),
    "fixed size": (PerSampleClip(0.1), mlp, FIXED, REPLACE),
    "adaptive": (PerSampleClip(AdaptiveNorm(0.1), blocks=tacit.by_layer), mlp, POISSON, ADD),
    "mini-sets": (BatchClip(0.1, 3), mlp, SETS, ADD),
    "clipless": (Clipless(), lipschitz_mlp, POISSON, ADD),
    "a user's own": (PlainClip(), mlp, POISSON, REPLACE),
}


@pytest.mark.parametrize("route", ROUTES)
def test_released_neighbours_are_close_and_noise_is_as_planned(route):
    query, model, sampler, relation = ROUTES[route]
    audited = (query, model(), LOSS, records(), sampler)
    noisy = {"noise_multiplier": 0.5}
    step = auditing.replay_release(*audited, relation=relation, allocation=PerLayerNoise(), **noisy)
    assert 0 < step.require().largest <= 1 + 1e-6
    noise = auditing.check_noise(*audited, relation=relation, numbers=2000, **noisy)
    assert noise.require().largest < 1
    assert "0.5 planned" in noise.compared


def test_nothing_is_left_in_the_model():
    model = mlp()
    model[0].weight.grad = kept = torch.ones_like(model[0].weight)
    before = [p.detach().clone() for p in model.parameters()]
    for audit in (auditing.replay_release, partial(auditing.check_noise, numbers=100)):
        audit(PerSampleClip(0.1), model, LOSS, records(), POISSON)
    assert all(map(torch.equal, before, model.parameters()))
    assert model[0].weight.grad is kept
    assert model[0].bias.grad is None


def test_a_sampler_that_draws_nobody_is_refused():
    sampler = partial(tacit.PoissonSampler, sampling_rate=1e-9)
    with pytest.raises(ValueError, match="drew nobody"):
        auditing.replay_release(PerSampleClip(0.1), mlp(), LOSS, records(), sampler)


class Wrapped:
    """A mechanism's randomness whose noise is changed by `change`, a function of the vector."""

    seed = None

    def __init__(self, randomness, change) -> None:
        self.randomness, self.change = randomness, change

    def stream(self, purpose, *step):
        stream = self.randomness.stream(purpose, *step)
        if purpose == "noise":
            draw, change = stream.flat_normals, self.change
            stream = type("Changed", (), {})()
            stream.flat_normals = lambda *args: change(draw(*args))
        return stream


def changing(change):
    class Changed(Mechanism):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self._randomness = Wrapped(self._randomness, change)

    return Changed


def same_for_both_halves(noise):
    half = len(noise) // 2
    return torch.cat([noise[:half], noise[:half], noise[2 * half :]])


def shifted(noise):
    """The second half is the first one, some places on: no two entries at equal distance."""
    half = len(noise) // 2
    return torch.cat([noise[:half], noise[: len(noise) - half].roll(5)])


def uniform(noise):
    return (torch.rand_like(noise) - 0.5) * 12**0.5


first_draw: dict[int, torch.Tensor] = {}


def partly_kept(noise):
    """A fifth of the first step's noise is in every later one."""
    kept = first_draw.setdefault(len(noise), noise.clone())  # the mechanism works in place
    return 0.98 * noise + 0.2 * kept


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda noise: noise.abs(), "is not Gaussian"),
        (lambda noise: 1.1 * noise, "times the deviation that it should have"),
        (same_for_both_halves, "two parameters"),
        (shifted, "occur a second time"),
        (uniform, "is not Gaussian"),
        (partly_kept, "the noise adds up over steps"),
    ],
)
def test_wrong_noise_is_seen(change, words):
    found = auditing.check_noise(
        PerSampleClip(0.1), mlp(80), LOSS, records(), POISSON, mechanism=changing(change)
    )
    assert words in "; ".join(found.faults)


class DividesByTheBatch(Mechanism):
    """The mechanism, and not the query, divides by the records that are there."""

    def privatise(self, model, loss, batch):
        pending = super().privatise(model, loss, batch)
        object.__setattr__(pending._bounded, "divisor", float(max(1, len(batch))))
        return pending


def test_a_mechanism_that_divides_by_the_batch_is_seen():
    audited = (PerSampleClip(0.1), mlp(), LOSS, records(), POISSON)
    found = auditing.replay_release(*audited, mechanism=DividesByTheBatch)
    assert "divisor" in str(found.faults) or "divided" in str(found.faults)


def test_parameters_of_sixteen_bits():
    audited = (PerSampleClip(0.1), mlp().bfloat16(), LOSS, records().to("cpu", torch.bfloat16))
    auditing.replay_release(*audited, POISSON).require()
    noise = auditing.check_noise(*audited, POISSON, numbers=4000).require()
    assert "repeats were not looked for" in noise.notes[0]


def test_the_false_alarm_that_is_stated():
    assert FALSE_ALARM <= 1e-9


@pytest.mark.parametrize("relation", list(Relation))
def test_a_model_with_dropout_is_no_fault(relation):
    torch.manual_seed(0)
    data = tacit.Records(torch.randn(64, 6), torch.arange(64) % 2, num_classes=2, public_size=64)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    sampler = partial(tacit.PoissonSampler, sampling_rate=0.2)
    loss = tacit.losses.CrossEntropy()
    query = PerSampleClip(1.0)
    report = auditing.replay_release(query, model, loss, data, sampler, relation=relation)
    assert report.holds, report.faults
    assert report.largest > 0.4  # a record of the clipped norm was taken out
