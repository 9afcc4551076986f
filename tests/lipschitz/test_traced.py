"""Modules with a forward of their own: followed where records stay apart, refused elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tacit.errors import UnboundedLayer
from tacit.lipschitz import (
    BoundedInput,
    MaxMin,
    Parameterless,
    SpectralLinear,
    audit_layer,
    propagate,
)
from tacit.lipschitz.program import compile_program


def module_of(function, **parts):
    """A module whose forward is `function(self, x)`."""
    made = type("Own", (nn.Module,), {"forward": function})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def linear():
    return SpectralLinear(4, 4)


def bounds_of(module, shape=(4,), norm=1.0, cotangent=1.0):
    return propagate(module, cotangent, shape, input_norm=norm)


def two_names(self, x):
    """Both names are of what was written."""
    y = other = self.a(x)
    y += self.b(x)
    y *= 0.5
    return other + y


def asserted(self, x):
    count, width = x.shape
    torch._assert(width == 4, f"{count} records of {width} numbers")
    return self.b(self.a(x))


FOLLOWED = {
    "block": (lambda self, x: x + self.a(F.relu(self.b(x))), (4,)),
    "half": (lambda self, x: 0.5 * (x + self.a(x)) - self.b(x) / 3, (4,)),
    "alpha": (lambda self, x: torch.add(self.a(x), self.b(x), alpha=2), (4,)),
    "shift": (lambda self, x: 1 - self.a(x) + 2.0 - self.b(x), (4,)),
    "cat": (lambda self, x: torch.cat([self.a(x), x, self.b(x).tanh()], dim=1), (4,)),
    "same value twice": (lambda self, x: (lambda y: y + self.b(y))(self.a(x)), (4,)),
    "tokens": (lambda self, x: self.a(x).mean(dim=1) + self.b(x)[:, 0], (3, 4)),
    "transposed": (lambda self, x: self.b(self.a(x.transpose(1, 2))).permute(0, 2, 1), (4, 3)),
    "image": (
        lambda self, x: (
            self.a(F.avg_pool2d(F.max_pool2d(x, 2), 2).flatten(1)) + self.b(x.mean((2, 3)))
        ),
        (4, 4, 4),
    ),
    "activations": (
        lambda self, x: F.gelu(self.a(x)) + F.softplus(self.b(x), 2.0) + torch.sigmoid(-x),
        (4,),
    ),
    "softmax": (lambda self, x: self.a(F.softmax(self.b(x), dim=-1)), (4,)),
    "contiguous": (lambda self, x: self.b(self.a(x).contiguous()), (4,)),
    "unused": (lambda self, x: (self.b(x), self.a(x))[1], (4,)),
    "two names": (two_names, (4,)),
    "asserted": (asserted, (4,)),
    "in-place method": (lambda self, x: self.a(x).mul_(3.0).add_(self.b(x)), (4,)),
    "in-place function": (lambda self, x: F.selu(self.a(x), inplace=True) + self.b(x), (4,)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_forward_that_keeps_records_apart_is_followed(name):
    torch.manual_seed(0)
    function, shape = FOLLOWED[name]
    report = audit_layer(module_of(function, a=linear(), b=linear()), shape, steps=24)
    assert report.passed, str(report)
    largest = max(f.tightness for f in report.findings if f.what.startswith("gradient"))
    assert largest > 0.7, str(report)


def test_the_same_bounds_as_the_layers():
    parts = {"a": linear(), "b": linear()}
    traced = bounds_of(module_of(lambda self, x: self.b(F.relu(self.a(x))), **parts))
    plain = bounds_of(nn.Sequential(parts["a"], nn.ReLU(), parts["b"]))
    assert list(traced.by_parameter.values()) == list(plain.by_parameter.values())


def test_a_value_used_twice_has_both_cotangents():
    both = bounds_of(module_of(lambda self, x: (lambda y: y + y)(self.a(x)), a=linear()))
    once = bounds_of(module_of(lambda self, x: self.a(x), a=linear()))
    assert both.by_parameter["a.weight"] == pytest.approx(2 * once.by_parameter["a.weight"])


def test_a_part_used_twice_counts_twice():
    twice = bounds_of(module_of(lambda self, x: self.a(self.a(x)), a=linear()))
    assert twice.by_parameter["a.weight"] == pytest.approx(2.0, rel=1e-3)


def test_parts_may_have_a_forward_of_their_own():
    inner = module_of(lambda self, x: x - self.a(x), a=linear())
    outer = module_of(lambda self, x: self.inner(x) + x, inner=inner)
    model = nn.Sequential(BoundedInput(1.0), outer, MaxMin())
    assert propagate(model, 1.0, (4,)).by_parameter["1.inner.a.weight"] == pytest.approx(1.0)


def test_the_mode_is_the_present_one():
    module = module_of(
        lambda self, x: self.a(F.dropout(x, 0.5, self.training)) * (3.0 if self.training else 1.0),
        a=linear(),
    )
    training, evaluation = bounds_of(module), bounds_of(module.eval())
    assert training.output.norm == pytest.approx(6 * evaluation.output.norm)


def test_random_numbers_are_left_as_they_were():
    module = module_of(lambda self, x: self.a(F.dropout(x, 0.5, self.training)), a=linear())
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    bounds_of(module)
    assert torch.equal(torch.rand(3), expected)


def in_place(self, x):
    skip = x
    x = self.a(x)
    skip += x
    return skip + x


def branching(self, x):
    return x if x.sum() > 0 else -x


def by_count(self, x):
    return self.a(x) / len(x)


def writes(self, x):
    x[0] = 0.0
    return self.a(x)


def hidden_write(self, x):
    y = self.a(x)
    torch.Tensor.mul_(y, 3.0)
    return y


def unread_write(self, x):
    y = self.a(x)
    torch.relu_(y)
    return y


def read_by_a_view(self, x):
    y = self.a(x)
    part = y[:, :2]
    y += x
    return torch.cat([y, part], dim=1)


def written_through_a_view(self, x):
    y = self.a(x)
    part = y[:, :]
    part *= 3.0
    return y


def own_weight_written(self, x):
    weight = self.a.weight
    weight *= 3.0
    return self.a(x)


CENTRE = 0.5 * torch.ones(4)

REFUSED = {
    "one record": (lambda self, x: x[0], "among records"),
    "some records": (lambda self, x: x[:1], "among records"),
    "by index": (lambda self, x: x[[1, 0]], "among records"),
    "by ellipsis": (lambda self, x: x[..., :1], "among records"),
    "by mask": (lambda self, x: x[x > 0], "gt|among records"),
    "repeated": (lambda self, x: x[:, [0, 0, 0]], "among records"),
    "flip": (lambda self, x: x.flip(0), "flip"),
    "torch.flip": (lambda self, x: torch.flip(x, (0,)), "flip"),
    "roll": (lambda self, x: x.roll(1, 0), "roll"),
    "mean of records": (lambda self, x: x - x.mean(0), "mix records"),
    "mean of all": (lambda self, x: x.mean(), "mixes records"),
    "mean of no axis": (lambda self, x: x.mean(dim=(), keepdim=True), "mixes records"),
    "mean by negative axis": (lambda self, x: x.mean(-2), "mix records"),
    "softmax over records": (lambda self, x: x.softmax(0), "mix records"),
    "cat of records": (lambda self, x: torch.cat([x, x]), "mix records"),
    "cat by negative axis": (lambda self, x: torch.cat([x, x], dim=-2), "mix records"),
    "flatten of all": (lambda self, x: x.flatten(), "mix records"),
    "transposed": (lambda self, x: x.transpose(0, 1), "mix records"),
    "permuted": (lambda self, x: x.permute(1, 0), "batch axis"),
    "T": (lambda self, x: x.T, "getattr"),
    "view": (lambda self, x: x.view(-1, 2), "view"),
    "reshape": (lambda self, x: x.reshape(4, -1), "reshape"),
    "product": (lambda self, x: x * x, "two values"),
    "square": (lambda self, x: x**2, "pow"),
    "matmul": (lambda self, x: x @ x.mT, "getattr|matmul"),
    "quotient": (lambda self, x: 1 / x, "divides"),
    "by zero": (lambda self, x: x / 0, "divides"),
    "infinite": (lambda self, x: x * float("inf"), "finite number"),
    "broadcast": (lambda self, x: x + x.mean(1, keepdim=True), "broadcasting"),
    "statistics": (lambda self, x: F.batch_norm(x, None, None, training=True), "batch_norm"),
    "layer norm": (lambda self, x: F.layer_norm(x, (4,)), "layer_norm"),
    "constant tensor": (lambda self, x: x + CENTRE, "tensor"),
    "own tensor": (lambda self, x: x + self.a.weight[0], "tensor"),
    "own weight": (lambda self, x: F.linear(x, self.a.weight), "tensor"),
    "noise": (lambda self, x: x + torch.randn_like(x), "randn_like"),
    "unknown": (lambda self, x: torch.exp(x), "exp"),
    "branching": (branching, "cannot be followed"),
    "by count": (by_count, "cannot be followed"),
    "shape": (lambda self, x: x / x.shape[0], "getattr"),
    "writes": (writes, "cannot be followed"),
    "in place": (in_place, "writes into"),
    "hidden write": (hidden_write, "mul_"),
    "unread write": (unread_write, "relu_"),
    "in-place method on the input": (lambda self, x: x.mul_(3.0), "writes into"),
    "steep in place on the input": (lambda self, x: F.selu(x, inplace=True), "inplace"),
    "read by a view": (read_by_a_view, "another name"),
    "written through a view": (written_through_a_view, "another name"),
    "own input returned": (lambda self, x: self.b(x).add_(x), "its own input"),
    "own weight written": (own_weight_written, "weight"),
    "two outputs": (lambda self, x: (x, x), "one tensor"),
    "two inputs": (lambda self, x, y=None: x, "one input"),
    "any inputs": (lambda self, *x: x[0], "one input"),
    "detour": (lambda self, x: self.a(x, None), "one value"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_by_name(name):
    function, words = REFUSED[name]
    model = nn.Sequential(SpectralLinear(4, 4), module_of(function, a=linear(), b=nn.Identity()))
    with pytest.raises(UnboundedLayer, match=words) as caught:
        propagate(model, 1.0, (4,), input_norm=1.0)
    assert "layer '1" in str(caught.value)


def test_parts_without_an_answer_are_named_by_their_place():
    model = nn.Sequential(module_of(lambda self, x: self.norm(x), norm=nn.LayerNorm(4)))
    with pytest.raises(UnboundedLayer, match=r"'0\.norm' \(LayerNorm\)"):
        bounds_of(model)


def test_hooks_are_refused():
    module = module_of(lambda self, x: self.a(x), a=linear())
    module.register_forward_hook(lambda m, args, out: out.flip(0))
    with pytest.raises(UnboundedLayer, match="hooks"):
        bounds_of(module)


def test_a_forward_that_is_not_the_same_twice_is_one_program():
    calls = []

    def forward(self, x):
        calls.append(None)
        y = self.a(x)
        return y if len(calls) % 2 else y + y

    for factor in (1, 2, 1):
        program = compile_program(module_of(forward, a=linear()))
        found = propagate(program, 1.0, (4,), input_norm=1.0)
        x = torch.randn(3, 4)
        for _ in range(2):
            assert torch.equal(program(x), factor * x @ program.trained["a.weight"].mT)
        assert found.output.norm == pytest.approx(factor, rel=1e-3)


def test_an_answer_of_its_own_comes_first():
    class Answers(nn.Module, Parameterless):
        def forward(self, x):
            return x * x.flip(1).sum() * 0 + x

    assert bounds_of(nn.Sequential(Answers(), linear())).by_parameter["1.weight"] == 1.0


class OtherWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return 10 * gradient


def test_a_way_back_that_forward_does_not_show_is_refused():
    module = module_of(lambda self, x: OtherWayBack.apply(self.a(x)), a=linear())
    with pytest.raises(UnboundedLayer, match="autograd Function"):
        bounds_of(module)
    # To the parameters alone, with the input reached another way.
    module = module_of(lambda self, x: x + OtherWayBack.apply(self.a(x)), a=linear())
    with pytest.raises(UnboundedLayer, match="autograd Function"):
        bounds_of(nn.Sequential(BoundedInput(1.0, sphere=True), module))


def test_where_nothing_goes_back_there_is_nothing_to_compare():
    def forward(self, x):
        with torch.no_grad():
            return self.a(x)

    assert bounds_of(module_of(forward, a=linear())).by_parameter["a.weight"] == 1.0
