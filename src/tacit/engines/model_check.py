"""Checks whether a model may be trained, by proofs and comparisons on a few records of the batch.

A query runs these checks on its logical batch before steps 1, 8, 64 …, so the verdict does not
depend on the engine or the piece size. Plans for other shapes are proved in the same way.
There are three checks.

- *Proof*, before the first step. Records stay apart, and nothing that a pass has left behind is in
  the losses of a later one (`gradient_plan`). The proof need not be repeated: a step that runs
  other operators, or the same on other operands, gets a new plan and a new proof.
- *Exactness*, before steps 1 and 8. The rules' gradients and norms are autograd's. Step 8 repeats
  it because weights that begin at zero hide what lies behind them.
- *Same results*, every time. Labels cannot show some influences: a record's place in the batch,
  the number of records, what a program reads without PyTorch's dispatcher (in a thread, in a
  compiled extension), and numbers that Python keeps from pass to pass. So the same records run
  beside others, beside copies of themselves, and once more, with equal random draws, in float64
  where the model runs in it and is not too large. Three records are enough, as the proof says that
  they do not mix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tacit.checks.isolation import (
    IsolationReport,
    refuse_mixing,
    refuse_stateful,
    require_isolation,
    require_no_writes,
)
from tacit.checks.side_effects import current_watch
from tacit.engines.book_keeping import planned_pass, record_gradients, run_program
from tacit.engines.clipping import ClipTask, RowScale
from tacit.engines.gradient_plan import GradientPlan, Planned, make_plan
from tacit.engines.pass_state import PassState, SteadyDraws
from tacit.engines.plain_programs import plain_program
from tacit.engines.programs import Operators, ProgramChanged, gradients
from tacit.engines.rules import NotFinite
from tacit.errors import MixesRecords, UnsupportedModule
from tacit.precision import ieee_float32, no_autocast, wide
from tacit.pytrees import Tree, device_of, map_tensors, num_rows, take_rows, tensors_of
from tacit.torch_internals import has_gradient_hooks, swapped

if TYPE_CHECKING:
    from tacit.sampling.sampler import Batch

Records = tuple[Tree, Tree]  # inputs and targets

_RECORDS = 8  # so that a model that mixes only larger batches is found at every piece size
_MOST_IN_SETS = 16
_COMPARED = 3  # records whose results are compared
_MOST_ROWS = 4096  # of a batch whose losses are compared with those of a few
_LAST_EXACT = 8  # the last step before which gradients are compared with autograd's
_MOST_DOUBLED = 1 << 29  # weights of a model that is copied in float64: 4 GiB
# How far the same pass may be off in a finer type than the model's, and one beside other records.
_OFF = {torch.float64: (1e-7, 1e-5), torch.float32: (1e-4, 1e-3)}


def check_model(
    task: ClipTask, batch: Batch, first_views: Callable[[Tree], Tree], *, alone: int = 0
) -> bool:
    """Raise MixesRecords or UnsupportedModule unless each record's gradient is of that record.

    Args:
        first_views: turns inputs into what the model is given, one view of each record.
        alone: for an engine that runs each record or mini-set in a pass of its own, the number of
            rows in such a pass. Then only statefulness is checked.

    Returns whether there were enough records for the check.
    """
    if not alone:
        refuse_mixing(task.model)  # by name, where it is known
    most = min(max(_RECORDS, 2 * alone), _MOST_IN_SETS)
    with ieee_float32():  # results are compared, and TensorFloat-32 keeps ten bits of them
        try:
            return _check_model(task, batch, most, first_views, alone)
        except torch.OutOfMemoryError:
            pass  # the error holds what was allocated, so the next try begins after it is gone
        return _check_model(task, batch, 2, first_views, alone)


def _check_model(
    task: ClipTask, batch: Batch, most: int, first_views: Callable[[Tree], Tree], alone: int
) -> bool:
    inputs, targets = sample_records(batch, most)
    if num_rows(inputs) == 0:
        return False
    watch, state = current_watch(task.model), PassState(inputs, task.model)
    _require_known_gradients(task, bool(alone))
    try:
        records = first_views(inputs), targets
        probe = _Probe(replace(task, views=1, active={}), state)
        if alone:
            one, other = (take_rows(records, rows) for rows in (slice(alone), slice(-alone, None)))
            probe.require_stateless(one)
            probe.require_same_results(one, other, alone=True)
            if alone > 1:
                probe.require_stateless_for_one(take_rows(records, slice(1)))
            return True
        if watch.steps == 0:
            watch.proved = probe.require_proof(records)
        elif watch.proved and watch.steps < _LAST_EXACT:
            probe.require_exact(take_rows(records, slice(2)))
        few = take_rows(records, slice(_COMPARED))
        last = num_rows(few[0]) - 1
        pair = take_rows(few, torch.full((2,), last, device=device_of(inputs)))
        probe.require_same_results(few, pair, alone=not watch.proved)
        if watch.proved:
            probe.require_any_size(batch, first_views)
        if watch.steps == 0:
            probe.require_stateless_for_one(take_rows(records, slice(1)))
    finally:
        state.restore_all()
    return True


def _require_known_gradients(task: ClipTask, alone: bool) -> None:
    for name, parameter in task.parameters.items():
        if parameter.is_complex():
            raise UnsupportedModule(
                f"parameter {name!r} is complex, and noise is added to real numbers; keep it as a "
                "real one with a last dimension of 2, torch.view_as_real(weight), and use "
                "torch.view_as_complex(parameter) in the forward pass"
            )
        if has_gradient_hooks(parameter) and not alone:
            raise UnsupportedModule(
                f"parameter {name!r} has a hook on its gradient (register_hook), which per-record "
                "gradients do not pass through; remove it and change the gradient after the step, "
                "or name engine=tacit.engines.PerRecord(), which runs each record alone"
            )


def sample_records(batch: Batch, most: int = _RECORDS) -> Records:
    """Two to `most` records: from the batch, and from its dataset if the batch has too few."""
    own = batch.indices if batch.mask is None else batch.indices[batch.mask]
    rows = own[:most]
    wanted = min(most, _RECORDS)
    if len(rows) < wanted:
        others = torch.ones(len(batch.records), dtype=torch.bool, device=rows.device)
        others[rows] = False
        rows = torch.cat([rows, others.nonzero().flatten()[: wanted - len(rows)]])
    if len(rows) == 1:
        rows = rows.repeat(2)
    whole = replace(batch, indices=rows, mask=None, groups=None)
    return whole.inputs, whole.targets


@dataclass(frozen=True)
class _Probe:
    """A model and its loss, and the state in which every pass over records begins."""

    task: ClipTask
    state: PassState

    # --- proofs -----------------------------------------------------------------------------------

    def require_proof(self, records: Records) -> bool:
        """Whether records are proved to stay apart in a batch; else each of them runs alone."""
        plan = self.require_exact(records)
        if plan.isolation.proves:
            self._require_no_stale_reads(records)
        return plan.isolation.proves and not plan.alone

    def require_exact(self, records: Records) -> GradientPlan:
        """A pass under shadow memory, in which records stay apart and gradients are autograd's."""
        self.state.restore_entries()
        planned = planned_pass(self.task, *records, num_rows(records[0]))
        require_isolation(planned.plan.isolation, self.task.model)
        if planned.plan.isolation.proves and not planned.plan.alone:
            self._compare_gradients(planned)
        return planned.plan

    def require_stateless(self, records: Records) -> None:
        """The same for the rows of one record or one mini-set, which count as one record."""
        isolation = self._forward(records, 1)
        require_no_writes(isolation, self.task.model)
        if not isolation.alone and not isolation.meetings:
            self._require_no_stale_reads(records, 1)

    def require_stateless_for_one(self, record: Records) -> None:
        """With one row a model may take another path, if it can run with one row at all."""
        try:
            self.require_stateless(record)
        except MixesRecords:
            raise
        except Exception:
            return

    def _require_no_stale_reads(self, records: Records, num_records: int | None = None) -> None:
        """Refuse a model if memory that earlier passes left behind reaches the losses of this one.

        Comparing whole storages costs nothing. Labels decide where that is not conclusive.
        """
        self.state.restore_entries()
        inputs, targets = map_tensors(torch.clone, records)
        with Operators(tensors_of((inputs, targets))) as operators:
            losses = run_program(self.task.model, self.task.loss, inputs, targets)
        if not operators.has_left_behind(losses):
            return
        del losses
        again = self._forward(map_tensors(torch.clone, records), num_records)
        if again.meetings and not again.alone:
            refuse_stateful((*again.stale_reads, *again.meetings)[0], self.task.model)

    def _forward(self, records: Records, num_records: int | None = None) -> IsolationReport:
        """The report on a forward pass; with one record, of all rows together."""
        task = self.task
        self.state.restore_entries()

        def run() -> Tensor:
            losses = run_program(task.model, task.loss, *records)
            return losses.sum().reshape(1) if num_records == 1 else losses

        count = num_records or num_rows(records[0])
        planned = make_plan(task.model, run, records, task.parameters, count, backward=False)
        return planned.plan.isolation

    def _compare_gradients(self, planned: Planned) -> None:
        """Require that the rules' gradients are autograd's, and that their norms are not smaller.

        Two records are compared one after the other. A hook may scale each cotangent to norm one;
        then sums with weights other than 0 and 1 are not those of the step.
        """
        plan, losses, task = planned.plan, planned.losses, self.task
        try:
            found = record_gradients(plan, planned.graph, losses, task)
        except (NotFinite, ProgramChanged):  # which an engine runs record by record
            return
        tolerance = _tolerance(task, planned.graph.dtypes())
        for pick in torch.eye(plan.num_records, device=losses.device)[[0, -1]]:
            grads: tuple[Tensor | None, ...] = (None,) * len(task.parameters)
            if losses.requires_grad:
                with plain_program():
                    weights = list(task.parameters.values())
                    grads = gradients([losses], weights, [pick.to(losses.dtype)])
            exact = error = bound = 0.0
            for (name, parameter), grad in zip(task.parameters.items(), grads, strict=True):
                got = torch.zeros(parameter.shape, device=losses.device)
                true = got if grad is None else wide(grad.to_dense().detach())
                if name in found:
                    got = found[name].total(RowScale(pick)).reshape(parameter.shape)
                    bound += float(wide(found[name].squares())[pick.bool()])
                exact += _square(true)
                error += _square(got - true)
            if not exact < 1e36:  # not finite, or so long that it is left out
                continue
            off = error**0.5 > tolerance * exact**0.5 + 1e-9
            if off or bound**0.5 < exact**0.5 * (1 - tolerance) - 1e-9:
                raise UnsupportedModule(
                    f"the per-record gradients of {type(task.model).__name__} are off by "
                    f"{error**0.5 / max(exact**0.5, 1e-30):.1e} of their norm. Is a rule of "
                    "tacit.gradient_rule wrong, or does the model draw from a generator of its "
                    "own? engine=tacit.engines.PerRecord() runs each record alone"
                )

    # --- results ----------------------------------------------------------------------------------

    def require_same_results(self, some: Records, others: Records, alone: bool) -> None:
        """Require the same losses and gradients of the same records, later and beside any others.

        `others` are copies of the last record of `some`, or any records for an engine that runs
        records `alone`. Passes run in a finer type than the model's, unless it does not run in
        one, or there is no memory for a copy of its weights.
        """
        finer = None if alone else _finer_type(self.task)
        if finer is not None:
            try:
                return self._compare(some, others, alone, finer)
            except MixesRecords:
                raise
            except Exception:
                self.state.restore_all()
        return self._compare(some, others, alone)

    def _compare(
        self, some: Records, others: Records, alone: bool, finer: torch.dtype | None = None
    ) -> None:
        # The same operators on the same numbers: only the order of a GPU's additions may differ.
        own = _tolerance(self.task)
        again, beside = (own / 50, own / 5) if finer is None else _OFF[finer]
        first, other = self._results(some, alone, finer), self._results(others, alone, finer)
        comparable = not alone and not self.state.drew()
        if not _same(first, self._results(some, alone, finer), again):
            refuse_stateful(None, self.task.model)
        if alone and self.state.attributes_changed():
            self._compare_from_the_first(some, others, again)
        if not comparable or _same([first[0][-1:].repeat(2), *first[1:]], other, beside):
            return
        rows = torch.arange(num_rows(some[0]), device=device_of(some)).roll(1)
        turned = self._results(take_rows(some, rows), alone, finer)
        if _same([first[0].roll(1)], turned[:1], beside):
            depends = (
                "how many records are beside it, a number that is private, or on what they hold. "
                "Use a constant in the place of the batch's length"
            )
        else:
            depends = (
                "the record's place in the batch, which changes when another record comes or goes. "
                "Are positions added along the dimension of the records? Use the dimension of time "
                "(batch_first)"
            )
        raise MixesRecords(
            f"what {type(self.task.model).__name__} (or its loss) gives for a record depends on "
            f"{depends}, or name engine=tacit.engines.PerRecord(), which runs each record alone"
        )

    def _compare_from_the_first(self, some: Records, others: Records, tolerance: float) -> None:
        """The same comparison, from the model's state before all checks, in both orders.

        It shows a scale that the first records set once, or a running maximum.
        """
        for one, other in ((some, others), (others, some)):
            self.state.restore_all()
            before = self._results(one, True)
            for buffers in (True, False):  # a cache that is filled once goes with its attribute
                self.state.restore_all()
                self._results(other, True)
                if _same(before, self._results(one, True, buffers=buffers), tolerance):
                    break
            else:
                refuse_stateful(None, self.task.model)

    def _results(
        self,
        records: Records,
        alone: bool,
        finer: torch.dtype | None = None,
        buffers: bool = True,
    ) -> list[Tensor]:
        """The losses, and the gradient of their sum or of the last one."""
        self.state.restore_entries() if buffers else self.state.restore_draws()
        given: AbstractContextManager[tuple[ClipTask, Records]] = nullcontext((self.task, records))
        if finer is not None:
            given = _in_type(finer, self.task, records)
        with given as (task, rows), SteadyDraws():
            losses = run_program(task.model, task.loss, *rows)
            of = losses.sum() if alone else losses[-1]
            if not of.requires_grad:
                return [losses.detach()]
            with plain_program():  # a checkpointed block runs again, and must run as before
                parameters = list(task.parameters.values())
                grads = gradients([of], parameters, [torch.ones_like(of)], retain_graph=False)
        return [losses.detach(), *(g.to_dense().flatten() for g in grads if g is not None)]

    def require_any_size(self, batch: Batch, first_views: Callable[[Tree], Tree]) -> None:
        """Require that the first records have the same losses in a batch of any size."""
        most = min(len(batch), batch.max_physical or _MOST_ROWS, _MOST_ROWS)
        if most <= _RECORDS:
            return
        self.state.restore_draws()
        inputs, targets = sample_records(batch.first(most), most)
        records = first_views(inputs), targets
        answers: list[Tensor] = []
        for some in (records, take_rows(records, slice(_COMPARED))):
            self.state.restore_entries()
            with SteadyDraws():
                losses = run_program(self.task.model, self.task.loss, *some)
            if self.state.drew():
                return
            answers.append(losses[:_COMPARED].detach())
        if not _same(answers[:1], answers[1:], 10 * _tolerance(self.task)):
            raise MixesRecords(
                f"what {type(self.task.model).__name__} (or its loss) gives for a record among "
                f"{most} is not what it gives among {_COMPARED}, so it depends on the number of "
                "records, which is private. Use a constant in the place of the batch's length, or "
                "name engine=tacit.engines.PerRecord(), which runs each record alone"
            )


def _finer_type(task: ClipTask) -> torch.dtype | None:
    """A finer type than the model's that its weights are copied in; None if that takes too much.

    A copy in float64 of 8 billion weights takes 64 GB, and the pass over it as much again.
    """
    tensors = [
        t for t in (*task.model.parameters(), *task.model.buffers()) if t.is_floating_point()
    ]
    if sum(t.numel() for t in tensors) <= _MOST_DOUBLED:
        return torch.float64
    return torch.float32 if any(t.dtype.itemsize < 4 for t in tensors) else None


@contextmanager
def _in_type(
    finer: torch.dtype, task: ClipTask, records: Records
) -> Iterator[tuple[ClipTask, Records]]:
    """The same task and records, with weights, buffers and real numbers in this type."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(finer) if tensor.is_floating_point() else tensor

    named = dict(task.model.named_parameters()) | dict(task.model.named_buffers())
    copies = {
        name: t.detach().to(finer if t.is_floating_point() else t.dtype, copy=True)
        for name, t in named.items()
    }
    for name, copy in copies.items():
        copy.requires_grad_(named[name].requires_grad)
    parameters: Any = {name: copies[name] for name in task.parameters}
    with swapped(task.model, copies), no_autocast(device_of(records)):
        yield replace(task, parameters=parameters), map_tensors(cast, records)


def _same(one: list[Tensor], other: list[Tensor], tolerance: float) -> bool:
    """Equal up to rounding. Numbers that are not finite say nothing."""
    if [t.shape for t in one] != [t.shape for t in other]:
        return False
    size = error = 0.0
    for a, b in zip(one, other, strict=True):
        difference = a - b  # not finite where either is not
        if not bool(difference.isfinite().all()):
            told = difference.isfinite()
            a, difference = a[told], difference[told]
        size += _square(a)
        error += _square(difference)
    return math.isinf(size) or error**0.5 <= tolerance * size**0.5 + 1e-6


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64)) ** 2


def _tolerance(task: ClipTask, computed: Iterable[torch.dtype] = ()) -> float:
    """By the coarsest type: of the weights, frozen ones too, of autocast, or of what is computed.

    A model may cast by itself, and adapters in float32 may lie on a body in bfloat16.
    """
    kinds = {*computed, *(p.dtype for p in task.model.parameters())}
    device = next(iter(task.parameters.values())).device.type
    if torch.is_autocast_enabled(device):
        kinds.add(torch.get_autocast_dtype(device))
    bits = min(torch.finfo(kind).bits for kind in kinds if kind.is_floating_point)
    if bits < 32:
        return 1e-1
    return 5e-3 if bits == 32 else 1e-6
