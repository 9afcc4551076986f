"""Per-record gradients of normalisation layers: y = x̂·γ + β, x̂ from one record alone."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from tacit.queries.engines import normalisation_triton
from tacit.queries.engines.precision import wide
from tacit.queries.engines.rows import RecordGradients, Stacked


def layer_norm_gradients(
    layer: nn.LayerNorm, wanted: set[str], inputs: Tensor, cotangent: Tensor
) -> dict[str, RecordGradients]:
    """∂/∂γ = Σ x̂·b and ∂/∂β = Σ b, over all but the normalised dimensions."""
    normalised = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    return _affine(wanted, normalised, cotangent, len(layer.normalized_shape))


def rms_norm_gradients(
    layer: nn.RMSNorm, wanted: set[str], inputs: Tensor, cotangent: Tensor
) -> dict[str, RecordGradients]:
    normalised = F.rms_norm(inputs, layer.normalized_shape, eps=layer.eps)
    return _affine(wanted, normalised, cotangent, len(layer.normalized_shape))


def group_norm_gradients(
    layer: nn.GroupNorm, wanted: set[str], inputs: Tensor, cotangent: Tensor
) -> dict[str, RecordGradients]:
    if normalisation_triton.fits(inputs, layer.num_groups):
        weight, bias = normalisation_triton.group_norm_rows(
            inputs, cotangent, layer.num_groups, layer.eps
        )
        rows = {"weight": weight, "bias": bias}
        return {name: Stacked(rows[name]) for name in wanted}
    normalised = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return _per_channel(wanted, normalised, cotangent)


def instance_norm_gradients(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d,
    wanted: set[str],
    inputs: Tensor,
    cotangent: Tensor,
) -> dict[str, RecordGradients]:
    normalised = F.instance_norm(inputs, eps=layer.eps)
    return _per_channel(wanted, normalised, cotangent)


def batch_norm_gradients(
    layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d,
    wanted: set[str],
    inputs: Tensor,
    cotangent: Tensor,
) -> dict[str, RecordGradients]:
    """Only in evaluation mode, where x̂ = (x − μ)/√(σ² + ε) with constants μ and σ²."""
    mean, variance = layer.running_mean, layer.running_var
    assert mean is not None
    assert variance is not None
    normalised = F.batch_norm(inputs, wide(mean), wide(variance), eps=layer.eps)
    return _per_channel(wanted, normalised, cotangent)


def _affine(
    wanted: set[str], normalised: Tensor, cotangent: Tensor, dims: int
) -> dict[str, RecordGradients]:
    over = tuple(range(1, cotangent.dim() - dims))

    def summed(x: Tensor) -> RecordGradients:
        return Stacked(x.sum(dim=over) if over else x)

    found = {}
    if "weight" in wanted:
        found["weight"] = summed(normalised * cotangent)
    if "bias" in wanted:
        found["bias"] = summed(cotangent)
    return found


def _per_channel(
    wanted: set[str], normalised: Tensor, cotangent: Tensor
) -> dict[str, RecordGradients]:
    found: dict[str, RecordGradients] = {}
    if "weight" in wanted:
        product = normalised * cotangent
        found["weight"] = Stacked(product.flatten(2).sum(2) if product.dim() > 2 else product)
    if "bias" in wanted:
        found["bias"] = Stacked(cotangent.flatten(2).sum(2) if cotangent.dim() > 2 else cotangent)
    return found
