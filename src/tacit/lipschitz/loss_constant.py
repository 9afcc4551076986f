"""The Lipschitz constant of a loss in one record's outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tacit.errors import UnboundedLayer


def loss_constant(loss: object, num_outputs: int) -> float:
    """The largest norm of one record's loss gradient in its outputs; UnboundedLayer if unknown."""
    found = loss_constant_or_none(loss, num_outputs)
    if found is not None:
        return found
    name = getattr(loss, "__name__", type(loss).__name__)
    raise UnboundedLayer(
        f"the loss {name!r} has no known Lipschitz constant; use one of tacit.losses, such as "
        "CrossEntropy(), say what it is with tacit.losses.WithConstant(loss, lipschitz), or clip "
        "the loss gradient with Clipless(gradient_clip=…)"
    )


def loss_constant_or_none(loss: object, num_outputs: int) -> float | None:
    """The constant, where the loss is known to have one: Tacit's answer `lipschitz_for`.

    PyTorch's own have none: a record chooses its targets, and cross-entropy of a soft label of
    10⁶, or of many positions summed, has no gradient of norm √2.
    """
    ask: Callable[[int], float] | None = getattr(loss, "lipschitz_for", None)
    if ask is not None:
        return float(ask(num_outputs))
    constant = getattr(loss, "lipschitz", None)
    return None if constant is None else float(constant)


@dataclass(frozen=True)
class ClippedLoss:
    """A loss whose gradient in the outputs is limited to `max_norm`, record by record."""

    loss: object
    max_norm: float

    def lipschitz_for(self, num_outputs: int) -> float:
        own = loss_constant_or_none(self.loss, num_outputs)
        return self.max_norm if own is None else min(self.max_norm, own)
