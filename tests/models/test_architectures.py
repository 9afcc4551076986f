"""Networks by name: what is registered can be built again from plain data."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import tacit
from tacit.models import Architecture, register_model, registered_models
from tacit.models.architectures import architecture_of


def test_what_a_registered_function_made_is_known_with_its_arguments() -> None:
    model = tacit.models.mlp((4,), num_classes=3, hidden=(8, 5))
    known = architecture_of(model)
    assert known == Architecture("mlp", (4,), 3, {"hidden": [8, 5]})
    again = Architecture(**json.loads(json.dumps(known.facts()))).build().model
    shapes = [p.shape for p in model.parameters()]
    assert [p.shape for p in again.parameters()] == shapes
    assert architecture_of(again) == known


@pytest.mark.parametrize("change", ["another layer", "another setting", "a copy"])
def test_a_network_that_is_another_by_now_is_not_known(change) -> None:
    model = tacit.models.mlp((4,), 3)
    if change == "another layer":
        model.append(nn.ReLU())
    elif change == "another setting":
        model[2] = nn.Sigmoid()
    else:
        model = tacit.make_trainable(model).model
    assert architecture_of(model) is None


def test_adapted_networks_are_built_adapted() -> None:
    built = Architecture("convnet", (3, 8, 8), 4, adapted="trainable").build()
    assert built.changes
    assert not any(isinstance(m, nn.BatchNorm2d) for m in built.model.modules())
    twin = Architecture("lenet", (1, 8, 8), 4, adapted="lipschitz-twin").build().model
    assert architecture_of(twin).adapted == "lipschitz-twin"
    tacit.lipschitz.propagate(twin, 1.0, (1, 8, 8))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="no network is registered as 'mlpp'"):
        Architecture("mlpp", (4,), 2)
    with pytest.raises(ValueError, match="adapted is 'somehow'; give as-built or trainable"):
        Architecture("mlp", (4,), 2, adapted="somehow")
    with pytest.raises(ValueError, match="argument 'hidden' is Tensor"):
        Architecture("mlp", (4,), 2, {"hidden": torch.ones(1)})
    with pytest.raises(ValueError, match="lower-case letters without blanks"):
        register_model("My Network")
    with pytest.raises(ValueError, match=r"'mlp' belongs to tacit\.models\.networks\.mlp already"):
        register_model("mlp")(lambda shape, num_outputs: nn.Linear(1, 1))


def test_a_function_of_ones_own_is_registered_and_its_odd_arguments_are_not_kept() -> None:
    @register_model("test-odd")
    def odd(shape, num_outputs, activation=nn.Tanh):
        return nn.Sequential(nn.Linear(*shape, num_outputs), activation())

    assert "test-odd" in registered_models()
    assert architecture_of(odd((3,), 2)) == Architecture("test-odd", (3,), 2)
    assert architecture_of(odd((3,), 2, nn.ReLU)) is None

    @register_model("test-none")
    def none(shape, num_outputs):
        return None

    with pytest.raises(TypeError, match=r"returned NoneType; return a torch\.nn\.Module"):
        none((3,), 2)
