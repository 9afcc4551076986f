"""Which record every number of a step belongs to, and where parameters meet records.

One forward and one backward pass run under shadow memory (`shadow`). They give

- a *certificate*: every loss depends on its own record alone, no value of a record was looked at by
  Python, and nothing of a record stays behind; or what speaks against it, with operator and line;
- a *plan*: the frontier of the autograd graph. A node is *pure* if every element of its cotangent
  belongs to one record. An edge from a pure node to a parameter, or to a node whose cotangent mixes
  records, is where a record's gradient can last be told apart. Behind such an edge lies only what
  no record has touched: a chain of operators on parameters.

Why that is exact. Record i's gradient of the summed loss is what the backward pass gives when all
cotangents of other records are zero. Operators are linear in their cotangents, so at an edge of
the frontier it is the operator's backward pass on the rows of record i, and behind the edge the
chain's backward pass on that. A parameter's gradient is the sum over all edges that lead to it.

The certificate holds for the operators that ran, for this batch size, whatever values the records
hold: labels are moved by shapes and indices, not by values. Every later step is run under
`Operators`, and one that runs another program is planned, and certified, anew. Where values of
records select rows (`nonzero`), each record runs alone; where an index that may be drawn anew
orders them (`randperm`), the program is planned anew in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from tacit.checks.certificate import Certificate, Event
from tacit.checks.side_effects import current_watch, same_tensors
from tacit.engines.chains import Moves, moves_to_parameter, parameters_below
from tacit.engines.draws import State
from tacit.engines.programs import Operators, gradients, watch_backward
from tacit.engines.rules import rule_for
from tacit.engines.shadow import Shadow
from tacit.engines.shadow_labels import SEVERAL, Layout
from tacit.pytrees import Tree, call_model, num_rows, take_rows, tensors_of
from tacit.torch_internals import Graph, is_python_node, outside_modes, plain_program


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
    """The frontier of one program at one batch shape; see `Certificate` for what it proves.

    Attributes:
        signature: of the operators that ran, and of the autograd graph.
        alone: why each record must run alone, or None.
        rewrites: buffers that the pass writes, as the power iteration of spectral norms does.
        fused_functions: whether the program calls functions that `plain_program` replaces.
        in_python: what Python code did in the backward pass, in hooks and functions of the user's.
    """

    certificate: Certificate
    signature: tuple[Any, ...] = field(default=(), repr=False)
    sites: tuple[Site, ...] = field(default=(), repr=False)
    num_records: int = 0
    alone: str | None = None
    rewrites: frozenset[str] = frozenset()
    fused_functions: bool = True
    in_python: frozenset[int] = frozenset()

    @cached_property
    def frontier(self) -> tuple[int, ...]:
        """The nodes whose operands are parameters, or made from parameters alone."""
        return tuple(sorted({edge.node for site in self.sites for edge in site.edges}))

    @property
    def dynamic(self) -> bool:
        """Whether layouts may be others in the next step, so that every step needs a new plan."""
        return bool(self.certificate.reorders)


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
    per record. What earlier passes have left behind counts as of several records. Without a
    `backward` pass there are no sites. Buffers that are found to be written with public numbers
    alone may be written in this step; for that, `private` must be a pair of inputs and targets.
    """
    start = State(private, model)
    shadow = Shadow(num_records)
    stale_reads: list[Event] = []

    def left_behind(func: Any, tensor: Tensor) -> None:
        stale_reads.append(shadow.event(func))
        with outside_modes():
            whole = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
            shadow.labels(whole).fill_(SEVERAL)

    def records_of(rows: Tensor) -> Tensor:
        each = torch.arange(1, num_records + 1, device=rows.device)
        return each.repeat_interleave(len(rows) // num_records)

    for tensor in tensors_of(private):
        shadow.mark(tensor, records_of(tensor))
    operators = Operators(tensors_of(private), left_behind)
    with shadow, operators, plain_program() as functions:
        losses = run()
    rewrites = start.changed()
    entries = _entries(model, rewrites)
    own, found = records_of(losses), shadow.labels(losses.detach())
    apart = bool(((found == 0) | (found == own)).all())
    meetings = () if apart else tuple(shadow.meetings) or (Event("loss", "the loss", "forward"),)
    graph = Graph(losses, operators)
    way_back = _BackwardPass(shadow, graph)
    if apart and graph.nodes and backward:
        way_back.run(losses, own, operators)
    certificate = Certificate(
        meetings=meetings + tuple(way_back.meetings),
        looks=tuple(shadow.looks),
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
    sites = _frontier(graph, way_back.layouts, names) if certificate.proves else ()
    plan = GradientPlan(
        certificate,
        (operators.signature, graph.signature()),
        sites,
        num_records,
        _why_alone(certificate, graph, sites),
        rewrites,
        functions is None or functions.replaced,
        frozenset(way_back.in_python),
    )
    if rewrites:
        again = _entries_again(model, rewrites, start, private, shadow)
        same = {n for n, b in again.items() if n in entries and same_tensors(b, entries[n])}
        current_watch(model).public.update(same & _public(certificate, model, rewrites))
    return Planned(plan, losses, graph)


class _BackwardPass:
    """The backward pass under shadow memory.

    Attributes:
        layouts: the layouts of each node's cotangents.
        meetings: the first operators that let records meet where a single record's share is needed.
        in_python: what Python code did.
    """

    def __init__(self, shadow: Shadow, graph: Graph) -> None:
        self.layouts: dict[int, list[Layout | None]] = {}
        self.meetings: list[Event] = []
        self.in_python: set[int] = set()
        self._shadow, self._graph = shadow, graph
        self._node: int | None = None  # the node that is running
        self._mixed: set[int] = set()  # nodes with a cotangent of several records
        self._meeting_in: dict[int, Event] = {}  # the first meeting in each node
        self._num_meetings = len(shadow.meetings)
        self._between: list[Event] = []  # what the user's hooks did to a record between two nodes

    def run(self, losses: Tensor, own: Tensor, operators: Operators) -> None:
        shadow, graph = self._shadow, self._graph
        variables = [graph.variable(i) for i in range(len(graph.nodes))]
        handles = []
        for index, (node, variable) in enumerate(zip(graph.nodes, variables, strict=True)):
            if variable is None:
                handles += [node.register_prehook(partial(self._enter, index))]
                handles += [node.register_hook(self._leave)]
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
            parents = (
                index
                for index, children in enumerate(self._graph.next)
                if any(child and child[0] == self._node for child in children)
            )
            blamed = (self._meeting_in[i] for i in parents if i in self._meeting_in)
            self.meetings.append(next(blamed, None) or self._shadow.event(func))


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
    for index, those in sorted(layouts.items()):
        kinds = {layout.kind for layout in those if layout is not None}
        if "mixed" in kinds or kinds <= {"public"}:
            continue
        for operand, child in enumerate(graph.next[index]):
            if child is not None and is_behind(*child):
                edges.setdefault(child, []).append(Edge(index, operand, tuple(those)))
    sites = []
    for (node, output), found in sorted(edges.items()):
        variable = graph.variable(node)
        shape = graph.shape(node, output) if variable is None else tuple(variable.shape)
        chain = moves_to_parameter(graph, node, output, names)
        leaves = tuple(parameters_below(graph, node))
        sites.append(Site(node, output, shape, tuple(found), chain, leaves))
    return tuple(sites)


def _why_alone(certificate: Certificate, graph: Graph, sites: tuple[Site, ...]) -> str | None:
    if certificate.alone:
        return certificate.alone
    for site in sites:
        for edge in site.edges:
            node = graph.nodes[edge.node]
            if is_python_node(node) and rule_for(node) is None:
                return (
                    f"{node.name().removesuffix('Backward')} is a torch.autograd.Function whose "
                    "backward pass takes parameters; register its rule with tacit.gradient_rule"
                )
    return None


def _public(certificate: Certificate, model: nn.Module, written: frozenset[str]) -> frozenset[str]:
    """Those of the written buffers that no record can have touched.

    Labels do not show whether a value of a record, or how many rows it selected, decided what
    Python did; nor what an operator does to memory that its schema does not declare.
    """
    if certificate.looks or certificate.selections:
        return frozenset()
    if not all(_has_schema(event.operator) for event in certificate.unknown):
        return frozenset()
    private = {name for name, _ in certificate.written}
    every = dict(model.named_buffers(remove_duplicate=False))
    seen = {name for name, b in every.items() if type(b) is Tensor and b.layout == torch.strided}
    return (written & seen) - private


def _has_schema(operator: str) -> bool:
    space, _, name = operator.partition(".")
    return bool(name) and hasattr(getattr(torch.ops, space), name)


def _entries_again(
    model: nn.Module, names: frozenset[str], start: State, private: Tree, shadow: Shadow
) -> dict[str, Tensor]:
    """What is written by a pass over another number of rows: that number is private as well."""
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
    every = model.named_buffers(remove_duplicate=False)
    return {name: b.detach().clone() for name, b in every if name in names}
