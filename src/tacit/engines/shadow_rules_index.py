"""Rules of operators that read or write at positions given by another tensor.

The values of the index decide which label an output gets, so these rules read them. An index that
comes from private data is more than that: record i decides *where* something is read or written.

- Reading: the output belongs to the owner of the element read and to the owner of the index.
- Writing: every element that the index could have reached belongs to the owner of the index as
  well, written or not. This is what makes one-hot encoding of a private class sound.

Where an index of one record could have reached an element of another record, the flow is implicit
and its labels would be -1 for every model that sorts tokens to experts. There the labels follow the
positions that were in fact used, and the operator is noted as a selection. In a backward pass they
are -1: such an operator adds up the gradient of a table, which belongs to no record.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.engines.shadow_labels import (
    SEVERAL,
    combine,
    count,
    public_labels,
    reduce_labels,
    scatter_labels,
)
from tacit.engines.shadow_rules import Call, Labels, label_rule


def _positions(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.arange(count(shape), device=device).view(tuple(shape))


def _follow(call: Call, used: Tensor, reachable: Tensor) -> Tensor:
    """Labels with everything that could have been reached, or those of what was used."""
    several = (reachable == SEVERAL) & (used != SEVERAL)
    if not call.backward and bool(several.any()):
        call.selects = True
        return torch.where(several, used, reachable)
    return reachable


def _write(
    call: Call,
    base: Tensor,
    positions: Tensor,
    values: Tensor,
    index: Tensor,
    reach: Tensor,
    keeps: bool,
) -> Tensor:
    """Labels after writing values at positions of base.

    Args:
        index: labels of the index, broadcasting to positions.
        reach: labels of all indices that could have pointed at each element, of base's shape.
        keeps: whether the old value still matters where something is written (accumulation).
    """
    new, touched = scatter_labels(base.numel(), positions, combine(values, index))
    new, touched = new.view(base.shape), touched.view(base.shape)
    old_matters = torch.ones_like(touched) if keeps else ~touched | (reach != 0)
    used = combine(torch.where(old_matters, base, 0), torch.where(touched, new, 0))
    return _follow(call, used, combine(used, reach))


def _note_order(call: Call, labels: Tensor, dims: Sequence[int], *indices: Tensor) -> None:
    """Note where a public index along `dims` decides whose row is read or written.

    It may be drawn anew in the next pass (a random permutation, some records left out). One of
    several that counts the rows is enough to fix their order.
    """
    if call.backward or call.reorders or labels.numel() == 0:
        return
    if not any(call.private(index) or call.in_order(index) for index in indices):
        met = bool((reduce_labels(labels, dims) == SEVERAL).any())
        call.reorders = met and not bool((labels == SEVERAL).any())


def _no_overlap(call: Call, *indices: Tensor) -> None:
    # Values are read after the operator has run; an index that it overwrote is gone.
    if call.func._schema.is_mutable:
        written = {t.untyped_storage().data_ptr() for t in call.outputs if t is not None}
        if any(index.untyped_storage().data_ptr() in written for index in indices):
            raise ValueError("the index shares memory with what is written")


class _Index:
    """Index tensors of `x[i, j, ...]`, boolean masks replaced by the positions that they choose."""

    def __init__(self, call: Call, shape: Sequence[int], indices: Sequence[Tensor | None]) -> None:
        self.given = [index for index in indices if index is not None]
        _no_overlap(call, *self.given)
        parts: list[Tensor | None] = []
        labels: list[Tensor] = []
        self.private_dims: list[int] = []
        self.each: list[tuple[range, Tensor]] = []
        for index in indices:
            if index is None:
                parts.append(None)
                continue
            shadow = call.labels(index)
            dim = len(parts)
            if index.dtype in (torch.bool, torch.uint8):
                chosen = index.to(call.device).nonzero(as_tuple=True)
                parts.extend(chosen)
                labels.append(shadow[chosen])
                call.selects = call.selects or call.private(index)
                width = index.dim()
            else:
                parts.append(index.to(call.device).long())
                labels.append(shadow)
                width = 1
            self.each.append((range(dim, dim + width), index))
            if call.private(index):
                self.private_dims += range(dim, dim + width)
        self.dims = [dim for dim, part in enumerate(parts) if part is not None]
        key = tuple(slice(None) if part is None else part for part in parts)
        self.positions = _positions(shape, call.device)[key]
        joined = combine(*labels)
        self.joined = joined
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1)) if self.dims else True
        before = self.dims[0] if self.dims and adjacent else 0
        after = self.positions.dim() - before - joined.dim()
        self.value_dims = range(before, before + joined.dim())
        self.labels = joined.reshape((1,) * before + tuple(joined.shape) + (1,) * after)

    def note_order(self, call: Call, base: Tensor) -> None:
        for dims, index in self.each:
            _note_order(call, base, dims, index)


@label_rule("index", "_unsafe_index")
def _index(call: Call) -> Labels:
    base = call.need("self")
    index = _Index(call, base.shape, call["indices"])
    index.note_order(call, base)
    used = combine(base.reshape(-1)[index.positions], index.labels)
    if not index.private_dims:
        return used
    reachable = reduce_labels(base, index.private_dims, keepdim=True).expand(base.shape)
    return _follow(call, used, combine(reachable.reshape(-1)[index.positions], used))


@label_rule("index_put", "_index_put_impl", "_unsafe_index_put")
def _index_put(call: Call) -> Labels:
    base = call.need("self")
    if _fills(call):
        mask = call.labels(call["indices"][0])
        spread = mask.reshape(*mask.shape, *(1 for _ in base.shape[mask.dim() :]))
        return combine(base, spread, call.need("values").reshape(()))
    index = _Index(call, base.shape, call["indices"])
    values = call.need("values").expand(index.positions.shape)
    index.note_order(call, base)
    _note_order(call, values, index.value_dims, *index.given)
    if index.private_dims:
        # Which of the indexed dimensions is private does not help: join over all of them.
        reach, _ = scatter_labels(
            base.numel(), index.positions, index.labels.expand(index.positions.shape)
        )
        reach = reduce_labels(reach.view(base.shape), index.private_dims, keepdim=True)
        reach = reach.expand(base.shape)
    else:
        reach = public_labels(base.shape, call.device)
    keeps = bool(call.get("accumulate", False))
    return _write(call, base, index.positions, values, index.labels, reach, keeps)


def _fills(call: Call) -> bool:
    """Whether `x[mask] = number` is written, which needs no count of what the mask chooses."""
    indices = [index for index in call["indices"] if index is not None]
    one_mask = len(call["indices"]) == 1 == len(indices) and indices[0].dtype == torch.bool
    return one_mask and call["values"].numel() == 1 and not call.get("accumulate", False)


@label_rule("_unsafe_masked_index", "_unsafe_masked_index_put_accumulate")
def _masked_index(call: Call) -> Labels:
    raise NotImplementedError(call.name)


@label_rule("gather")
def _gather(call: Call) -> Labels:
    base, index, dim = call.need("self"), call["index"], call["dim"]
    _no_overlap(call, index)
    labels = call.labels(index)
    if base.dim() == 0 or index.dim() == 0:
        return combine(reduce_labels(base), labels)
    _note_order(call, base, [dim], index)
    used = combine(torch.gather(base, dim, index.to(call.device)), labels)
    if not call.private(index):
        return used
    reachable = reduce_labels(base, dim, keepdim=True).expand(base.shape)
    reachable = torch.gather(reachable, dim, index.to(call.device))
    return _follow(call, used, combine(reachable, used))


@label_rule("index_select", "take")
def _index_select(call: Call) -> Labels:
    base, index = call.need("self"), call["index"]
    _no_overlap(call, index)
    labels = call.labels(index)
    if base.dim() == 0:
        return combine(base, labels).reshape(call.output.shape)
    _note_order(call, base, range(base.dim()) if call.name == "take" else [call["dim"]], index)
    if call.name == "take":
        used = combine(base.reshape(-1)[index.to(call.device)], labels)
        reachable = reduce_labels(base)
    else:
        dim = call["dim"] % base.dim()
        labels = labels.reshape([-1 if k == dim else 1 for k in range(base.dim())])
        used = combine(base.index_select(dim, index.to(call.device).reshape(-1)), labels)
        reachable = reduce_labels(base, dim, keepdim=True)
    if not call.private(index):
        return used
    return _follow(call, used, combine(reachable, used))


@label_rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(call: Call) -> Labels:
    base, index, dim = call.need("self"), call["index"], call["dim"]
    _no_overlap(call, index)
    labels = call.labels(index)
    source = call.of("src")
    values = labels if source is None else source
    if base.dim() == 0 or index.dim() == 0:
        return reduce_labels(combine(reduce_labels(base), reduce_labels(values), labels))
    corner = tuple(slice(size) for size in index.shape)
    values = combine(values[corner], labels)
    _note_order(call, base, [dim], index)
    _note_order(call, values, [dim], index)
    dim %= base.dim()
    lines = tuple(slice(None) if k == dim else part for k, part in enumerate(corner))
    positions = torch.gather(_positions(base.shape, call.device)[lines], dim, index.to(call.device))
    reach = torch.zeros(base.shape, dtype=torch.int32, device=call.device)
    if call.private(index):
        reach[lines] = reduce_labels(labels, dim, keepdim=True).expand_as(reach[lines])
    keeps = call.name != "scatter" or call.get("reduce") is not None
    return _write(call, base, positions, values, labels, reach, keeps)


@label_rule("index_add", "index_copy", "index_fill", "index_reduce")
def _index_write(call: Call) -> Labels:
    base, index = call.need("self"), call["index"]
    _no_overlap(call, index)
    labels = call.labels(index)
    source = call.of("source") if "source" in call.arguments else call.of("value")
    if base.dim() == 0:
        return combine(base, reduce_labels(labels), *(() if source is None else (source,)))
    dim = call["dim"] % base.dim()
    lines = [-1 if k == dim else 1 for k in range(base.dim())]
    positions = _positions(base.shape, call.device).index_select(
        dim, index.to(call.device).reshape(-1)
    )
    index_labels = labels.reshape(lines)
    values = public_labels((), call.device) if source is None else source
    if values.dim() == 0:
        values = values.expand(positions.shape)
    _note_order(call, base, [dim], index)
    _note_order(call, values, [dim], index)
    reach = reduce_labels(labels).expand(base.shape)
    keeps = call.name in ("index_add", "index_reduce")
    return _write(call, base, positions, values, index_labels, reach, keeps)


@label_rule("put")
def _put(call: Call) -> Labels:
    base, index = call.need("self"), call["index"]
    _no_overlap(call, index)
    labels = call.labels(index)
    reach = reduce_labels(labels).expand(base.shape)
    keeps = bool(call.get("accumulate", False))
    values = call.need("source").reshape(index.shape)
    _note_order(call, base, range(base.dim()), index)
    _note_order(call, values, range(values.dim()), index)
    return _write(call, base, index.to(call.device), values, labels, reach, keeps)


@label_rule("nonzero", "argwhere")
def _nonzero(call: Call) -> Labels:
    call.selects = True
    return call.need("self")[call["self"].nonzero(as_tuple=True)].unsqueeze(-1)


@label_rule("masked_select")
def _masked_select(call: Call) -> Labels:
    call.selects = call.private(call["mask"])
    mask, values = torch.broadcast_tensors(call["mask"], call["self"])
    labels = combine(call.need("mask"), call.need("self")).expand(values.shape)
    _note_order(call, labels, range(labels.dim()), mask)
    return labels[mask]


@label_rule("masked_scatter")
def _masked_scatter(call: Call) -> Labels:
    _no_overlap(call, call["mask"])
    call.selects = call.selects or call.private(call["mask"])
    base, source = call.need("self"), call.need("source").reshape(-1)
    _note_order(call, source, [0], call["mask"])
    shape = torch.broadcast_shapes(base.shape, call["mask"].shape)
    mask = call["mask"].expand(shape)
    result = combine(base, call.need("mask")).expand(shape).clone()
    result[mask] = combine(result[mask], source[: int(mask.sum())])
    return result


@label_rule("masked_scatter_backward")
def _masked_scatter_backward(call: Call) -> Labels:
    grad, mask = call.need("grad_output"), call["mask"]
    call.selects = call.selects or call.private(mask)
    chosen = combine(grad, call.need("mask").expand_as(grad))[mask.expand_as(grad)]
    result = torch.zeros(count(call.output.shape), dtype=torch.int32, device=call.device)
    result[: chosen.numel()] = chosen
    return result.view(call.output.shape)


@label_rule("repeat_interleave")
def _repeat_interleave(call: Call) -> Labels:
    return torch.repeat_interleave(call.need("repeats"), call["repeats"])


@label_rule("_pack_padded_sequence")
def _pack(call: Call) -> Labels:
    packed, _ = call.func(
        call.need("input").to(torch.float64), call["lengths"], call["batch_first"]
    )
    return [packed.to(torch.int32), reduce_labels(call.need("lengths"))]


# --- embeddings -----------------------------------------------------------------------------------


@label_rule("embedding")
def _embedding(call: Call) -> Labels:
    labels = call.need("indices").unsqueeze(-1)
    if not call.private(call["weight"]):
        return labels
    used = combine(call.need("weight")[call["indices"]], labels)
    return _follow(call, used, combine(used, reduce_labels(call.need("weight"))))


@label_rule("embedding_dense_backward", "_embedding_bag_dense_backward", "_embedding_bag_backward")
def _embedding_backward(call: Call) -> Labels:
    if call.get("scale_grad_by_freq", False):
        raise NotImplementedError("a record's gradient is divided by counts over all records")
    return call.whole()


@label_rule("embedding_renorm")
def _embedding_renorm(call: Call) -> Labels:
    return call.whole()


@label_rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(call: Call) -> Labels:
    indices, offsets = call["indices"], call["offsets"]
    labels = combine(call.need("indices"), call.of("per_sample_weights")).unsqueeze(-1)
    if call.private(call["weight"]):
        labels = combine(labels, call.need("weight")[indices])
    bags = call.output.shape[0]
    starts = offsets[:bags].to(call.device).contiguous()
    bag = torch.searchsorted(
        starts, torch.arange(indices.numel(), device=call.device, dtype=starts.dtype), right=True
    )
    width = labels.shape[-1]
    columns = torch.arange(width, device=call.device)
    joined, _ = scatter_labels(bags * width, (bag - 1).unsqueeze(-1) * width + columns, labels)
    per_bag = joined.view(bags, width)
    call.selects = call.selects or call.private(offsets)
    per_bag = combine(per_bag, call.need("offsets")[:bags].unsqueeze(-1))
    bag_of_index = reduce_labels(call.need("offsets"))
    skips_padding = call.get("padding_idx", -1) >= 0
    bag_size = reduce_labels(per_bag, -1) if skips_padding else bag_of_index
    uses_maximum = call["mode"] == 2
    return [per_bag, bag_of_index, bag_size, per_bag if uses_maximum else 0]


@label_rule("_embedding_bag_per_sample_weights_backward")
def _embedding_bag_weights(call: Call) -> Labels:
    grad = reduce_labels(call.need("grad"), -1)
    positions = torch.arange(call["indices"].numel(), device=call.device)
    starts = call["offsets"].to(call.device)
    bag = torch.searchsorted(starts, positions.to(starts.dtype), right=True) - 1
    weight = reduce_labels(call.need("weight"))
    offsets = reduce_labels(call.need("offsets"))
    return combine(grad[bag], call.need("indices"), weight, offsets)
