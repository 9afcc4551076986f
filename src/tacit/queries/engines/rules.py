"""Which rule gives a module's per-record gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from tacit.queries.engines.rows import RecordGradients
from tacit.queries.engines.tape import Call

# The first argument is a module of the rule's own kind, which `RULES` pairs it with.
Rule = Callable[[Any, set[str], Tensor, Tensor], dict[str, RecordGradients]]

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
# Their forward pass is that of the class they are derived from; only their weights are bounded.
_SPECTRAL_CONVOLUTIONS = (SpectralConv1d, SpectralConv2d, SpectralConv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

# By exact type: a subclass may compute something else in its forward pass.
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_gradients,
    SpectralLinear: linear_gradients,
    FrobeniusLinear: linear_gradients,
    nn.LayerNorm: layer_norm_gradients,
    nn.RMSNorm: rms_norm_gradients,
    nn.GroupNorm: group_norm_gradients,
    nn.Embedding: embedding_gradients,
    **dict.fromkeys(_CONVOLUTIONS, convolution_gradients),
    **dict.fromkeys(_SPECTRAL_CONVOLUTIONS, convolution_gradients),
    **dict.fromkeys(_BATCH_NORMS, batch_norm_gradients),
    **dict.fromkeys(_INSTANCE_NORMS, instance_norm_gradients),
}


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
    return rule(module, wanted, wide(inputs), wide(cotangent))


def _is_special(module: nn.Module) -> bool:
    """Options that change what the forward or the backward pass computes."""
    if isinstance(module, nn.Embedding):
        return module.scale_grad_by_freq
    if isinstance(module, _INSTANCE_NORMS):
        return module.track_running_stats and not module.training
    return False
