"""The gradient plan: where parameters meet records in a program, and the proof of isolation.

One forward and one backward pass run with a label on every number (`shadow`). They give

- a *report* on isolation. It proves that every loss depends on its own record alone, that Python
  read no value of a record, and that nothing of a record stays in memory; or it names the operators
  and lines that contradict this;
- a *plan*: the frontier of the autograd graph. A node is *pure* if every element of its cotangent
  belongs to one record. An edge from a pure node to a parameter, or to a node whose cotangent mixes
  records, is where a record's gradient can last be told apart. Behind it lies a *chain*: operators
  on parameters that no record touches, such as transposes, casts and weight normalisation.

Why that is exact. Record i's gradient of the summed loss is what the backward pass gives when all
cotangents of other records are zero. Operators are linear in their cotangents, so at an edge of
the frontier it is the operator's backward pass on the rows of record i, and behind the edge the
chain's backward pass on that. A parameter's gradient is the sum over all edges that lead to it.

The report holds for the operators that ran, for this batch size, whatever values the records
hold: labels are moved by shapes and indices, not by values. Every later step runs under
`Operators`, and one that runs another program is planned, and proved, anew. Where values of
records select rows (`nonzero`), each record runs alone; where an index that may be drawn anew
orders them (`randperm`), the program is planned anew in every step.

Most chains only move elements: reshapes, transposes, casts, slices. They keep norms, so norms are
taken before the pull-back, and sums are pulled back in float32 whatever the weights' type: pulled
through autograd, a cast to bfloat16 would round the sum of all records. One look-up at public
places may be among them, of positions or of distances between two. Every other chain is pulled
back record by record, and norms are taken of the numbers that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from tacit.checks.isolation import Event, IsolationReport
from tacit.checks.side_effects import current_watch, same_tensors
from tacit.engines.clipping import added
from tacit.engines.pass_state import PassState
from tacit.engines.plain_programs import plain_program
from tacit.engines.programs import Operators, gradients, saved, watch_backward
from tacit.engines.rules import is_look_up, rule_for
from tacit.engines.shadow import Shadow
from tacit.engines.shadow_labels import SEVERAL, Layout
from tacit.precision import wide
from tacit.pytrees import Tree, call_model, num_rows, take_rows, tensors_of
from tacit.torch_internals import Graph, Node, is_python_node, outside_modes, signed

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ChainLookup:
    """A look-up in a chain: moves to its output, its node, and the shape of its table."""

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
    look_up: ChainLookup | None = None

    def pull_back(self, total: Tensor) -> Tensor:
        for move in self.moves:
            total = move(total)
        return total


@dataclass(frozen=True)
class Edge:
    """Operand `operand` of node `node`, whose cotangents have these layouts."""

    node: int
    operand: int
    layouts: tuple[Layout | None, ...]


@dataclass(frozen=True)
class Site:
    """One output of a node behind the frontier, the edges that lead to it, and the way on.

    `chain` is the way to the one parameter that it is a moved copy of, or None; `leaves` are the
    nodes of all parameters that it is made from.
    """

    node: int
    output: int
    shape: tuple[int, ...]
    edges: tuple[Edge, ...]
    chain: Moves | None
    leaves: tuple[int, ...]


@dataclass(frozen=True)
class GradientPlan:
    """The frontier of one program at one batch shape; see `IsolationReport` for what it proves.

    Attributes:
        signature: of the operators that ran, and of the autograd graph.
        alone: why each record must run alone, or None.
        rewrites: buffers that the pass writes to, such as those of spectral normalisation.
        fused_functions: whether the program calls functions that `plain_program` replaces.
        in_python: what Python code did in the backward pass, in hooks and functions of the user's.
        dynamic: whether the next step may have other layouts, so that each step needs a new plan.
    """

    isolation: IsolationReport
    signature: tuple[Any, ...] = field(repr=False)
    sites: tuple[Site, ...] = field(repr=False)
    num_records: int
    alone: str | None
    rewrites: frozenset[str]
    fused_functions: bool
    in_python: frozenset[int]
    dynamic: bool

    @cached_property
    def frontier(self) -> dict[int, int]:
        """The nodes whose operands are parameters or made from them, with their output counts."""
        edges = [edge for site in self.sites for edge in site.edges]
        return {edge.node: len(edge.layouts) for edge in sorted(edges, key=lambda e: e.node)}


@dataclass
class Planned:
    """A plan, with the losses and the graph of the pass that it was made from."""

    plan: GradientPlan
    losses: Tensor
    graph: Graph


def make_plan(
    model: nn.Module,
    run: Callable[[], Tensor],
    private: Tree,
    parameters: dict[str, nn.Parameter],
    num_records: int,
    *,
    backward: bool = True,
) -> Planned:
    """Run `run()` under shadow memory, with the rows of every tensor of `private` marked.

    `run` gives one loss per row; rows iK … iK + K − 1 belong to record i where there are K rows
    per record. Memory that earlier passes left behind counts as belonging to several records.
    Without a `backward` pass there are no sites. The step may write to buffers that are proved to
    receive public numbers alone; for that, `private` must be a pair of inputs and targets.
    """
    start = PassState(private, model)
    shadow, stale_reads = Shadow(num_records), list[Event]()

    def left_behind(func: Any, tensor: Tensor) -> None:
        stale_reads.append(shadow.event(func))
        with outside_modes():
            whole = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
            shadow.labels(whole).fill_(SEVERAL)

    def records_of(rows: Tensor) -> Tensor:
        records = torch.arange(1, num_records + 1, device=rows.device)
        return records.repeat_interleave(len(rows) // num_records)

    for tensor in tensors_of(private):
        shadow.mark(tensor, records_of(tensor))
    operators = Operators(tensors_of(private), left_behind)
    with shadow, operators, plain_program() as functions:
        losses = run()
    rewrites = start.changed()
    entries = _entries(model, rewrites)
    own, labels = records_of(losses), shadow.labels(losses.detach())
    apart = bool(((labels == 0) | (labels == own)).all())
    meetings = () if apart else tuple(shadow.meetings) or (Event("loss", "the loss", "forward"),)
    graph = Graph(losses, operators)
    backward_pass = _BackwardPass(shadow, graph)
    if apart and graph.nodes and backward:
        backward_pass.run(losses, own, operators)
    isolation = IsolationReport(
        meetings=(*meetings, *shadow.misread, *backward_pass.meetings),
        value_reads=tuple(shadow.value_reads),
        written=tuple(
            (name, shadow.origin(tensor))
            for name, tensor in [*model.named_buffers(), *model.named_parameters()]
            if shadow.private(tensor)
        ),
        unknown=tuple(shadow.unknown),
        selections=tuple(shadow.selections),
        reorders=tuple(shadow.reorders),
        stale_reads=tuple(stale_reads),
    )
    names = {id(p): name for name, p in parameters.items()}
    sites = _frontier(graph, backward_pass.layouts, names) if isolation.proves else ()
    if rewrites:
        again = _entries_again(model, rewrites, start, private, shadow)
        same = {n for n, b in again.items() if n in entries and same_tensors(b, entries[n])}
        current_watch(model).public.update(same & _public(isolation, model, rewrites))
    plan = GradientPlan(
        isolation,
        signature=(operators.signature, graph.signature()),
        sites=sites,
        num_records=num_records,
        alone=_why_alone(isolation, graph, sites, backward_pass.unplaced),
        rewrites=rewrites,
        fused_functions=functions is None or functions.replaced,
        in_python=frozenset(backward_pass.in_python),
        dynamic=bool(isolation.reorders),
    )
    shadow.forget()
    return Planned(plan, losses, graph)


class _BackwardPass:
    """The backward pass under shadow memory.

    Attributes:
        layouts: the layouts of each node's cotangents.
        meetings: the first operators that let records meet where a single record's share is needed.
        in_python: what Python code did.
        unplaced: nodes whose results belong to unknown records.
    """

    def __init__(self, shadow: Shadow, graph: Graph) -> None:
        self.layouts: dict[int, list[Layout | None]] = {}
        self.meetings: list[Event] = []
        self.in_python: set[int] = set()
        self.unplaced: set[int] = set()
        self._shadow, self._graph = shadow, graph
        self._num_meetings = len(shadow.meetings)
        self._node: int | None = None  # the node that is running
        self._mixed: set[int] = set()  # nodes with a cotangent of several records
        self._meeting_in: dict[int, Event] = {}  # the first meeting in each node
        self._between: list[Event] = []  # what the user's hooks did to a record between two nodes

    def run(self, losses: Tensor, own: Tensor, operators: Operators) -> None:
        shadow, graph = self._shadow, self._graph
        variables = [graph.variable(i) for i in range(len(graph.nodes))]
        handles = []
        for index, (node, variable) in enumerate(zip(graph.nodes, variables, strict=True)):
            if variable is None:
                handles += [node.register_prehook(partial(self._enter, index))]
                handles += [node.register_hook(self._leave)]
        shadow.keep_results(losses)
        ones = torch.ones_like(losses)
        shadow.mark(ones, own)
        shadow.phase, shadow.on_record = "backward", self._note_record
        try:
            with shadow, plain_program(), watch_backward(operators) as self._python:
                gradients([losses], [v for v in variables if v is not None], [ones])
            self.in_python = self._python.names
        finally:
            shadow.on_record = None
            for handle in handles:
                handle.remove()

    def _enter(self, index: int, cotangents: Sequence[Tensor | None]) -> None:
        self._close()
        self._node = index
        with outside_modes():
            self._python.arrived(index, cotangents)
            node = self._graph.nodes[index]
            for output, b in enumerate(cotangents):
                if b is not None and b.layout == torch.strided:
                    misplaced = self._shadow.misplaced(node, output, b)
                    if misplaced:
                        event = Event(
                            node.name(), "a cotangent moved to another record", "backward"
                        )
                        self.meetings.extend(self._between[:1] or [event])
                    elif misplaced is None:
                        self.unplaced.add(index)
            self.layouts[index] = layouts = [
                None if b is None or b.layout != torch.strided else self._shadow.layout(b)
                for b in cotangents
            ]
            if any(layout is not None and layout.kind == "mixed" for layout in layouts):
                self._mixed.add(index)
                self.meetings.extend(self._between[:1])
                for b in cotangents:  # a row that one record alone looked up is no record
                    if b is not None:
                        self._shadow.labels(b).fill_(SEVERAL)

    def _leave(self, *_: Any) -> None:
        self._close()
        self._node = None
        self._between.clear()

    def _close(self) -> None:
        meetings = self._shadow.meetings
        if self._node is not None and len(meetings) > self._num_meetings:
            self._meeting_in.setdefault(self._node, meetings[self._num_meetings])
        self._num_meetings = len(meetings)

    def _note_record(self, func: Any) -> None:
        if self._node is None and func not in _ADDS:
            self._between.append(self._shadow.event(func))
        # Behind the frontier no record may be met again: a mixed cotangent has no share of it.
        if self._node in self._mixed and not self.meetings:
            of_parents = (
                meeting
                for parent, meeting in sorted(self._meeting_in.items())
                if any(child and child[0] == self._node for child in self._graph.next[parent])
            )
            self.meetings.append(next(of_parents, None) or self._shadow.event(func))


# Between two nodes autograd itself adds up the cotangents of a tensor that was used twice.
_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def _frontier(
    graph: Graph, layouts: dict[int, list[Layout | None]], names: dict[int, str]
) -> tuple[Site, ...]:
    def is_behind(index: int, output: int) -> bool:
        layout = layouts[index][output] if index in layouts else None
        mixed = layout is not None and layout.kind == "mixed"
        return mixed or graph.variable(index) is not None

    edges: dict[tuple[int, int], list[Edge]] = {}
    for index, of_node in sorted(layouts.items()):
        kinds = {layout.kind for layout in of_node if layout is not None}
        if "mixed" in kinds or kinds <= {"public"}:
            continue
        for operand, child in enumerate(graph.next[index]):
            if child is not None and is_behind(*child):
                edges.setdefault(child, []).append(Edge(index, operand, tuple(of_node)))
    return tuple(
        Site(
            *place,
            _shape(graph, *place),
            tuple(edges_to),
            moves_to_parameter(graph, *place, names),
            tuple(parameters_below(graph, place[0])),
        )
        for place, edges_to in sorted(edges.items())
    )


def _shape(graph: Graph, index: int, output: int) -> tuple[int, ...]:
    """The shape of a node's output, or of the leaf that it stands for."""
    variable = graph.variable(index)
    return graph.shape(index, output) if variable is None else tuple(variable.shape)


def _why_alone(
    isolation: IsolationReport, graph: Graph, sites: tuple[Site, ...], unplaced: set[int]
) -> str | None:
    if isolation.alone:
        return isolation.alone
    for index, node in ((e.node, graph.nodes[e.node]) for site in sites for e in site.edges):
        if index in unplaced:
            return f"it is not known which records the results of {node.name()} belong to"
        if is_python_node(node) and rule_for(node) is None:
            return (
                f"{node.name().removesuffix('Backward')} is a torch.autograd.Function whose "
                "backward pass takes parameters; register its rule with tacit.gradient_rule"
            )
    return None


def _public(
    isolation: IsolationReport, model: nn.Module, written: frozenset[str]
) -> frozenset[str]:
    """The written buffers whose values cannot come from any record.

    Labels do not show whether a value of a record, or how many rows it selected, decided what
    Python did; nor what an operator does to memory that its schema does not declare.
    """

    def has_schema(operator: str) -> bool:
        space, _, name = operator.partition(".")
        return bool(name) and hasattr(getattr(torch.ops, space), name)

    if isolation.value_reads or isolation.selections:
        return frozenset()
    if not all(has_schema(event.operator) for event in isolation.unknown):
        return frozenset()
    private = {name for name, _ in isolation.written}
    labelled = {
        name
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if type(buffer) is Tensor and buffer.layout == torch.strided
    }
    return (written & labelled) - private


def _entries_again(
    model: nn.Module, names: frozenset[str], start: PassState, private: Tree, shadow: Shadow
) -> dict[str, Tensor]:
    """The buffers' entries after a pass over another number of rows, which is private as well."""
    rows = num_rows(private)
    other = torch.arange(2 if rows > 2 else 2 * rows) % rows
    try:
        # Under shadow memory, so that what the model keeps of this pass has labels too.
        with start.as_before(names), shadow, plain_program(), torch.enable_grad():
            inputs, _ = take_rows(private, other)
            call_model(model, inputs)
            return _entries(model, names)
    except Exception:  # a program that takes no other number of rows
        return {}


def _entries(model: nn.Module, names: frozenset[str]) -> dict[str, Tensor]:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {name: buffers[name].detach().clone() for name in names & buffers.keys()}


def moves_to_parameter(
    graph: Graph, index: int, output: int, names: dict[int, str]
) -> Moves | None:
    """The chain from one output of a node, or None if it does more than move elements."""
    moves: list[Move] = []
    transposed: bool | None = False
    look_up: ChainLookup | None = None
    while (variable := graph.variable(index)) is None:
        child, *others = graph.next[index]
        if child is None or any(others):
            return None
        node, shape = graph.nodes[index], _shape(graph, *child)
        if look_up is None and is_look_up(node):
            look_up = ChainLookup(tuple(moves), index, shape)
            moves, transposed = [], False
        elif node.name() not in _KEEP:
            move = _move(node, output, shape)
            if move is None:
                return None
            moves.append(move)
            turns = node.name() == "TBackward0"
            if node.name() == "TransposeBackward0" and len(shape) == 2:
                turns = (signed(saved(node, "dim0")) - signed(saved(node, "dim1"))) % 2 == 1
            transposed = not transposed if turns and transposed is not None else None
        index, output = child
    name = names.get(id(variable))
    return None if name is None else Moves(name, tuple(moves), transposed, look_up)


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
        start, end, step = (saved(node, part) for part in ("start", "end", "step"))
    else:
        size = saved(node, "split_sizes" if name == "SplitWithSizesBackward0" else "split_size")
        sizes = list(size) if isinstance(size, Sequence) else [int(size)] * (output + 1)
        start = sum(sizes[:output])
        end = min(start + sizes[output], shape[dim])
    return lambda g: torch.ops.aten.slice_backward(g, shape, dim, start, end, step)


def _nodes(names: str) -> frozenset[str]:
    return frozenset(f"{name}Backward0" for name in names.split())


_KEEP = _nodes("Alias Clone ToCopy Detach")
_SQUEEZES = {"SqueezeBackward1", "SqueezeBackward2"}
_RESHAPES = _nodes("View UnsafeView ReshapeAlias Unsqueeze Squeeze") | _SQUEEZES
_PARTS = _nodes("Slice Select Split UnsafeSplit SplitWithSizes Unbind")


@lru_cache
def share_no_element(places: tuple[tuple[Moves, tuple[int, ...]], ...]) -> bool:
    """Whether chains from places of these shapes reach disjoint parts of one parameter."""
    reached = added([chain.pull_back(torch.ones(shape)) for chain, shape in places])
    return bool((reached <= 1).all())


def parameters_below(graph: Graph, index: int) -> list[int]:
    """The nodes of all leaves that a node is made from."""
    reached, stack = {index}, [index]
    while stack:
        below = {child[0] for child in graph.next[stack.pop()] if child is not None}
        stack += below - reached
        reached |= below
    return sorted(node for node in reached if graph.variable(node) is not None)


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
        stacks = gradients(edge, targets, [rows_B], batched=True)
    except RuntimeError:
        of_leaves = zip(*(gradients(edge, targets, [row]) for row in rows_B), strict=True)
        stacks = tuple(None if of[0] is None else torch.stack(of) for of in of_leaves)
    return [None if stack is None else wide(stack) for stack in stacks]
