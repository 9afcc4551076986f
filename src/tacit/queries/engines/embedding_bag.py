"""Per-record gradients of an embedding bag on (records, tokens): a bag is a record."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit.errors import UnsupportedModule
from tacit.queries.engines.embedding import table_gradients
from tacit.queries.engines.precision import wide
from tacit.queries.engines.rows import RecordGradients
from tacit.queries.engines.tape import Call


def embedding_bag_gradients(
    call: Call, wanted: set[str], batch: int
) -> dict[str, RecordGradients] | None:
    """Row v gets w_t·b for every token t of the bag that reads v: w_t is 1, or 1/T in a mean."""
    layer, (cotangent,) = call.module, call.gradients
    assert isinstance(layer, nn.EmbeddingBag)
    assert cotangent is not None
    given = dict(zip(("input", "offsets", "per_sample_weights"), call.args, strict=False))
    given |= call.kwargs
    if given.get("offsets") is not None:
        raise UnsupportedModule(
            "EmbeddingBag takes offsets, which cut one long row of tokens into bags; give it "
            "tokens of two dimensions, a bag in each row, with padding_idx where bags differ"
        )
    if layer.mode == "max" or layer.scale_grad_by_freq:
        return None
    tokens_BT: Tensor = given["input"]
    call.check_rows(tokens_BT, batch)
    weights = given.get("per_sample_weights")
    weights_BT = torch.ones_like(tokens_BT, dtype=wide(cotangent).dtype)
    if weights is not None:
        weights_BT = wide(weights)
    if layer.padding_idx is not None:
        weights_BT = weights_BT * (tokens_BT != layer.padding_idx)
    if layer.mode == "mean":
        weights_BT = weights_BT / weights_BT.sum(dim=1, keepdim=True).clamp_min(1)
    b_BTP = weights_BT[:, :, None] * wide(cotangent)[:, None, :]
    return {"weight": table_gradients(layer.weight, tokens_BT, b_BTP)} if wanted else {}
