"""Per-record gradients of an embedding: row v of the table gets the b_t of every t that read v."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit.queries.engines.rows import Contracted, RecordGradients, pieces


def embedding_gradients(
    layer: nn.Embedding, wanted: set[str], inputs: Tensor, cotangent: Tensor
) -> dict[str, RecordGradients]:
    """‖∂/∂E‖² = Σ_{t,u: v_t = v_u} b_t·b_u: no table a record is ever made for the norm."""
    if "weight" not in wanted:
        return {}
    batch = len(inputs)
    tokens_BT = inputs.reshape(batch, -1)
    b_BTP = cotangent.reshape(batch, tokens_BT.shape[1], -1)
    if layer.padding_idx is not None:
        b_BTP = b_BTP.masked_fill((tokens_BT == layer.padding_idx)[..., None], 0.0)
    norms, reach = b_BTP.new_empty(batch), b_BTP.new_empty(batch)
    for part in pieces(batch, 2 * tokens_BT.shape[1] ** 2):
        same = tokens_BT[part][:, :, None] == tokens_BT[part][:, None, :]
        gram = b_BTP[part] @ b_BTP[part].transpose(1, 2)
        norms[part] = (gram * same).sum(dim=(1, 2))
        reach[part] = gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().sum(dim=1)

    def contract(scale_B: Tensor) -> Tensor:
        scaled = b_BTP * scale_B.to(b_BTP.dtype)[:, None, None]
        table = torch.zeros_like(layer.weight, requires_grad=False)
        return table.index_add_(0, tokens_BT.flatten(), scaled.flatten(0, 1).to(table.dtype))

    def make_rows() -> Tensor:
        tables = b_BTP.new_zeros(batch, layer.num_embeddings, layer.embedding_dim)
        index = tokens_BT[..., None].expand_as(b_BTP)
        return tables.scatter_add_(1, index, b_BTP)

    return {"weight": Contracted(norms, reach, contract, make_rows)}
