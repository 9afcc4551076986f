"""A model is read again whenever something of it has changed, and is not kept alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tacit.checks.side_effects import contents_of, named_parameters_of, parameters_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale, self.steps, self.mode, self.option = 0.5, 3, "plain", None
        self.sizes, self.nested, self.fixed = [1, 2], ([1, [2]], 3), (1, (2, 3))
        self.register_buffer("table", torch.ones(2))
        self.me = [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(x)


class Other(Layer):
    pass


def model() -> nn.Module:
    return nn.Sequential(Layer(), nn.Dropout(0.1), nn.Conv2d(1, 1, 3, padding="same"))


CHANGES = {
    "float": lambda m: setattr(m[0], "scale", 0.25),
    "int": lambda m: setattr(m[0], "steps", 4),
    "text": lambda m: setattr(m[0], "mode", "other"),
    "None": lambda m: setattr(m[0], "option", True),
    "list in place": lambda m: m[0].sizes.append(3),
    "list in a tuple": lambda m: m[0].nested[0][1].append(3),
    "tuple": lambda m: setattr(m[0], "fixed", (1, (2, 4))),
    "renamed": lambda m: m[0].__dict__.update(other=m[0].__dict__.pop("scale")),
    "mode": lambda m: m.eval(),
    "class": lambda m: setattr(m[0], "__class__", Other),
    "child": lambda m: setattr(m[0], "linear", nn.Linear(3, 3)),
    "children swapped": lambda m: m.__setitem__(1, nn.Dropout(0.1)),
    "hook": lambda m: m[0].register_forward_hook(lambda *_: None),
    "forward": lambda m: setattr(m[0], "forward", lambda x: x),
    "parameter": lambda m: setattr(m[0].linear, "weight", nn.Parameter(torch.ones(3, 3))),
    "address": lambda m: setattr(m[0].linear.weight, "data", torch.ones(3, 3)),
    "buffer": lambda m: setattr(m[0], "table", torch.ones(2)),
    "new buffer": lambda m: m.register_buffer("more", torch.ones(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change) -> None:
    net = model()
    kept = list(net.modules()), list(net.parameters()), list(net.buffers())  # no address is reused
    before = contents_of(net).recorded_state()
    assert contents_of(net).recorded_state() == before
    change(net)
    assert contents_of(net).recorded_state() != before
    assert len(kept) == 3


def test_tensors_are_those_that_the_model_holds_now() -> None:
    net = model()
    contents_of(net)
    net[0].linear.weight = nn.Parameter(torch.ones(3, 3))
    net[0].table = torch.zeros(2)
    held = dict(net.named_parameters()) | dict(net.named_buffers())
    seen = contents_of(net).tensors()
    assert seen.keys() == held.keys()
    assert all(seen[name] is held[name] for name in held)


def test_a_child_that_takes_another_ones_address_is_seen() -> None:
    net = nn.Sequential(nn.Dropout(0.5))
    for _ in range(50):  # CPython gives the memory to the next object of that size
        before = contents_of(net).recorded_state()
        rate = net[0].p / 2
        del net[0]
        net.append(nn.Dropout(rate))
        assert contents_of(net).recorded_state() != before


def test_models_are_not_kept_alive() -> None:
    net = model()
    contents_of(net)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_scripted_modules_are_read_each_time() -> None:
    net = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert set(contents_of(net).tensors()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert contents_of(net).recorded_state() == contents_of(net).recorded_state()


LISTED_ANEW = CHANGES | {
    "tied": lambda m: setattr(m[2], "weight", m[0].linear.weight),
    "untied": lambda m: setattr(m[0], "twin", nn.Parameter(torch.zeros(3))),
    "none": lambda m: setattr(m[2], "bias", None),
    "gone": lambda m: m[0].__delattr__("linear"),
    "frozen": lambda m: m[0].linear.weight.requires_grad_(False),
    "own list": lambda m: setattr(m, "named_parameters", lambda *_, **__: iter(())),
    "own walk of a child": lambda m: setattr(m[0], "named_modules", lambda *_, **__: iter(())),
    "class with a list": lambda m: setattr(m, "__class__", ListsNothing),
}


class ListsNothing(nn.Sequential):
    def parameters(self, recurse: bool = True):
        return iter(())


@pytest.mark.parametrize("change", LISTED_ANEW.values(), ids=LISTED_ANEW)
def test_parameters_are_listed_as_the_model_lists_them(change) -> None:
    net = model()
    net[0].twin = net[2].bias
    for step in (lambda _: None, change):
        step(net)
        own = dict(net.named_parameters())
        listed = named_parameters_of(net)
        assert list(listed) == list(own)
        assert all(listed[name] is own[name] for name in own)
        pairs = zip(parameters_of(net), net.parameters(), strict=True)
        assert all(ours is theirs for ours, theirs in pairs)
