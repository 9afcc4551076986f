"""The engines: `PerRecord` for one record at a time, `BookKeeping` and `Automatic` for a batch.

`BookKeeping` clips per record in one forward and one backward pass of any program. The backward
pass stops at the frontier (`gradient_plan`): it gives the cotangents there and computes no weight
gradient. With what the operators saved, they give each record's squared norm (`rules`,
`products`); the norms give the scales, and scaled cotangents give the clipped sums.  [Bu 2023,
book-keeping, here read off the program instead of its modules]

`Automatic` records such steps where that pays; `run_recorded` makes each a function of tensors,
which a `Recorder` can repeat.

`PerRecord` makes every record a batch of its own, so that no operator can bring two of them
together. It is slower and exact for any program. `BookKeeping` falls back to it where shadow
memory or the rules do not know an operator.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tacit.checks.isolation import Event, refuse_stateful, require_isolation
from tacit.checks.side_effects import function_kind, values_of
from tacit.engines.clipping import (
    Clipped,
    ClipTask,
    Moved,
    RecordGradients,
    Stacked,
    added,
    clip_and_sum,
    flattened,
    norms_of_blocks,
)
from tacit.engines.gradient_plan import (
    ChainLookup,
    GradientPlan,
    Moves,
    Planned,
    Site,
    make_plan,
    pull_back_rows,
    share_no_element,
)
from tacit.engines.pass_state import PassState
from tacit.engines.plain_programs import plain_program, uncompiled
from tacit.engines.products import Dense, Lookup, matrix_gradients
from tacit.engines.programs import (
    Operators,
    ProgramChanged,
    gradients,
    note_arrivals,
    planned_backward,
)
from tacit.engines.recorder import (
    Outputs,
    RecordedStep,
    Recorder,
    constants_on,
    padded,
)
from tacit.engines.rules import NoRule, NotFinite, Use, gradients_of, looked_up
from tacit.engines.shadow_events import SourceLines, operator_name
from tacit.losses.record_loss import Scheduled, losses_of
from tacit.precision import full_precision, wide
from tacit.pytrees import (
    Tree,
    call_model,
    device_of,
    map_tensors,
    take_rows,
    tensors_of,
    with_tensors,
)
from tacit.torch_internals import Graph, unflattened

if TYPE_CHECKING:
    from tacit.sampling.sampler import Batch

Gradients = dict[str, RecordGradients]
Form = Dense | Lookup | RecordGradients
Part = tuple[Moves, tuple[int, ...], Form]  # a chain to a parameter, from a place of this shape
_Plans = dict[Hashable, dict[Hashable, GradientPlan]]  # by shapes, and by signature of the graph


class _RecordEngine(abc.ABC):
    """From the gradients of all records of a batch to clipped sums and norms."""

    @abc.abstractmethod
    def _gradients(self, task: ClipTask, inputs: Tree, targets: Tree) -> Gradients: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def clipped_sums(self, task: ClipTask, piece: Batch) -> Clipped:
        """Σ_i clip(g_i) over the records of one physical batch, without those it masks out."""
        if len(piece) == 0:
            return Clipped()
        return self.clipped_sums_of(task, piece.inputs, piece.targets, piece.mask)

    def clipped_sums_of(
        self, task: ClipTask, inputs: Tree, targets: Tree, mask: Tensor | None
    ) -> Clipped:
        gradients = self._gradients(task, inputs, targets)
        mask = None if mask is None else mask[:: task.views]
        return clip_and_sum(task, gradients, num_records(task, inputs), device_of(inputs), mask)

    def block_norms(self, task: ClipTask, piece: Batch) -> list[Tensor]:
        """‖g_i‖ in each block, for each record of a *public* batch."""
        device = piece.indices.device
        gradients = self._gradients(task, piece.inputs, piece.targets)
        with full_precision(device):
            return norms_of_blocks(task, gradients, len(piece) // task.views, device)


class PerRecord(_RecordEngine):
    """An engine that runs every record alone, for models that would mix the records of a batch.

    A branch on values, padding to the longest record and statistics of the batch then depend on one
    record alone. The sums are exact; a step takes one pass per record.

        PerSampleClip(1.0, engine=PerRecord())
    """

    def _gradients(self, task: ClipTask, inputs: Tree, targets: Tree) -> Gradients:
        return gradients_one_by_one(task, inputs, targets)


class BookKeeping(_RecordEngine):
    """An engine that clips per record in one pass over the batch, operator by operator.

    A program is planned when a batch shape is first met, and again when its autograd graph is not
    the one that was planned. A plan in which records mix is refused (`require_isolation`); a
    program that cannot be analysed runs record by record.
    """

    def __init__(self) -> None:
        self._plans: WeakKeyDictionary[nn.Module, dict[Hashable, _Plans]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own plans: they are known by the model's identity."""
        return vars(self) | {"_plans": {}}

    def _plans_of(self, task: ClipTask) -> _Plans:
        program = function_kind(task.loss), tuple(task.parameters), task.views
        return self._plans.setdefault(task.model, {}).setdefault(program, {})

    def _gradients(self, task: ClipTask, inputs: Tree, targets: Tree) -> Gradients:
        plans = self._plans_of(task)
        if _run_alone(plans):
            return gradients_one_by_one(task, inputs, targets)
        known = _plans_for(plans, inputs, targets)
        rewrites = [plan.rewrites for plan in known.values()]
        start = PassState(inputs, task.model, frozenset().union(*rewrites) if known else None)
        if known and not any(plan.dynamic for plan in known.values()):
            fused = any(plan.fused_functions for plan in known.values())
            losses, graph, signature = planned_program(task, inputs, targets, fused)
            plan = known.get(signature)
            if plan is not None:
                try:
                    return record_gradients(plan, graph, losses, task)
                except NotFinite:
                    start.restore()
                    return gradients_one_by_one(task, inputs, targets)
                except ProgramChanged:  # Python took another path in the backward pass
                    pass
            start.restore()
        planned = planned_pass(task, inputs, targets, num_records(task, inputs))
        plan = planned.plan
        require_isolation(plan.isolation, task.model)
        known[plan.signature] = plan
        if not plan.alone:
            try:
                return record_gradients(plan, planned.graph, planned.losses, task)
            except ProgramChanged as error:
                why = "Python code in the backward pass does something else each time it runs"
                why = str(error) if isinstance(error, NoRule) else why
                plan = known[plan.signature] = replace(plan, alone=why)
            except NotFinite:
                pass
        if plan.alone:
            kind = type(task.model).__name__
            warnings.warn(f"records of {kind} run one by one: {plan.alone}", stacklevel=2)
        start.restore()
        return gradients_one_by_one(task, inputs, targets)


def _plans_for(plans: _Plans, inputs: Tree, targets: Tree) -> dict[Hashable, GradientPlan]:
    """The plans for tensors of these shapes, by the signature of their graphs."""
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors_of((inputs, targets)))
    return plans.setdefault(shapes, {})


def _single(known: dict[Hashable, GradientPlan]) -> GradientPlan | None:
    """The one plan of a batch shape, for a recorder; None if there is none, or several."""
    plan, *others = known.values() or (None,)
    return None if plan is None or others or plan.dynamic or plan.alone else plan


def _run_alone(plans: _Plans) -> bool:
    """Whether a plan, for any batch shape, runs each record alone."""
    return any(plan.alone for known in plans.values() for plan in known.values())


class Automatic(BookKeeping):
    """`BookKeeping`, with steps that are captured and compiled where that pays (`Recorder`).

    Batches are padded to a few sizes, and padding rows are masked out of the sums. The sums are
    those of `BookKeeping` up to the rounding of their order.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        super().__init__()
        self.recorder = recorder or Recorder()

    def clipped_sums(self, task: ClipTask, piece: Batch) -> Clipped:
        kind = kind_of(task)
        self.recorder.begin(kind, task.model, piece.indices.device)
        plans = self._plans_of(task)
        if len(piece) == 0 or _run_alone(plans):  # padding would only add records
            return super().clipped_sums(task, piece)
        if piece.mask is None:  # whoever made a mask has chosen the batch's shape
            piece = padded(piece, task.views)
        inputs, targets = piece.inputs, piece.targets
        known = _plans_for(plans, inputs, targets)
        plan = _single(known)
        if plan is None:
            start = PassState(inputs, task.model)
            clipped = self.clipped_sums_of(task, inputs, targets, piece.mask)
            plan = _single(known)
            if plan is None or not self.recorder.wants(kind, task.model):
                return clipped
            start.restore()  # a shape's first batch is computed as those of other shapes are

        def work(task: ClipTask, inputs: Tree, targets: Tree, mask: Tensor) -> Clipped:
            losses, graph, signature = planned_program(task, inputs, targets, plan.fused_functions)
            if signature != plan.signature:
                raise ProgramChanged("the model ran other operators than those that were planned")
            gradients = record_gradients(plan, graph, losses, task)
            return clip_and_sum(task, gradients, plan.num_records, mask.device, mask)

        start = PassState(inputs, task.model, plan.rewrites)
        try:
            return run_recorded(self.recorder, task, inputs, targets, piece.mask, work)
        except (ProgramChanged, NotFinite):  # another path through the model needs its own plan
            start.restore()
            return self.clipped_sums_of(task, inputs, targets, piece.mask)

    def expect(self, steps: int) -> None:
        """Announce how many steps are still to come; see `Recorder.expect`."""
        self.recorder.expect(steps)

    def forget(self) -> None:
        """Free the recordings' memory; later steps are recorded again."""
        self.recorder.forget()


def run_recorded(
    recorder: Recorder,
    task: ClipTask,
    inputs: Tree,
    targets: Tree,
    mask: Tensor | None,
    work: Callable[[ClipTask, Tree, Tree, Tensor], Clipped],
) -> Clipped:
    """`work`, which clips and sums gradients of records or mini-sets, as a step of a recorder."""

    def run(parameters: Any, batch: Sequence[Tensor]) -> Outputs:
        *leaves, mask, constants = batch
        numbers, num_norms = constants.unbind(), len(task.norms)
        factors = None if task.factors is None else numbers[num_norms:]
        same = replace(task, parameters=parameters, norms=numbers[:num_norms], factors=factors)
        clipped = work(same, *with_tensors((inputs, targets), leaves), mask)
        counts = {f"#{h}": count for h, count in enumerate(clipped.counts)}
        return {"sums": flattened(clipped.sums, parameters)} | counts

    leaves = tensors_of((inputs, targets))
    device, rows = leaves[0].device, len(leaves[0]) // task.views
    everyone = torch.ones(rows, dtype=torch.bool, device=device)
    keep = everyone if mask is None else mask[:: task.views]
    constants = constants_on(device, [*task.norms, *(task.factors or ())])
    plain = isinstance(inputs, Tensor) and isinstance(targets, Tensor)
    structure = None if plain else repr(map_tensors(lambda t: None, (inputs, targets)))
    step = RecordedStep(
        model=task.model,
        kind=kind_of(task),
        parameters=task.parameters,
        batch=[*leaves, keep, constants],
        work=run,
        # The epoch of a scheduled loss is in a tensor, which a recording reads.
        settings=None if isinstance(task.loss, Scheduled) else values_of(task.loss),
        structure=structure,
    )
    outputs = recorder(step)
    flat = outputs["sums"]
    parts = unflattened(flat, list(task.parameters.values()))
    sums = dict(zip(task.parameters, parts, strict=True))
    counts = tuple(output for name, output in outputs.items() if name != "sums")
    return Clipped(sums, counts, flat)


def kind_of(task: ClipTask) -> Hashable:
    """What of a task stays the same from step to step."""
    masks = tuple((name, active.data_ptr()) for name, active in task.active.items())
    rule = task.rule if isinstance(task.rule, Hashable) else (id(task.rule), values_of(task.rule))
    of_task = id(task.loss), task.blocks, rule, task.views, task.counted, task.factors is None
    return of_task, tuple(task.parameters), masks


def num_records(task: ClipTask, inputs: Tree) -> int:
    return len(tensors_of(inputs)[0]) // task.views


def gradients_one_by_one(task: ClipTask, inputs: Tree, targets: Tree) -> Gradients:
    """Each record's gradient, from a forward and a backward pass over its rows alone."""
    parameters = list(task.parameters.values())
    rows: dict[str, list[Tensor]] = {name: [] for name in task.parameters}
    buffers, written = PassState(None, task.model), frozenset[str]()
    for record in range(num_records(task, inputs)):
        written = buffers.changed() if record == 1 else written
        buffers.restore(written)  # every record meets the model as the first one did
        loss = _loss_of_record(task, inputs, targets, record)
        grads: tuple[Tensor | None, ...] = (None,) * len(parameters)
        if loss.requires_grad:
            grads = gradients([loss], parameters, [torch.ones_like(loss)], retain_graph=False)
        for (name, parameter), grad in zip(task.parameters.items(), grads, strict=True):
            row = torch.zeros_like(parameter, requires_grad=False) if grad is None else grad
            rows[name].append(wide(row.to_dense() if row.is_sparse else row))
    return {name: _only_active(task, name, torch.stack(of_name)) for name, of_name in rows.items()}


def _loss_of_record(task: ClipTask, inputs: Tree, targets: Tree, record: int) -> Tensor:
    """The mean over a record's views, each a batch of its own."""
    losses, reads, lines = [], list[Event](), SourceLines()

    def note(func: Any, _: Tensor) -> None:
        reads.append(Event(operator_name(func), lines.where()))

    for row in range(record * task.views, (record + 1) * task.views):
        # Cloned, so that what a model keeps of one record does not share memory with the next.
        x, y = map_tensors(torch.clone, take_rows((inputs, targets), slice(row, row + 1)))
        operators = Operators(tensors_of((x, y)), note)
        with torch.enable_grad(), uncompiled(), operators:
            losses.append(losses_of(task.loss, call_model(task.model, x), y).sum())
        if operators.has_left_behind(losses[-1]):
            refuse_stateful(reads[0] if reads else None, task.model)
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def _only_active(task: ClipTask, name: str, rows: Tensor) -> Stacked:
    mask = task.active.get(name)
    return Stacked(rows if mask is None else torch.where(mask, rows, 0.0))


def run_program(
    model: nn.Module, loss: Any, inputs: Tree, targets: Tree, fused_functions: bool = True
) -> Tensor:
    """One loss per row of the batch, with every operator in the autograd graph.

    Pass False for a program that is known to call no fused functions: it then runs faster.
    """
    with plain_program(fused_functions), torch.enable_grad():
        return losses_of(loss, call_model(model, inputs), targets)


def planned_program(
    task: ClipTask, inputs: Tree, targets: Tree, fused_functions: bool
) -> tuple[Tensor, Graph, Hashable]:
    """The losses, their graph, and the signature that identifies the plan of such a pass."""
    with Operators(tensors_of((inputs, targets))) as operators:
        losses = run_program(task.model, task.loss, inputs, targets, fused_functions)
    graph = Graph(losses, operators)
    return losses, graph, (operators.signature, graph.signature())


def planned_pass(task: ClipTask, inputs: Tree, targets: Tree, num_records: int) -> Planned:
    def run() -> Tensor:
        return run_program(task.model, task.loss, inputs, targets)

    return make_plan(task.model, run, (inputs, targets), task.parameters, num_records)


def record_gradients(plan: GradientPlan, graph: Graph, losses: Tensor, task: ClipTask) -> Gradients:
    """Each parameter's per-record gradients of the mean over a record's views."""
    total = losses.sum() if task.views == 1 else losses.sum() / task.views
    # A checkpointed block runs again in the backward pass, and must run as it did before.
    back = planned_backward(graph.operators, plan.in_python)
    with full_precision(losses.device), plain_program(plan.fused_functions), back:
        uses = _uses(plan, graph, total)
        with torch.no_grad():
            of_parameters = _by_parameter(graph, uses, task)
            for name in task.active.keys() & of_parameters.keys():
                rows = wide(of_parameters[name].rows())
                of_parameters[name] = _only_active(task, name, rows)
    return of_parameters


def _uses(plan: GradientPlan, graph: Graph, total: Tensor) -> list[tuple[Site, list[Use]]]:
    """The frontier's sites, and their operands with cotangents."""
    nodes = plan.frontier
    if not nodes:
        return []
    edges = [graph.edge(node, output) for node, count in nodes.items() for output in range(count)]
    arrived: dict[int, Sequence[Tensor | None]] = {}
    handles = [
        graph.nodes[node].register_prehook(partial(arrived.__setitem__, node)) for node in nodes
    ]
    try:
        returned = iter(gradients([total], edges, [torch.ones_like(total)]))
    finally:
        for handle in handles:
            handle.remove()
    cotangents = {node: tuple(islice(returned, count)) for node, count in nodes.items()}
    # Where a node runs too, because the pass goes on behind it, `grad` gives its cotangent from
    # before the hooks of the user (`tensor.register_hook`); the node has seen it after them.
    cotangents |= {node: tuple(of_node) for node, of_node in arrived.items()}
    for node, of_node in cotangents.items():
        note_arrivals(node, of_node)
    reached = {n: bs for n, bs in cotangents.items() if any(b is not None for b in bs)}
    uses, records = [], plan.num_records
    for site in plan.sites:
        of_site = [
            Use(graph.nodes[e.node], e.operand, site.shape, reached[e.node], e.layouts, records)
            for e in site.edges
            if e.node in reached
        ]
        if of_site:
            uses.append((site, of_site))
    return uses


def _by_parameter(graph: Graph, uses: list[tuple[Site, list[Use]]], task: ClipTask) -> Gradients:
    """From gradients at the frontier to those of the parameters behind it."""
    names = {id(p): name for name, p in task.parameters.items()}
    parts: dict[str, list[Part]] = {}
    stacks: dict[str, list[Tensor]] = {}
    for site, of_site in uses:
        if site.chain is not None:
            of_parameter = parts.setdefault(site.chain.parameter, [])
            look_up = site.chain.look_up
            if look_up is None:
                of_parameter += [(site.chain, site.shape, gradients_of(use)) for use in of_site]
            else:
                form = _read(graph, site, look_up, of_site)
                of_parameter.append((site.chain, look_up.shape, form))
            continue
        owners = [names.get(id(graph.variable(leaf))) for leaf in site.leaves]
        if not any(owners):
            continue
        # The whole site at once, for all parameters that it is made from.
        rows = _rows(site, of_site)
        of_leaves = pull_back_rows(graph, site.node, site.output, site.leaves, rows)
        for name, stack in zip(owners, of_leaves, strict=True):
            if name is not None and stack is not None:
                stacks.setdefault(name, []).append(stack)
    return {
        name: _of_parameter(parts.get(name, []), stacks.get(name, [])) for name in parts | stacks
    }


def _rows(site: Site, uses: list[Use]) -> Tensor:
    rows = added([wide(_finished(gradients_of(use)).rows()) for use in uses])
    return rows.reshape(len(rows), *site.shape)


def _read(graph: Graph, site: Site, look_up: ChainLookup, uses: list[Use]) -> Form:
    """The gradients of a table of which a site has rows that were read at public places."""
    rows = _rows(site, uses)
    for move in look_up.moves:
        rows = torch.vmap(move)(rows)
    return looked_up(graph.nodes[look_up.node], look_up.shape, rows)


def _of_parameter(parts: list[Part], stacks: list[Tensor]) -> RecordGradients:
    """One parameter's gradients, from all places that are moved copies of it or made from it."""
    if not stacks and (uses := _uses_of_matrix(parts)):
        return matrix_gradients(uses)
    if not stacks and len(parts) == 1 and not parts[0][0].moves:
        return _finished(parts[0][2])
    moved = [(_finished(form), chain.pull_back) for chain, _, form in parts]
    if not stacks and share_no_element(tuple((chain, shape) for chain, shape, _ in parts)):
        return Moved(moved)
    return Stacked(added([*stacks, *(wide(Moved([part]).rows()) for part in moved)]))


def _uses_of_matrix(parts: list[Part]) -> list[Dense | Lookup] | None:
    """One matrix in products and look-ups: a layer, recurrent steps, or a tied output layer."""
    uses: list[Dense | Lookup] = []
    for chain, _, form in parts:
        if isinstance(form, Dense) and chain.transposed:
            uses.append(Dense(form.b_BTP, form.a_BTD))
        elif isinstance(form, Dense | Lookup) and chain.transposed is False:
            uses.append(form)
        else:
            return None
    return uses


def _finished(form: Form) -> RecordGradients:
    return matrix_gradients([form]) if isinstance(form, Dense | Lookup) else form
