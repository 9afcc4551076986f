"""Per-record gradients of a linear layer: y = x Wᵀ + c, on any number of dimensions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit.queries.engines.ghost import ghost_norms, product_squares
from tacit.queries.engines.rows import Contracted, RecordGradients, Stacked, pieces
from tacit.queries.engines.scaling import present, scaled
from tacit.tensor_float import uses_tensor_float


def linear_gradients(
    layer: nn.Linear, wanted: set[str], inputs: Tensor, cotangent: Tensor
) -> dict[str, RecordGradients]:
    """∂/∂W of record i is Σ_t b_t a_tᵀ over its T positions, and ∂/∂c is Σ_t b_t."""
    batch = len(cotangent)
    a_BTD = inputs.reshape(batch, -1, inputs.shape[-1])
    b_BTP = cotangent.reshape(batch, -1, cotangent.shape[-1])
    found: dict[str, RecordGradients] = {}
    if "weight" in wanted:
        found["weight"] = outer_products(a_BTD, b_BTP)
    if "bias" in wanted:
        found["bias"] = Stacked(b_BTP.sum(dim=1))
    return found


def outer_products(a_BTD: Tensor, b_BTP: Tensor) -> RecordGradients:
    """Σ_t b_t a_tᵀ of each record, as rows or by the ghost norm, whichever is cheaper."""
    batch, positions, width_in = a_BTD.shape
    width_out = b_BTP.shape[-1]

    def make_rows() -> Tensor:
        return b_BTP.transpose(1, 2) @ a_BTD

    def contract(scale_B: Tensor) -> Tensor:
        b, a = scaled(b_BTP, scale_B), present(a_BTD, scale_B)
        return b.flatten(0, 1).T @ a.flatten(0, 1)

    if positions == 1:
        product = product_squares(a_BTD[:, 0], b_BTP[:, 0])
        return Contracted(product, product.sqrt(), contract, make_rows, _coarse(a_BTD))
    # Rows that are not much larger than what they come from are kept: no second contraction.
    if width_in * width_out <= 2 * positions * (width_in + width_out):
        return Stacked(make_rows())
    norms, reach = a_BTD.new_empty(batch), a_BTD.new_empty(batch)
    for part in pieces(batch, 3 * positions**2):
        norms[part], reach[part] = ghost_norms(a_BTD[part], b_BTP[part])
    return Contracted(norms, reach, contract, make_rows, _coarse(a_BTD))


def _coarse(tensor: Tensor) -> bool:
    """Whether matrix products of this tensor may run in TensorFloat-32."""
    return tensor.dtype == torch.float32 and uses_tensor_float("matmul", tensor.device)
