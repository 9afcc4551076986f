"""The engine: exact per-sample clipping of any program in one forward and one backward pass.

The backward pass stops at the frontier (`plan`): it gives the cotangents there and computes no
weight gradient. With what the operators saved, they give each record's squared norm (`rules`,
`products`), the norms give the scales, and scaled cotangents give the clipped sums.  [Bu 2023,
book-keeping, read off the program instead of its modules]
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tacit.batch import Batch
from tacit.checks.certificate import require_apart
from tacit.checks.side_effects import kind_of
from tacit.engines.chains import Disjoint, Moved, Moves, pull_back_rows, share_no_element
from tacit.engines.draws import State
from tacit.engines.gradients import RecordGradients, Stacked
from tacit.engines.loop import gradients_alone
from tacit.engines.plan import Plan, Planned, Site, make_plan
from tacit.engines.precision import full_precision, wide
from tacit.engines.products import Dense, Lookup, joined_products, outer_products, table_gradients
from tacit.engines.rules import Use, found_by_rule, mask_of, rule_for
from tacit.engines.sums import clipped, norms_of_blocks, squares_of
from tacit.engines.task import Clipped, Task
from tacit.engines.torch_internals import (
    Graph,
    Operators,
    OtherOperators,
    before_node,
    gradients,
    note_arrivals,
    plain_program,
    planned_backward,
    run_node,
)
from tacit.losses.record_losses import losses_of
from tacit.pytrees import Tree, call_model, device_of, tensors_of

Form = Dense | Lookup | RecordGradients | None  # what a rule finds; None where it has no answer


class NotFinite(ArithmeticError):
    """Infinite numbers of one record may have reached the gradients of others as 0·∞."""


class BookKeeping:
    """Sums of clipped gradients, operator by operator, without recording anything.

    A program is planned when a batch shape is first met, and again when its autograd graph is not
    the one that was planned. A plan whose certificate does not prove that records stay apart is
    refused (`verdict`).
    """

    def __init__(self) -> None:
        self._plans: WeakKeyDictionary[nn.Module, dict[_Key, dict[Hashable, Plan]]] = (
            WeakKeyDictionary()
        )
        self._told: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """A copy plans its models itself: plans are known by the model's identity."""
        return vars(self) | {"_plans": {}}

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped:
        if len(piece) == 0:
            return Clipped()
        return self.clipped_sums_of(task, piece.inputs, piece.targets, piece.mask)

    def clipped_sums_of(
        self, task: Task, inputs: Tree, targets: Tree, mask: Tensor | None
    ) -> Clipped:
        num_records = _rows(inputs) // task.views
        found = self._gradients(task, inputs, targets, num_records)
        mask = None if mask is None else mask[:: task.views]
        return clipped(task, found, num_records, device_of(inputs), mask)

    def block_norms(self, task: Task, piece: Batch) -> list[Tensor]:
        num_records = len(piece) // task.views
        device = piece.indices.device
        found = self._gradients(task, piece.inputs, piece.targets, num_records)
        with full_precision(device):
            return norms_of_blocks(task, squares_of(found), num_records, device)

    def single_plan(self, task: Task, inputs: Tree, targets: Tree) -> Plan | None:
        """The one plan of this batch shape, for a recorder; None if there is none, or several."""
        plans = list(self._known(task, inputs, targets).values())
        if len(plans) != 1 or plans[0].dynamic or plans[0].alone:
            return None
        return plans[0]

    def runs_alone(self, task: Task) -> bool:
        """Whether a plan of this program, at any batch shape, says that each record runs alone."""
        *asked, _ = plan_key(task, (), ())
        return any(
            plan.alone
            for (*key, _), plans in self._plans.get(task.model, {}).items()
            if key == asked
            for plan in plans.values()
        )

    def _known(self, task: Task, inputs: Tree, targets: Tree) -> dict[Hashable, Plan]:
        """The plans of this model, loss and batch shape, by the signature of their graphs."""
        of_model = self._plans.setdefault(task.model, {})
        return of_model.setdefault(plan_key(task, inputs, targets), {})

    def _gradients(
        self, task: Task, inputs: Tree, targets: Tree, num_records: int
    ) -> dict[str, RecordGradients]:
        if self.runs_alone(task):
            return gradients_alone(task, inputs, targets)
        known = self._known(task, inputs, targets)
        rewrites = [plan.rewrites for plan in known.values()]
        start = State(inputs, task.model, frozenset().union(*rewrites) if known else None)
        if known and not any(plan.dynamic for plan in known.values()):
            fused = any(plan.fused_functions for plan in known.values())
            losses, graph, signature = planned_program(task, inputs, targets, fused)
            plan = known.get(signature)
            if plan is not None:
                try:
                    return record_gradients(plan, graph, losses, task)
                except NotFinite:
                    start.restore()
                    return gradients_alone(task, inputs, targets)
                except OtherOperators:  # Python took another way in the backward pass
                    pass
            start.restore()
        planned = planned_pass(task, inputs, targets, num_records)
        plan = planned.plan
        require_apart(plan.certificate, task.model)
        known[plan.signature] = plan
        if plan.alone:
            self._say_alone(task.model, plan.alone)
        else:
            try:
                return record_gradients(plan, planned.graph, planned.losses, task)
            except OtherOperators:
                why = "Python code in the backward pass does something else each time it runs"
                known[plan.signature] = replace(plan, alone=why)
                self._say_alone(task.model, why)
            except NotFinite:
                pass
        start.restore()
        return gradients_alone(task, inputs, targets)

    def _say_alone(self, model: nn.Module, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            kind = type(model).__name__
            warnings.warn(f"records of {kind} run one by one: {why}", stacklevel=2)


def run_program(
    model: nn.Module, loss: Any, inputs: Tree, targets: Tree, fused_functions: bool = True
) -> Tensor:
    """One loss per row of the batch, with every operator in the autograd graph.

    A program that was planned, and calls no fused functions, runs faster if it says so.
    """
    with plain_program(fused_functions), torch.enable_grad():
        return losses_of(loss, call_model(model, inputs), targets)


def planned_program(
    task: Task, inputs: Tree, targets: Tree, fused_functions: bool
) -> tuple[Tensor, Graph, Hashable]:
    """The losses, their graph, and the signature by which the plan of such a pass is known."""
    with Operators(tensors_of((inputs, targets))) as operators:
        losses = run_program(task.model, task.loss, inputs, targets, fused_functions)
    graph = Graph(losses, operators)
    return losses, graph, (operators.signature, graph.signature())


def planned_pass(task: Task, inputs: Tree, targets: Tree, num_records: int) -> Planned:
    def run() -> Tensor:
        return run_program(task.model, task.loss, inputs, targets)

    return make_plan(task.model, run, (inputs, targets), task.parameters, num_records)


_Key = tuple[Hashable, ...]


def plan_key(task: Task, inputs: Tree, targets: Tree) -> _Key:
    """What a plan depends on, apart from the operators that run."""
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors_of((inputs, targets)))
    return kind_of(task.loss), tuple(task.parameters), task.views, shapes


def record_gradients(
    plan: Plan, graph: Graph, losses: Tensor, task: Task
) -> dict[str, RecordGradients]:
    """Each parameter's per-record gradients of the mean over a record's views."""
    total = losses.sum() if task.views == 1 else losses.sum() / task.views
    # A checkpointed block runs again in the backward pass, and must run as it did before.
    back = planned_backward(graph.operators, plan.in_python)
    with full_precision(losses.device), plain_program(plan.fused_functions), back:
        uses = _uses(plan, graph, total)
        with torch.no_grad():
            found = _by_parameter(plan, graph, uses, task)
            for name, mask in task.active.items():
                if name in found:
                    rows = wide(found[name].rows())
                    found[name] = Stacked(torch.where(mask, rows, 0.0))
    return found


def _uses(plan: Plan, graph: Graph, total: Tensor) -> dict[tuple[int, int], list[Use]]:
    """The frontier's operands with their cotangents, by site."""
    nodes = plan.frontier
    places = [(node, out) for node in nodes for out in range(graph.num_outputs(node))]
    if not places:
        return {}
    edges = [graph.edge(*place) for place in places]
    ran: dict[int, Sequence[Tensor | None]] = {}
    handles = [before_node(graph.nodes[node], partial(ran.__setitem__, node)) for node in nodes]
    try:
        found = gradients([total], edges, [torch.ones_like(total)])
    finally:
        for handle in handles:
            handle.remove()
    cotangents: dict[int, list[Tensor | None]] = {}
    for (node, _), cotangent in zip(places, found, strict=True):
        cotangents.setdefault(node, []).append(cotangent)
    # Where a node runs too, because the pass goes on behind it, `grad` gives its cotangent from
    # before the hooks of the user (`tensor.register_hook`); the node has seen it after them.
    cotangents |= {node: list(arrived) for node, arrived in ran.items()}
    for node, those in cotangents.items():
        note_arrivals(node, those)
    uses: dict[tuple[int, int], list[Use]] = {}
    for site in plan.sites:
        for edge in site.edges:
            arrived = tuple(cotangents[edge.node])
            if any(b is not None for b in arrived):
                use = Use(
                    graph.nodes[edge.node],
                    edge.operand,
                    site.shape,
                    arrived,
                    edge.layouts,
                    plan.num_records,
                )
                uses.setdefault((site.node, site.output), []).append(use)
    return uses


def _by_parameter(
    plan: Plan, graph: Graph, uses: dict[tuple[int, int], list[Use]], task: Task
) -> dict[str, RecordGradients]:
    names = {id(p): name for name, p in task.parameters.items()}
    of_parameter: dict[str, list[Site]] = {}
    for site in plan.sites:
        if (site.node, site.output) in uses:
            for leaf in site.leaves:
                name = names.get(id(graph.variable(leaf)))
                if name is not None:
                    of_parameter.setdefault(name, []).append(site)
    found: dict[str, RecordGradients] = {}
    stacks: dict[str, Tensor] = {}
    pulled: set[tuple[int, int]] = set()
    for name, sites in of_parameter.items():
        if all(site.chain is not None for site in sites):
            found[name] = _moved(sites, uses, tuple(task.parameters[name].shape))
            continue
        for site in sites:  # the whole site at once, for all parameters that it is made from
            place = (site.node, site.output)
            if place in pulled:
                continue
            pulled.add(place)
            rows = _site_rows(site, uses[place])
            each = pull_back_rows(graph, *place, site.leaves, rows)
            for leaf, stack in zip(site.leaves, each, strict=True):
                owner = names.get(id(graph.variable(leaf)))
                if owner is not None and stack is not None:
                    stacks[owner] = stacks[owner] + stack if owner in stacks else stack
    for name, sites in of_parameter.items():
        if name not in found:
            rest = [s for s in sites if (s.node, s.output) not in pulled]
            total = stacks[name]
            if rest:
                total = total + _moved(rest, uses, tuple(total.shape[1:])).rows()
            found[name] = Stacked(total)
    return found


def _moved(
    sites: Sequence[Site],
    uses: dict[tuple[int, int], list[Use]],
    shape: tuple[int, ...],
) -> RecordGradients:
    """A parameter's gradients from places that are moved copies of it, or of parts of it."""
    chains = [site.chain for site in sites if site.chain is not None]
    each = [uses[site.node, site.output] for site in sites]
    forms = [
        (_found(use), chain) for chain, those in zip(chains, each, strict=True) for use in those
    ]
    if len(shape) == 2 and all(
        isinstance(form, Dense | Lookup) and chain.transposed is not None for form, chain in forms
    ):
        joined = _joined(forms)
        if joined is not None:
            return joined
    if len(forms) == 1:
        return Moved(_gradients_of(each[0][0], forms[0][0]), chains[0])
    if all(len(those) == 1 for those in each) and share_no_element(
        chains, [site.shape for site in sites]
    ):
        parts = [
            Moved(_gradients_of(those[0], form), chain)
            for those, (form, chain) in zip(each, forms, strict=True)
        ]
        return Disjoint(tuple(parts))
    total: Tensor | None = None
    for site, those, chain in zip(sites, each, chains, strict=True):
        rows = Moved(Stacked(_site_rows(site, those)), chain).rows()
        total = rows if total is None else total + rows
    assert total is not None
    return Stacked(total)


def _joined(forms: Sequence[tuple[Any, Moves]]) -> RecordGradients | None:
    """One matrix in products and look-ups: a layer, recurrent steps, or a tied output layer."""
    uses: list[Dense | Lookup] = []
    for form, chain in forms:
        if not chain.transposed:
            uses.append(form)
        elif isinstance(form, Dense):
            uses.append(Dense(form.b_BTP, form.a_BTD))
        else:
            return None
    return joined_products(uses)


def _found(use: Use) -> Form:
    rule = rule_for(use.node)
    return None if rule is None else found_by_rule(rule, use)


def _gradients_of(use: Use, found: Form) -> RecordGradients:
    if found is None:
        return Stacked(_one_by_one(use))
    if isinstance(found, Dense):
        return outer_products(found.a_BTD, found.b_BTP)
    if isinstance(found, Lookup):
        return table_gradients(found.num_rows, found.tokens_BT, found.b_BTD)
    return found


def _site_rows(site: Site, uses: Sequence[Use]) -> Tensor:
    """(B, *shape): the sum over all operators that this place enters."""
    total: Tensor | None = None
    for use in uses:
        rows = wide(_gradients_of(use, _found(use)).rows())
        rows = rows.reshape(use.num_records, *site.shape)
        total = rows if total is None else total + rows
    assert total is not None
    return total


def _one_by_one(use: Use) -> Tensor:
    """The operator's own backward pass, with the cotangents of one record at a time.

    The node itself is called, not autograd from the node on: other operands may lead to the same
    place by ways that have edges of their own. What the operator saved is of all records, and a
    cotangent of zero does not hide an infinite number (0·∞ is NaN): raises NotFinite then.
    """
    rows = []
    nothing = torch.zeros(use.shape, device=use.cotangent.device, dtype=use.cotangent.dtype)
    owners = _owners(use)
    for record in range(use.num_records):
        if owners is not None and record not in owners:
            rows.append(wide(nothing))
            continue
        cotangents = [
            None
            if b is None or lay is None or lay.kind == "public"
            else torch.where(mask_of(lay, record, use.num_records, b), b, 0.0)
            for b, lay in zip(use.cotangents, use.layouts, strict=True)
        ]
        row = run_node(use.node, cotangents)[use.operand]
        row = nothing if row is None else row
        row = wide(row.to_dense() if row.is_sparse else row)
        rows.append(row.sum_to_size(use.shape))
    stack = torch.stack(rows)
    if use.num_records > 1 and not stack.isfinite().all():
        raise NotFinite
    return stack


def _owners(use: Use) -> set[int] | None:
    """The records that own something here, or None for all: a loop over records has one each."""
    found: set[int] = set()
    for b, lay in zip(use.cotangents, use.layouts, strict=True):
        if b is None or lay is None or lay.kind == "public":
            continue
        if lay.ids is None:
            return None
        found |= set(lay.ids.unique().tolist())
    return found


def _rows(tree: Tree) -> int:
    return len(tensors_of(tree)[0])
