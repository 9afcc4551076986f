"""Shadow memory: proves which record every number of a program belongs to.

Run a program under `Shadow`, with its batch marked, and every element of every tensor gets a label:
0 is public, i in 1..n is record i, -1 is several records. The labels follow the operators that
PyTorch executes, in the forward and in the backward pass, so they see what no numerical probe sees:
`0 * z.mean(0)`, a detached mean, a mixture scaled by 1e-9.

    shadow = Shadow(num_records=len(x))
    shadow.mark(x)
    with shadow:
        losses = loss(model(x))
    assert not shadow.meetings and layout(shadow.labels(losses), len(x)).kind == "blocks"

Guarantee: an element that changes when record i changes has label i or -1, along the path that
Python took. Where the path or a position depends on private data, the flow is implicit, and is
listed in `value_reads` and `selections`. Code that reads or writes memory without PyTorch's
dispatcher is not seen, apart from `numpy`, `tolist`, `__dlpack__`, raw pointers handed out by a
private tensor, and private scalars in a list that becomes a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tacit.checks.isolation import Event
from tacit.engines import shadow_indexing  # noqa: F401  (registers rules)
from tacit.engines.shadow_calls import ALIASES, VALUE_READS, Call, Labels, flat, reads_no_value
from tacit.engines.shadow_events import PythonWatch, SourceLines, operator_name
from tacit.engines.shadow_labels import (
    SEVERAL,
    LabelMemory,
    Layout,
    bounds,
    distinct,
    has_elements,
    has_several,
    is_private,
    is_wrapper,
    layout,
    parts,
)
from tacit.engines.shadow_rules import find_rule
from tacit.torch_internals import (
    SavedInBlocks,
    TorchDispatchMode,
    decomposition_of,
    memory_of,
    number_of,
    outside_modes,
    saves_through_hooks,
    schema_of,
    without_functions,
    written_operands,
)


class Shadow(TorchDispatchMode):
    """Labels every element that is computed inside `with shadow:`.

    Modes of PyTorch belong to a thread, so what another thread does is not seen. Nor is
    `torch.utils.dlpack.to_dlpack`, which PyTorch shows to no mode (`tensor.__dlpack__` is seen), or
    a look inside a function of the user's that itself checks for `__torch_function__`.

    Attributes, of which the first six are lists of events without repetitions:
        meetings: operators that made an element of several records from elements that were not.
        value_reads: places where Python read a private value, or the shape of a tensor depends on
            one.
        selections: places where private data chose rows or positions of several records, or how
            many of them there are.
        reorders: places where public data, which may be drawn anew, chose whose row is where.
        misread: places where a checkpointed block ran again, and gave other records' numbers for
            those that it had saved.
        unknown: operators without a rule that had a private operand; their outputs are -1.
        phase: "forward" or "backward", set by the caller and kept in each event.
        on_record: called with each operator that has an operand with a record's own label.
    """

    #: Without this, PyTorch refuses to run operators such as `torch.cond` under the mode.
    supports_higher_order_operators = True

    def __init__(self, num_records: int) -> None:
        super().__init__()
        if num_records < 1:
            raise ValueError(f"num_records must be at least 1, got {num_records}")
        self.num_records = num_records
        self.meetings: list[Event] = []
        self.value_reads: list[Event] = []
        self.selections: list[Event] = []
        self.reorders: list[Event] = []
        self.misread: list[Event] = []
        self.unknown: list[Event] = []
        self.phase = "forward"
        self.on_record: Callable[[Any], None] | None = None
        self._memory = LabelMemory()
        self._counting: dict[int, Tensor] = {}  # what `arange` made of integers
        # The labels of what each node of the autograd graph gives, by its number and the output.
        self._results: dict[tuple[int, int], Tensor | None] = {}
        self._in_block = False  # whether a checkpointed block runs again
        self._decomposed: list[Call] = []  # the operators whose decomposition is running
        self._watch = PythonWatch(self)
        self._saved_in_blocks = SavedInBlocks(self._labels_now, self._read_again)
        self._sources = SourceLines()

    def __enter__(self) -> Shadow:
        super().__enter__()
        self._watch.__enter__()
        self._saved_in_blocks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._saved_in_blocks.__exit__(*exc)
        self._watch.__exit__(*exc)
        super().__exit__(*exc)

    def forget(self) -> None:
        """Free the labels. They take up to 4 bytes per number, and this object is in a cycle."""
        self._memory = LabelMemory()
        self._results.clear()
        self._counting.clear()

    def mark(self, tensor: Tensor, labels: Tensor | None = None) -> None:
        """Give row k of `tensor` the label `labels[k]`, by default k + 1."""
        if tensor.dim() == 0:
            raise ValueError("mark() needs a tensor with rows; write to labels() for a scalar")
        if labels is None:
            if tensor.shape[0] != self.num_records:
                raise ValueError(
                    f"the tensor has {tensor.shape[0]} rows for {self.num_records} records; "
                    "pass labels= to say whose each row is"
                )
            labels = torch.arange(1, self.num_records + 1)
        with without_functions():
            labels = labels.detach().to(device=tensor.device, dtype=torch.int32)
            rows = labels.reshape(-1, *[1] * (tensor.dim() - 1))
            self._memory.write(tensor, rows.expand(tensor.shape))

    def labels(self, tensor: Tensor) -> Tensor:
        """The int32 labels of a tensor, of its shape. Writing to them marks the tensor.

        Ask again after another operator has run: it may have made new label memory. A tensor whose
        elements have no labels (a sparse or nested one, a wrapper of others) has one label.
        """
        with without_functions():
            if has_elements(tensor):
                return self._memory.open(tensor)
            label = SEVERAL if self.private(tensor) or not is_wrapper(tensor) else 0
            return torch.full((1,), label, dtype=torch.int32, device=tensor.device)

    def layout(self, tensor: Tensor) -> Layout:
        """How records lie in a tensor: `layout(shadow.labels(tensor), num_records)`, but faster."""
        with without_functions():
            labels = self._memory.find(tensor) if has_elements(tensor) else self.labels(tensor)
            return Layout("public") if labels is None else layout(labels, self.num_records)

    def private(self, tensor: Tensor) -> bool:
        """Whether any element of a tensor belongs to a record, or cannot be seen."""
        with without_functions():
            if is_wrapper(tensor):
                inside = parts(tensor)
                return inside is None or any(self.private(inner) for inner in inside)
            try:
                return is_private(self._memory.find(tensor))
            except (NotImplementedError, RuntimeError):
                return False

    def keep_results(self, *tensors: Any) -> None:
        """Keep the labels of what the nodes of the autograd graph gave, for `misplaced`."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and has_elements(tensor) and tensor.grad_fn is not None:
                place = number_of(tensor.grad_fn), tensor.output_nr
                if place not in self._results:
                    labels = self._memory.find(tensor)
                    self._results[place] = None if labels is None else distinct(labels).clone()

    def misplaced(self, node: Any, output: int, cotangent: Tensor) -> bool | None:
        """Whether a record's cotangent lies where the node gave another record's number.

        Autograd never moves it there. Python code in the backward pass may, and the node's own
        backward pass would then join the cotangent of one record with the numbers of another.
        None where it is not known whose number the node gave.
        """
        with without_functions():
            labels, place = self._memory.find(cotangent), (number_of(node), output)
            if labels is None or not is_private(labels):
                return False
            if place not in self._results:
                return None
            own, labels = self._results[place], distinct(labels)
            return own is not None and bool(((labels > 0) & (own != 0) & (own != labels)).any())

    def _labels_now(self, tensor: Tensor) -> Tensor:
        with outside_modes():
            labels = self._memory.find(tensor) if has_elements(tensor) else self.labels(tensor)
            return torch.tensor(0) if labels is None else distinct(labels).clone()

    def _read_again(self, saved: Tensor, again: Callable[[], Tensor]) -> Tensor:
        """What a checkpointed block gives must have the labels of what it saved, or be public."""
        outer, self._in_block = self._in_block, True
        try:
            tensor = again()
        finally:
            self._in_block = outer
        labels = self._labels_now(tensor)
        with outside_modes():
            if bool(((labels != 0) & (labels != saved.to(labels.device))).any()):
                self.note("misread", "checkpoint")
        return tensor

    def origin(self, tensor: Tensor) -> Event | None:
        """The operator that first wrote something private into a tensor's memory."""
        return self._memory.origin(tensor)

    # --- one operator -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._decomposed:
            self._require_harmless(func, args, kwargs)
        shapes = _shapes(func, args)
        if self.phase == "forward" and not self._decomposed:
            with without_functions():  # before an operator that works in place
                self.keep_results(*flat([args, *kwargs.values()]))
                if saves_through_hooks():  # they may give a node the numbers of another record
                    self.note("unknown", "saved_tensors_hooks")
        try:
            output = func(*args, **kwargs)
        except Exception:
            # The program may catch the error, and go another way.
            self.note_error(operator_name(func), [*args, *kwargs.values()])
            raise
        with without_functions():
            is_arange = getattr(func, "overloadpacket", None) is torch.ops.aten.arange
            # A program is known by its integers; floats may be others in the next pass.
            if is_arange and not any(isinstance(x, float) for x in (*args, *kwargs.values())):
                self._counting[memory_of(output)] = output
            elif self._counting:
                for tensor in written_operands(func, args, kwargs):
                    self._counting.pop(memory_of(tensor), None)
            if self.phase == "forward" and not self._decomposed:
                self._sources.note()
            try:
                self._label(func, args, kwargs, output, resized=shapes != _shapes(func, args))
            except Exception:  # a kind of tensor that no rule has met
                self._deny(func, args, kwargs, output)
        return output

    def _label(self, func: Any, args: Any, kwargs: Any, output: Any, resized: bool) -> None:
        operands = [t for t in flat([args, *kwargs.values()]) if isinstance(t, Tensor)]
        opaque = touched = False
        for tensor in operands:
            try:
                if not is_wrapper(tensor):
                    touched = touched or self._memory.known(tensor)
                elif self.private(tensor):
                    touched = opaque = True
            except (NotImplementedError, RuntimeError):
                opaque = True
        # The branches of a higher-order operator may reach what is no operand.
        if schema_of(func) is None:
            return self._deny(func, args, kwargs, output)
        if not touched:
            return None
        call = Call(func, args, kwargs, output, self._memory.find)
        if opaque or any(t is not None and not has_elements(t) for t in call.outputs):
            if any(self.private(tensor) for tensor in operands):
                self._deny(func, args, kwargs, output)
            return None
        if self._is_alias(call, operands):
            self._note_joined_elements(call, operands[0])
            if self.on_record is not None:
                self._report(func, bounds(map(self._memory.find, operands))[1])
            return None
        call.in_order = self._in_order
        call.backward = self.phase == "backward" and not self._in_block
        found = [labels for labels in map(call.find, call.reads()) if labels is not None]
        low, high = bounds(found)
        private = bool(low or high)
        self._report(func, high)
        written = [tensor for tensor in [*call.outputs, *call.mutated] if tensor is not None]
        if not found:
            for tensor in written:
                self._memory.write(tensor, 0)
        elif not reads_no_value(call):
            checked = self._watch.inside_check and not self._decomposed
            if private and call.name in VALUE_READS and not checked:
                self._note("value_reads", func)
            if private and call.name == "_linalg_check_errors":
                self._note("selections", func)  # a program may catch the error, and go another way
            elif private and (resized or (not written and call.name not in VALUE_READS)):
                self._deny(func, args, kwargs, output)
            elif written:
                self._apply(call, private, had_several=low < 0)
        return None

    def _apply(self, call: Call, private: bool, had_several: bool) -> None:
        try:
            rule = find_rule(call.name) or self._decompose
            results = list(flat(rule(call)))
            results = results * len(call.outputs) if len(results) == 1 else results
            # What is returned in an operand's memory, and not declared as written, is as it was.
            mutable = schema_of(call.func).is_mutable
            given = set() if mutable else {memory_of(tensor) for tensor in call.reads()}
            targets = [
                (tensor, _expand(label, tensor))
                for tensor, label in zip(call.outputs, results, strict=True)
                if tensor is None or memory_of(tensor) not in given
            ]
        except Exception:
            if private:
                return self._deny(call.func, call.args, call.kwargs, call.outputs)
            targets = [(tensor, 0) for tensor in call.outputs]
        if call.selects and private:
            self._note("selections", call.func)
        if call.reorders:  # in a block that runs again, the next time may have another order
            self._note("unknown" if self._in_block else "reorders", call.func)
        done = {id(tensor) for tensor in call.outputs} | set(call.written)
        targets += call.written.values()
        targets += [(tensor, call.whole()) for tensor in call.mutated if id(tensor) not in done]
        origin = self.event(call.func)
        for tensor, label in targets:
            if tensor is not None and tensor.numel():
                self._memory.write(tensor, label, origin)
        if not had_several and any(isinstance(x, Tensor) and has_several(x) for _, x in targets):
            self._note("meetings", call.func)
        return None

    def _decompose(self, call: Call) -> Labels:
        """The labels that the outputs get from PyTorch's decomposition, run on the same operands.

        This is sound: a decomposition computes the same function by calling operators alone, so
        whatever an output depends on passes through rules. One that draws random numbers, or writes
        to an operand, is not run: that would change the program.
        """
        tags, is_mutable = call.func.tags, schema_of(call.func).is_mutable
        changes = is_mutable or torch.Tag.nondeterministic_seeded in tags
        program = None if changes else decomposition_of(call.func)
        if program is None or any(call.func is outer.func for outer in self._decomposed):
            raise NotImplementedError(f"no rule for {call.name}")
        self._decomposed.append(call)
        super().__enter__()
        try:
            results = list(flat(program(*call.args, **call.kwargs)))
        finally:
            super().__exit__(None, None, None)
            self._decomposed.pop()
        labels: list[Tensor | None] = []
        for output, result in zip(call.outputs, results, strict=True):
            if output is None or result is None:  # kernels may return what nobody asked for
                labels.append(None if output is None else call.whole())
                continue
            if output.shape != result.shape:
                raise ValueError("an unexpected shape")
            labels.append(self._memory.find(result))
        return labels

    def _require_harmless(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Part of a decomposition must not draw numbers, or write to what it was given."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError("a decomposition that draws random numbers")
        written = {memory_of(tensor) for tensor in written_operands(func, args, kwargs)}
        if written and not written.isdisjoint(map(memory_of, self._decomposed[-1].reads())):
            raise NotImplementedError("a decomposition that writes to an operand")

    def _in_order(self, index: Tensor) -> bool:
        """Whether `arange` made an index of integers, so that it is the same in the next pass."""
        return memory_of(index) in self._counting

    @staticmethod
    def _is_alias(call: Call, operands: list[Tensor]) -> bool:
        """Whether the outputs are views of the operands, so that labels follow by themselves."""
        if torch.Tag.inplace_view in call.func.tags:
            return True
        if not call.func.is_view and call.name not in ALIASES:
            return False
        sources = {memory_of(tensor) for tensor in operands}
        return all(t is None or memory_of(t) in sources for t in call.outputs)

    def _note_joined_elements(self, call: Call, source: Tensor) -> None:
        """A view with larger elements joins labels; note it where records meet in one element."""
        for output in call.outputs:
            if output is not None and output.itemsize > source.itemsize:
                had_several = has_several(self._memory.find(source))
                if has_several(self._memory.find(output)) and not had_several:
                    self._note("meetings", call.func)

    def _deny(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Label all that an operator returns or writes to as several records, and name it."""
        self._note("unknown", func)
        returned = [leaf for leaf in flat(output) if isinstance(leaf, Tensor)]
        for tensor in (*returned, *written_operands(func, args, kwargs)):
            with suppress(Exception):  # what cannot be labelled is named above all the same
                for inner in (parts(tensor) or []) if is_wrapper(tensor) else [tensor]:
                    self._memory.write(inner, SEVERAL, self.event(func))

    # --- events -----------------------------------------------------------------------------------

    def event(self, func: Any) -> Event:
        return Event(operator_name(func), self._sources.where(), self.phase)

    def _report(self, func: Any, highest: int) -> None:
        if highest > 0 and self.on_record is not None and not self._decomposed:
            self.on_record(func)

    def _note(self, kind: str, func: Any) -> None:
        if not self._decomposed:
            self.note(kind, operator_name(func))
        elif kind == "selections":
            self._decomposed[-1].selects = True
        elif kind == "reorders":
            self._decomposed[-1].reorders = True
        elif kind != "meetings":
            raise NotImplementedError(f"{kind} in the decomposition of {self._decomposed[-1].name}")

    def note(self, kind: str, name: str) -> None:
        event, seen = Event(name, self._sources.where(), self.phase), getattr(self, kind)
        if event not in seen:
            seen.append(event)

    def note_error(self, name: str, operands: Any) -> None:
        with without_functions():
            private = any(self.private(t) for t in flat(operands) if isinstance(t, Tensor))
            if private and not self._decomposed:
                self.note("value_reads", f"the error of {name}")


def _expand(label: Any, tensor: Tensor | None) -> Any:
    if tensor is None or label is None or tensor.numel() == 0:  # there is nothing to label
        return 0
    return label if isinstance(label, int) else label.expand(tensor.shape)


def _shapes(func: Any, args: Any) -> list[torch.Size]:
    """The shapes of the operands of an operator that may change them."""
    return [x.shape for x in written_operands(func, args, {}) if has_elements(x)]
