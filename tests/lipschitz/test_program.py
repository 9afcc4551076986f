"""A program computes what an honest model does, bit for bit, and follows the model's changes."""

from __future__ import annotations

import copy
import gc
import math
import random
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tacit
import tacit.lipschitz as lip
from tacit.errors import UnboundedLayer
from tacit.lipschitz.program import compile_program
from tacit.lipschitz.torch_modules import KNOWN, REASONS
from tacit.losses import CrossEntropy


class Block(nn.Module):
    """A forward of its own, made of layers, functions and arithmetic."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, 0.25

    def forward(self, x):
        y = F.dropout(self.inner(x), 0.3, self.training)
        z = torch.cat([torch.tanh(y), x - 2 * y], dim=1)
        return self.scale * z[:, 1:-1] + 1.5


FLAT = {
    "linear": lambda n: lip.SpectralLinear(n, n, bias=True),
    "frobenius": lambda n: lip.FrobeniusLinear(n, n),
    "reshape": lambda n: nn.Sequential(lip.Reshape(2, n // 2), lip.Permute(2, 1), nn.Flatten()),
    "unflatten": lambda n: nn.Sequential(nn.Unflatten(1, (2, n // 2)), nn.Flatten()),
    "softmax": lambda n: nn.Softmax(1),
    "log softmax": lambda n: nn.LogSoftmax(-1),
    "softmin": lambda n: nn.Softmin(1),
    "dropout": lambda n: nn.Dropout(0.5),
    "block": lambda n: Block(lip.SpectralLinear(n, n)),
}
ANY = {
    "absolute": lambda n: lip.Absolute(),
    "average": lambda n: lip.AverageResidual(lip.MaxMin()),
    "bias": lambda n: lip.AddBias(n),
    "bounded": lambda n: lip.BoundedInput(2.0),
    "centering": lambda n: lip.LayerCentering(),
    "clip": lambda n: lip.ClipGradient(0.5),
    "concatenate": lambda n: lip.Concatenate([lip.MaxMin(), lip.Scale(0.5)]),
    "convex": lambda n: lip.ConvexResidual(nn.Sequential(lip.MaxMin(), lip.Absolute())),
    "full sort": lambda n: lip.FullSort(),
    "group sort": lambda n: lip.GroupSort(2),
    "householder": lambda n: lip.Householder(n),
    "max-min": lambda n: lip.MaxMin(),
    "residual": lambda n: lip.Residual(lip.Scale(0.5)),
    "scale": lambda n: lip.Scale(-0.7),
    "sum": lambda n: lip.Sum([lip.MaxMin(), nn.Sequential(lip.Absolute(), lip.Scale(0.5))]),
    "identity": lambda n: nn.Identity(),
    "relu": lambda n: nn.Sequential(lip.Scale(0.9), nn.ReLU(inplace=True)),
    "gelu": lambda n: nn.GELU(),
    "softplus": lambda n: nn.Softplus(),
    "hardtanh": lambda n: nn.Hardtanh(-0.5, 2.0),
}
IMAGE = {
    "conv": lambda n: lip.SpectralConv2d(n, n, 3, padding=1, bias=True),
    "circular": lambda n: lip.SpectralConv2d(n, 4, 3, padding=1, padding_mode="circular"),
    "orthogonal": lambda n: lip.OrthogonalConv2d(n, n, 3),
    "shift": lambda n: lip.Shift((3, 3), "zeros"),
    "depth": lambda n: nn.Sequential(lip.SpaceToDepth(2), nn.PixelShuffle(2)),
    "unshuffle": lambda n: nn.Sequential(nn.PixelUnshuffle(2), nn.Upsample(scale_factor=2)),
    "pool": lambda n: nn.Sequential(
        lip.ScaledL2NormPool2d(2), nn.UpsamplingNearest2d(scale_factor=2)
    ),
    "max pool": lambda n: nn.MaxPool2d(3, 1, 1),
    "average pool": lambda n: nn.AvgPool2d(3, 1, 1),
    "pad": lambda n: nn.Sequential(nn.ZeroPad2d(1), nn.AvgPool2d(3, 1)),
    "reflect": lambda n: nn.Sequential(nn.ReflectionPad2d(1), nn.MaxPool2d(3, 1)),
    "adaptive": lambda n: nn.AdaptiveAvgPool2d((4, 4)),
    "softmax2d": lambda n: nn.Softmax2d(),
    "dropout2d": lambda n: nn.Dropout2d(0.5),
    "shuffle": lambda n: nn.ChannelShuffle(2),
    "tokens": lambda n: nn.Sequential(lip.Tokens(), lip.Permute(2, 1), nn.Unflatten(2, (4, 4))),
    "deep": lambda n: nn.Sequential(
        nn.Unflatten(1, (n // 2, 2)), lip.SpectralConv3d(n // 2, n // 2, 3, padding=1),
        nn.Flatten(1, 2),
    ),
    "lines": lambda n: nn.Sequential(
        nn.Flatten(2), lip.SpectralConv1d(n, n, 3, padding=1), lip.OrthogonalConv1d(n, n, 3),
        nn.Unflatten(2, (4, 4)),
    ),
    "image block": lambda n: Block(lip.SpectralConv2d(n, n, 1)),
}  # fmt: skip


def network(seed):
    """Every kind of layer in a random order; the channels are kept even and few."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    made, shape = [lip.BoundedInput(3.0)], (4, 4, 4)
    for kinds in ({**IMAGE, **ANY}, {**FLAT, **ANY}):
        for name in draw.sample(sorted(kinds), 14):
            channels = shape[0]
            if channels > 16 and "block" not in name:
                continue
            layer = kinds[name](channels)
            made.append(layer)
            with torch.no_grad():
                shape = tuple(nn.Sequential(*made).eval()(torch.zeros(2, 4, 4, 4)).shape[1:])
        if len(shape) > 1:
            made.append(nn.Flatten())
            shape = (torch.Size(shape).numel(),)
            made.append(lip.SpectralLinear(shape[0], 6))
            shape = (6,)
    made.append(lip.SpectralLinear(shape[0], 3))
    return nn.Sequential(*made).train()


def outcome(module, parameters, x):
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    y = module(1.0 * x)
    return y, *torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)


@pytest.mark.parametrize("seed", range(12))
def test_a_program_is_the_model_bit_for_bit(seed):
    model = network(seed)
    parameters = list(model.parameters())
    for mode in (True, False):
        program = compile_program(model.train(mode))
        for count in (1, 3):
            x = torch.randn(count, 4, 4, 4)
            pairs = zip(outcome(model, parameters, x), outcome(program, parameters, x), strict=True)
            for one, other in pairs:
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)


def test_every_layer_is_in_the_random_networks():
    drawn = {type(m) for make in (*FLAT.values(), *ANY.values(), *IMAGE.values())
             for m in make(4).modules()}  # fmt: skip
    assert {kind.__name__ for kind in drawn} >= set(lip.layers.__all__)


def test_every_known_module_is_copied_whole():
    """With the settings that its forward reads, and no others."""
    for kind in set(KNOWN) - set(REASONS):
        arguments = {
            nn.Unflatten: (1, (2, 2)), nn.PixelShuffle: (2,), nn.PixelUnshuffle: (2,),
            nn.ChannelShuffle: (2,), nn.Upsample: (None, 2), nn.UpsamplingNearest2d: (None, 2),
            nn.UpsamplingBilinear2d: (None, 2), nn.Softmax: (1,), nn.LogSoftmax: (1,),
            nn.Softmin: (1,),
        }.get(kind, ())  # fmt: skip
        for part, usual in (("ConstantPad", (1, 0.5)), ("Pool", (2,)), ("Pad", (1,))):
            if part in kind.__name__:
                arguments = usual
                break
        module = kind(*arguments).eval()
        dims = 3 if "3d" in kind.__name__ else 1 if "1d" in kind.__name__ else 2
        shape = (4, 4) if kind is nn.Unflatten else (4, *(4,) * dims)
        x = torch.randn(2, *shape)
        step = compile_program(module).body
        assert type(step.layer) is kind
        assert step.layer is not module
        assert torch.equal(step.forward(x.clone()), module(x.clone()))


def batch(count=4):
    torch.manual_seed(3)
    inputs, targets = torch.randn(count, 6), torch.arange(count) % 3
    return tacit.sampling.batch_of(inputs, targets, divisor=1.0, scheme=tacit.sampling.Poisson(0.1))


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        lip.BoundedInput(1.0), lip.SpectralLinear(6, 6), lip.MaxMin(), lip.SpectralLinear(6, 3)
    )


@pytest.mark.parametrize("change", ["weights", "mode", "layers"])
def test_a_query_follows_the_model_that_it_has_met(change):
    """What was compiled for the model as it was is never run for the model as it is."""
    model, query, loss = small(), tacit.Clipless(), CrossEntropy()
    query(model, loss, batch())
    if change == "weights":
        with torch.no_grad():
            model[1].weight.mul_(0.5)
    elif change == "mode":
        model.insert(3, nn.Dropout(1.0)).eval()
        query(model, loss, batch())
        model.train()
    else:
        model.append(lip.Scale(2.0))
    found, fresh = query(model, loss, batch()), tacit.Clipless()(model, loss, batch())
    for one, other in zip(found.blocks, fresh.blocks, strict=True):
        assert one.bound == other.bound
        assert all(map(torch.equal, one.sums, other.sums))


def test_a_loss_that_looks_inside_is_refused_and_never_fed_from_the_model():
    """The hooks that it reads from are on the model, which does not run."""
    model, loss = small(), tacit.losses.PreActivationPenalty()
    query = tacit.Clipless(gradient_clip=0.1)
    with tacit.losses.watched(model, loss), pytest.raises(ValueError, match="Clipless"):
        query(model, loss, batch())


NORMS_TAKEN = []


@dataclass(frozen=True)
class Counted(lip.SpectralBall):
    """A set that notes when the norms of its weights are taken."""

    def norm_upper(self, stack):
        NORMS_TAKEN.append(len(stack))
        return super().norm_upper(stack)


def test_projecting_and_enforcing_share_one_certificate():
    """Else each step would certify the weights anew, which costs a norm of each."""
    shared, second, last = (lip.SpectralLinear(6, 6, within=Counted) for _ in range(3))
    own = type("Own", (nn.Module,), {"forward": lambda self, x: self.b(x) - self.a(x)})()
    own.a, own.b = shared, second
    model = nn.Sequential(lip.BoundedInput(), shared, own, lip.MaxMin(), last)
    query = tacit.Clipless()
    tacit.project(model)
    assert sum(NORMS_TAKEN) >= 3
    NORMS_TAKEN.clear()
    query(model, CrossEntropy(), batch())
    query(model, CrossEntropy(), batch())
    assert not NORMS_TAKEN
    with torch.no_grad():
        shared.weight.mul_(2)
    query(model, CrossEntropy(), batch())
    assert sum(NORMS_TAKEN) == 3


def test_a_program_keeps_no_model_alive():
    model, query = small(), tacit.Clipless()
    query(model, CrossEntropy(), batch())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=lambda f: f.__name__)
def test_a_copied_query_asks_the_model_and_not_a_copy_of_it(copied):
    model, query, loss = small(), tacit.Clipless(), CrossEntropy()
    query(model, loss, batch())
    other = copied(query)
    with torch.no_grad():
        model[1].weight.mul_(-1.0)
    pairs = zip(other(model, loss, batch()).blocks, query(model, loss, batch()).blocks, strict=True)
    for one, same in pairs:
        assert torch.equal(one.sums[0], same.sums[0])
        assert one.parameters[0] is same.parameters[0]


class Wide(lip.SpectralLinear):
    """New attributes and methods are the user's own business."""

    def __init__(self, features):
        super().__init__(features, features)
        self.note, self.when = object(), ["today"]

    def describe(self):
        return f"{self.when} {self.extra_repr()}"


def test_a_subclass_that_only_adds_is_the_layer_it_is_derived_from():
    layer = Wide(6)
    program = compile_program(nn.Sequential(lip.BoundedInput(), layer))
    step = program.body.steps[1]
    assert type(step.layer) is lip.SpectralLinear
    assert step.kind is Wide
    assert step.layer.weight is layer.weight
    assert not hasattr(step.layer, "note")


class Twice(nn.Module):
    """A composite of a user's own, with a child that it does not use."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"a": lip.SpectralLinear(6, 6), "b": lip.MaxMin()})
        self.unused = nn.BatchNorm1d(6).requires_grad_(False)

    def forward(self, x):
        return self.parts["b"](self.parts["a"](x))

    def walk_bounds(self, x, walk):
        x, first = walk("parts.a", x)
        x, second = walk("parts.b", x)
        return x, lambda cotangent: first(second(cotangent))


def test_a_composite_runs_on_the_steps_of_its_children():
    block = Twice()
    model = nn.Sequential(lip.BoundedInput(1.0), block, lip.SpectralLinear(6, 3))
    x = torch.randn(3, 6)
    assert torch.equal(compile_program(model)(x), model(x))
    block.parts["b"] = block.unused
    with pytest.raises(UnboundedLayer, match="LayerCentering"):
        tacit.lipschitz.propagate(model, 1.0, (6,))


def test_a_wrapped_constructor_changes_no_layer(monkeypatch):
    """`torch.compile` wraps nn.Module.__init__ for the whole process."""
    original = nn.Module.__init__

    def wrapped(self, *args, **kwargs):
        original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__init__", wrapped)
    model = nn.Sequential(tacit.lipschitz.BoundedInput(1.0), tacit.lipschitz.SpectralLinear(3, 2))
    assert math.isfinite(tacit.lipschitz.propagate(model, 1.0, (3,)).total())
