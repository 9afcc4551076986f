"""Multi-head attention in the open: softmax(Q Kᵀ/√d + mask) V between linear projections."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.errors import UnsupportedModule
from tacit.queries.engines.products import Products


def open_attention(
    module: nn.MultiheadAttention,
    products: Products,
    batch: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,  # only says what attn_mask is, which must be given too
) -> tuple[Tensor, Tensor | None]:
    """What nn.MultiheadAttention returns. B records, L queries, S keys, H heads, E the width."""
    records = 0 if module.batch_first else 1
    if query.dim() != 3 or query.shape[records] != batch:
        raise UnsupportedModule(
            f"MultiheadAttention with batch_first={module.batch_first} saw a tensor of shape "
            f"{tuple(query.shape)} where there are {batch} records; give it (records, positions, "
            "width) with batch_first=True, and the first two exchanged without"
        )
    q, k, v = _projections(module, products, query, key, value)
    padded = 0
    if module.bias_k is not None:
        k = torch.cat([k, products.constant("bias_k", batch)], dim=1)
        v = torch.cat([v, products.constant("bias_v", batch)], dim=1)
        padded += 1
    if module.add_zero_attn:
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        padded += 1
    heads = module.num_heads
    q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in (q, k, v))  # B H L E/H
    mask = _mask(attn_mask, key_padding_mask, batch, heads, padded, q.dtype)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        weights = F.dropout((scores if mask is None else scores + mask).softmax(dim=-1), dropout)
        mixed = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    out = products(mixed.transpose(1, 2).flatten(2), "out_proj.weight", "out_proj.bias")
    return out if module.batch_first else out.transpose(0, 1), weights


def _projections(
    module: nn.MultiheadAttention, products: Products, query: Tensor, key: Tensor, value: Tensor
) -> list[Tensor]:
    """Q, K and V with records first; in one product where they come from one tensor."""
    width = module.embed_dim
    same = query is key and key is value
    sides = [t if module.batch_first else t.transpose(0, 1) for t in (query, key, value)]
    packed = module.in_proj_weight is not None
    if packed and same:
        return list(products(sides[0], "in_proj_weight", "in_proj_bias").chunk(3, dim=-1))
    projected = []
    for i, (letter, side) in enumerate(zip("qkv", sides, strict=True)):
        rows = slice(i * width, (i + 1) * width)
        if packed:
            projected.append(products(side, "in_proj_weight", "in_proj_bias", rows, rows))
        else:
            name = f"{letter}_proj_weight"
            projected.append(products(side, name, "in_proj_bias", slice(None), rows))
    return projected


def _mask(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    batch: int,
    heads: int,
    padded: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Both masks as one number to add to each score; keys that the module adds are never masked."""
    total = None
    if attn_mask is not None:
        total = _to_add(attn_mask, dtype)
        total = total.unflatten(0, (batch, heads)) if total.dim() == 3 else total[None, None]
    if key_padding_mask is not None:
        keys = _to_add(key_padding_mask, dtype)[:, None, None, :]
        total = keys if total is None else total + keys
    return F.pad(total, (0, padded)) if total is not None and padded else total


def _to_add(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
