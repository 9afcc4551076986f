"""The release: charged first, once, with the noise that it says, for the layers in order."""

import math

import dp_accounting as dpa
import pytest
import torch
from norm_cases import ADD, REPLACE, buffers, generator, image_net, images, ledger_for, same
from torch import nn

from tacit import Budget, Ledger, Records
from tacit.accounting import Plan
from tacit.accounting.plan import epsilon_of_event
from tacit.errors import BudgetExceeded, MixesRecords, PlanChanged, UndeclaredConstant
from tacit.errors import UnsupportedModule as Unsupported
from tacit.randomness import Randomness
from tacit.sampling import Poisson
from tacit.statistics import ReleasedStatistics, refuse_private_statistics
from tacit.statistics.running_statistics import moments_bound

TINY = 1e-7  # a noise multiplier that is next to none, for what is not about noise


def exactly(records, model, **more):
    """What is released when the noise is next to none."""
    release = ReleasedStatistics(records, TINY, 100.0, **more)
    release.apply(model, ledger_for(release.event))
    return model


def test_without_noise_and_clipping_they_are_the_statistics_of_all_records():
    records, model = images(24), exactly(images(24), image_net(), max_physical_batch=7)
    x = records.inputs
    with torch.no_grad():
        for place, layer in enumerate(model.eval()):
            if place in (1, 4):  # the norms before are in evaluation mode, with what they got
                assert torch.allclose(layer.running_mean, x.mean((0, 2, 3)), atol=1e-5)
                variance = x.transpose(0, 1).flatten(1).var(1, correction=0)
                assert torch.allclose(layer.running_var, variance, rtol=1e-3, atol=1e-5)
            x = layer(x)
    refuse_private_statistics(model)


@pytest.mark.parametrize("scale", [0.3, 1.0, 5.0])
def test_the_scale_is_taken_out_again(scale):
    one, other = exactly(images(), image_net()), exactly(images(), image_net(), scale=scale)
    for name, buffer in buffers(one).items():
        assert torch.allclose(buffer, buffers(other)[name], rtol=1e-3, atol=1e-4)


def test_the_divisor_is_the_declared_size_and_never_the_count():
    """A planted bug would show: divided by the count, the mean would be 2 and not 1."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
    records = Records(torch.full((10, 3), 2.0), torch.zeros(10), public_size=20)
    exactly(records, model)
    assert torch.allclose(model[0].running_mean, torch.ones(3), atol=1e-5)
    assert not torch.allclose(model[0].running_mean, torch.full((3,), 2.0))
    with pytest.raises(UndeclaredConstant, match="public_size"):
        ReleasedStatistics(Records(torch.zeros(2, 3), torch.zeros(2)), 1.0)


class Wide(nn.Module):
    """Some norms of many channels that see nobody's data: what they get is noise."""

    def __init__(self, layers, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.norms = nn.ModuleList(nn.BatchNorm1d(channels).double() for _ in range(layers))

    def forward(self, x):
        for norm in self.norms:
            norm(x)
        return x


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("layers", [1, 4])
def test_the_noise_has_the_stated_standard_deviation(relation, layers):
    """Measured for each layer; one without √L, or for the wrong relation, is half as large."""
    channels, z, size, scale, max_norm = 20_000, 0.7, 10**9, 3.0, 0.5
    nobody = Records(
        torch.empty(0, channels, dtype=torch.float64), torch.empty(0), public_size=size
    )
    release = ReleasedStatistics(nobody, z, max_norm, scale=scale)
    model = Wide(layers, channels)
    release.apply(model, ledger_for(release.event, relation))
    factor = 1 if relation is ADD else 2
    want = z * math.sqrt(layers) * factor * max_norm * math.sqrt(channels)
    for norm in model.norms:
        mean = norm.running_mean / scale * size
        assert mean.std().item() == pytest.approx(want, rel=0.03)
        second = (norm.running_var / scale**2 - 1 + (norm.running_mean / scale) ** 2) * size
        assert second.std().item() == pytest.approx(want, rel=0.03)
        assert abs(torch.corrcoef(torch.stack((mean, second)))[0, 1]) < 0.05
    means = torch.stack([norm.running_mean for norm in model.norms])
    assert torch.unique(means).numel() == means.numel()  # no noise was used twice


@pytest.mark.parametrize("relation", [ADD, REPLACE])
@pytest.mark.parametrize("norms", [1, 2, 20])
def test_all_layers_together_cost_what_the_event_says(norms, relation):
    """The layers' own multipliers, std over sensitivity, composed: without √L it would not fit."""
    release = ReleasedStatistics(images(), 2.0, 0.7)
    composed, forgetful = (
        dpa.ComposedDpEvent(
            [
                dpa.GaussianDpEvent(
                    release.noise_std(channels, counted, relation)
                    / relation.sensitivity(moments_bound(channels, 0.7))
                )
                for channels in range(1, norms + 1)
            ]
        )
        for counted in (norms, 1)
    )
    want = epsilon_of_event(release.event, 1e-5, relation)
    assert epsilon_of_event(composed, 1e-5, relation) == pytest.approx(want, rel=1e-6)
    planted = epsilon_of_event(forgetful, 1e-5, relation)
    assert (planted > 1.2 * want) if norms > 1 else planted == pytest.approx(want)


def test_a_variance_is_never_below_its_noise():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    nn.init.zeros_(model[0].weight)
    records = Records(torch.randn(50, 3), torch.zeros(50), public_size=50)
    release = ReleasedStatistics(records, 30.0)
    release.apply(model, ledger_for(release.event))
    floor = release.noise_std(3, 1, ADD) / 50
    assert (model[1].running_var >= floor * (1 - 1e-6)).all()
    assert model.eval()(records.inputs).isfinite().all()


class Watched(Exception):
    pass


def test_it_is_charged_on_disk_before_a_record_is_read(tmp_path):
    """Killed when the first record goes in: the charge and the claim are there already."""
    path, model, records = tmp_path / "ledger.sqlite", image_net(), images()
    release = ReleasedStatistics(records, 2.0)
    plan = Plan(Poisson(1.0), 5.0, ADD, 1, prelude=(release.event,))

    def killed(module, args):
        # Zeros and random rows, which find the order and whether records meet, are nobody's data.
        if any(torch.equal(args[0][0], row) for row in release.records.inputs):
            with Ledger(path) as seen:
                (run,) = seen.statement().runs
                assert run.plan.prelude == (release.event,)
                assert run.epsilon == pytest.approx(epsilon_of_event(release.event, 1e-5, ADD))
            raise Watched

    hook = model.register_forward_pre_hook(killed)
    ledger = Ledger(path, Budget(1e6, 1e-5))
    ledger.begin(plan, name="one")
    with pytest.raises(Watched):
        release.apply(model, ledger)
    hook.remove()
    del ledger  # without an end, as by a kill
    with Ledger(path) as again:
        again.begin(plan, name="one")
        with pytest.raises(BudgetExceeded, match="has been made"):
            release.apply(model, again)


class LessTheMean(nn.Module):
    def forward(self, x):
        return x - 0.01 * x.mean(dim=0)


def test_records_that_meet_before_a_norm_are_refused():
    """Within a mini-set they may, and BatchClip takes such a model; its moments have no bound."""
    model = nn.Sequential(nn.Linear(3, 4), LessTheMean(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    records = (torch.randn(20, 3), torch.zeros(20, dtype=torch.long))
    release = ReleasedStatistics(Records(*records, public_size=20), 2.0)
    with pytest.raises(Unsupported, match="records meet before BatchNorm1d"):
        release.check(model)
    model[1] = nn.Identity()
    release.check(model)


class KeepsTheLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if not self.training:
            self.seen.copy_(x[-1].detach())
        return x


def test_a_model_that_keeps_records_in_evaluation_mode_is_refused():
    records = Records(torch.randn(9, 4), torch.zeros(9, dtype=torch.long), public_size=9)
    release = ReleasedStatistics(records, 1.0)
    model = nn.Sequential(KeepsTheLast(), nn.BatchNorm1d(4))
    with pytest.raises(MixesRecords, match=r"0\.seen.*written"):
        release.apply(model, ledger_for(release.event))


def test_without_a_charge_nothing_is_read():
    model, release = image_net(), ReleasedStatistics(images(), 2.0)
    before = buffers(model)
    with Ledger(None, Budget(10.0, 1e-5)) as none_begun:
        with pytest.raises(PlanChanged, match="did not plan"):
            release.apply(model, none_begun)
        none_begun.begin(Plan(Poisson(1.0), 5.0, ADD, 1))
        with pytest.raises(PlanChanged, match="did not plan"):
            release.apply(model, none_begun)
    with pytest.raises(PlanChanged, match="did not plan"):
        release.apply(model, ledger_for(dpa.GaussianDpEvent(2.5)))  # somebody else's charge
    assert same(buffers(model), before)


def test_one_charge_is_one_release_whoever_goes_on_with_the_run(tmp_path):
    path, model, release = (
        tmp_path / "ledger.sqlite",
        image_net(),
        ReleasedStatistics(images(), 2.0),
    )
    ledger = ledger_for(release.event, path=path)
    plan = ledger.statement().runs[0].plan
    release.check(model, ledger)
    release.apply(model, ledger)
    before = buffers(model)
    with pytest.raises(BudgetExceeded, match="has been made"):
        release.check(model, ledger)
    with pytest.raises(BudgetExceeded, match="has been made"):
        release.apply(model, ledger)
    ledger.close()
    with Ledger(path) as again:
        again.begin(plan, name="run-1")
        with pytest.raises(BudgetExceeded, match="has been made"):
            ReleasedStatistics(images(), 2.0).apply(model, again)
    assert same(buffers(model), before)


def test_a_charge_that_another_release_has_taken_is_taken():
    release = ReleasedStatistics(images(), 2.0)
    ledger = ledger_for(release.event)
    ledger.claim(release.event, "scaling statistics")
    with pytest.raises(BudgetExceeded, match="has been made"):
        release.apply(image_net(), ledger)


def test_frozen_norms_modes_and_weights_stay():
    model = image_net().train()
    model[1].running_mean.fill_(0.5)
    model[1].eval()
    frozen, weights = buffers(model[1]), [p.clone() for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    exactly(images(), model)
    assert same(buffers(model[1]), frozen)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not any(module._forward_pre_hooks for module in model.modules())
    # One norm is released, so its noise is for one and not for two.
    release = ReleasedStatistics(images(public_size=10**6), 1.0, seed=0)
    release.apply(model, ledger_for(release.event))
    floor = release.noise_std(4, 1, ADD) / 10**6
    assert model[4].running_mean.abs().max() < 10 * floor


def test_norms_go_in_the_order_in_which_they_run():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.second, self.first = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.second(self.first(x))

    x = 5 + 2 * torch.randn(400, 3, generator=generator())
    model = exactly(Records(x, torch.zeros(400), public_size=400), Backwards(), scale=5.0)
    assert torch.allclose(model.first.running_mean, x.mean(0), atol=1e-3)
    assert torch.allclose(model.second.running_mean, torch.zeros(3), atol=1e-2)
    assert torch.allclose(model.second.running_var, torch.ones(3), atol=1e-1)


class Twice(nn.Sequential):
    def forward(self, x):
        return super().forward(super().forward(x))


class Folded(nn.Sequential):
    def forward(self, x):
        return super().forward(x.reshape(-1, 2))


@pytest.mark.parametrize(
    ("model", "shape", "error", "words"),
    [
        (Twice(nn.Linear(3, 3), nn.BatchNorm1d(3)), (3,), Unsupported, "runs 2 times"),
        (Folded(nn.Linear(2, 2), nn.BatchNorm1d(2)), (4,), Unsupported, "4 rows for 2 records"),
        (
            nn.Sequential(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, track_running_stats=True)),
            (2, 5),
            Unsupported,
            "not of the batch",
        ),
        (
            nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)),
            (3,),
            MixesRecords,
            "mixes records",
        ),
    ],
    ids=["twice", "folded", "instance", "mixing"],
)
def test_what_has_no_bound_is_refused_before_it_is_charged(model, shape, error, words):
    release = ReleasedStatistics(
        Records(torch.randn(6, *shape), torch.zeros(6), public_size=6), 1.0
    )
    ledger = ledger_for(release.event)
    with pytest.raises(error, match=words):
        release.check(model.train())
    with pytest.raises(error, match=words):
        release.apply(model.train(), ledger)
    ledger.require_unclaimed(release.event, "BatchNorm's running statistics")


def test_fresh_noise_unless_seeded_and_never_the_gradients():
    def once(seed=None):
        model, release = image_net(), ReleasedStatistics(images(), 1.0, seed=seed)
        release.apply(model, ledger_for(release.event))
        return buffers(model)

    assert not same(once(), once())
    assert same(once(5), once(5))
    nobody = Records(torch.empty(0, 50, dtype=torch.float64), torch.empty(0), public_size=1)
    release, model = ReleasedStatistics(nobody, 1.0, seed=5), Wide(1, 50)
    release.apply(model, ledger_for(release.event))
    drawn = model.norms[0].running_mean / math.sqrt(50)
    gradients = Randomness(5).stream("noise", 0).normals([50], torch.device("cpu"))[0]
    assert (drawn - gradients).abs().max() > 0.5


@pytest.mark.parametrize(
    "bad",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"max_norm": -1.0},
        {"scale": math.inf},
        {"max_physical_batch": 0},
    ],
)
def test_what_must_be_declared_well(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ReleasedStatistics(images(), **({"noise_multiplier": 1.0} | bad))
