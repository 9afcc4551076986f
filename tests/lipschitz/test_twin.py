"""The Lipschitz twin of an ordinary network."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tacit
from tacit.lipschitz import (
    Absolute,
    BoundedInput,
    LayerCentering,
    MaxMin,
    Parameterless,
    Residual,
    SpectralConv2d,
    SpectralLinear,
)
from tacit.lipschitz.sets import ReshapedKernel


def ordinary() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2),
        nn.Dropout(), nn.Conv2d(6, 5, 3), nn.GELU(), nn.Flatten(), nn.Linear(20, 3),
    )  # fmt: skip


def test_it_is_bounded_and_says_what_it_changed() -> None:
    model = ordinary()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    twin, changes = tacit.lipschitz_twin(model)
    found = tacit.lipschitz.propagate(twin, 1.0, (1, 8, 8))
    assert set(found.by_parameter) == {n for n, _ in twin.named_parameters()}
    assert len(changes) == 1 + 8
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    kinds = [type(m) for m in twin[1]]
    assert isinstance(twin[0], BoundedInput)
    assert kinds[:3] == [SpectralConv2d, LayerCentering, MaxMin]
    assert kinds[6] is Absolute  # five channels


def test_a_record_stays_within_its_bounds() -> None:
    torch.manual_seed(1)
    twin = tacit.lipschitz_twin(ordinary(), sphere=True).model.double().eval()
    loss = tacit.losses.CrossEntropy(0.1)
    report = tacit.lipschitz.audit_model(twin, loss, (1, 8, 8), torch.arange(3))
    assert report.passed, report.violations


def test_shared_layers_stay_shared() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    twin = tacit.lipschitz_twin(model).model
    assert twin[1][0] is twin[1][2]
    assert len(list(twin.parameters())) == 1
    once = tacit.lipschitz.propagate(tacit.lipschitz_twin(nn.Sequential(layer)).model, 1.0, (4,))
    twice = tacit.lipschitz.propagate(twin, 1.0, (4,))
    assert twice.by_parameter["1.0.weight"] == pytest.approx(
        2 * once.by_parameter["1.0.weight"], rel=1e-2
    )


def test_a_subclass_of_a_sequence_is_a_sequence() -> None:
    layer = nn.Linear(4, 4)
    model = type("Layers", (nn.Sequential,), {})(layer, nn.ReLU(), layer)
    twin = tacit.lipschitz_twin(model).model
    assert type(twin[1]) is nn.Sequential
    assert twin[1][0] is twin[1][2]


def test_options() -> None:
    twin = tacit.lipschitz_twin(
        ordinary(), input_norm=3.0, reshaped=True, activation=lambda channels, axis: Absolute()
    ).model
    assert twin[0].max_norm == 3.0
    assert isinstance(twin[1][2], Absolute)
    assert isinstance(twin[1][0].within, ReshapedKernel)


def test_weights_that_are_tied_stay_so() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    twin = tacit.lipschitz_twin(nn.Sequential(first, nn.ReLU(), second)).model
    assert twin[1][0].weight is twin[1][2].weight


class Answers(nn.Module, Parameterless):
    """Answers for itself and what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Bilinear(1, 1, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


def test_layers_that_answer_for_themselves_stay() -> None:
    model = nn.Sequential(Answers(), Residual(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    twin = tacit.lipschitz_twin(model).model
    assert isinstance(twin[1][0].frozen, nn.Bilinear)
    assert isinstance(twin[1][1].f[0], SpectralLinear)
    assert tacit.lipschitz.propagate(twin, 1.0, (4,)).output.norm == pytest.approx(2, rel=1e-3)


def test_activations_sort_the_axis_of_the_features() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.ReLU(), nn.Linear(5, 6), nn.GELU())
    twin = tacit.lipschitz_twin(model).model
    assert [twin[1][i].axis for i in (1, 3)] == [1, -1]
    assert tacit.lipschitz.propagate(twin, 1.0, (2, 5)).output.shape == (4, 6)


# ---- modules with a forward of their own --------------------------------------------------------


class Block(nn.Module):
    """What foreign networks do: writes in place, layer scale, dropout by mode, reshaping."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * 16, 3)
        self.gamma = nn.Parameter(torch.full((4,), 1e-6))
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: bool = True) -> torch.Tensor:
        batch, channels, height, _ = x.shape
        torch._assert(height == 4, f"images of {height} rows and {channels} channels")
        out = self.act(self.norm(self.conv(x)))
        out = F.dropout(out, 0.5, self.training, inplace=True)
        if scale:
            out.mul_(self.gamma.reshape(1, -1, 1, 1))
        out += x
        return self.head(self.act(out).reshape(batch, -1))


def test_a_forward_of_its_own_becomes_a_graph() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block())
    twin, changes = tacit.lipschitz_twin(model)
    assert model.training
    assert {n for n, _ in twin.named_parameters()} == {"1.0.conv.weight", "1.0.head.weight"}
    assert any("gamma removed" in change for change in changes)
    assert any("average" in change for change in changes)
    x = 0.1 * torch.randn(3, 4, 4, 4)
    block = twin[1][0]
    branch = block.act(block.norm(block.conv(x)))
    torch.testing.assert_close(twin(x), block.head(block.act((branch + x) / 2).flatten(1)))
    report = tacit.lipschitz.audit_layer(twin, (4, 4, 4), steps=24)
    assert report.passed, str(report)
    assert copy.deepcopy(twin)(x).equal(twin(x))


def module_of(function, **parts) -> nn.Module:
    made = type("Own", (nn.Module,), {"forward": function})()
    for name, part in parts.items():
        made.register_buffer(name, part) if type(part) is torch.Tensor else setattr(
            made, name, part
        )
    return made


def test_sums_do_not_grow() -> None:
    def forward(self, x):
        y = torch.add(self.a(x), x, alpha=-3)
        return (y - x) + self.a.weight[0] + 0.5 * (y + y)

    twin = tacit.lipschitz_twin(module_of(forward, a=nn.Linear(4, 4))).model
    found = tacit.lipschitz.propagate(twin, 1.0, (4,))
    assert found.output.norm <= 1 + 1e-3
    assert tacit.lipschitz.input_lipschitz(twin, (4,)) <= 1 + 1e-3
    assert tacit.lipschitz.audit_layer(twin, (4,), steps=24).passed


NO_TWIN = {
    "product": (lambda self, x: self.a(x) * x, "two values"),
    "buffer": (lambda self, x: self.a(x) + self.centre, "no parameter"),
    "weight": (lambda self, x: F.linear(x, self.a.weight), "a.weight"),
    "two inputs": (lambda self, x, y: self.a(x), "one input"),
    "keywords": (lambda self, x, **more: self.a(x), "one input"),
    "two values": (lambda self, x: self.a(x, x), "one value"),
    "two outputs": (lambda self, x: (self.a(x), x), "one tensor"),
    "by value": (lambda self, x: x if x.sum() > 0 else -x, "cannot be followed"),
    "attention": (lambda self, x: F.scaled_dot_product_attention(x, x, x), "attention"),
    "across records": (lambda self, x: x.reshape(-1, 2), "reshape"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_TWIN)
def test_a_forward_without_a_twin_is_named(name: str) -> None:
    function, words = NO_TWIN[name]
    part = module_of(function, a=nn.Linear(4, 4), centre=torch.ones(4))
    with pytest.raises(tacit.errors.UnboundedLayer, match=f"layer '1' .Own.*{words}"):
        tacit.lipschitz_twin(nn.Sequential(nn.Linear(4, 4), part))


def test_what_has_no_twin_is_named() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.Bilinear(2, 2, 2), nn.Flatten())
    with pytest.raises(tacit.errors.UnboundedLayer, match=r"'0' \(ConvTranspose2d\).*1 more"):
        tacit.lipschitz_twin(model)
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, out: out)
    with pytest.raises(tacit.errors.UnboundedLayer, match="hooks"):
        tacit.lipschitz_twin(model)
    model = nn.Sequential(nn.Linear(4, 4))
    model.append(model)
    with pytest.raises(tacit.errors.UnboundedLayer, match="contains itself"):
        tacit.lipschitz_twin(model)
