"""Per-record gradients of an embedding: row v of the table gets the b_t of every t that read v."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit.queries.engines.ghost import depth, gram, lengths, safe_squares
from tacit.queries.engines.rows import Contracted, RecordGradients, pieces
from tacit.queries.engines.scaling import scaled


def embedding_gradients(
    layer: nn.Embedding, wanted: set[str], inputs: Tensor, cotangent: Tensor
) -> dict[str, RecordGradients]:
    if "weight" not in wanted:
        return {}
    batch = len(inputs)
    tokens_BT = inputs.reshape(batch, -1)
    b_BTP = cotangent.reshape(batch, tokens_BT.shape[1], -1)
    if layer.padding_idx is not None:
        b_BTP = b_BTP.masked_fill((tokens_BT == layer.padding_idx)[..., None], 0.0)
    return {"weight": table_gradients(layer.weight, tokens_BT, b_BTP)}


def table_gradients(weight: Tensor, tokens_BT: Tensor, b_BTP: Tensor) -> RecordGradients:
    """‖∂/∂E‖² = Σ_{t,u: v_t = v_u} b_t·b_u: no table a record is ever made for the norm."""
    batch, positions, width = b_BTP.shape
    norms, reach = b_BTP.new_empty(batch), b_BTP.new_empty(batch)
    for part in pieces(batch, 4 * positions**2):
        same = tokens_BT[part][:, :, None] == tokens_BT[part][:, None, :]
        inner = gram(b_BTP[part])
        length = lengths(inner, width)
        # Only positions that read the same row meet: R² = Σ_{t,u: v_t = v_u} ‖b_t‖·‖b_u‖.
        together = length[:, :, None] * length[:, None, :] * same
        reach[part] = together.sum(dim=2).sum(dim=1).sqrt()
        squares = (inner * same).sum(dim=2).sum(dim=1)
        norms[part] = safe_squares(squares, reach[part], depth(width), positions)

    def contract(scale_B: Tensor) -> Tensor:
        table = torch.zeros_like(weight, dtype=b_BTP.dtype, requires_grad=False)
        b = scaled(b_BTP, scale_B)
        return table.index_add_(0, tokens_BT.flatten(), b.flatten(0, 1))

    def make_rows() -> Tensor:
        tables = b_BTP.new_zeros(batch, *weight.shape)
        index = tokens_BT[..., None].expand_as(b_BTP)
        return tables.scatter_add_(1, index, b_BTP)

    return Contracted(norms, reach, contract, make_rows)
