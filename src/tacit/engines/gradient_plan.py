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
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tacit.checks.certificate import Certificate, Event
from tacit.checks.side_effects import allow_writes, same_tensors
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
    """The frontier of one program at one batch shape; see `Certificate` for what it proves."""

    certificate: Certificate
    signature: tuple[Any, ...] = ()
    sites: tuple[Site, ...] = ()
    num_records: int = 0
    # Why each record must run alone, or None: an operator of the frontier is Python code, or …
    alone: str | None = None
    # Buffers that the pass writes, as the power iteration of spectral norms does.
    rewrites: frozenset[str] = frozenset()
    # Whether the program calls functions that `plain_program` replaces.
    fused_functions: bool = True
    # What Python code did in the backward pass, in hooks and functions of the user's.
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


@dataclass
class _Pass:
    """The layouts of all cotangents of a backward pass, and where the pass met records."""

    layouts: dict[int, list[Layout | None]] = field(default_factory=dict)
    at: int | None = None
    meets: list[Event] = field(default_factory=list)
    mixed_at: dict[int, Event] = field(default_factory=dict)  # the first meeting in each node
    in_python: set[int] = field(default_factory=set)


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
    `backward` pass there are no sites.
    Buffers that are found to be written with public numbers alone may be written in this step;
    for that, `private` must be a pair of inputs and targets.
    """
    start = State(private, model)
    shadow = Shadow(num_records)
    remembers: list[Event] = []

    def left_behind(func: Any, tensor: Tensor) -> None:
        remembers.append(shadow.event(func))
        with outside_modes():
            whole = tensor.detach().new_empty(0).set_(tensor.untyped_storage())
            shadow.labels(whole).fill_(SEVERAL)

    labels: Tensor | None = None
    for tensor in tensors_of(private):
        rows = len(tensor)
        labels = _labels(rows, num_records, tensor.device)
        shadow.mark(tensor, labels)
    shadow.phase = "forward"
    operators = Operators(tensors_of(private), left_behind)
    with shadow, operators, plain_program() as functions:
        losses = run()
    rewrites = start.changed()
    entries = _entries(model, rewrites)
    own = _labels(len(losses), num_records, losses.device)
    found = shadow.labels(losses.detach())
    apart = bool(((found == 0) | (found == own)).all())
    graph = Graph(losses, operators)
    meets = () if apart else tuple(shadow.meetings) or (Event("loss", "the loss", "forward"),)
    found_back = _Pass()
    if apart and graph.nodes and backward:
        found_back = _backward(shadow, graph, losses, own, operators)
    certificate = Certificate(
        meets=meets + tuple(found_back.meets),
        looks=tuple(shadow.looks),
        written=_written(shadow, model),
        unknown=tuple(shadow.unknown),
        selections=tuple(shadow.selections),
        reorders=tuple(shadow.reorders),
        remembers=tuple(remembers),
    )
    names = {id(p): name for name, p in parameters.items()}
    sites = _frontier(graph, found_back.layouts, names) if certificate.proves else ()
    alone = _why_alone(certificate, graph, sites)
    plan = GradientPlan(
        certificate,
        (operators.signature, graph.signature()),
        sites,
        num_records,
        alone,
        rewrites,
        functions is None or functions.replaced,
        frozenset(found_back.in_python),
    )
    if rewrites:
        again = _entries_again(model, rewrites, start, private, shadow)
        same = {n for n, b in again.items() if n in entries and same_tensors(b, entries[n])}
        allow_writes(model, same & _public(certificate, model, rewrites))
    return Planned(plan, losses, graph)


def _labels(rows: int, num_records: int, device: torch.device) -> Tensor:
    each = rows // num_records
    return torch.arange(1, num_records + 1, device=device).repeat_interleave(each)


def _backward(
    shadow: Shadow,
    graph: Graph,
    losses: Tensor,
    own: Tensor,
    operators: Operators,
) -> _Pass:
    """The backward pass under shadow memory: the layout of each node's cotangents."""
    found = _Pass()
    impure: set[int] = set()
    seen = len(shadow.meetings)

    def close() -> None:
        nonlocal seen
        meetings = shadow.meetings
        if found.at is not None and len(meetings) > seen:
            found.mixed_at.setdefault(found.at, meetings[seen])
        seen = len(meetings)

    between: list[Event] = []  # what hooks of the user did to a record since the last node ran

    def leave(*_: Any) -> None:
        close()
        found.at = None
        between.clear()

    def note(index: int) -> Callable[[Sequence[Tensor | None]], None]:
        def before(cotangents: Sequence[Tensor | None]) -> None:
            close()
            found.at = index
            with outside_modes():
                python.arrived(index, cotangents)
                lays = [
                    None if b is None or b.layout != torch.strided else shadow.layout(b)
                    for b in cotangents
                ]
                found.layouts[index] = lays
                if any(lay is not None and lay.kind == "mixed" for lay in lays):
                    impure.add(index)
                    found.meets.extend(between[:1])
                    for b in cotangents:  # a row that one record alone looked up is no record
                        if b is not None:
                            shadow.labels(b).fill_(SEVERAL)

        return before

    def operator(func: Any, has_record: bool, has_several: bool) -> None:
        # Behind the frontier no record may be met again: a mixed cotangent has no share of it.
        if has_record and found.at is None and func not in _ADDS:
            between.append(shadow.event(func))
        if has_record and found.at in impure and not found.meets:
            parents = [
                i
                for i, those in enumerate(graph.next)
                if any(c and c[0] == found.at for c in those)
            ]
            blamed = [found.mixed_at[i] for i in parents if i in found.mixed_at]
            found.meets.append(blamed[0] if blamed else shadow.event(func))

    inner = [(i, node) for i, node in enumerate(graph.nodes) if graph.variable(i) is None]
    handles = [node.register_prehook(note(i)) for i, node in inner]
    handles += [node.register_hook(leave) for _, node in inner]
    leaves = [v for i in range(len(graph.nodes)) if (v := graph.variable(i)) is not None]
    ones = torch.ones_like(losses)
    shadow.mark(ones, own)
    shadow.phase = "backward"
    shadow.on_operator = operator
    try:
        with shadow, plain_program(), watch_backward(operators) as python:
            gradients([losses], leaves, [ones])
        found.in_python = python.names
    finally:
        shadow.on_operator = None
        for handle in handles:
            handle.remove()
    return found


# Between two nodes autograd itself adds up the cotangents of a tensor that was used twice.
_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def _frontier(
    graph: Graph, layouts: dict[int, list[Layout | None]], names: dict[int, str]
) -> tuple[Site, ...]:
    edges: dict[tuple[int, int], list[Edge]] = {}
    for index, lays in sorted(layouts.items()):
        present = [lay for lay in lays if lay is not None]
        if any(lay.kind == "mixed" for lay in present):
            continue
        if all(lay.kind == "public" for lay in present):
            continue
        for operand, child in enumerate(graph.next[index]):
            if child is not None and _behind(graph, layouts, child):
                edges.setdefault(child, []).append(Edge(index, operand, tuple(lays)))
    sites = []
    for (node, output), those in sorted(edges.items()):
        variable = graph.variable(node)
        shape = graph.shape(node, output) if variable is None else tuple(variable.shape)
        chain = moves_to_parameter(graph, node, output, names)
        leaves = tuple(parameters_below(graph, node))
        sites.append(Site(node, output, shape, tuple(those), chain, leaves))
    return tuple(sites)


def _behind(graph: Graph, layouts: dict[int, list[Layout | None]], child: tuple[int, int]) -> bool:
    index, output = child
    if graph.variable(index) is not None:
        return True
    lays = layouts.get(index)
    if lays is None or lays[output] is None:
        return False
    return lays[output].kind == "mixed"  # type: ignore[union-attr]


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


def _written(shadow: Shadow, model: nn.Module) -> tuple[tuple[str, Event | None], ...]:
    """The model's buffers and parameters that hold values of records after the pass."""
    named = [*model.named_buffers(), *model.named_parameters()]
    return tuple((n, shadow.origin(t)) for n, t in named if shadow.private(t))


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
    model: nn.Module,
    names: frozenset[str],
    start: State,
    private: Tree,
    shadow: Shadow,
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
