"""Does a module do what its class says? Bounds are read off classes, and hooks are not in them."""

from __future__ import annotations

from torch import nn

from tacit.errors import UnboundedLayer
from tacit.foreign_hooks import foreign_hooks, process_wide_hooks


def require_as_written(model: nn.Module) -> None:
    """Refuse a model of which some part does something else than its class's forward.

    A hook may replace what comes out of a module or goes back through it, and so may a `forward`
    of the instance's own; the answers would still be the class's. Hooks of this library only look.
    They can be added at any time, so whoever keeps bounds asks again each time.
    """
    for hook in process_wide_hooks().values():
        raise UnboundedLayer(
            f"no module has a gradient bound: {getattr(hook, '__qualname__', hook)} was registered "
            "as a hook of all modules of the process, which may change anything; remove it"
        )
    for name, module in model.named_modules():
        where = f"layer {name or 'model'!r} ({type(module).__name__})"
        if foreign_hooks(module):
            raise UnboundedLayer(
                f"{where} has no gradient bound: it has hooks, which may change anything; remove "
                "them, or make what they do a layer with the three answers of "
                "tacit.lipschitz.Bounded"
            )
        if "forward" in vars(module):
            raise UnboundedLayer(
                f"{where} has no gradient bound: its forward was replaced, and bounds are those of "
                "its class; write a class that has this forward"
            )


def require_plain_gradients(model: nn.Module) -> None:
    """Refuse a trainable parameter with hooks: they change a gradient after it was bounded."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter._backward_hooks:
            raise UnboundedLayer(
                f"parameter {name!r} has hooks, which may change its gradient after it was "
                "bounded; remove them, and change the gradient once it is released"
            )
