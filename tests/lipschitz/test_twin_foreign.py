"""Lipschitz twins of networks that nobody here wrote: torchvision, timm and transformers."""

from __future__ import annotations

import importlib
import time

import pytest
import torch
from torch import nn

import tacit
from tacit.errors import UnboundedLayer
from tacit.lipschitz import Orthogonal, ReshapedKernel, TrueConvolution, audit_model
from tacit.lipschitz.audit import climb, start_points
from tacit.lipschitz.sets import FrobeniusBall
from tacit.losses import CrossEntropy

CLASSES = 4
LOSS = CrossEntropy(0.1)


def library(name):
    pytest.importorskip(name.split(".")[0], exc_type=ImportError)
    return importlib.import_module(name)


def resnet18():
    return library("torchvision.models").resnet18(num_classes=CLASSES), (3, 32, 32)


def vgg11():
    """As it is taken to small images: without the 120 million weights of its classifier."""
    model = library("torchvision.models").vgg11(num_classes=CLASSES)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    _, relu, dropout, *_ = model.classifier
    model.classifier = nn.Sequential(nn.Linear(512, 64), relu, dropout, nn.Linear(64, CLASSES))
    return model, (3, 32, 32)


def narrow_vgg():
    vgg = library("torchvision.models.vgg")
    features = vgg.make_layers([4, "M", 8, "M"], batch_norm=True)
    model = vgg.VGG(features, CLASSES, init_weights=False)
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(2), nn.Linear(32, CLASSES)
    return model, (3, 8, 8)


def convnext():
    convnext = library("torchvision.models.convnext")
    blocks = [convnext.CNBlockConfig(8, 12, 1), convnext.CNBlockConfig(12, None, 1)]
    return convnext.ConvNeXt(blocks, 0.1, num_classes=CLASSES), (3, 16, 16)


def mobilenet():
    settings = [[1, 4, 1, 1], [2, 4, 2, 1]]
    models = library("torchvision.models.mobilenetv2")
    model = models.MobileNetV2(CLASSES, 0.25, settings, round_nearest=4)
    model.features[-1] = nn.Identity()
    model.classifier = nn.Linear(4, CLASSES)
    return model, (3, 16, 16)


def mixer():
    mixer = library("timm.models.mlp_mixer")
    return mixer.MlpMixer(
        CLASSES, 16, patch_size=4, num_blocks=2, embed_dim=12, drop_path_rate=0.1
    ), (3, 16, 16)


def resmlp():
    mixer = library("timm.models.mlp_mixer")
    return mixer.MlpMixer(
        CLASSES, 16, patch_size=4, num_blocks=1, embed_dim=12, mlp_ratio=4,
        block_layer=mixer.ResBlock, norm_layer=mixer.Affine,
    ), (3, 16, 16)  # fmt: skip


def timm_resnet():
    resnet = library("timm.models.resnet")
    model = resnet.ResNet(
        resnet.Bottleneck, (1,) * 4, CLASSES, channels=(1, 1, 2, 2), drop_path_rate=0.1
    )
    return model, (3, 16, 16)


def timm_convnext():
    convnext = library("timm.models.convnext")
    return convnext.ConvNeXt(
        num_classes=CLASSES, depths=(1,) * 4, dims=(4, 4, 8, 8), drop_path_rate=0.1
    ), (3, 32, 32)


SMALL = [narrow_vgg, convnext, mobilenet, mixer, resmlp, timm_resnet, timm_convnext]
LARGE = [resnet18, vgg11]


def by_name(make):
    return make.__name__


def records(shape, count=8):
    torch.manual_seed(1)
    return torch.randn(count, *shape), torch.arange(count) % CLASSES


def train_for_two_steps(twin, shape):
    inputs, targets = records(shape)
    sampler = tacit.PoissonSampler(
        tacit.Records(inputs, targets, public_size=8), 1.0, expected_batch_size=8, steps=2
    )
    mechanism = tacit.Mechanism(tacit.Clipless(gradient_clip=1.0), sampler, 1.0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    start = [p.detach().clone() for p in twin.parameters()]
    with tacit.Ledger(budget=tacit.Budget(epsilon=100.0, delta=1e-5)) as ledger:
        ledger.begin(mechanism.plan)
        for batch in sampler:
            ledger.release(mechanism.privatise(twin, LOSS, batch), into=twin)
            optimizer.step()
            tacit.project(twin)
    moved = zip(twin.parameters(), start, strict=True)
    assert all(not torch.equal(now, then) for now, then in moved)
    assert twin(inputs).shape == (8, CLASSES)


@pytest.mark.parametrize("make", SMALL, ids=by_name)
def test_a_twin_trains_and_no_ascent_passes_a_bound(make):
    """Every parameter's bound by itself, over inputs, labels and weights."""
    torch.manual_seed(0)
    model, shape = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    twin, changes = tacit.lipschitz_twin(model)
    assert len(changes) > 4
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    report = audit_model(twin, LOSS, shape, torch.arange(CLASSES), steps=4, rows=2, restarts=2)
    assert report.passed, str(report)
    assert max(finding.tightness for finding in report.findings[1:]) > 0.01, str(report)
    train_for_two_steps(twin, shape)


@pytest.mark.slow
@pytest.mark.parametrize("make", LARGE, ids=by_name)
def test_a_large_twin_trains_and_no_ascent_passes_a_bound(make):
    """All parameters at once: what climbs is the largest ratio of a gradient to its bound."""
    torch.manual_seed(0)
    model, shape = make()
    twin = tacit.lipschitz_twin(model, sphere=True, max_cost=1e9).model
    train_for_two_steps(twin, shape)
    assert 1e-4 < attacked(twin.double(), shape, steps=3) <= 1


def attacked(twin, shape, steps):
    bounds = tacit.lipschitz.propagate(twin, LOSS, shape).by_parameter
    parameters = dict(twin.named_parameters())
    assert set(bounds) == set(parameters)
    labels = torch.zeros(1, dtype=torch.long)

    def ratios(x):
        each = []
        for row, label in zip(x.split(1), labels.split(1), strict=True):
            loss = LOSS(twin(row), label)
            found = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            norms = [g.norm() / bounds[name] for g, name in zip(found, parameters, strict=True)]
            each.append(torch.stack(norms).max())
        return torch.stack(each)

    points = start_points(shape, 1.0, 1, torch.Generator().manual_seed(0))
    return climb(ratios, [points], twin, steps)


# ---- what has no twin ---------------------------------------------------------------------------


def vit():
    return library("torchvision.models").vit_b_16(num_classes=CLASSES), "self_attention"


def swin():
    return library("torchvision.models").swin_t(num_classes=CLASSES), "ShiftedWindowAttention"


def timm_vit():
    timm = library("timm")
    return timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES), r"blocks\.0\.attn"


def transformers_vit():
    transformers = library("transformers")
    settings = transformers.ViTConfig(num_hidden_layers=2, hidden_size=24, num_attention_heads=2)
    return transformers.ViTForImageClassification(settings), "ViTAttention"


def efficientnet():
    models = library("torchvision.models")
    return models.efficientnet_b0(num_classes=CLASSES), "SqueezeExcitation.*mul on two values"


def densenet():
    return library("torchvision.models").densenet121(), "denselayer1"


@pytest.mark.parametrize(
    "make", [vit, swin, timm_vit, transformers_vit, efficientnet, densenet], ids=by_name
)
def test_what_has_no_twin_is_named_at_once(make, monkeypatch):
    """The layer and the reason, before any weight is projected."""
    model, words = make()

    def never(*args, **kwargs):
        raise AssertionError("a weight was projected")

    monkeypatch.setattr(Orthogonal, "project", never)
    monkeypatch.setattr("tacit.lipschitz.twin.project", never)
    started = time.process_time()
    with pytest.raises(UnboundedLayer, match=words):
        tacit.lipschitz_twin(model)
    assert time.process_time() - started < 5


# ---- what it costs ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resnet_is_built_in_seconds():
    model, shape = resnet18()
    started = time.process_time()
    twin = tacit.lipschitz_twin(model).model
    assert time.process_time() - started < 20  # two to seven on one core; it was 108
    body = twin[1]
    assert isinstance(body.layer1.get_submodule("0").conv1.within, TrueConvolution)
    assert isinstance(body.layer4.get_submodule("0").conv2.within, ReshapedKernel)
    assert tacit.lipschitz.propagate(twin, LOSS, shape).output.norm < 3


def test_large_weights_are_kept_in_cheap_sets():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 64))
    kinds = {}
    for max_cost in (1e12, 10.0):
        twin, changes = tacit.lipschitz_twin(model, max_cost=max_cost)
        kinds[max_cost] = [type(twin[1][i].within) for i in (0, 2)]
        assert ("cheap" in " ".join(changes)) == (max_cost == 10.0)
        report = audit_model(twin, LOSS, (3, 8, 8), torch.arange(64), steps=6, restarts=1)
        assert report.passed, str(report)
    assert kinds == {1e12: [TrueConvolution, Orthogonal], 10.0: [ReshapedKernel, FrobeniusBall]}
