"""From the place where a tensor meets records back to the parameters that it is made from.

Between a parameter and its first meeting with a record lie operators that no record touches: a
transpose, a cast to bfloat16, a slice, weight normalisation, the product of two LoRA matrices. A
record's gradient at that place is pulled back through them.

Most chains only move elements: reshapes, transposes, casts, slices. They keep norms, so norms are
taken before the pull-back, and sums are pulled back in float32 whatever the weights' type: pulled
through autograd, a cast to bfloat16 would round the sum of all records. Every other chain is pulled
back record by record, and norms are taken of the numbers that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.engines.gradients import RecordGradients, Scale
from tacit.engines.precision import wide
from tacit.engines.torch_internals import Graph, Node, gradients, saved, signed

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Moves:
    """A chain to one parameter that only moves elements.

    `transposed` is True or False where the chain does nothing but transpose a matrix an odd or an
    even number of times, and None where it does more. `whole` says that every element of the
    parameter is reached.
    """

    parameter: str
    moves: tuple[Move, ...]
    transposed: bool | None
    whole: bool

    def pull_back(self, total: Tensor) -> Tensor:
        for move in self.moves:
            total = move(total)
        return total


def moves_to_parameter(
    graph: Graph, index: int, output: int, names: dict[int, str]
) -> Moves | None:
    """The chain from one output of a node, or None if it does more than move elements."""
    moves: list[Move] = []
    transposed: bool | None = False
    whole = True
    while True:
        variable = graph.variable(index)
        if variable is not None:
            name = names.get(id(variable))
            return None if name is None else Moves(name, tuple(moves), transposed, whole)
        children = graph.next[index]
        used = [child for child in children if child is not None]
        if len(used) != 1 or children[0] is None:
            return None
        child = children[0]
        variable = graph.variable(child[0])
        shape = graph.shape(*child) if variable is None else tuple(variable.shape)
        made = _move(graph.nodes[index], output, shape)
        if made is None:
            return None
        move, turns, covers = made
        if move is not None:
            moves.append(move)
        whole = whole and covers
        flips = turns if transposed is not None else None
        transposed = None if flips is None else transposed != flips
        index, output = child


def _move(
    node: Node, output: int, shape: tuple[int, ...]
) -> tuple[Move | None, bool | None, bool] | None:
    """(how a gradient moves to the operand's shape, matrix transposed, covers all elements)."""
    name = node.name()
    if name in ("AliasBackward0", "CloneBackward0", "ToCopyBackward0", "DetachBackward0"):
        return None, False, True
    if name == "TBackward0":
        return lambda g: g.t(), True, True
    if name == "TransposeBackward0":
        dims = signed(saved(node, "dim0")), signed(saved(node, "dim1"))
        is_matrix = len(shape) == 2 and dims[0] % 2 != dims[1] % 2
        return lambda g: g.transpose(*dims), is_matrix or None, True
    if name == "PermuteBackward0":
        order = [signed(d) % len(shape) for d in saved(node, "dims")]
        back = [order.index(d) for d in range(len(order))]
        return lambda g: g.permute(back), None, True
    if name in _RESHAPES:
        return lambda g: g.reshape(shape), None, True
    if name == "SliceBackward0":
        dim, step = signed(saved(node, "dim")), saved(node, "step")
        start, end = saved(node, "start"), saved(node, "end")
        sizes = list(shape)
        return lambda g: torch.ops.aten.slice_backward(g, sizes, dim, start, end, step), None, False
    if name == "SelectBackward0":
        dim, place = signed(saved(node, "dim")), signed(saved(node, "index"))
        sizes = list(shape)
        return lambda g: torch.ops.aten.select_backward(g, sizes, dim, place), None, False
    if name in ("SplitBackward0", "UnsafeSplitBackward0", "SplitWithSizesBackward0"):
        dim = signed(saved(node, "dim"))
        size = saved(node, "split_size" if name != "SplitWithSizesBackward0" else "split_sizes")
        parts = list(size) if isinstance(size, Sequence) else [int(size)] * (output + 1)
        start = sum(parts[:output])
        end = min(start + parts[output], shape[dim])
        sizes = list(shape)
        return lambda g: torch.ops.aten.slice_backward(g, sizes, dim, start, end, 1), None, False
    if name == "UnbindBackward0":
        dim, sizes = signed(saved(node, "dim")), list(shape)
        return lambda g: torch.ops.aten.select_backward(g, sizes, dim, output), None, False
    return None


_RESHAPES = frozenset(
    {
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
    }
)


@dataclass(frozen=True)
class Moved:
    """Per-record gradients at a place, as gradients of the parameter behind a chain of moves."""

    gradients: RecordGradients
    chain: Moves

    def squares(self) -> Tensor:
        return self.gradients.squares()

    def total(self, scale: Scale) -> Tensor:
        return self.chain.pull_back(self.gradients.total(scale))

    def rows(self) -> Tensor:
        if not self.chain.moves:
            return self.gradients.rows()
        return torch.stack([self.chain.pull_back(row) for row in self.gradients.rows()])


@dataclass(frozen=True)
class Disjoint:
    """Gradients of parts of one parameter that share no element: squares add up."""

    parts: tuple[RecordGradients, ...]

    def squares(self) -> Tensor:
        return torch.stack([part.squares() for part in self.parts]).sum(0)

    def total(self, scale: Scale) -> Tensor:
        return _added([part.total(scale) for part in self.parts])

    def rows(self) -> Tensor:
        return _added([part.rows() for part in self.parts])


def _added(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def share_no_element(chains: Sequence[Moves], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether the parts of one parameter that these chains reach are disjoint."""
    if any(chain.whole for chain in chains):
        return len(chains) == 1
    reached = _added([c.pull_back(torch.ones(s)) for c, s in zip(chains, shapes, strict=True)])
    return bool((reached <= 1).all())


def parameters_below(graph: Graph, index: int) -> list[int]:
    """The nodes of all leaves that a node is made from."""
    found, seen, stack = [], {index}, [index]
    while stack:
        at = stack.pop()
        if graph.variable(at) is not None:
            found.append(at)
        for child in graph.next[at]:
            if child is not None and child[0] not in seen:
                seen.add(child[0])
                stack.append(child[0])
    return sorted(found)


def pull_back_rows(
    graph: Graph, index: int, output: int, leaves: Sequence[int], rows_B: Tensor
) -> list[Tensor | None]:
    """Each record's gradient at a place, as gradients (B, *shape) of the leaves it is made from.

    All records at once by `vmap` of the chain's backward pass; one after another where PyTorch
    has no batching rule for an operator of the chain.
    """
    edge = [graph.edge(index, output)]
    targets = [graph.edge(leaf, 0) for leaf in leaves]
    rows_B = rows_B.to(graph.dtype(index, output))
    try:
        found = gradients(edge, targets, [rows_B], batched=True)
        return [None if g is None else wide(g) for g in found]
    except RuntimeError:
        each = [gradients(edge, targets, [row]) for row in rows_B]
    return [None if of[0] is None else wide(torch.stack(of)) for of in zip(*each, strict=True)]
