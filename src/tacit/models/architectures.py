"""Networks by name: what a saved run needs to build its network again without importing a file.

`register_model` makes a function of (shape, num_outputs) known by a name, to `tacit train --model`
and to the folders of runs. An `Architecture` is such a name with its arguments and what was changed
afterwards; it is plain data, and `build` makes the network. What a registered function returns is
remembered, so that `tacit.save_run` knows the network by name.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from torch import nn

from tacit.lipschitz.twin import lipschitz_twin
from tacit.models.make_trainable import Trainable, make_trainable

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])
Adaptation = Literal["as-built", "trainable", "lipschitz-twin"]

Shape = Sequence[int]

_REGISTERED: dict[str, Callable[..., nn.Module]] = {}


@dataclass(frozen=True)
class Architecture:
    """A registered network: its name, the arguments of its function, and how it was adapted.

    `arguments` are those beside shape and number of outputs: numbers, texts, truth values, None,
    and lists or mappings of them. `adapted` is "trainable" for `make_trainable` and
    "lipschitz-twin" for `lipschitz_twin`.

        model = Architecture("mlp", (4,), 3, {"hidden": (16,)}).build().model
    """

    name: str
    shape: Shape
    num_outputs: int
    arguments: dict[str, Any] = field(default_factory=dict)
    adapted: Adaptation = "as-built"

    def __post_init__(self) -> None:
        if self.name not in _REGISTERED:
            raise ValueError(
                f"no network is registered as {self.name!r}; known are "
                f"{', '.join(registered_models())}. A network of your own is registered with "
                "@tacit.models.register_model, and its module imported before (tacit --plugin FILE)"
            )
        if self.adapted not in _ADAPTATIONS:
            raise ValueError(f"adapted is {self.adapted!r}; give {' or '.join(_ADAPTATIONS)}")
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "arguments", plain_arguments(self.arguments))

    def build(self) -> Trainable:
        """The network with fresh weights, and what was changed in it."""
        network = _REGISTERED[self.name](self.shape, self.num_outputs, **self.arguments)
        built = _ADAPTATIONS[self.adapted](network)
        _KNOWN[built.model] = self, _structure(built.model)
        return built

    def facts(self) -> dict[str, Any]:
        """As JSON can hold it; `Architecture(**facts)` is the same again."""
        return asdict(self)


# What registered functions made, and its structure then: a network that was changed since is not
# known by name any more.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[Architecture, str]] = weakref.WeakKeyDictionary()
_ADAPTATIONS: dict[str, Callable[[nn.Module], Trainable]] = {
    "as-built": lambda network: Trainable(network, ()),
    "trainable": make_trainable,
    "lipschitz-twin": lambda network: Trainable(*lipschitz_twin(network)),
}


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Make a network known by `name` to `tacit train --model name` and to saved runs.

    Decorates a function of (shape, num_outputs), with further arguments that have defaults. `shape`
    is that of one record; there is one output per class, label or number to predict.

        @tacit.models.register_model("two-layers")
        def two_layers(shape, num_outputs, width=32):
            return nn.Sequential(nn.Linear(*shape, width), nn.Tanh(), nn.Linear(width, num_outputs))
    """
    if not name or name != name.strip().lower() or any(c.isspace() for c in name):
        raise ValueError(f"name is {name!r}; give lower-case letters without blanks: my-network")

    def register(function: Builder) -> Builder:
        owner = _REGISTERED.get(name, function)
        if _origin(owner) != _origin(function):
            raise ValueError(f"the name {name!r} belongs to {_origin(owner)} already; give another")
        signature = inspect.signature(function)

        @functools.wraps(function)
        def built(*args: Any, **kwargs: Any) -> nn.Module:
            network = function(*args, **kwargs)
            if not isinstance(network, nn.Module):
                raise TypeError(
                    f"the network {name!r} is made by {function.__qualname__}, which returned "
                    f"{type(network).__name__}; return a torch.nn.Module"
                )
            shape, outputs, *rest = signature.bind(*args, **kwargs).arguments.items()
            # An argument such as a function leaves the network without a name.
            with suppress(ValueError):
                made = Architecture(name, shape[1], outputs[1], dict(rest))
                _KNOWN[network] = made, _structure(network)
            return network

        _REGISTERED[name] = built
        return built  # type: ignore[return-value]

    return register


def registered_models() -> tuple[str, ...]:
    """The names that `--model` takes, in alphabetical order."""
    return tuple(sorted(_REGISTERED))


def architecture_of(model: nn.Module) -> Architecture | None:
    """How to build this network again; None where no registered function made it as it is."""
    architecture, structure = _KNOWN.get(model, (None, ""))
    return architecture if architecture is not None and _structure(model) == structure else None


def _structure(model: nn.Module) -> str:
    """The modules with their settings, and the names and shapes of all weights."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return f"{model} {shapes}"


def plain_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as JSON gives them back; ValueError for what JSON cannot hold."""
    return {str(name): _plain(value, name) for name, value in dict(arguments).items()}


def _plain(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return [_plain(part, name) for part in value]
    if isinstance(value, dict):
        return {str(key): _plain(part, name) for key, part in value.items()}
    raise ValueError(
        f"argument {name!r} is {type(value).__name__}; a saved run holds numbers, texts and lists "
        "of them"
    )


def _origin(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
