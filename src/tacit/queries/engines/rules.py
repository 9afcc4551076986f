"""Which rule gives a module's per-record gradients; rules are registered by module class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from tacit.lipschitz.layers import (
    FrobeniusLinear,
    SpectralConv1d,
    SpectralConv2d,
    SpectralConv3d,
    SpectralLinear,
)
from tacit.queries.engines.convolution import convolution_gradients
from tacit.queries.engines.embedding import embedding_gradients
from tacit.queries.engines.embedding_bag import embedding_bag_gradients
from tacit.queries.engines.linear import linear_gradients
from tacit.queries.engines.normalisation import (
    batch_norm_gradients,
    group_norm_gradients,
    instance_norm_gradients,
    layer_norm_gradients,
    rms_norm_gradients,
)
from tacit.queries.engines.precision import wide
from tacit.queries.engines.rows import RecordGradients, Stacked
from tacit.queries.engines.tape import Call

# A rule's first argument is a module of the kind that it was registered for.
Rule = Callable[[Any, set[str], Tensor, Tensor], Mapping[str, RecordGradients | Tensor]]
Registered = TypeVar("Registered", bound=Rule)

# By exact type: a subclass may compute something else in its forward pass.
RULES: dict[type[nn.Module], Rule] = {}


def register_gradient_rule(*kinds: type[nn.Module]) -> Callable[[Registered], Registered]:
    """Register how the per-record gradients of a module class are computed.

    A rule is called as rule(module, wanted, inputs, cotangent) for each use of a module that was
    given one tensor and returned one:

    - `inputs` is what the module was given and `cotangent` the gradient of the summed loss in what
      it returned, both in float32 or wider. Records lie along the first dimension, B of them.
    - `wanted` holds the names of the module's own parameters whose gradients are asked for.
    - The answer has one entry for each wanted name: a tensor (B, *parameter.shape) of each
      record's gradient, or a `RecordGradients` that keeps the same promise without storing it:
      `squares()` are norms squared, *exact or from above*, of the very numbers that `total(scale)`
      adds up, and `total` leaves out records whose scale is 0, finite or not.
    - Record i's gradient depends on row i alone, and the module is not changed.

    The rule is used for exactly these classes, not for subclasses. Clipping bounds a record's share
    by these numbers, so that a rule whose norms are too small breaks ε: check it with
    `tacit.check_gradient_rule(module, example_inputs)`. A module without a rule is run by
    `torch.func`, record by record.

        @tacit.register_gradient_rule(Scale)
        def scale_gradients(module, wanted, inputs, cotangent):
            return {"weight": (inputs * cotangent).flatten(2).sum(2)}
    """
    if not kinds or not all(isinstance(k, type) and issubclass(k, nn.Module) for k in kinds):
        raise TypeError(
            f"register_gradient_rule was given {kinds}; give module classes: "
            "@tacit.register_gradient_rule(MyModule)"
        )

    def register(rule: Registered) -> Registered:
        for kind in kinds:
            known = RULES.get(kind)
            if known is not None and _origin(known) != _origin(rule):
                raise ValueError(
                    f"{kind.__name__} has the rule {'.'.join(_origin(known))} already; derive a "
                    "class of your own and register that"
                )
            RULES[kind] = rule
        return rule

    return register


def _origin(rule: Any) -> tuple[str, str]:
    return getattr(rule, "__module__", ""), getattr(rule, "__qualname__", repr(rule))


_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

# The forward pass of a Lipschitz layer is that of the class it is derived from.
register_gradient_rule(nn.Linear, SpectralLinear, FrobeniusLinear)(linear_gradients)
register_gradient_rule(
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    SpectralConv1d,
    SpectralConv2d,
    SpectralConv3d,
)(convolution_gradients)
register_gradient_rule(nn.LayerNorm)(layer_norm_gradients)
register_gradient_rule(nn.RMSNorm)(rms_norm_gradients)
register_gradient_rule(nn.GroupNorm)(group_norm_gradients)
register_gradient_rule(*_INSTANCE_NORMS)(instance_norm_gradients)
register_gradient_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)(batch_norm_gradients)
register_gradient_rule(nn.Embedding)(embedding_gradients)


def record_gradients(call: Call, wanted: set[str], batch: int) -> dict[str, RecordGradients] | None:
    """By the module's own rule; None where `torch.func` must do."""
    module = call.module
    if call.products is not None:
        return call.products.gradients(call.gradients, wanted)
    if type(module) is nn.EmbeddingBag:
        return embedding_bag_gradients(call, wanted, batch)
    values = [*call.args, *call.kwargs.values()]
    rule = RULES.get(type(module))
    if rule is None or _is_special(module) or len(values) != 1:
        return None
    inputs, (cotangent,) = values[0], call.gradients
    assert cotangent is not None
    call.check_rows(cotangent, batch)
    return as_gradients(rule(module, wanted, wide(inputs), wide(cotangent)))


def as_gradients(found: Mapping[str, RecordGradients | Tensor]) -> dict[str, RecordGradients]:
    """Tensors are rows, one per record."""
    return {n: Stacked(g) if isinstance(g, Tensor) else g for n, g in found.items()}


def _is_special(module: nn.Module) -> bool:
    """Options that change what the forward or the backward pass computes."""
    if isinstance(module, nn.Embedding):
        return module.scale_grad_by_freq
    if isinstance(module, _INSTANCE_NORMS):
        return module.track_running_stats and not module.training
    return False
