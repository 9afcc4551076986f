"""Every layer's rule gives autograd's gradients, over random shapes and options. Float64."""

from __future__ import annotations

import pytest
import torch
from engine_checks import COUNTS, GROUPINGS, NORMS, SEEDS, check_exact
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

BOOL = st.booleans()
PADDINGS = ["zeros", "reflect", "replicate", "circular"]


def several(count):
    return settings(max_examples=count, deadline=None)


def in_a_model(layer, width, deep):
    """Alone, where its output begins the graph; or with something differentiable before it."""
    if not deep:
        return nn.Sequential(layer, nn.Tanh()).double()
    return nn.Sequential(nn.Linear(width, width), layer, nn.Tanh()).double()


def freeze(layer, which):
    """Train both, the weight alone, or the bias alone; something must be left to train."""
    named = dict(layer.named_parameters())
    if which in named and len(named) > 1:
        named[which].requires_grad_(False)


FROZEN = st.sampled_from(["nothing", "weight", "bias"])


@several(60)
@given(
    n=COUNTS,
    middle=st.lists(st.integers(1, 4), max_size=3),
    before=st.integers(1, 40),
    after=st.integers(1, 40),
    bias=BOOL,
    deep=BOOL,
    frozen=FROZEN,
    max_norm=NORMS,
    grouping=GROUPINGS,
    seed=SEEDS,
)
def test_linear(n, middle, before, after, bias, deep, frozen, max_norm, grouping, seed):
    torch.manual_seed(seed)
    layer = nn.Linear(before, after, bias=bias)
    freeze(layer, frozen)
    inputs = torch.randn(n, *middle, before, dtype=torch.float64)
    check_exact(in_a_model(layer, before, deep), inputs, max_norm, grouping)


@st.composite
def convolutions(draw, transposed):
    dims = draw(st.integers(1, 3))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    groups = draw(st.integers(1, 3))
    c_in, c_out = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 4))
    kernel, dilation, stride = each(1, 3), each(1, 2), each(1, 3)
    options = {"groups": groups, "bias": draw(BOOL), "dilation": dilation}
    sizes = tuple(
        draw(st.integers((k - 1) * d + 1, (k - 1) * d + 5))
        for k, d in zip(kernel, dilation, strict=True)
    )
    if transposed:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        padding = tuple(
            min(p, (k - 1) * d) for p, k, d in zip(each(0, 2), kernel, dilation, strict=True)
        )
        extra = tuple(
            min(p, max(s, d) - 1) for p, s, d in zip(each(0, 2), stride, dilation, strict=True)
        )
        options |= {"stride": stride, "padding": padding, "output_padding": extra}
        sizes = each(1, 4)
        made = [
            (i - 1) * s - 2 * p + d * (k - 1) + e + 1
            for i, s, p, d, k, e in zip(
                sizes, stride, padding, dilation, kernel, extra, strict=True
            )
        ]
        assume(min(made) >= 1)
    else:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        mode = draw(st.sampled_from(PADDINGS))
        options["padding_mode"] = mode
        if draw(st.integers(0, 3)) == 0:
            options |= {"padding": "same", "stride": 1}
            assume(
                mode != "reflect"
                or all(s > (k - 1) * d for s, k, d in zip(sizes, kernel, dilation, strict=True))
            )
        else:
            padding = tuple(min(p, s - 1) for p, s in zip(each(0, 2), sizes, strict=True))
            options |= {"padding": padding, "stride": stride}
    return kind, (c_in, c_out, kernel), options, (c_in, *sizes)


@pytest.mark.parametrize("transposed", [False, True])
@several(60)
@given(
    data=st.data(),
    n=COUNTS,
    deep=BOOL,
    frozen=FROZEN,
    max_norm=NORMS,
    grouping=GROUPINGS,
    seed=SEEDS,
)
def test_convolution(transposed, data, n, deep, frozen, max_norm, grouping, seed):
    kind, channels, options, shape = data.draw(convolutions(transposed))
    torch.manual_seed(seed)
    layer = kind(*channels, **options)
    freeze(layer, frozen)
    inputs = torch.randn(n, *shape, dtype=torch.float64)
    check_exact(in_a_model(layer, shape[-1], deep), inputs, max_norm, grouping)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(40, 60, 3, padding=1), (40, 4)),
        (nn.Conv2d(24, 30, 3, stride=2, groups=2, padding_mode="circular", padding=1), (24, 5, 4)),
        (nn.Conv3d(10, 12, 3), (10, 4, 3, 4)),
        (nn.Conv1d(20, 20, 15), (20, 40)),
        (nn.ConvTranspose2d(30, 32, 3, stride=2, padding=1, output_padding=1), (30, 3, 2)),
        (nn.Linear(60, 70), (4, 60)),
        (nn.Embedding(500, 40), None),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("max_norm", [1e-2, 1e6])
def test_shapes_for_which_norms_are_taken_without_rows(layer, shape, max_norm):
    torch.manual_seed(0)
    tokens = torch.randint(0, 500, (4, 6)) % 7
    inputs = tokens if shape is None else torch.randn(4, *shape, dtype=torch.float64)
    check_exact(nn.Sequential(layer, nn.Tanh()).double(), inputs, max_norm)


@several(40)
@given(
    n=COUNTS, shape=st.lists(st.integers(1, 6), max_size=2), vocabulary=st.integers(1, 30),
    width=st.integers(1, 20), padding=BOOL, frequent=BOOL, max_norm=NORMS, seed=SEEDS,
)  # fmt: skip
def test_embedding(n, shape, vocabulary, width, padding, frequent, max_norm, seed):
    torch.manual_seed(seed)
    layer = nn.Embedding(vocabulary, width, padding_idx=vocabulary - 1 if padding else None)
    tokens = torch.randint(0, min(2, vocabulary) if frequent else vocabulary, (n, *shape))
    check_exact(nn.Sequential(layer, nn.Tanh()).double(), tokens, max_norm)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@several(30)
@given(
    n=COUNTS,
    length=st.integers(1, 6),
    vocabulary=st.integers(2, 9),
    width=st.integers(1, 9),
    padding=BOOL,
    max_norm=NORMS,
    seed=SEEDS,
)
def test_embedding_bag(mode, n, length, vocabulary, width, padding, max_norm, seed):
    torch.manual_seed(seed)
    layer = nn.EmbeddingBag(vocabulary, width, mode=mode, padding_idx=0 if padding else None)
    tokens = torch.randint(0, vocabulary, (n, length))
    model = nn.Sequential(layer, nn.Tanh()).double()
    check_exact(model, tokens, max_norm)


@st.composite
def normalisations(draw):
    spatial = [draw(st.integers(2, 4)) for _ in range(draw(st.integers(0, 3)))]
    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 3)) + (0 if groups > 1 else 1)
    kind = draw(st.sampled_from(["layer", "rms", "group", "instance", "batch"]))
    affine = draw(BOOL)
    if kind in ("layer", "rms"):
        shape = (channels, *spatial)
        last = draw(st.integers(1, len(shape)))
        bias = {"bias": affine} if kind == "layer" else {}
        make = nn.LayerNorm if kind == "layer" else nn.RMSNorm
        return make(shape[-last:], eps=0.1, **bias), shape
    if kind == "group":
        spatial = spatial or [2]  # one number a group is refused by PyTorch
        return nn.GroupNorm(groups, channels, eps=0.1), (channels, *spatial)
    spatial = spatial or [3]
    if kind == "instance":
        make = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[len(spatial) - 1]
        layer = make(channels, eps=0.1, affine=True, track_running_stats=affine)
        return (layer.eval() if affine else layer), (channels, *spatial)
    make = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(spatial) - 1]
    return make(channels).eval(), (channels, *spatial)


@several(60)
@given(
    data=st.data(),
    n=COUNTS,
    deep=BOOL,
    frozen=FROZEN,
    max_norm=NORMS,
    grouping=GROUPINGS,
    seed=SEEDS,
)
def test_normalisation(data, n, deep, frozen, max_norm, grouping, seed):
    torch.manual_seed(seed)
    layer, shape = data.draw(normalisations())
    for tensor in [*layer.parameters(), *layer.buffers()]:
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 2)
    freeze(layer, frozen)
    training = layer.training
    model = in_a_model(layer, shape[-1], deep)
    layer.train(training)
    inputs = torch.randn(n, *shape, dtype=torch.float64)
    check_exact(model, inputs, max_norm, grouping)
