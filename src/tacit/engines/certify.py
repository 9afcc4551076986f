"""Ask a program, on a few real records, for its certificate and for exact gradients.

A query comes here with its logical batch, before steps 1, 8, 64 … and at least two records, so the
verdict does not depend on engine or piece size. Later plans, made for the shapes that run, are
refused by the same verdict.

Whether a model remembers is asked twice. A second pass under shadow memory, in which what is left
of the first belongs to a record of its own, proves that nothing of it reaches the losses: a model
may keep a note, and may not read it. Numbers that Python keeps (a count, a float) have no labels,
so a record is also asked again after others have passed, and must get the same answer.

Nor has a record's place in the batch a label, or the number of records, or what a program reads
behind the dispatcher's back (in a thread, in a compiled extension). So records are asked in another
order and in other company, in float64 where the model runs in it, and with random draws that are
the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tacit.batch import Batch
from tacit.checks import refuse_mixing
from tacit.checks.certificate import (
    require_apart,
    require_no_memory,
    require_nothing_written,
)
from tacit.engines.book_keeping import NotFinite, planned_pass, record_gradients, run_program
from tacit.engines.draws import GENERATORS, Draws, NoDropout, OwnDraws, SteadyDraws
from tacit.engines.gradients import Scale
from tacit.engines.plan import Planned, make_plan
from tacit.engines.precision import no_autocast, wide
from tacit.engines.task import Task
from tacit.engines.torch_internals import (
    OtherOperators,
    gradients,
    has_gradient_hooks,
    plain_program,
    swapped,
)
from tacit.errors import MixesRecords, UnsupportedModule
from tacit.pytrees import Tree, device_of, map_tensors, num_rows, take_rows, tensors_of
from tacit.tensor_float import all_digits

_RECORDS = 16  # so that a model that mixes only larger batches is found at every piece size
_COMPARED = 3  # records whose gradients are compared with autograd's
_MOST_ROWS = 4096  # of a batch whose losses are compared with those of a few


def certify(task: Task, batch: Batch, seen: Callable[[Tree], Tree], *, alone: int = 0) -> bool:
    """Raise MixesRecords or UnsupportedModule unless each record's gradient is of that record.

    `seen` makes of inputs what the model is given, one view of each record. An engine that runs
    `alone` rows at a time, one record's or one set's, is asked only whether anything is remembered.
    Returns whether there were records to ask with.
    """
    if not alone:
        refuse_mixing(task.model)  # by name, where it is known
    with all_digits():  # answers are compared, and TensorFloat-32 keeps ten bits of them
        try:
            return _certify(task, batch, _RECORDS, seen, alone)
        except torch.OutOfMemoryError:
            return _certify(task, batch, 2, seen, alone)


def _certify(task: Task, batch: Batch, most: int, seen: Callable[[Tree], Tree], alone: int) -> bool:
    inputs, targets = sample(batch, most)
    count = num_rows(inputs)
    if count == 0:
        return False
    state = _State(task.model, inputs)
    plain = replace(task.flat(), views=1, active={})
    try:
        _require_known_gradients(task, bool(alone))
        state.restore()
        inputs = seen(inputs)
        if alone:
            one = take_rows(inputs, slice(alone)), take_rows(targets, slice(alone))
            _require_no_memory_alone(plain, one, state)
            other = slice(-alone, None)
            others = take_rows(inputs, other), take_rows(targets, other)
            _require_same_again(plain, one, others, state)
            if alone > 1:
                _require_no_memory_of_one(plain, inputs, targets, state)
            return True
        state.restore()
        planned = planned_pass(plain, inputs, targets, count)
        plan = planned.plan
        require_apart(plan.certificate, task.model)
        proved = plan.certificate.proves and not plan.alone
        if proved:
            _require_exact(planned, plain)
        del planned
        if plan.certificate.proves:
            state.restore()
            _second_pass(plain, (inputs, targets), count)
        half = slice((count + 1) // 2, None) if count > 1 else slice(None)
        others = take_rows(inputs, half), take_rows(targets, half)
        _require_same_again(plain, (inputs, targets), others, state)
        if proved:
            _require_any_company(plain, inputs, targets, state)
            _require_any_size(plain, batch, seen, state)
        if count > 1:
            _require_no_memory_of_one(plain, inputs, targets, state)
    finally:
        state.restore()
        state.restore_attributes()
    return True


class _State:
    """What a check must leave as it was: generators, buffers and the modules' attributes."""

    def __init__(self, model: nn.Module, inputs: Tree) -> None:
        self.draws = Draws(inputs)
        self._buffers = [(buffer.detach(), buffer.detach().clone()) for buffer in model.buffers()]
        # A scripted module keeps everything outside of Python.
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._attributes = [(module, dict(vars(module))) for module in modules]
        self._tables = [(module._buffers, dict(module._buffers)) for module in modules]
        own = [v for _, held in self._attributes for v in held.values()]
        self._own_draws = [OwnDraws(v) for v in own if isinstance(v, GENERATORS)]

    def restore(self, buffers: bool = True) -> None:
        """Draws and buffers, so that the next pass begins as the first did."""
        self.draws.restore()
        for own in self._own_draws:
            own.restore()
        with torch.no_grad():
            for buffer, before in self._buffers if buffers else ():
                if not torch.equal(buffer, before):  # a write would spoil the caller's own graphs
                    buffer.copy_(before)

    def drew(self) -> bool:
        """Whether any generator has drawn: what nothing makes steady cannot be compared."""
        own = any(draws.moved() for draws in self._own_draws)
        return own or self.draws.moved() or self.draws.moved_in_python()

    def attributes_changed(self) -> bool:
        return any(
            vars(module).keys() != held.keys()
            or any(vars(module)[name] is not value for name, value in held.items())
            for module, held in self._attributes
        )

    def restore_attributes(self) -> None:
        """Not before every pass: what a model keeps there is what is looked for."""
        for module, held in self._attributes:
            vars(module).clear()
            vars(module).update(held)
        for table, buffers in self._tables:
            table.clear()
            table.update(buffers)


def _require_known_gradients(task: Task, alone: bool) -> None:
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
                "or name engine=tacit.PerRecord(), which runs each record alone"
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


def _second_pass(task: Task, records: tuple[Tree, Tree], num_records: int) -> None:
    """The same pass in new memory: what is left of the earlier one must not reach the losses."""
    inputs, targets = map_tensors(torch.clone, records)

    def run() -> Tensor:
        losses = run_program(task.model, task.loss, inputs, targets)
        return losses.sum().reshape(1) if num_records == 1 else losses

    private = (inputs, targets)
    made = make_plan(task.model, run, private, task.parameters, num_records, backward=False)
    again = made.plan.certificate
    if again.meets and not again.alone:
        event = again.remembers[0] if again.remembers else again.meets[0]
        require_no_memory(event, task.model)


def _require_no_memory_alone(task: Task, records: tuple[Tree, Tree], state: _State) -> None:
    """Asked of the rows of one record, or of one set."""
    inputs, targets = records

    def run() -> Tensor:
        return run_program(task.model, task.loss, inputs, targets).sum().reshape(1)

    state.restore()
    certificate = make_plan(task.model, run, (inputs, targets), task.parameters, 1).plan.certificate
    require_nothing_written(certificate, task.model)
    if certificate.alone or certificate.meets:
        return
    state.restore()
    _second_pass(task, records, 1)


def _require_no_memory_of_one(task: Task, inputs: Tree, targets: Tree, state: _State) -> None:
    """A model may take another way with one row; where it cannot run with one, it does not."""
    one = take_rows(inputs, slice(1)), take_rows(targets, slice(1))
    try:
        _require_no_memory_alone(task, one, state)
    except MixesRecords:
        raise
    except Exception:
        return


def _require_same_again(
    task: Task, records: tuple[Tree, Tree], others: tuple[Tree, Tree], state: _State
) -> None:
    """The same records, after others have passed, have the same losses and gradients.

    Where a model keeps something in an attribute, that is asked of the model as it was before all
    checks too, both ways round: a scale that is set once, or the largest number so far, was of
    these records.
    """

    def ask(inputs: Tree, targets: Tree, buffers: bool = True) -> list[Tensor]:
        state.restore(buffers)
        losses = run_program(task.model, task.loss, inputs, targets)
        return _with_gradients(task, losses, losses.sum())

    def same(before: list[Tensor], after: list[Tensor]) -> bool:
        # The same operators on the same numbers: only the order of a GPU's additions may differ.
        return _same(before, after, _tolerance(task, before[0]) / 50)

    def same_from_the_first(one: tuple[Tree, Tree], other: tuple[Tree, Tree]) -> bool:
        state.restore_attributes()
        before = ask(*one)
        for buffers in (True, False):  # a cache that is filled once goes with its attribute
            state.restore_attributes()
            ask(*other)
            if same(before, ask(*one, buffers=buffers)):
                return True
        return False

    before, _, after = ask(*records), ask(*others), ask(*records)
    steady = same(before, after)
    if state.attributes_changed():
        steady = steady and same_from_the_first(records, others)
        steady = steady and same_from_the_first(others, records)
    if not steady:
        require_no_memory(None, task.model)


def _with_gradients(task: Task, losses: Tensor, of: Tensor) -> list[Tensor]:
    if not of.requires_grad:
        return [losses.detach()]
    with plain_program():  # a checkpointed block runs again, and must run as before
        parameters = list(task.parameters.values())
        grads = gradients([of], parameters, [torch.ones_like(of)], retain_graph=False)
    return [losses.detach(), *(g.to_dense().flatten() for g in grads if g is not None)]


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
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _require_exact(planned: Planned, task: Task) -> None:
    """The rules' gradients of each record are autograd's, and their norms are not below."""
    plan, graph, losses = planned.plan, planned.graph, planned.losses
    try:
        found = record_gradients(plan, graph, losses, task)
    except (NotFinite, OtherOperators):  # which an engine runs record by record
        return
    parameters = list(task.parameters.values())
    for record in range(min(plan.num_records, _COMPARED)):
        pick = torch.zeros(plan.num_records, device=losses.device)
        pick[record] = 1.0
        grads: tuple[Tensor | None, ...] = (None,) * len(parameters)
        if losses.requires_grad:
            with plain_program():
                grads = gradients([losses], parameters, [pick.to(losses.dtype)])
        exact, error, bound = 0.0, 0.0, 0.0
        for name, grad in zip(task.parameters, grads, strict=True):
            shape = task.parameters[name].shape
            got = torch.zeros(shape, device=losses.device)
            true = got if grad is None else wide(grad.to_dense().detach())
            if name in found:
                got = found[name].total(Scale(pick)).reshape(shape)
                bound += float(wide(found[name].squares())[record])
            exact += _square(true)
            error += _square(got - true)
        if not exact < 1e36:  # not finite, or so long that it is left out
            continue
        tolerance = _tolerance(task, losses)
        off = error**0.5 > tolerance * exact**0.5 + 1e-9
        if off or bound**0.5 < exact**0.5 * (1 - tolerance) - 1e-9:
            raise UnsupportedModule(
                f"the per-record gradients of {type(task.model).__name__} are off by "
                f"{error**0.5 / max(exact**0.5, 1e-30):.1e} of their norm. Is a rule of "
                "tacit.gradient_rule wrong, or does the model draw from a generator of its own? "
                "engine=tacit.PerRecord() runs each record alone"
            )


@dataclass(frozen=True)
class _Answer:
    """The losses of some rows, and the gradient of one of them."""

    losses: Tensor
    gradient: list[Tensor]


def _require_any_company(task: Task, inputs: Tree, targets: Tree, state: _State) -> None:
    """A record's loss and gradient are the same in every place, and beside any others.

    The records are asked once in order and once turned by one place; the last one is also asked
    beside a copy of itself. A model that draws what cannot be made steady has no answer to compare.
    """
    try:
        _compare_company(task, inputs, targets, state, 1e-5, _in_double)
    except (MixesRecords, torch.OutOfMemoryError):
        raise
    except Exception:  # a model that insists on its own type
        tolerance = _tolerance(task, tensors_of(inputs)[0]) / 5
        _compare_company(task, inputs, targets, state, tolerance, _as_it_is)


def _compare_company(
    task: Task, inputs: Tree, targets: Tree, state: _State, tolerance: float, how: _Precision
) -> None:
    def ask(rows: Tensor, place: int) -> _Answer | None:
        state.restore()
        x, y = take_rows((inputs, targets), rows)
        with how(task, x, y) as (asked, x, y), NoDropout(), SteadyDraws():
            losses = run_program(asked.model, asked.loss, x, y)
            if state.drew() or not losses.requires_grad:
                return None
            _, *gradient = _with_gradients(asked, losses, losses[place])
        return _Answer(losses.detach(), gradient)

    every = torch.arange(num_rows(inputs), device=device_of(inputs))
    whole, turned = ask(every, len(every) - 1), ask(every.roll(1), 0)
    pair = ask(every[-1:].repeat(2), 0)
    if whole is None or turned is None or pair is None:
        return
    kind = type(task.model).__name__
    if not _same(
        [whole.losses.roll(1), *whole.gradient], [turned.losses, *turned.gradient], tolerance
    ):
        raise MixesRecords(
            f"what {kind} (or its loss) gives for a record depends on the record's place in the "
            "batch, which changes when another record comes or goes. Are positions added along "
            "the dimension of the records? Use the dimension of time (batch_first), or name "
            "engine=tacit.PerRecord(), which runs each record alone"
        )
    last = whole.losses[-1:].repeat(2)
    if not _same([last, *whole.gradient], [pair.losses, *pair.gradient], tolerance):
        raise MixesRecords(
            f"what {kind} (or its loss) gives for a record depends on how many records are beside "
            "it, a number that is private, or on what they hold. Use a constant in the place of "
            "the batch's length, or name engine=tacit.PerRecord(), which runs each record alone"
        )


@contextmanager
def _in_double(task: Task, inputs: Tree, targets: Tree) -> Iterator[tuple[Task, Tree, Tree]]:
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
    with swapped(model, copies), no_autocast(device_of(inputs)):
        yield (
            replace(task, parameters=parameters),
            map_tensors(double, inputs),
            map_tensors(double, targets),
        )


@contextmanager
def _as_it_is(task: Task, inputs: Tree, targets: Tree) -> Iterator[tuple[Task, Tree, Tree]]:
    yield task, inputs, targets


_Precision = Callable[[Task, Tree, Tree], AbstractContextManager[tuple[Task, Tree, Tree]]]


def _require_any_size(
    task: Task, batch: Batch, seen: Callable[[Tree], Tree], state: _State
) -> None:
    """The first records have the same losses in a whole batch: a branch on its size is found."""
    most = min(len(batch), batch.max_physical or _MOST_ROWS, _MOST_ROWS)
    if most <= _RECORDS:
        return
    state.restore()
    inputs, targets = sample(batch.first(most), most)
    inputs = seen(inputs)
    few = slice(_RECORDS)
    answers = []
    for x, y in ((inputs, targets), (take_rows(inputs, few), take_rows(targets, few))):
        state.restore()
        with NoDropout(), SteadyDraws():
            losses = run_program(task.model, task.loss, x, y)
        if state.drew():
            return
        answers.append([losses[few].detach()])
    whole, alone = answers
    if not _same(whole, alone, 10 * _tolerance(task, whole[0])):
        raise MixesRecords(
            f"what {type(task.model).__name__} (or its loss) gives for a record among {most} is "
            f"not what it gives among {_RECORDS}, so it depends on the number of records, which is "
            "private. Use a constant in the place of the batch's length, or name "
            "engine=tacit.PerRecord(), which runs each record alone"
        )


def _tolerance(task: Task, losses: Tensor) -> float:
    bits = min(torch.finfo(p.dtype).bits for p in task.parameters.values())
    if bits < 32 or torch.is_autocast_enabled(losses.device.type):
        return 1e-1
    return 5e-3 if bits == 32 else 1e-6
