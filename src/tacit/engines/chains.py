"""From the place where a tensor meets records back to the parameters that it is made from.

Between a parameter and its first meeting with a record lie operators that no record touches: a
transpose, a cast to bfloat16, a slice, weight normalisation, the product of two LoRA matrices. A
record's gradient at that place is pulled back through them.

Most chains only move elements: reshapes, transposes, casts, slices. They keep norms, so norms are
taken before the pull-back, and sums are pulled back in float32 whatever the weights' type: pulled
through autograd, a cast to bfloat16 would round the sum of all records. One look-up at public
places may be among them, of positions or of distances between two. Every other chain is pulled
back record by record, and norms are taken of the numbers that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tacit.engines.clipping import added
from tacit.engines.programs import gradients, saved
from tacit.engines.rules import is_look_up
from tacit.precision import wide
from tacit.torch_internals import Graph, Node, signed

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LookUp:
    """Moves from a place to the output of a look-up, its node, and the shape of its table."""

    moves: tuple[Move, ...]
    node: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Moves:
    """A chain to one parameter that only moves elements, from a place or a table read there.

    `transposed` is True or False where the chain does nothing but transpose a matrix an odd or an
    even number of times, and None where it does more.
    """

    parameter: str
    moves: tuple[Move, ...]
    transposed: bool | None
    look_up: LookUp | None = None

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
    look_up: LookUp | None = None
    while (variable := graph.variable(index)) is None:
        child, *others = graph.next[index]
        if child is None or any(others):
            return None
        variable = graph.variable(child[0])
        shape = graph.shape(*child) if variable is None else tuple(variable.shape)
        node = graph.nodes[index]
        if look_up is None and is_look_up(node):
            look_up = LookUp(tuple(moves), index, shape)
            moves, transposed = [], False
        elif node.name() not in _KEEP:
            move = _move(node, output, shape)
            if move is None:
                return None
            moves.append(move)
            turns = _turns_matrix(node, shape) and transposed is not None
            transposed = not transposed if turns else None
        index, output = child
    name = names.get(id(variable))
    return None if name is None else Moves(name, tuple(moves), transposed, look_up)


def _turns_matrix(node: Node, shape: tuple[int, ...]) -> bool:
    if node.name() == "TransposeBackward0" and len(shape) == 2:
        return signed(saved(node, "dim0")) % 2 != signed(saved(node, "dim1")) % 2
    return node.name() == "TBackward0"


def _move(node: Node, output: int, shape: tuple[int, ...]) -> Move | None:
    """How a gradient moves to the operand's shape, or None if it does not only move."""
    name = node.name()
    if name in _RESHAPES:
        return lambda g: g.reshape(shape)
    if name == "TBackward0":
        return lambda g: g.t()
    if name == "PermuteBackward0":
        order = [signed(d) % len(shape) for d in saved(node, "dims")]
        back = [order.index(d) for d in range(len(order))]
        return lambda g: g.permute(back)
    if name == "TransposeBackward0":
        dims = signed(saved(node, "dim0")), signed(saved(node, "dim1"))
        return lambda g: g.transpose(*dims)
    if name not in _PARTS:
        return None
    dim, step = signed(saved(node, "dim")), 1
    if name in ("SelectBackward0", "UnbindBackward0"):
        place = output if name == "UnbindBackward0" else signed(saved(node, "index"))
        return lambda g: torch.ops.aten.select_backward(g, shape, dim, place)
    if name == "SliceBackward0":
        start, end, step = (saved(node, each) for each in ("start", "end", "step"))
    else:
        size = saved(node, "split_sizes" if name == "SplitWithSizesBackward0" else "split_size")
        sizes = list(size) if isinstance(size, Sequence) else [int(size)] * (output + 1)
        start = sum(sizes[:output])
        end = min(start + sizes[output], shape[dim])
    return lambda g: torch.ops.aten.slice_backward(g, shape, dim, start, end, step)


def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward0" for name in names.split())


_KEEP = _nodes("Alias Clone ToCopy Detach")
_RESHAPES = _nodes("View UnsafeView ReshapeAlias Unsqueeze Squeeze")
_RESHAPES |= {"SqueezeBackward1", "SqueezeBackward2"}
_PARTS = _nodes("Slice Select Split UnsafeSplit SplitWithSizes Unbind")


@lru_cache
def share_no_element(places: tuple[tuple[Moves, tuple[int, ...]], ...]) -> bool:
    """Whether chains from places of these shapes reach disjoint parts of one parameter."""
    reached = added([chain.pull_back(torch.ones(shape)) for chain, shape in places])
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
