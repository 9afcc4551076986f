"""Per-record gradients of one operand of one operator, found by the operator's name.

A parameter, or a tensor made from parameters alone, enters an operator as an operand. The operator
saved its other operands, and autograd gives its cotangent b, in which every element belongs to one
record. From these a rule computes the operand's gradient of each record: an outer product for
matrix products, a look-up for embeddings, a sum over broadcast dimensions for point-wise operators.
An operator without a rule runs its own backward pass once per record.

`gradient_rule` is public: it registers rules for a user's operators and autograd Functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from tacit.engines.clipping import RecordGradients, Stacked
from tacit.engines.convolution_gradients import kernel_gradients
from tacit.engines.products import Dense, Lookup
from tacit.engines.programs import ProgramChanged, run_node, saved
from tacit.engines.shadow_labels import Layout
from tacit.precision import wide
from tacit.torch_internals import Node, function_of, has_saved, is_python_node, signed


class NotFinite(ArithmeticError):
    """Infinite numbers of one record may have reached the gradients of others as 0·∞."""


class NoRule(ProgramChanged):
    """A user's Function has a rule that does not apply, so each record must run alone."""


@dataclass
class Use:
    """One operand of one operator, with all that its per-record gradients are computed from.

    Args:
        node: the autograd node of the operator.
        operand: the place of the operand among the operator's differentiable operands.
        shape: the shape of that operand.
        cotangents: the gradients at the operator's outputs.
        layouts: the record that each row of a cotangent belongs to.
        num_records: B.
    """

    node: Node
    operand: int
    shape: tuple[int, ...]
    cotangents: tuple[Tensor | None, ...]
    layouts: tuple[Layout | None, ...]
    num_records: int

    @cached_property
    def private(self) -> list[tuple[Tensor, Layout] | None]:
        """The cotangents that hold values of records, with their layouts; None for the others."""
        return [
            None if b is None or layout is None or layout.kind == "public" else (b, layout)
            for b, layout in zip(self.cotangents, self.layouts, strict=True)
        ]

    @cached_property
    def cotangent(self) -> Tensor:
        """The cotangent of the first output that has one."""
        return next(b for b in self.cotangents if b is not None)

    @cached_property
    def layout(self) -> Layout:
        """The layout of the first private cotangent."""
        return next(pair[1] for pair in self.private if pair is not None)

    @property
    def is_by_row(self) -> bool:
        """Whether the cotangent's first dimension holds the same number of rows per record."""
        return self.layout.dim == 0 and self.layout.kind == "blocks"

    def saved(self, name: str) -> Any:
        """A value that the operator saved, by its name in PyTorch's derivatives."""
        return saved(self.node, name)

    def rows(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """(B, R, …): dimension `dim` split into R rows per record, in front of the others."""
        return rows_by_record(tensor, self.layout, self.num_records, dim)

    def summed(self, full: Tensor, shape: Sequence[int] | None = None) -> Tensor | None:
        """(B, *shape): the gradients of a broadcast operand, summed over all other dimensions.

        `full` has the cotangent's shape. None where the operand itself has rows of records.
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
        leading = extra if place >= 0 else extra - 1  # dimensions that the operand lacks in front
        if leading:
            total = total.flatten(1, leading).sum(1)
        over = [1 + d for d, size in enumerate(shape) if size == 1 and total.shape[1 + d] != 1]
        return total.sum(over, keepdim=True) if over else total

    def summed_by_channel(self, full: Tensor) -> Tensor | None:
        """The same for an operand with one number per channel, which is dimension 1 of `full`."""
        return self.summed(full, (*self.shape, *(1 for _ in full.shape[2:])))


# What a rule returns: a stack (B, *shape), a factored form, or None if the rule does not apply.
RuleResult = RecordGradients | Dense | Lookup | Tensor | None
Rule = Callable[[Use], RuleResult]
Registered = TypeVar("Registered", bound=Rule)
RULES: dict[str | type, Rule] = {}


def gradient_rule(*operators: Any) -> Callable[[Registered], Registered]:
    """Register the per-record gradients of an operator's operands.

    An operator is a `torch.autograd.Function` class, or the name of an autograd node such as
    "AddmmBackward0" (`tensor.grad_fn.name()` tells it). The rule is given a `Use` and returns

    - a tensor of shape (B, *use.shape) with each record's gradient of the operand,
    - a `Dense` product, a `Lookup` or other `RecordGradients`, whose norms are exact or from
      above, or
    - None, where it does not apply: then the operator runs once per record, and a program with a
      Function runs record by record.

    Record i's gradient must depend on row i alone. Each plan compares the first records' gradients
    with autograd's, so a wrong rule is refused when it is first used.

        @tacit.gradient_rule(MyScale)
        def scale(use):
            (x,) = use.node.saved_tensors
            return (use.rows(x) * use.rows(use.cotangent)).sum(1)
    """

    def register(rule: Registered) -> Registered:
        for operator in operators:
            is_class = isinstance(operator, type)
            if not (issubclass(operator, Function) if is_class else isinstance(operator, str)):
                raise TypeError(
                    f"gradient_rule was given {operator!r}; give a torch.autograd.Function class "
                    'or the name of an autograd node, such as "AddmmBackward0"'
                )
            RULES[operator] = rule
        return rule

    return register


def rule_for(node: Node) -> Rule | None:
    """The registered rule, the rule for broadcast operands, or None for a user's Function."""
    if is_python_node(node):
        function = function_of(node)
        return None if function is None else RULES.get(function)
    return RULES.get(node.name(), _broadcast)


def gradients_of(use: Use) -> Dense | Lookup | RecordGradients:
    """What the operator's rule gives, or its own backward pass for one record at a time."""
    rule = rule_for(use.node)
    result: RuleResult = None
    if use.layout.kind != "scattered" and (rule in _COMPLEX or not use.cotangent.is_complex()):
        result = None if rule is None else rule(use)
    if result is None:
        result = _one_by_one(use)
    if isinstance(result, Tensor):
        return Stacked(wide(result).reshape(use.num_records, *use.shape))
    return result


def _one_by_one(use: Use) -> Tensor:
    """The operator's own backward pass, with the cotangents of one record at a time.

    The node itself is called, not autograd from the node on: other operands may lead to the same
    place through edges of their own. The operator saved values of all records, and a cotangent of
    zero does not hide an infinite one (0·∞ is NaN). Raises NotFinite then. What a user's Function
    does with the values of other records is not known: raises NoRule.
    """
    if is_python_node(use.node):
        raise NoRule(f"the rule of {use.node.name().removesuffix('Backward')} does not apply")
    owners = [owners_of(*pair, use.num_records) if pair else None for pair in use.private]
    present = set(range(use.num_records))
    if not any(pair and pair[1].ids is None for pair in use.private):
        # A Python loop over the records runs one operator for each.
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


# The names of the two factors, and whether a tensor is added to their product.
_FACTORS = {
    "MmBackward0": ("self", "mat2", False),
    "AddmmBackward0": ("mat1", "mat2", True),
    "BmmBackward0": ("self", "mat2", False),
    "BaddbmmBackward0": ("batch1", "batch2", True),
}


@gradient_rule(*_FACTORS)
def _product(use: Use) -> RuleResult:
    """A product with a matrix, or with one matrix for each of H groups.

    y = x W has ∂W = Σ_t x̄_t b_tᵀ over rows t; y = W x has ∂W = Σ_t b_t x̄_tᵀ over columns t. The
    groups may be frequencies with complex entries.
    """
    *names, adds = _FACTORS[use.node.name()]
    if adds and use.operand == 0:
        return _scaled(use.summed(use.cotangent), use.saved("beta"))
    operand, grouped = use.operand - adds, len(use.shape) == 3
    if use.layout.dim != grouped + 1 - operand or (use.cotangent.is_complex() and not grouped):
        return None
    x = wide(use.rows(use.saved(names[1 - operand]), use.layout.dim).conj())
    b = _scaled(wide(use.rows(use.cotangent)), use.saved("alpha") if adds else 1)
    left, right = (x, b) if operand else (b, x)
    if grouped:
        return Stacked(torch.einsum("brhm,brhn->bhmn", left, right))
    return Dense(right, left)


@gradient_rule("TrilinearBackward0")
def _bilinear(use: Use) -> RuleResult:
    """`nn.Bilinear`: y_o = Σ_ij x_i W_oij z_j has ∂W_oij = b_o x_i z_j."""
    sums = [list(use.saved(name)) for name in ("expand1", "expand2", "expand3", "sumdim")]
    if use.operand != 1 or use.layout.dim or sums != [[1, 3], [0], [1, 2], [2, 3]]:
        return None
    x, z = use.rows(wide(use.saved("i1")), 0), use.rows(wide(use.saved("i3")), 0)
    return Stacked(torch.einsum("bro,bri,brj->boij", use.rows(wide(use.cotangent)), x, z))


# Look-ups.


@gradient_rule("EmbeddingBackward0", "IndexBackward0")
def _look_up(use: Use) -> RuleResult:
    """Rows of a table: `nn.Embedding`, or table[i, j, …] with integers for the first dimensions."""
    if use.operand != 0 or not is_look_up(use.node):
        return None
    place = _places(use.node, use.shape)
    if use.layout.dim >= place.dim() or (_is_embedding(use.node) and use.layout.kind != "blocks"):
        return None
    tokens_BT = use.rows(place).flatten(1)
    return _table(use.node, use.shape, tokens_BT, wide(use.rows(use.cotangent)))


def is_look_up(node: Node) -> bool:
    """Whether an operator reads rows of its one operand, so that `looked_up` holds for it."""
    if node.name() == "IndexBackward0":
        indices = saved(node, "indices")
        return all(index is not None and index.dtype != torch.bool for index in indices)
    return _is_embedding(node) and not saved(node, "scale_grad_by_freq")


def looked_up(node: Node, shape: Sequence[int], rows_B: Tensor) -> Lookup | Stacked:
    """The gradients of a table, from those of the rows that were read at public places.

    The places are the same for every record: positions in a sequence, or distances between two.
    """
    tokens_BT = _places(node, shape).reshape(1, -1).expand(len(rows_B), -1)
    return _table(node, shape, tokens_BT, rows_B)


def _is_embedding(node: Node) -> bool:
    return node.name() == "EmbeddingBackward0"


def _places(node: Node, shape: Sequence[int]) -> Tensor:
    """The rows that were read, where all dimensions of the table that are indexed count as one."""
    if _is_embedding(node):
        return saved(node, "indices")
    indices = torch.broadcast_tensors(*saved(node, "indices"))
    place = torch.zeros_like(indices[0], dtype=torch.long)
    for index, size in zip(indices, shape, strict=False):
        place = place * size + torch.where(index < 0, index + size, index)
    return place


def _table(node: Node, shape: Sequence[int], tokens_BT: Tensor, values: Tensor) -> Lookup | Stacked:
    """The gradients of a table from those of the rows that each record read."""
    num_indexed, values = 1, values.reshape(*tokens_BT.shape, -1)
    if not _is_embedding(node):
        num_indexed = len(saved(node, "indices"))
    elif (padding := signed(saved(node, "padding_idx"))) >= 0:
        values = values.masked_fill((tokens_BT == padding)[..., None], 0.0)
    table = Lookup(math.prod(shape[:num_indexed]), tokens_BT, values)
    if len(shape) == 2 and num_indexed == 1:
        return table
    return Stacked(table.rows().reshape(len(values), *shape))


@gradient_rule("IndexSelectBackward0")
def _index_select(use: Use) -> RuleResult:
    if signed(use.saved("dim")) % len(use.shape) or use.layout.dim or len(use.shape) != 2:
        return None
    tokens_BT = use.rows(use.saved("index"))
    return Lookup(use.shape[0], tokens_BT, wide(use.rows(use.cotangent)))


@gradient_rule("EmbeddingBagBackward0")
def _embedding_bag(use: Use) -> RuleResult:
    """Sums or means of look-ups: a token's cotangent is that of its bag."""
    by_sum, by_mean = 0, 1
    mode, layout = use.saved("mode"), use.layout
    plain = use.saved("per_sample_weights") is None and signed(use.saved("padding_idx")) < 0
    if use.operand != 0 or use.saved("scale_grad_by_freq") or not plain:
        return None
    if mode not in (by_sum, by_mean) or not use.is_by_row:
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


# Convolutions and normalisation.


@gradient_rule("ConvolutionBackward0")
def _convolution(use: Use) -> RuleResult:
    b = use.cotangent
    if use.operand == 2:
        return use.summed_by_channel(b)
    if use.operand != 1 or not use.is_by_row:
        return None
    inputs, rows = use.saved("input"), use.layout.outer * use.layout.inner
    if use.layout.outer > 1:
        inputs, b = use.rows(inputs).flatten(0, 1), use.rows(b).flatten(0, 1)
    names = "weight", "stride", "padding", "dilation", "transposed", "output_padding", "groups"
    return kernel_gradients(*(inputs, b, *map(use.saved, names), rows))


@gradient_rule("NativeLayerNormBackward0", "FusedRmsNormBackward0")
def _layer_norm(use: Use) -> RuleResult:
    """y = x̂·γ + β with x̂ = (x − mean)·rstd, or without mean and β for RMS norm."""
    values = wide(use.cotangent)
    if use.operand == 1:
        normalised, rstd = wide(use.saved("input")), use.saved("result1")
        if has_saved(use.node, "result2"):
            normalised, rstd = normalised - wide(rstd), use.saved("result2")
        values = values * (normalised * wide(rstd))
    return use.summed(values)


@gradient_rule("NativeGroupNormBackward0")
def _group_norm(use: Use) -> RuleResult:
    if use.operand == 2:
        return use.summed_by_channel(use.cotangent)
    if not use.is_by_row or use.layout.outer > 1:
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
def _batch_norm(use: Use) -> RuleResult:
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


# Recurrent cells on a GPU: a bias's gradient is that of the gates it is added to.


@gradient_rule("ThnnFusedLstmCellBackward0", "ThnnFusedGruCellBackward0")
def _fused_cell(use: Use) -> RuleResult:
    """Operands: gates of the input and of the hidden state, the state, a bias for each gate."""
    if use.operand not in (3, 4) or not use.is_by_row:
        return None
    gate = run_node(use.node, use.cotangents)[use.operand - 3]
    return None if gate is None else use.rows(wide(gate)).sum(1)


# Broadcast operands.


@gradient_rule("ExpandBackward0")
def _expand(use: Use) -> RuleResult:
    return use.summed(use.cotangent)


@gradient_rule("RepeatBackward0")
def _repeat(use: Use) -> RuleResult:
    b, layout = use.cotangent, use.layout
    extra = b.dim() - len(use.shape)
    if len(use.shape) == b.dim() == 1 and layout.kind == "blocks":
        if layout.outer == 1 and layout.inner % use.shape[0] == 0:
            return use.rows(wide(b)).reshape(use.num_records, -1, use.shape[0]).sum(1)
        return None
    if any(n not in (1, m) for n, m in zip(use.shape, b.shape[extra:], strict=True)):
        return None
    return use.summed(b)


def _broadcast(use: Use) -> RuleResult:
    """Any point-wise operator: its own backward pass, before the sum over broadcast dimensions."""
    full = run_node(use.node, use.cotangents)[use.operand]
    if full is None or full.shape != use.cotangent.shape or tuple(full.shape) == use.shape:
        return None
    return use.summed(full)


def _scaled(values: Any, factor: float) -> Any:
    return values if values is None or factor == 1 else values * factor


# Rules that also hold for complex numbers. A parameter is real, so these never give its gradient.
_COMPLEX = (_product, _broadcast)
