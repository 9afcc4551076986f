"""What a module does besides its class's forward is refused: no answer is for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)

from tacit import Clipless
from tacit.certificates import certified_radius
from tacit.certificates.certifier import certifier_for
from tacit.errors import UnboundedLayer
from tacit.lipschitz import (
    Absolute,
    BoundedInput,
    Parameterless,
    Residual,
    SpectralLinear,
    input_lipschitz,
    propagate,
)
from tacit.losses import CrossEntropy, PreActivationPenalty, watched
from tacit.sampling import Poisson, batch_of


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(BoundedInput(1.0), SpectralLinear(4, 6), nn.ReLU(), SpectralLinear(6, 3))


def replace_forward(m: nn.Module) -> None:
    forward = m.forward
    m.forward = lambda x: 10 * forward(x)


CHANGES = {
    "forward hook": lambda m: m.register_forward_hook(lambda m, args, out: 10 * out),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda m, args: (10 * args[0],)),
    "backward hook": lambda m: m.register_full_backward_hook(lambda m, gi, go: (10 * gi[0],)),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda m, go: (10 * go[0],)),
    "forward": replace_forward,
}


@pytest.mark.parametrize("place", [None, 0, 1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_hooks_are_refused_wherever_they_are(name: str, place: int | None) -> None:
    model = network()
    query, loss = Clipless(), CrossEntropy()
    batch = batch_of(torch.randn(2, 4), torch.tensor([0, 1]), divisor=1.0, scheme=Poisson(0.1))
    query(model, loss, batch)
    CHANGES[name](model if place is None else model[place])
    words = r"layer .* no gradient bound: (it has hooks|its forward was replaced)"
    with pytest.raises(UnboundedLayer, match=words):
        propagate(model, 1.0, (4,))
    with pytest.raises(UnboundedLayer, match=words):
        input_lipschitz(model, (4,))
    with pytest.raises(UnboundedLayer, match=words):
        query(model, loss, batch)  # although it knew the bounds of this model
    with pytest.raises(UnboundedLayer, match="no certificate"):
        certified_radius(model, torch.randn(2, 4))


def test_a_parameter_with_hooks_is_refused_while_it_is_trained() -> None:
    model = network()
    model[1].weight.register_hook(lambda g: 10 * g)
    with pytest.raises(UnboundedLayer, match=r"parameter '1.weight' has hooks"):
        propagate(model, 1.0, (4,))
    model[1].weight.requires_grad_(False)
    propagate(model, 1.0, (4,))


def test_hooks_of_the_library_only_look() -> None:
    model = network()
    expected = propagate(model, 1.0, (4,)).by_parameter
    with watched(model, PreActivationPenalty()):
        assert any(m._forward_hooks for m in model.modules())
        assert propagate(model, 1.0, (4,)).by_parameter == expected


class Loud(Absolute):
    def forward(self, x):
        return 9 * x.abs()


class LoudAndSaysSo(Absolute):
    def forward(self, x):
        return 9 * x.abs()

    def lipschitz(self, x):
        return 9.0


class LoudLinear(SpectralLinear):
    def forward(self, x):
        return 9 * super().forward(x)


class HalfSaid(LoudLinear):
    """Its weight's gradient is still that of another forward."""

    def lipschitz(self, x):
        return 9.0


class AllSaid(HalfSaid):
    def output_norm(self, x):
        return 9 * super().output_norm(x)

    def gradient_norms(self, x, cotangent):
        return {n: 9 * norm for n, norm in super().gradient_norms(x, cotangent).items()}


class LoudResidual(Residual):
    def forward(self, x):
        return 9 * super().forward(x)


class Called(Absolute):
    def __call__(self, x):
        return 9 * super().__call__(x)


class Renamed(SpectralLinear):
    """Inherits both."""


class Halve(nn.Module, Parameterless):
    def forward(self, x):
        return x / 2

    def lipschitz(self, x):
        return 0.5


class Quarter(Halve):
    def forward(self, x):
        return x / 4


@pytest.mark.parametrize(
    "layer",
    [Loud(), LoudLinear(4, 4), HalfSaid(4, 4), LoudResidual(nn.ReLU()), Called(), Quarter()],
    ids=lambda layer: type(layer).__name__,
)
def test_answers_for_another_forward_are_refused(layer: nn.Module) -> None:
    with pytest.raises(UnboundedLayer, match="of its own"):
        propagate(nn.Sequential(layer), 1.0, (4,), input_norm=1.0)


@pytest.mark.parametrize(
    ("layer", "norm"),
    [(LoudAndSaysSo(), 9.0), (AllSaid(4, 4), 81.0), (Renamed(4, 4), 1.0), (Halve(), 0.5)],
    ids=lambda value: type(value).__name__,
)
def test_answers_for_the_same_forward_are_taken(layer: nn.Module, norm: float) -> None:
    found = propagate(nn.Sequential(layer), 1.0, (4,), input_norm=1.0)
    assert found.output.norm == pytest.approx(norm, rel=1e-3)


PROCESS_WIDE = {
    "forward hook": (register_module_forward_hook, lambda m, args, out: 10 * out),
    "forward pre-hook": (register_module_forward_pre_hook, lambda m, args: (10 * args[0],)),
    "backward hook": (register_module_full_backward_hook, lambda m, gi, go: gi),
    "backward pre-hook": (register_module_full_backward_pre_hook, lambda m, go: (10 * go[0],)),
}


@pytest.mark.parametrize("name", PROCESS_WIDE)
def test_a_hook_of_all_modules_is_refused(name: str) -> None:
    register, hook = PROCESS_WIDE[name]
    model, query, loss = network(), Clipless(), CrossEntropy()
    batch = batch_of(torch.randn(2, 4), torch.tensor([0, 1]), divisor=1.0, scheme=Poisson(0.1))
    query(model, loss, batch)  # bounds are kept from here on
    certify = certifier_for(model, (4,))
    handle = register(hook)
    try:
        with pytest.raises(UnboundedLayer, match="all modules"):
            query(model, loss, batch)
        with pytest.raises(UnboundedLayer, match="all modules"):
            propagate(model, 1.0, (4,))
        with pytest.raises(UnboundedLayer, match="all modules"):
            certify(torch.randn(2, 4))
    finally:
        handle.remove()
    query(model, loss, batch)
