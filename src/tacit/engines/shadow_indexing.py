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

`gather`, `index_select`, `scatter_add` and the like are all written as `base[key]`, so there is one
rule for reading and one for writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tacit.engines.shadow_calls import Call, Labels, label_rule
from tacit.engines.shadow_labels import (
    SEVERAL,
    combine,
    distinct,
    public_labels,
    reduce_labels,
    scatter_labels,
)
from tacit.torch_internals import schema_of


class _Key:
    """The key of the `base[key]` that an operator reads or writes, and who chose it.

    Attributes:
        key: one slice or tensor of positions for each dimension of the base.
        chosen: each index that was given, with the dimensions of the base that it chooses in.
        private_dims: the dimensions of the base in which private data chooses.
        labels: labels of the index, broadcasting to `base[key]`.
        value_dims: the dimensions of `base[key]` along which the indices run.
    """

    def __init__(self, call: Call, rank: int, indices: Sequence[Tensor | None]) -> None:
        given = [index for index in indices if index is not None]
        _no_overlap(call, given)
        key: list[Tensor | slice] = []
        labels: list[Tensor] = []
        self.chosen: list[tuple[range, Tensor]] = []
        for index in indices:
            start = len(key)
            if index is None:
                key.append(slice(None))
                continue
            if index.dtype in (torch.bool, torch.uint8):
                positions = index.to(call.device).nonzero(as_tuple=True)
                labels.append(call.labels(index)[positions])
                call.selects = call.selects or call.private(index)
                key.extend(positions)
            else:
                labels.append(call.labels(index))
                key.append(index.to(call.device).long())
            self.chosen.append((range(start, len(key)), index))
        self.key = tuple(key)
        self.private_dims = [d for dims, i in self.chosen if call.private(i) for d in dims]
        self.dims = [d for dims, _ in self.chosen for d in dims]
        joined = combine(*labels)
        adjacent = self.dims == list(range(self.dims[0], self.dims[-1] + 1)) if self.dims else True
        before = self.dims[0] if self.dims and adjacent else 0
        after = rank - len(self.dims) - before
        self.value_dims: Sequence[int] = range(before, before + joined.dim())
        self.labels = joined.reshape((1,) * before + tuple(joined.shape) + (1,) * after)

    def along(self, dim: int, rank: int) -> _Key:
        """The same for an index with all dimensions of the base, as of `gather` and `scatter`."""
        index = self.key[dim]
        assert isinstance(index, Tensor)
        lines = [torch.arange(size, device=index.device) for size in index.shape]
        lines = [line.view(-1, *[1] * (rank - k - 1)) for k, line in enumerate(lines)]
        self.key = (*lines[:dim], index, *lines[dim + 1 :])
        self.labels = self.labels.reshape(index.shape)
        self.dims, self.value_dims = list(range(rank)), [dim]
        return self


def _locate(call: Call, base: Tensor) -> tuple[Tensor, _Key]:
    """The labels of the base, in the shape that the key is for, and the key."""
    if "indices" in call.arguments:
        indices = call["indices"]
        indices = [indices] if isinstance(indices, Tensor) else indices
        return base, _Key(call, base.dim(), indices)
    index = call["index"]
    if call.name in ("take", "put"):
        return base.reshape(-1), _Key(call, 1, [index])
    base = base.reshape(base.shape or (1,))
    dim = call["dim"] % base.dim()
    key = _Key(call, base.dim(), [None] * dim + [index.reshape(index.shape or (1,))])
    return base, key.along(dim, base.dim()) if call.name in _ALONG else key


_ALONG = ("gather", "scatter", "scatter_add", "scatter_reduce")


@label_rule("index", "_unsafe_index", "gather", "index_select", "take", "embedding")
def _read(call: Call) -> Labels:
    name = "weight" if call.name == "embedding" else "self"
    base, key = _locate(call, call.need(name))
    used = key.labels
    if call.private(call[name]):
        for dims, index in key.chosen:
            _note_order(call, base, dims, index)
        base = distinct(base, key.dims)
        used = combine(base[key.key], key.labels)
        if key.private_dims:
            reachable = reduce_labels(base, key.private_dims, keepdim=True).expand(base.shape)
            used = _follow(call, used, combine(reachable[key.key], used))
    return used if used.dim() == call.output.dim() else used.reshape(call.output.shape)


@label_rule("index_put", "_index_put_impl", "_unsafe_index_put", "put", "scatter", "scatter_add")
def _write(call: Call) -> Labels:
    accumulates = call.get("accumulate", call.get("reduce", "add" in call.name))
    indices = call.get("indices", [])
    one_mask = len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool
    if one_mask and call["values"].numel() == 1 and not accumulates:
        # `x[mask] = number` needs no count of what the mask chooses.
        mask = call.labels(indices[0])
        mask = mask.reshape(*mask.shape, *[1] * (call["self"].dim() - mask.dim()))
        return combine(call.need("self"), mask, call.need("values").reshape(()))
    base, key = _locate(call, call.need("self"))
    positions = torch.arange(base.numel(), device=call.device).view(base.shape)[key.key]
    found = [call.of(name) for name in ("values", "source", "src", "value")]
    values = combine(public_labels((), call.device), *found)
    if call.name == "put":
        values = values.reshape(positions.shape)
    elif call.name in _ALONG and values.dim():
        values = values[tuple(slice(size) for size in positions.shape)]
    values = values.expand(positions.shape)
    for dims, index in key.chosen:
        _note_order(call, base, dims, index)
    _note_order(call, values, key.value_dims, *[index for _, index in key.chosen])
    reach = public_labels(base.shape, call.device)
    if key.private_dims:  # it could have reached everything along the dimensions that it chooses in
        reach = scatter_labels(base.numel(), positions, key.labels)[0].view(base.shape)
        reach = reduce_labels(reach, key.private_dims, keepdim=True).expand(base.shape)
    new, touched = scatter_labels(base.numel(), positions, combine(values, key.labels))
    new, touched = new.view(base.shape), touched.view(base.shape)
    old_matters = torch.ones_like(touched) if accumulates else ~touched | (reach != 0)
    used = combine(torch.where(old_matters, base, 0), torch.where(touched, new, 0))
    return _follow(call, used, combine(used, reach)).reshape(call.output.shape)


label_rule("scatter_reduce", "index_add", "index_copy", "index_fill", "index_reduce")(_write)


def _follow(call: Call, used: Tensor, reachable: Tensor) -> Tensor:
    """Labels with everything that could have been reached, or those of what was used."""
    several = (reachable == SEVERAL) & (used != SEVERAL)
    if not call.backward and bool(several.any()):
        call.selects = True
        return torch.where(several, used, reachable)
    return reachable


def _note_order(call: Call, labels: Tensor, dims: Sequence[int], *indices: Tensor) -> None:
    """Note where a public index along `dims` decides whose row is read or written.

    It may be drawn anew in the next pass (a random permutation, some records left out), or be a
    table that is replaced. What `arange` made is neither.
    """
    if call.backward or call.reorders or labels.numel() == 0:
        return
    if not all(call.private(index) or call.in_order(index) for index in indices):
        met = bool((reduce_labels(labels, dims) == SEVERAL).any())
        call.reorders = met and not bool((labels == SEVERAL).any())


def _no_overlap(call: Call, indices: Sequence[Tensor]) -> None:
    # Values are read after the operator has run; an index that it overwrote is gone.
    if schema_of(call.func).is_mutable:
        written = {t.untyped_storage().data_ptr() for t in call.outputs if t is not None}
        if any(index.untyped_storage().data_ptr() in written for index in indices):
            raise ValueError("the index shares memory with what is written")


# --- masks and counts -------------------------------------------------------------------------


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
    _no_overlap(call, [call["mask"]])
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
    result = torch.zeros(prod(call.output.shape), dtype=torch.int32, device=call.device)
    result[: chosen.numel()] = chosen
    return result.view(call.output.shape)


@label_rule("repeat_interleave")
def _repeat_interleave(call: Call) -> Labels:
    return torch.repeat_interleave(call.need("repeats"), call["repeats"])


@label_rule("_pack_padded_sequence")
def _pack(call: Call) -> Labels:
    labels = call.need("input").to(torch.float64)
    packed, _ = call.func(labels, call["lengths"], call["batch_first"])
    return [packed.to(torch.int32), reduce_labels(call.need("lengths"))]


# --- the backward of embeddings, and bags of them -------------------------------------------------


@label_rule("embedding_dense_backward", "_embedding_bag_dense_backward", "_embedding_bag_backward")
def _embedding_backward(call: Call) -> Labels:
    if call.get("scale_grad_by_freq", False):
        raise NotImplementedError("a record's gradient is divided by counts over all records")
    return call.whole()


def _bags(call: Call, num_bags: int) -> Tensor:
    """The bag that each index of an embedding bag is in."""
    starts = call["offsets"][:num_bags].to(call.device).contiguous()
    positions = torch.arange(call["indices"].numel(), device=call.device, dtype=starts.dtype)
    return torch.searchsorted(starts, positions, right=True) - 1


@label_rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(call: Call) -> Labels:
    labels = combine(call.need("indices"), call.of("per_sample_weights"))
    if call.private(call["weight"]):
        labels = combine(labels, reduce_labels(call.need("weight"), -1)[call["indices"]])
        call.selects = call.selects or call.private(call["indices"])  # whose row it is
        _note_order(call, call.need("weight"), [0], call["indices"])
    _note_order(call, labels, [0], call["offsets"])
    num_bags = call.output.shape[0]
    per_bag, _ = scatter_labels(num_bags, _bags(call, num_bags), labels)
    call.selects = call.selects or call.private(call["offsets"])
    per_bag = combine(per_bag, call.need("offsets")[:num_bags])
    bag_of_index = reduce_labels(call.need("offsets"))
    bag_size = per_bag if call.get("padding_idx", -1) >= 0 else bag_of_index
    rows = per_bag.unsqueeze(-1)
    return [rows, bag_of_index, bag_size, rows if call["mode"] == 2 else 0]  # 2 is the maximum


@label_rule("_embedding_bag_per_sample_weights_backward")
def _embedding_bag_weights(call: Call) -> Labels:
    grad = reduce_labels(call.need("grad"), -1)[_bags(call, len(call["offsets"]))]
    weight, offsets = reduce_labels(call.need("weight")), reduce_labels(call.need("offsets"))
    return combine(grad, call.need("indices"), weight, offsets)
