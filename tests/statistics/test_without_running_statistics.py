"""Inside the context nothing is remembered, outside it nothing has changed."""

import pytest
import torch
from norm_cases import buffers, image_net, same
from torch import nn
from torch.func import functional_call, grad, vmap

from tacit.errors import UnsupportedModule
from tacit.statistics import without_running_statistics

LAYERS = [
    (nn.BatchNorm1d(3), (5, 3)),
    (nn.BatchNorm1d(3, momentum=None), (5, 3, 7)),
    (nn.BatchNorm2d(3, affine=False), (5, 3, 4, 4)),
    (nn.BatchNorm3d(3), (5, 3, 2, 2, 2)),
    (nn.SyncBatchNorm(3), (5, 3, 4)),
    (nn.InstanceNorm1d(3, track_running_stats=True), (5, 3, 7)),
    (nn.InstanceNorm2d(3, track_running_stats=True, affine=True), (5, 3, 4, 4)),
    (nn.InstanceNorm1d(3, track_running_stats=True), (3, 7)),
    (nn.BatchNorm2d(3, track_running_stats=False), (5, 3, 4, 4)),
]
IDS = [f"{type(layer).__name__}-{shape}" for layer, shape in LAYERS]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=IDS)
@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf"), 1e30])
def test_statistics_stay_bit_by_bit_and_outputs_are_those_of_training(layer, shape, fill):
    x = 3 + 2 * torch.randn(shape) + fill
    layer.train()
    before, attributes = buffers(layer), dict(vars(layer))
    with without_running_statistics(layer):
        inside = layer(x)
    assert same(buffers(layer), before)
    assert vars(layer) == attributes
    outside = layer(x)  # as in ordinary training, which does remember
    assert torch.equal(inside, outside) or (fill and inside.isnan().any())
    if before:
        assert not same(buffers(layer), before)
        layer.reset_running_stats()


def test_tracking_left_on_is_caught():
    """The planted bug: what the test above looks at is really moved by a plain forward pass."""
    model = image_net()
    before = buffers(model)
    model(torch.randn(8, 2, 4, 4))
    assert not same(buffers(model), before)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=IDS)
def test_evaluation_mode_is_as_ever(layer, shape):
    x = torch.randn(shape)
    if layer.track_running_stats:
        layer.running_mean.fill_(0.3)
        layer.running_var.fill_(2.0)
    layer.eval()
    before = buffers(layer)
    want = layer(x)
    with without_running_statistics(layer):
        assert torch.equal(layer(x), want)
    assert same(buffers(layer), before)
    layer.train()
    if layer.track_running_stats:
        layer.reset_running_stats()


def test_frozen_modules_that_are_thawed_inside_do_not_remember():
    model = image_net().eval()
    before = buffers(model)
    with without_running_statistics(model):
        model.train()
        model(torch.randn(8, 2, 4, 4))
    assert same(buffers(model), before)


def test_an_exception_and_a_nested_context_put_everything_back():
    model = nn.Sequential(image_net()[:3], nn.InstanceNorm2d(3, track_running_stats=True))
    before, x = buffers(model), torch.randn(8, 2, 4, 4)

    def stopped():
        with without_running_statistics(model):
            with without_running_statistics(model):
                model(x)
            model(x)  # the outer context still holds
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped()
    assert same(buffers(model), before)
    model(x)
    assert not same(buffers(model), before)


def test_functional_call_with_the_models_own_buffers():
    model = nn.Sequential(image_net()[:3], nn.InstanceNorm2d(3, track_running_stats=True))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before, x = buffers(model), torch.randn(8, 2, 4, 4)
    with without_running_statistics(model):
        want = model(x)
        assert torch.equal(functional_call(model, state, (x,)), want)
    assert same(buffers(model), before)


def test_vmap_over_mini_sets_gives_each_its_own_statistics():
    model = image_net()
    before, sets = buffers(model), torch.randn(3, 5, 2, 4, 4)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x):
        return functional_call(model, weights, (x,)).square().sum()

    with without_running_statistics(model):
        found = vmap(grad(loss), in_dims=(None, 0))(weights, sets)
        one_by_one = [grad(loss)(weights, x) for x in sets]
    for name in weights:
        want = torch.stack([each[name] for each in one_by_one])
        assert torch.allclose(found[name], want, atol=1e-5)
    assert same(buffers(model), before)


def test_lazy_norms_are_refused_until_they_have_channels():
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with (
        pytest.raises(UnsupportedModule, match="does not know its channels"),
        without_running_statistics(model),
    ):
        pass
    model.eval()(torch.zeros(2, 3))
    before = buffers(model.train())
    with without_running_statistics(model):
        model(torch.randn(4, 3))
    assert same(buffers(model), before)
    assert before["0.num_batches_tracked"] == 0


class Remembering(nn.BatchNorm1d):
    def forward(self, x):
        self.running_mean.add_(x.detach().mean(0))
        return super().forward(x)


class Instance(nn.InstanceNorm1d):
    def _apply_instance_norm(self, x):
        self.running_mean.add_(1)
        return x


@pytest.mark.parametrize("norm", [Remembering(3), Instance(3, track_running_stats=True)])
def test_a_forward_pass_of_its_own_is_refused(norm):
    model = nn.Sequential(nn.Linear(3, 3), norm)
    with (
        pytest.raises(UnsupportedModule, match=r"'1' .*forward pass of its own"),
        without_running_statistics(model),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_remembers_nothing_when_replayed():
    model = image_net().cuda()
    x = torch.randn(8, 2, 4, 4, device="cuda")
    before = buffers(model)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with without_running_statistics(model), torch.no_grad():
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
    graph.replay()
    torch.cuda.synchronize()
    assert same(buffers(model), before)
