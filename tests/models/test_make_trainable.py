"""make_trainable: nothing is refused afterwards, and everything else is as it was."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_checks import assert_exact, batch_for, sums_of
from torch import nn

import tacit
from tacit import make_trainable
from tacit.errors import MixesRecords, UnsupportedModule
from tacit.models import WeightStandardised, WeightStandardisedConv2d, group_norm, resnet, vgg

pytestmark = pytest.mark.filterwarnings("ignore:WeightStandardisedConv2d has no rule")
CHANNELS, SIDE = 6, 5


class Residual(nn.Module):
    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x):
        return x + self.body(x)


def conv():
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)


# name: (pieces, number of changes)
PIECES = {
    "batch norm": (lambda: [conv(), nn.BatchNorm2d(CHANNELS)], 1),
    "not affine": (lambda: [nn.BatchNorm2d(CHANNELS, affine=False)], 1),
    "no statistics": (lambda: [nn.BatchNorm2d(CHANNELS, track_running_stats=False)], 1),
    "nothing at all": (
        lambda: [nn.BatchNorm2d(CHANNELS, affine=False, track_running_stats=False)],
        1,
    ),
    "frozen": (lambda: [nn.BatchNorm2d(CHANNELS).requires_grad_(False), conv()], 1),
    "evaluated": (lambda: [conv(), nn.BatchNorm2d(CHANNELS).eval()], 1),
    "residual": (lambda: [Residual(conv(), nn.BatchNorm2d(CHANNELS), nn.ReLU(inplace=True))], 1),
    "sync": (lambda: [nn.SyncBatchNorm(CHANNELS)], 1),
    "instance": (lambda: [nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True)], 1),
    "plain": (lambda: [conv(), nn.Tanh()], 0),
    "group norm": (lambda: [nn.GroupNorm(2, CHANNELS), nn.InstanceNorm2d(CHANNELS)], 0),
    "flat": (
        lambda: [
            nn.Flatten(),
            nn.Linear(CHANNELS * SIDE**2, CHANNELS * SIDE**2),
            nn.BatchNorm1d(CHANNELS * SIDE**2),
            nn.Unflatten(1, (CHANNELS, SIDE, SIDE)),
        ],
        1,
    ),
}


def images(records=3):
    return torch.randn(records, CHANNELS, SIDE, SIDE, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4),
    standardised=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_random_networks_can_be_trained_afterwards(names, standardised, seed):
    torch.manual_seed(seed)
    pieces = [PIECES[name] for name in names]
    body = [module for make, _ in pieces for module in make()]
    head = [conv(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 2)]
    model = nn.Sequential(*body, *head).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    kinds = [type(m) for m in model.modules()]

    made, changes = make_trainable(model, WeightStandardised() if standardised else group_norm(4))

    expected = sum(count for _, count in pieces)
    assert sum("Conv2d" not in change for change in changes) == expected
    assert [type(m) for m in model.modules()] == kinds
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        if name in made.state_dict():
            assert torch.equal(value, made.state_dict()[name])
            assert value.data_ptr() != made.state_dict()[name].data_ptr()
    assert [m.training for m in made.modules()] == modes
    frozen = [p.requires_grad for p in model.parameters()]
    assert [p.requires_grad for p in made.parameters()] == frozen
    assert_exact(made.train(), images())


@pytest.mark.parametrize("standardised", [False, True])
def test_a_record_does_not_change_the_others(standardised):
    torch.manual_seed(0)
    model = resnet(channels=CHANNELS, width=8).double()
    x = images(5)
    keep = torch.tensor([0, 1, 3, 4])
    assert (model(x)[keep] - model(x[keep])).abs().max() > 1e-3
    made, _ = make_trainable(model, WeightStandardised() if standardised else group_norm(4))
    torch.testing.assert_close(made(x)[keep], made(x[keep]), rtol=0, atol=1e-12)


def test_changes_name_the_layer_what_it_was_what_it_is_and_why():
    model = nn.Module()
    model.features = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64))
    model.scale = nn.InstanceNorm2d(64, track_running_stats=True)
    model.table = nn.Embedding(5, 2, max_norm=1.5)
    model.bag = nn.EmbeddingBag(5, 2, max_norm=2)
    _, changes = make_trainable(model)
    assert changes == (
        "layer 'features.1': BatchNorm2d(64) → GroupNorm(16, 64): batch statistics mix records",
        "layer 'scale': InstanceNorm2d(64) with running statistics → without: they are not noised",
        "layer 'table': Embedding with max_norm=1.5 → without: it rewrites the rows that records "
        "read",
        "layer 'bag': EmbeddingBag with max_norm=2 → without: it rewrites the rows that records "
        "read",
    )
    assert model.table.max_norm == 1.5
    assert model.scale.track_running_stats


def test_a_model_that_needs_nothing_is_an_equal_copy():
    model = vgg((1, 12, 12), 10, width=4)
    made, changes = make_trainable(model)
    assert changes == ()
    assert made is not model
    assert str(made) == str(model)
    torch.testing.assert_close(made.state_dict(), model.state_dict())


def test_the_model_itself_may_be_what_is_replaced():
    made, changes = make_trainable(nn.BatchNorm1d(4, eps=0.1).double())
    assert isinstance(made, nn.GroupNorm)
    assert made.eps == 0.1
    assert made.weight.dtype == torch.float64
    assert changes[0].startswith("the model itself: BatchNorm1d(4)")
    x = torch.randn(3, 4, dtype=torch.float64)
    assert made(x).shape == x.shape
    assert made(x).abs().max() > 0.1


class Sharing(nn.Module):
    """One norm under two names and in a plain list, and a norm that borrows its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(CHANNELS)
        self.again = self.first
        self.tied = nn.BatchNorm2d(CHANNELS)
        self.tied.weight = self.first.weight
        self.unlisted = [self.first]
        self.head = nn.Linear(CHANNELS, 2)

    def forward(self, x):
        x = self.unlisted[0](self.tied(self.first(x)).tanh())
        return self.head(self.again(x).tanh().mean(dim=(2, 3)))


def test_shared_modules_and_tied_weights_stay_so():
    model = Sharing().double()
    nn.init.uniform_(model.first.weight)
    made, changes = make_trainable(model, group_norm(3))
    assert made.first is made.again
    assert made.first is made.unlisted[0]
    assert isinstance(made.first, nn.GroupNorm)
    assert made.tied.weight is made.first.weight
    assert made.tied is not made.first
    assert len(changes) == 2
    assert changes[0].startswith("layer 'first' = 'again': ")
    assert_exact(made, images())


def test_a_table_tied_to_a_head_stays_tied():
    model = nn.Sequential(nn.Embedding(7, 4, max_norm=1.0), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    made, _ = make_trainable(model)
    assert made[1].weight is made[0].weight
    assert made[0].max_norm is None
    torch.testing.assert_close(made[0].weight, model[0].weight)


def test_convolutions_that_feed_a_norm_are_standardised_and_no_others():
    feeding = nn.Conv2d(4, CHANNELS, 3, 2, 1, groups=2, bias=False, padding_mode="reflect")
    model = nn.Sequential(
        feeding, nn.BatchNorm2d(CHANNELS), conv(), nn.ReLU(), nn.BatchNorm2d(CHANNELS), conv()
    )
    made, changes = make_trainable(model, WeightStandardised(group_norm(2)))
    kinds = [type(m) for m in made]
    assert kinds == [
        WeightStandardisedConv2d, nn.GroupNorm, nn.Conv2d, nn.ReLU, nn.GroupNorm, nn.Conv2d,
    ]  # fmt: skip
    assert len(changes) == 3
    assert "layer '0': Conv2d(4, 6) → WeightStandardisedConv2d(4, 6)" in changes[0]
    assert made[1].num_groups == 2
    torch.testing.assert_close(made[0].weight, feeding.weight)
    x = torch.randn(2, 4, 9, 9)
    by_hand = copy.deepcopy(feeding)
    by_hand.weight.data = made[0].standardised().detach()
    torch.testing.assert_close(made[0](x), by_hand(x))


def test_standardised_weights_have_no_mean_and_unit_length():
    layer = WeightStandardisedConv2d(4, 7, 3).double()
    with torch.no_grad():
        layer.weight.mul_(50).add_(3)
    found = layer.standardised()
    w = layer.weight.flatten(1)
    centred = w - w.mean(dim=1, keepdim=True)
    expected = centred / (centred.square().sum(dim=1, keepdim=True) + layer.eps).sqrt()
    torch.testing.assert_close(found.flatten(1), expected)
    torch.testing.assert_close(
        found.flatten(1).norm(dim=1), torch.ones(7).double(), atol=1e-6, rtol=0
    )
    x = torch.randn(2, 4, 6, 6).double()
    torch.testing.assert_close(layer(x), F.conv2d(x, found, layer.bias))


@pytest.mark.parametrize("options", [{}, {"stride": 2, "bias": False}, {"groups": 2}])
def test_a_standardised_convolutions_gradients_are_exact(options):
    torch.manual_seed(0)
    model = nn.Sequential(
        WeightStandardisedConv2d(4, 6, 3, **options), nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)
    )
    model(torch.zeros(1, 4, 7, 7))
    assert_exact(model.double(), torch.randn(3, 4, 7, 7, dtype=torch.float64))


class WithActivation(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


class WithGain(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.gain = nn.Parameter(torch.ones(()))


class OtherName(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    ("module", "error", "says"),
    [
        (WithActivation(4), MixesRecords, r"layer '0' \(WithActivation\).*by hand"),
        (WithGain(4), MixesRecords, r"layer '0' \(WithGain\).*by hand"),
        (nn.BatchNorm1d(1), MixesRecords, "one channel"),
        (nn.LazyBatchNorm2d(), UnsupportedModule, "batch of zeros"),
        (nn.LazyBatchNorm2d(affine=False, track_running_stats=False), UnsupportedModule, "zeros"),
    ],
)
def test_what_cannot_be_replaced_is_named(module, error, says):
    with pytest.raises(error, match=says):
        make_trainable(nn.Sequential(module))


def test_a_norm_that_mixes_is_refused():
    with pytest.raises(MixesRecords):
        make_trainable(nn.Sequential(nn.BatchNorm2d(4)), nn.BatchNorm2d)


def test_a_lazy_norm_is_replaced_once_it_knows_its_channels():
    model = nn.Sequential(nn.LazyBatchNorm2d(), OtherName(4))
    model(torch.zeros(2, 4, 3, 3))
    made, changes = make_trainable(model)
    assert [type(m) for m in made] == [nn.GroupNorm, nn.GroupNorm]
    assert "OtherName(4) → GroupNorm(2, 4)" in changes[1]


def test_any_norm_may_be_chosen():
    norm = nn.BatchNorm2d(CHANNELS).half()
    nn.init.uniform_(norm.bias)
    made, _ = make_trainable(
        nn.Sequential(norm), lambda channels: nn.InstanceNorm2d(channels, affine=True)
    )
    assert isinstance(made[0], nn.InstanceNorm2d)
    assert made[0].bias.dtype == torch.float16
    torch.testing.assert_close(made[0].bias, norm.bias)


def test_it_trains_where_the_model_was_refused():
    model = resnet(num_classes=2, channels=CHANNELS, width=4).double()
    with pytest.raises(MixesRecords):
        sums_of(model, batch_for(images()), nn.CrossEntropyLoss())
    assert isinstance(tacit.make_trainable(model), tacit.models.Trainable)
    assert sums_of(make_trainable(model).model, batch_for(images()), nn.CrossEntropyLoss())


class NormThenAct(nn.BatchNorm2d):
    """A BatchNorm with an activation inside, as in timm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class ActThenNorm(NormThenAct):
    def forward(self, x):
        return nn.BatchNorm2d.forward(self, self.act(x))


def test_an_activation_inside_a_norm_is_kept():
    layers = nn.Conv2d(3, 32, 3), NormThenAct(32), nn.Flatten(), nn.Linear(32 * 36, 3)
    model, changes = make_trainable(nn.Sequential(*layers))
    assert [type(m) for m in model[1]] == [nn.GroupNorm, nn.Identity, nn.SiLU]
    assert "GroupNorm(16, 32) and Identity() and SiLU()" in changes[0]
    x = torch.randn(4, 32, 6, 6)
    assert torch.equal(model[1](x), F.silu(model[1].norm(x)))
    inputs = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    assert_exact(model.double(), inputs, torch.arange(4) % 3)


def test_what_else_a_norm_does_is_not_guessed():
    with pytest.raises(MixesRecords, match="does more"):
        make_trainable(nn.Sequential(ActThenNorm(8)))
