"""Per-record gradients of one operand of one operator, by the operator's name.

A parameter, or a tensor made from parameters alone, enters an operator as an operand. The operator
saved its other operands, and autograd gives its cotangent b, in which every element belongs to one
record. From those a rule makes the gradients of the operand, record by record: an outer product for
matrix products, a look-up for embeddings, a sum over the broadcast dimensions for everything that
is point-wise. An operator without a rule runs its own backward pass once per record.

`gradient_rule` is public: a user registers rules for operators and `torch.autograd.Function`s of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit.engines.convolution_gradients import kernel_gradients
from tacit.engines.gradients import RecordGradients, Stacked
from tacit.engines.products import Dense, Lookup
from tacit.engines.programs import run_node, saved
from tacit.engines.shadow_labels import Layout
from tacit.precision import wide
from tacit.torch_internals import Node, function_of, has_saved, is_python_node, signed


class NotFinite(ArithmeticError):
    """Infinite numbers of one record may have reached the gradients of others as 0·∞."""


@dataclass
class Use:
    """One operand of one operator, with what is needed for its per-record gradients.

    `cotangents` are those of the operator's outputs, `layouts` say which record each row of them
    belongs to, `operand` counts the operator's differentiable operands, and `shape` is that of the
    operand whose gradients are asked for.
    """

    node: Node
    operand: int
    shape: tuple[int, ...]
    cotangents: tuple[Tensor | None, ...]
    layouts: tuple[Layout | None, ...]
    num_records: int

    @cached_property
    def private(self) -> list[tuple[Tensor, Layout] | None]:
        """The cotangents of records with their layouts, None for an output that has none."""
        return [
            None if b is None or lay is None or lay.kind == "public" else (b, lay)
            for b, lay in zip(self.cotangents, self.layouts, strict=True)
        ]

    @cached_property
    def cotangent(self) -> Tensor:
        """The cotangent of the first output that has one."""
        return next(b for b in self.cotangents if b is not None)

    @cached_property
    def layout(self) -> Layout:
        return next(found[1] for found in self.private if found is not None)

    def saved(self, name: str) -> Any:
        """A value that the operator saved, by its name in PyTorch's derivatives."""
        return saved(self.node, name)

    def rows(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """(B, R, …): R rows for each record, taken from dimension `dim`; the others keep their
        order."""
        return rows_by_record(tensor, self.layout, self.num_records, dim)

    def summed(self, full: Tensor, shape: Sequence[int] | None = None) -> Tensor | None:
        """(B, *shape): a broadcast operand's gradients, summed over all other dimensions.

        `full` has the cotangent's shape. None where the operand itself has rows for records.
        """
        shape = self.shape if shape is None else shape
        extra = full.dim() - len(shape)
        place = self.layout.dim - extra
        if extra < 0 or (place >= 0 and shape[place] != 1):
            return None
        rows_BR = self.rows(wide(full))  # (B, R, the other dimensions)
        total = rows_BR.squeeze(1) if rows_BR.shape[1] == 1 else rows_BR.sum(1)
        if place >= 0:
            total = total.unsqueeze(1 + self.layout.dim)
        lacking = extra if place >= 0 else extra - 1  # dimensions in front that the operand has not
        if lacking:
            total = total.flatten(1, lacking).sum(1)
        over = [1 + d for d, size in enumerate(shape) if size == 1 and total.shape[1 + d] != 1]
        return total.sum(over, keepdim=True) if over else total

    def summed_by_channel(self, full: Tensor) -> Tensor | None:
        """The same for an operand with one number per channel, which is dimension 1 of `full`."""
        return self.summed(full, (*self.shape, *(1 for _ in full.shape[2:])))


# What a rule returns: a stack (B, *shape), a factored form, or None if the rule does not apply.
Found = RecordGradients | Dense | Lookup | Tensor | None
Rule = Callable[[Use], Found]
Registered = TypeVar("Registered", bound=Rule)
RULES: dict[str, Rule] = {}
FUNCTION_RULES: dict[type, Rule] = {}


def gradient_rule(*operators: Any) -> Callable[[Registered], Registered]:
    """Register the per-record gradients of an operator's operands.

    An operator is a `torch.autograd.Function` class of your own, or the name of an autograd node
    such as "AddmmBackward0" (`tensor.grad_fn.name()` tells it). The rule gets a `Use` and returns

    - a tensor of shape (B, *use.shape) with each record's gradient of the operand,
    - a `Dense` product, a `Lookup` or other `RecordGradients`, whose norms are exact or from
      above, or
    - None, where it does not apply: then the operator runs once per record.

    Record i's gradient must depend on row i alone. `use.saved_tensors` of a Function are
    `use.node.saved_tensors`; `use.rows(t)` splits a tensor into (B, R, …). Each plan compares the
    first records' gradients with autograd's, so a wrong rule is refused when it is first used.

        @tacit.gradient_rule(MyScale)
        def scale(use):
            (x,) = use.node.saved_tensors
            return (use.rows(x) * use.rows(use.cotangent)).sum(1)
    """

    def register(rule: Registered) -> Registered:
        for operator in operators:
            if isinstance(operator, str):
                RULES[operator] = rule
            elif isinstance(operator, type) and issubclass(operator, torch.autograd.Function):
                FUNCTION_RULES[operator] = rule
            else:
                raise TypeError(
                    f"gradient_rule was given {operator!r}; give a torch.autograd.Function class "
                    'or the name of an autograd node, such as "AddmmBackward0"'
                )
        return rule

    return register


def rule_for(node: Node) -> Rule | None:
    """The registered rule, the rule for broadcast operands, or None for a user's Function."""
    if is_python_node(node):
        function = function_of(node)
        return None if function is None else FUNCTION_RULES.get(function)
    return RULES.get(node.name(), _broadcast)


def gradients_of(use: Use) -> Dense | Lookup | RecordGradients:
    """What the operator's rule finds, or its own backward pass for one record at a time."""
    rule = rule_for(use.node)
    found: Found = None
    if use.layout.kind != "scattered" and (rule in _COMPLEX or not use.cotangent.is_complex()):
        found = None if rule is None else rule(use)
    if found is None:
        found = _one_by_one(use)
    if isinstance(found, Tensor):
        return Stacked(wide(found).reshape(use.num_records, *use.shape))
    return found


def _one_by_one(use: Use) -> Tensor:
    """The operator's own backward pass, with the cotangents of one record at a time.

    The node itself is called, not autograd from the node on: other operands may lead to the same
    place by ways that have edges of their own. What the operator saved is of all records, and a
    cotangent of zero does not hide an infinite number (0·∞ is NaN): raises NotFinite then.
    """
    owners = [owners_of(*found, use.num_records) if found else None for found in use.private]
    present = set(range(use.num_records))
    if not any(found and found[1].ids is None for found in use.private):
        # A loop over the records in Python has an operator for each.
        present &= {r for owner in owners if owner is not None for r in owner.unique().tolist()}
    nothing = torch.zeros(use.shape, device=use.cotangent.device, dtype=use.cotangent.dtype)
    rows = [wide(nothing)] * use.num_records
    for record in present:
        cotangents = [
            None if b is None or owner is None else torch.where(owner == record, b, 0.0)
            for b, owner in zip(use.cotangents, owners, strict=True)
        ]
        row = run_node(use.node, cotangents)[use.operand]
        if row is not None:
            rows[record] = wide(row.to_dense() if row.is_sparse else row).sum_to_size(use.shape)
    stack = torch.stack(rows)
    if use.num_records > 1 and not stack.isfinite().all():
        raise NotFinite
    return stack


def owners_of(tensor: Tensor, layout: Layout, num_records: int) -> Tensor:
    """The record of each element, in a shape that broadcasts to that of `tensor`."""
    if layout.kind == "scattered":
        assert layout.ids is not None
        return layout.ids
    owner = layout.ids
    if owner is None:
        records = torch.arange(num_records, device=tensor.device)
        owner = records.repeat_interleave(layout.inner).repeat(layout.outer)
    return owner.view([-1 if dim == layout.dim else 1 for dim in range(tensor.dim())])


def rows_by_record(
    tensor: Tensor, layout: Layout, num_records: int, dim: int | None = None
) -> Tensor:
    """(B, R, …) from the rows of dimension `dim`, by default the layout's own."""
    dim = layout.dim if dim is None else dim
    if layout.kind == "blocks":
        outer, inner = layout.outer, layout.inner
        if outer == 1 and dim == 0:
            return tensor.reshape(num_records, inner, *tensor.shape[1:])
        split = tensor.unflatten(dim, (outer, num_records, inner))
        return split.movedim((dim + 1, dim, dim + 2), (0, 1, 2)).flatten(1, 2)
    assert layout.ids is not None
    places_BR = padded_places(layout.ids, num_records)
    rows = tensor.movedim(dim, 0)
    with_zero = torch.cat([rows, torch.zeros_like(rows[:1])])
    return with_zero[places_BR]


def padded_places(ids_N: Tensor, num_records: int) -> Tensor:
    """(B, R) places of each record's rows, N where a record has fewer than R. Reads the ids."""
    counts_B = torch.bincount(ids_N[ids_N >= 0], minlength=num_records)
    width = max(1, int(counts_B.max()))
    order = torch.argsort(ids_N, stable=True)
    order = order[ids_N[order] >= 0]
    starts_B = counts_B.cumsum(0) - counts_B
    record = ids_N[order]
    place = torch.arange(len(order), device=ids_N.device) - starts_B[record]
    places = torch.full((num_records, width), len(ids_N), device=ids_N.device)
    places[record, place] = order
    return places


# Matrix products.


@gradient_rule("AddmmBackward0")
def _addmm(use: Use) -> Found:
    if use.operand == 0:
        return _scaled(use.summed(use.cotangent), use.saved("beta"))
    return _matrix(use, use.operand - 1, ("mat1", "mat2"), use.saved("alpha"))


@gradient_rule("MmBackward0")
def _mm(use: Use) -> Found:
    return _matrix(use, use.operand, ("self", "mat2"))


def _matrix(use: Use, operand: int, names: tuple[str, str], alpha: float = 1) -> Found:
    """y = x W has ∂W = Σ_t x_t b_tᵀ over rows t; y = W x has ∂W = Σ_t b_t x_tᵀ over columns t."""
    if use.layout.dim == operand:
        return None
    x = wide(use.rows(use.saved(names[1 - operand]), use.layout.dim))
    b = _scaled(wide(use.rows(use.cotangent)), alpha)
    return Dense(b, x) if operand else Dense(x, b)


@gradient_rule("BmmBackward0", "BaddbmmBackward0")
def _bmm(use: Use) -> Found:
    """A matrix for each of H groups, with the records in the rows (or columns) of every group.

    The groups may be frequencies, and everything complex: then ∂W = Σ_t x̄_t b_tᵀ.
    """
    plain = use.node.name() == "BmmBackward0"
    if not plain and use.operand == 0:
        return _scaled(use.summed(use.cotangent), use.saved("beta"))
    names = ("self", "mat2") if plain else ("batch1", "batch2")
    operand = use.operand if plain else use.operand - 1
    if use.layout.dim != 2 - operand:
        return None
    x_BRHD = wide(use.rows(use.saved(names[1 - operand]), use.layout.dim).conj())
    b_BRHP = _scaled(wide(use.rows(use.cotangent)), 1 if plain else use.saved("alpha"))
    sides = (x_BRHD, b_BRHP) if operand else (b_BRHP, x_BRHD)
    return Stacked(torch.einsum("brhm,brhn->bhmn", *sides))


@gradient_rule("TrilinearBackward0")
def _bilinear(use: Use) -> Found:
    """`nn.Bilinear`: y_o = Σ_ij x_i W_oij z_j has ∂W_oij = b_o x_i z_j."""
    sums = [list(use.saved(name)) for name in ("expand1", "expand2", "expand3", "sumdim")]
    if use.operand != 1 or use.layout.dim or sums != [[1, 3], [0], [1, 2], [2, 3]]:
        return None
    x, z = use.rows(wide(use.saved("i1")), 0), use.rows(wide(use.saved("i3")), 0)
    return Stacked(torch.einsum("bro,bri,brj->boij", use.rows(wide(use.cotangent)), x, z))


# Look-ups.


@gradient_rule("EmbeddingBackward0")
def _embedding(use: Use) -> Found:
    if use.operand != 0 or use.saved("scale_grad_by_freq") or use.layout.kind != "blocks":
        return None
    tokens_BT = use.rows(use.saved("indices")).flatten(1)
    values = wide(use.rows(use.cotangent)).reshape(*tokens_BT.shape, -1)
    padding = signed(use.saved("padding_idx"))
    if padding >= 0:
        values = values.masked_fill((tokens_BT == padding)[..., None], 0.0)
    return Lookup(use.shape[0], tokens_BT, values)


@gradient_rule("EmbeddingBagBackward0")
def _embedding_bag(use: Use) -> Found:
    """Sums or means of look-ups: a token's cotangent is that of its bag."""
    by_sum, by_mean = 0, 1
    mode, layout = use.saved("mode"), use.layout
    plain = use.saved("per_sample_weights") is None and signed(use.saved("padding_idx")) < 0
    if use.operand != 0 or use.saved("scale_grad_by_freq") or not plain:
        return None
    if mode not in (by_sum, by_mean) or layout.dim or layout.kind != "blocks":
        return None
    b, indices = wide(use.cotangent), use.saved("indices")
    places = torch.arange(len(indices), device=b.device)
    bag_of_token = torch.searchsorted(use.saved("offsets").long(), places, right=True) - 1
    if mode == by_mean:
        sizes = torch.bincount(bag_of_token, minlength=len(b))
        b = b / sizes.clamp_min(1)[:, None]
    owner = owners_of(b[:, 0], layout, use.num_records)
    tokens = Layout("rows", ids=owner[bag_of_token])
    sides = (rows_by_record(x, tokens, use.num_records) for x in (indices, b[bag_of_token]))
    return Lookup(use.shape[0], *sides)


@gradient_rule("IndexBackward0")
def _index(use: Use) -> Found:
    """table[i, j, …] with tensors of integers for the first dimensions; they may be public."""
    indices = use.saved("indices")
    if use.operand != 0 or any(i is None or i.dtype == torch.bool for i in indices):
        return None
    indexed = use.shape[: len(indices)]
    place = _flat_places(indices, indexed)
    if use.layout.dim >= place.dim():
        return None
    tokens_BT = use.rows(place).flatten(1)
    values = wide(use.rows(use.cotangent)).reshape(*tokens_BT.shape, -1)
    num_rows = math.prod(indexed)
    if len(use.shape) == 2 and len(indices) == 1:
        return Lookup(num_rows, tokens_BT, values)
    return Lookup(num_rows, tokens_BT, values).rows()


def _flat_places(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Which row of a table is read, where its first dimensions, of these sizes, are one."""
    parts = torch.broadcast_tensors(*indices)
    place = torch.zeros_like(parts[0], dtype=torch.long)
    for part, size in zip(parts, sizes, strict=True):
        place = place * size + torch.where(part < 0, part + size, part)
    return place


def is_look_up(node: Node) -> bool:
    """Whether an operator reads rows of its one operand, so that `looked_up` holds for it."""
    if node.name() == "IndexBackward0":
        indices = saved(node, "indices")
        return all(index is not None and index.dtype != torch.bool for index in indices)
    return node.name() == "EmbeddingBackward0" and not saved(node, "scale_grad_by_freq")


def looked_up(node: Node, shape: Sequence[int], rows_B: Tensor) -> Lookup | Stacked:
    """The gradients of a table of some shape, from those of what was read at public places.

    The same places for every record: positions in a sequence, distances between two of them.
    """
    if node.name() == "IndexBackward0":
        indices = saved(node, "indices")
        num_read, place = len(indices), _flat_places(indices, shape[: len(indices)])
    else:
        num_read, place = 1, saved(node, "indices")
    tokens_BT = place.reshape(1, -1).expand(len(rows_B), -1)
    values = rows_B.reshape(*tokens_BT.shape, -1)
    if node.name() == "EmbeddingBackward0" and (padding := signed(saved(node, "padding_idx"))) >= 0:
        values = values.masked_fill((tokens_BT == padding)[..., None], 0.0)
    table = Lookup(math.prod(shape[:num_read]), tokens_BT, values)
    if len(shape) == 2 and num_read == 1:
        return table
    return Stacked(table.rows().reshape(len(rows_B), *shape))


@gradient_rule("IndexSelectBackward0")
def _index_select(use: Use) -> Found:
    if signed(use.saved("dim")) % len(use.shape) or use.layout.dim or len(use.shape) != 2:
        return None
    tokens_BT = use.rows(use.saved("index"))
    return Lookup(use.shape[0], tokens_BT, wide(use.rows(use.cotangent)))


# Convolutions and normalisation.


@gradient_rule("ConvolutionBackward0")
def _convolution(use: Use) -> Found:
    b = use.cotangent
    if use.operand == 2:
        return use.summed_by_channel(b)
    if use.operand != 1 or use.layout.dim or use.layout.kind != "blocks":
        return None
    inputs, rows = use.saved("input"), use.layout.outer * use.layout.inner
    if use.layout.outer > 1:
        inputs, b = use.rows(inputs).flatten(0, 1), use.rows(b).flatten(0, 1)
    names = "weight", "stride", "padding", "dilation", "transposed", "output_padding", "groups"
    return kernel_gradients(*(inputs, b, *map(use.saved, names), rows))


@gradient_rule("NativeLayerNormBackward0")
def _layer_norm(use: Use) -> Found:
    values = wide(use.cotangent)
    if use.operand == 1:
        x, mean, rstd = (wide(use.saved(name)) for name in ("input", "result1", "result2"))
        values = values * ((x - mean) * rstd)
    return use.summed(values)


@gradient_rule("FusedRmsNormBackward0")
def _rms_norm(use: Use) -> Found:
    values = wide(use.cotangent)
    if use.operand == 1:
        values = values * (wide(use.saved("input")) * wide(use.saved("result1")))
    return use.summed(values)


@gradient_rule("NativeGroupNormBackward0")
def _group_norm(use: Use) -> Found:
    if use.operand == 2:
        return use.summed_by_channel(use.cotangent)
    if use.layout.dim or use.layout.kind != "blocks" or use.layout.outer > 1:
        return None
    x, mean, rstd = (use.saved(name) for name in ("input", "result1", "result2"))
    return use.summed(group_norm_rows(x, mean, rstd, use.cotangent, use.saved("group")))


def group_norm_rows(
    inputs: Tensor, mean: Tensor, rstd: Tensor, cotangent: Tensor, num_groups: int
) -> Tensor:
    """Σ x̂·b of each row and channel, with x̂ = (x − mean)·rstd in each group."""
    x, b, mean, rstd = wide(inputs), wide(cotangent), wide(mean), wide(rstd)
    mean, rstd = mean.reshape(len(x), num_groups), rstd.reshape(len(x), num_groups)
    grouped = (len(x), num_groups, x.shape[1] // num_groups, *x.shape[2:])
    column = (len(x), num_groups, *(1 for _ in grouped[2:]))
    centred = x.reshape(grouped) - mean.view(column)
    # rstd is the same for all positions of a channel, and is multiplied in at the end.
    product = (centred.reshape(x.shape) * b).reshape(*x.shape[:2], -1).sum(dim=2)
    return product * rstd.repeat_interleave(grouped[2], dim=1)


@gradient_rule("NativeBatchNormBackward0", "CudnnBatchNormBackward0", "MiopenBatchNormBackward0")
def _batch_norm(use: Use) -> Found:
    """With fixed statistics, y = (x − μ)/√(σ² + ε)·γ + β, channel by channel."""
    if use.saved("training"):
        return None
    values = wide(use.cotangent)
    if use.operand == 1:
        shape = (1, -1) + (1,) * (values.dim() - 2)
        mean, variance = wide(use.saved("running_mean")), wide(use.saved("running_var"))
        epsilon = "eps" if has_saved(use.node, "eps") else "epsilon"
        rstd = (variance + use.saved(epsilon)).rsqrt()
        values = values * ((wide(use.saved("input")) - mean.view(shape)) * rstd.view(shape))
    return use.summed_by_channel(values)


# Recurrent cells of a GPU: a bias's gradient is that of the gates it is added to.


@gradient_rule("ThnnFusedLstmCellBackward0", "ThnnFusedGruCellBackward0")
def _fused_cell(use: Use) -> Found:
    """Operands: gates of the input and of the hidden state, the state, a bias for each gate."""
    if use.operand not in (3, 4) or use.layout.dim or use.layout.kind != "blocks":
        return None
    gate = run_node(use.node, use.cotangents)[use.operand - 3]
    return None if gate is None else use.rows(wide(gate)).sum(1)


# Broadcast operands.


@gradient_rule("ExpandBackward0")
def _expand(use: Use) -> Found:
    return use.summed(use.cotangent)


@gradient_rule("RepeatBackward0")
def _repeat(use: Use) -> Found:
    b, layout = use.cotangent, use.layout
    extra = b.dim() - len(use.shape)
    if len(use.shape) == b.dim() == 1 and layout.kind == "blocks":
        if layout.outer == 1 and layout.inner % use.shape[0] == 0:
            return use.rows(wide(b)).reshape(use.num_records, -1, use.shape[0]).sum(1)
        return None
    if any(n not in (1, m) for n, m in zip(use.shape, b.shape[extra:], strict=True)):
        return None
    return use.summed(b)


def _broadcast(use: Use) -> Found:
    """Any point-wise operator: its own backward pass, before the sum over broadcast dimensions."""
    full = run_node(use.node, use.cotangents)[use.operand]
    if full is None or full.shape != use.cotangent.shape or tuple(full.shape) == use.shape:
        return None
    return use.summed(full)


def _scaled(values: Any, factor: float) -> Any:
    return values if values is None or factor == 1 else values * factor


# Rules that hold for complex numbers; a parameter is real, so these are never its own gradients.
_COMPLEX = (_bmm, _broadcast)
