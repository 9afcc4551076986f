"""Ask a program, on a few real records, for its certificate and for exact gradients.

A query comes here with its logical batch, before steps 1, 8, 64 … and at least two records, so the
verdict does not depend on engine or piece size. Later plans, made for the shapes that run, are
refused by the same verdict.

Three things are asked.

- *Proof*, before the first step: records stay apart, and nothing that a pass has left behind is in
  the losses of a later one (`plan`). Not asked again: every step runs the operators that were
  certified, on operands that are told apart by what they hold of records, or is planned anew.
- *Exactness*, before steps 1 and 8: the rules' gradients and norms are autograd's. Again at step 8
  because weights that begin at zero hide what lies behind them.
- *Answers*, every time: what has no labels. Those are a record's place in the batch, the number of
  records, what a program reads behind the dispatcher's back (in a thread, in a compiled extension)
  and numbers that Python keeps from pass to pass. So records are asked beside others, beside
  themselves and again, in float64 where the model runs in it, with random draws that are the same
  for all. Three records are enough: that they do not mix is proved already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tacit.checks.certificate import (
    refuse_mixing,
    require_apart,
    require_no_memory,
    require_nothing_written,
)
from tacit.checks.side_effects import current_watch
from tacit.engines.book_keeping import planned_pass, record_gradients, run_program
from tacit.engines.clipping import ClipTask
from tacit.engines.draws import State, SteadyDraws
from tacit.engines.gradient_plan import GradientPlan, Planned, make_plan
from tacit.engines.gradients import RowScale
from tacit.engines.programs import Operators, ProgramChanged, gradients
from tacit.engines.rules import NotFinite
from tacit.errors import MixesRecords, UnsupportedModule
from tacit.precision import ieee_float32, no_autocast, wide
from tacit.pytrees import Tree, device_of, map_tensors, num_rows, take_rows, tensors_of
from tacit.sampling.batch import Batch
from tacit.torch_internals import has_gradient_hooks, plain_program, swapped

_RECORDS = 8  # so that a model that mixes only larger batches is found at every piece size
_MOST_IN_SETS = 16
_ASKED = 3  # records whose answers are compared
_MOST_ROWS = 4096  # of a batch whose losses are compared with those of a few
_LAST_EXACT = 8  # the last step before which gradients are compared with autograd's


def certify(task: ClipTask, batch: Batch, seen: Callable[[Tree], Tree], *, alone: int = 0) -> bool:
    """Raise MixesRecords or UnsupportedModule unless each record's gradient is of that record.

    `seen` makes of inputs what the model is given, one view of each record. An engine that runs
    `alone` rows at a time, one record's or one set's, is asked only whether anything is remembered.
    Returns whether there were records to ask with.
    """
    if not alone:
        refuse_mixing(task.model)  # by name, where it is known
    with ieee_float32():  # answers are compared, and TensorFloat-32 keeps ten bits of them
        try:
            return _certify(task, batch, min(max(_RECORDS, 2 * alone), _MOST_IN_SETS), seen, alone)
        except torch.OutOfMemoryError:
            return _certify(task, batch, 2, seen, alone)


def _certify(
    task: ClipTask, batch: Batch, most: int, seen: Callable[[Tree], Tree], alone: int
) -> bool:
    inputs, targets = sample(batch, most)
    if num_rows(inputs) == 0:
        return False
    watch, state = current_watch(task.model), State(inputs, task.model)
    _require_known_gradients(task, bool(alone))
    try:
        records = seen(inputs), targets
        asked = _Asked(replace(task.flat(), views=1, active={}), state)
        if alone:
            one, other = (take_rows(records, rows) for rows in (slice(alone), slice(-alone, None)))
            asked.require_no_memory_alone(one)
            asked.require_same_answers(one, other, alone=True)
            if alone > 1:
                asked.require_no_memory_of_one(take_rows(records, slice(1)))
            return True
        if watch.steps == 0:
            watch.proved = asked.require_proof(records)
        elif watch.proved and watch.steps < _LAST_EXACT:
            asked.require_exact(take_rows(records, slice(2)))
        few = take_rows(records, slice(_ASKED))
        last = num_rows(few[0]) - 1
        pair = take_rows(few, torch.full((2,), last, device=device_of(inputs)))
        asked.require_same_answers(few, pair, alone=not watch.proved)
        if watch.proved:
            asked.require_any_size(batch, seen)
        if watch.steps == 0:
            asked.require_no_memory_of_one(take_rows(records, slice(1)))
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


def sample(batch: Batch, most: int = _RECORDS) -> tuple[Tree, Tree]:
    """Two to `most` records: the batch's own, and others of its dataset where it has few."""
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


Records = tuple[Tree, Tree]


@dataclass(frozen=True)
class _Asked:
    """A model and its loss, and the state in which every pass over records begins."""

    task: ClipTask
    state: State

    # --- proofs -----------------------------------------------------------------------------------

    def require_proof(self, records: Records) -> bool:
        """Whether records are proved to stay apart in a batch; else each of them runs alone."""
        plan = self.require_exact(records)
        if plan.certificate.proves:
            self._require_unread(records)
        return plan.certificate.proves and not plan.alone

    def require_exact(self, records: Records) -> GradientPlan:
        """A pass under shadow memory, in which records stay apart and gradients are autograd's."""
        self.state.restore_entries()
        planned = planned_pass(self.task, *records, num_rows(records[0]))
        require_apart(planned.plan.certificate, self.task.model)
        if planned.plan.certificate.proves and not planned.plan.alone:
            self._compare_gradients(planned)
        return planned.plan

    def require_no_memory_alone(self, records: Records) -> None:
        """Asked of the rows of one record, or of one set: they count as one."""
        certificate = self._forward(records, 1)
        require_nothing_written(certificate, self.task.model)
        if not certificate.alone and not certificate.meets:
            self._require_unread(records, 1)

    def require_no_memory_of_one(self, record: Records) -> None:
        """A model may take another way with one row; where it cannot run with one, it does not."""
        try:
            self.require_no_memory_alone(record)
        except MixesRecords:
            raise
        except Exception:
            return

    def _require_unread(self, records: Records, num_records: int | None = None) -> None:
        """What earlier passes have left behind does not reach the losses of a pass in new memory.

        Told by whole storages at first, at no cost, and by labels where those cannot tell.
        """
        self.state.restore_entries()
        inputs, targets = map_tensors(torch.clone, records)
        with Operators(tensors_of((inputs, targets))) as operators:
            losses = run_program(self.task.model, self.task.loss, inputs, targets)
        if not operators.has_left_behind(losses):
            return
        del losses
        again = self._forward(map_tensors(torch.clone, records), num_records)
        if again.meets and not again.alone:
            require_no_memory((*again.remembers, *again.meets)[0], self.task.model)

    def _forward(self, records: Records, num_records: int | None = None) -> Any:
        """The certificate of a forward pass; with one record, of all rows together."""
        task = self.task
        self.state.restore_entries()

        def run() -> Tensor:
            losses = run_program(task.model, task.loss, *records)
            return losses.sum().reshape(1) if num_records == 1 else losses

        count = num_records or num_rows(records[0])
        planned = make_plan(task.model, run, records, task.parameters, count, backward=False)
        return planned.plan.certificate

    def _compare_gradients(self, planned: Planned) -> None:
        """The rules' gradients of two records are autograd's, and their norms are not below.

        One record after the other: a hook may scale each cotangent to norm one, so that sums with
        other weights than 0 and 1 are not those of the step.
        """
        plan, losses, task = planned.plan, planned.losses, self.task
        try:
            found = record_gradients(plan, planned.graph, losses, task)
        except (NotFinite, ProgramChanged):  # which an engine runs record by record
            return
        tolerance = _tolerance(task, losses)
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

    # --- answers ----------------------------------------------------------------------------------

    def require_same_answers(self, some: Records, others: Records, alone: bool) -> None:
        """The same records have the same losses and gradients, later and beside any others.

        `others` are copies of the last record of `some`, or, for an engine that runs records
        `alone`, any. In float64, unless a model insists on its own type.
        """
        try:
            self._compare(some, others, alone, double=not alone)
        except (MixesRecords, torch.OutOfMemoryError):
            raise
        except Exception:
            if alone:
                raise
            self.state.restore_all()
            self._compare(some, others, alone, double=False)

    def _compare(self, some: Records, others: Records, alone: bool, double: bool) -> None:
        # The same operators on the same numbers: only the order of a GPU's additions may differ.
        again = 1e-7 if double else _tolerance(self.task, tensors_of(some)[0]) / 50
        first, other = self._ask(some, alone, double), self._ask(others, alone, double)
        comparable = not alone and not self.state.drew()
        if not _same(first, self._ask(some, alone, double), again):
            require_no_memory(None, self.task.model)
        if alone and self.state.attributes_changed():
            self._compare_from_the_first(some, others, again)
        if not comparable:
            return
        last = [first[0][-1:].repeat(2), *first[1:]]
        if _same(last, other, 1e-5 if double else 10 * again):
            return
        rows = torch.arange(num_rows(some[0]), device=device_of(some)).roll(1)
        turned = self._ask(take_rows(some, rows), alone, double)
        by_place = not _same([first[0].roll(1)], turned[:1], 1e-5 if double else 10 * again)
        depends, instead = _ON_PLACE if by_place else _ON_NUMBER
        raise MixesRecords(
            f"what {type(self.task.model).__name__} (or its loss) gives for a record depends on "
            f"{depends} {instead}, or name engine=tacit.engines.PerRecord(), which runs each "
            "record alone"
        )

    def _compare_from_the_first(self, some: Records, others: Records, tolerance: float) -> None:
        """Of the model as it was before all checks, both ways round.

        A scale that is set once, or the largest number so far, was of the first records.
        """
        for one, other in ((some, others), (others, some)):
            self.state.restore_all()
            before = self._ask(one, True)
            for buffers in (True, False):  # a cache that is filled once goes with its attribute
                self.state.restore_all()
                self._ask(other, True)
                if _same(before, self._ask(one, True, buffers=buffers), tolerance):
                    break
            else:
                require_no_memory(None, self.task.model)

    def _ask(
        self, records: Records, alone: bool, double: bool = False, buffers: bool = True
    ) -> list[Tensor]:
        """The losses, and the gradient of their sum or of the last one."""
        self.state.restore_entries() if buffers else self.state.restore_draws()
        with _in_double(self.task, records) if double else _as_it_is(self.task, records) as asked:
            task, records = asked
            with SteadyDraws():
                losses = run_program(task.model, task.loss, *records)
                of = losses.sum() if alone else losses[-1]
                if not of.requires_grad:
                    return [losses.detach()]
                with plain_program():  # a checkpointed block runs again, and must run as before
                    parameters = list(task.parameters.values())
                    grads = gradients([of], parameters, [torch.ones_like(of)], retain_graph=False)
        return [losses.detach(), *(g.to_dense().flatten() for g in grads if g is not None)]

    def require_any_size(self, batch: Batch, seen: Callable[[Tree], Tree]) -> None:
        """The first records have the same losses in a whole batch, whatever its size."""
        most = min(len(batch), batch.max_physical or _MOST_ROWS, _MOST_ROWS)
        if most <= _RECORDS:
            return
        self.state.restore_draws()
        inputs, targets = sample(batch.first(most), most)
        records = seen(inputs), targets
        answers: list[list[Tensor]] = []
        for some in (records, take_rows(records, slice(_ASKED))):
            self.state.restore_entries()
            with SteadyDraws():
                losses = run_program(self.task.model, self.task.loss, *some)
            if self.state.drew():
                return
            answers.append([losses[:_ASKED].detach()])
        if not _same(answers[0], answers[1], 10 * _tolerance(self.task, answers[0][0])):
            raise MixesRecords(
                f"what {type(self.task.model).__name__} (or its loss) gives for a record among "
                f"{most} is not what it gives among {_ASKED}, so it depends on the number of "
                "records, which is private. Use a constant in the place of the batch's length, or "
                "name engine=tacit.engines.PerRecord(), which runs each record alone"
            )


_ON_PLACE = (
    "the record's place in the batch, which changes when another record comes or goes.",
    "Are positions added along the dimension of the records? Use the dimension of time "
    "(batch_first)",
)
_ON_NUMBER = (
    "how many records are beside it, a number that is private, or on what they hold.",
    "Use a constant in the place of the batch's length",
)


@contextmanager
def _in_double(task: ClipTask, records: Records) -> Iterator[tuple[ClipTask, Records]]:
    """The same question with float64 weights, buffers and records."""

    def double(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    model = task.model
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    copies = {
        name: double(t.detach()).clone().requires_grad_(t.requires_grad)
        for name, t in named.items()
    }
    parameters: Any = {name: copies[name] for name in task.parameters}
    with swapped(model, copies), no_autocast(device_of(records)):
        yield replace(task, parameters=parameters), map_tensors(double, records)


@contextmanager
def _as_it_is(task: ClipTask, records: Records) -> Iterator[tuple[ClipTask, Records]]:
    yield task, records


def _same(one: list[Tensor], other: list[Tensor], tolerance: float) -> bool:
    """Equal up to roundings; numbers that are not finite say nothing."""
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
    if math.isinf(size):
        return True
    return error**0.5 <= tolerance * size**0.5 + 1e-6


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.detach(), dtype=torch.float64)) ** 2


def _tolerance(task: ClipTask, losses: Tensor) -> float:
    bits = min(torch.finfo(p.dtype).bits for p in task.parameters.values())
    if bits < 32 or torch.is_autocast_enabled(losses.device.type):
        return 1e-1
    return 5e-3 if bits == 32 else 1e-6
