"""Which rule gives a module's per-record gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tacit.queries.engines.convolution import convolution_gradients
from tacit.queries.engines.embedding import embedding_gradients
from tacit.queries.engines.linear import linear_gradients
from tacit.queries.engines.normalisation import (
    group_norm_gradients,
    instance_norm_gradients,
    layer_norm_gradients,
    rms_norm_gradients,
)
from tacit.queries.engines.rows import RecordGradients

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
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

# By exact type: a subclass may compute something else in its forward pass.
RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear_gradients,
    nn.LayerNorm: layer_norm_gradients,
    nn.RMSNorm: rms_norm_gradients,
    nn.GroupNorm: group_norm_gradients,
    nn.Embedding: embedding_gradients,
    **dict.fromkeys(_CONVOLUTIONS, convolution_gradients),
    **dict.fromkeys(_INSTANCE_NORMS, instance_norm_gradients),
}


def rule_for(module: nn.Module) -> Rule | None:
    """The module's own rule; None where `torch.func` must do."""
    if isinstance(module, nn.Embedding) and (
        module.scale_grad_by_freq or module.sparse or module.max_norm is not None
    ):
        return None
    return RULES.get(type(module))
