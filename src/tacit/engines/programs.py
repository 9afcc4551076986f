"""Compares the operators of a pass, and their operands, with those of the pass that was proved.

A proof holds for the operators that ran, so a later step must run the same straight-line
program, whatever path Python takes to it. `Operators` notes the forward pass. A backward pass is
the autograd graph's own, except for hooks, a user's `autograd.Function` and checkpointed blocks
that run again; `PythonOperators` notes what those do. `gradients`, `saved` and `run_node` call
autograd in such a way that this code can be noted.

Memory that a pass has computed from records, and that outlives the pass, is *left behind*. It has
one name in all later passes, so a program that reads it differs from one that reads a public
tensor in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from tacit.errors import UnsupportedModule
from tacit.torch_internals import (
    Node,
    SavedInBlocks,
    TorchDispatchMode,
    edge_of,
    memory_of,
    outside_modes,
    run_backward,
    saved_name,
    saves_through_hooks,
    schema_of,
    vmap_backward,
    weak_memory,
    without_functions,
    written_operands,
)

T = TypeVar("T")
Place = GradientEdge | Tensor

# Memory that passes over records have written, or were given, and that still exists.
_left_behind: dict[int, Any] = {}
# Names of operands. A record's tensor has -1, -2, …, and an operator's result a positive number.
_LEFT_BEHIND, _COTANGENT = -(1 << 40), -(1 << 41)

_numbers: dict[Any, int] = {}


def _number(value: Any) -> int:
    """A number of its own for each value; unlike a hash, no other value has it."""
    return _numbers.setdefault(value, (1 << 42) + len(_numbers))


class ProgramChanged(RuntimeError):
    """A pass took another path through the model's code than the one that was planned."""


class _OperatorLog(TorchDispatchMode):
    """Notes operators with their operands and integers, and which memory is computed from records.

    An operand is known by the operator that last wrote its memory (or the record's tensor that it
    is) and by its place there. Floats are left out: a rate or a temperature may change in every
    step, and moves no record.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._references: dict[int, Any] = {}  # weak references to memory, by its handle
        self._reads_records = False
        self._operands: set[int] = set()  # the memory that the operator was given

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # programs run uncompiled here anyway
        return False

    def _name_of(self, func: Any, memory: int, tensor: Tensor) -> int:
        """The name of an operand; sets `_reads_records` if it is computed from records."""
        raise NotImplementedError

    def _described(self, func: Any, value: Any) -> Any:
        """An operand, or several, as a value that is equal for equal operands and for no others.

        To be compared, not only hashed: hash(-1) is hash(-2).
        """
        kind = type(value)
        if kind is list or kind is tuple:
            return tuple(self._described(func, inner) for inner in value)
        if kind is torch.UntypedStorage:  # of which `set_` makes a tensor
            with outside_modes():
                value = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)
        if isinstance(value, Tensor):
            if memory := _memory(value):
                self._operands.add(memory)
            name = self._name_of(func, memory, value)
            return _placed(name, value)
        return value if kind in _DECISIONS else None if value is None else kind

    def _results(self, func: Any, written: Sequence[Any], output: Any) -> Iterator[tuple[int, Any]]:
        """What an operator has written to or returned, each with the handle of its memory.

        Without operands that it returns as they are: cuDNN's recurrent layers do so with their flat
        weights, which are no result of the records.
        """
        returned = output if isinstance(output, tuple | list) else (output,)
        given = self._operands if _returns_new_memory(func) else ()
        for tensor in (*written, *returned):
            if isinstance(tensor, Tensor) and (memory := _memory(tensor)) not in given:
                yield memory, tensor


class Operators(_OperatorLog):
    """Notes which operators run in a forward pass over `records`.

    The autograd graph does not show what is done to records before a parameter meets them, or to
    detached tensors. Casts of weights are left out, which autocast keeps from pass to pass.
    `on_left_behind` is called with each operator that reads what an earlier pass has left behind,
    and with the operand, before the operator runs.
    """

    def __init__(
        self, records: Sequence[Tensor], on_left_behind: Callable[[Any, Tensor], None] | None = None
    ) -> None:
        super().__init__()
        self._ran: list[Any] = []
        self._on_left_behind = on_left_behind
        self._reads_left_behind = False
        self._saved_in_blocks = SavedInBlocks(self.saved, self._saved_again)
        with without_functions():
            for memory in [m for m, reference in _left_behind.items() if reference.expired()]:
                del _left_behind[memory]
            given = {_memory(tensor): tensor for tensor in records}
            self._of_left_behind = _left_behind.keys() - given.keys()
            self.names = dict.fromkeys(_left_behind, _LEFT_BEHIND)
            self.names |= {memory: -1 - k for k, memory in enumerate(given)}
            self.of_records = set(self.names)
            _left_behind.update((m, weak_memory(tensor)) for m, tensor in given.items() if m)

    @property
    def signature(self) -> tuple[Any, ...]:
        return tuple(self._ran)

    def has_left_behind(self, tensor: Tensor) -> bool:
        """Whether something left behind may be in a result of this pass, by whole storages."""
        return _memory(tensor) in self._of_left_behind

    def saved(self, tensor: Tensor) -> Any:
        """A tensor that is saved for the backward pass, as a value to compare."""
        with without_functions():
            return _placed(self.names.get(_memory(tensor), 0), tensor)

    def _saved_again(self, before: Any, again: Callable[[], Tensor]) -> Tensor:
        """The tensor that a checkpointed block recomputes; noted like one that reaches a node."""
        tensor = _watched(again)
        for mode in _watching[-1:]:
            mode.names.add(_number((before, mode.saved(tensor))))
        return tensor

    def __enter__(self) -> Operators:
        self._saved_in_blocks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        _left_behind.update((m, r) for m, r in self._references.items() if m in self.of_records)
        super().__exit__(*exc)
        self._saved_in_blocks.__exit__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with without_functions():  # these questions are not the program's
            self._operands.clear()
            self._reads_records = self._reads_left_behind = False
            call = self._described(func, (args, tuple(kwargs.items()) if kwargs else None))
            if func in _MOVES_NOTHING and not self._reads_records:
                source = call[0][0][0] if isinstance(args[0], Tensor) else 0
            else:
                self._ran.append((func, call, saves_through_hooks()))
                source = len(self._ran)
            written = written_operands(func, args, kwargs or {}) if self._reads_records else ()
        output = func(*args, **kwargs) if kwargs else func(*args)
        with without_functions():
            for memory, tensor in self._results(func, written, output):
                self._wrote(func, memory, tensor, source)
        return output

    def _name_of(self, func: Any, memory: int, tensor: Tensor) -> int:
        name = self.names.get(memory, 0)
        if memory in self.of_records:
            self._reads_records = True
            self._reads_left_behind |= memory in self._of_left_behind
            if name == _LEFT_BEHIND and self._on_left_behind is not None:
                self._on_left_behind(func, tensor)
        return name

    def _wrote(self, func: Any, memory: int, tensor: Tensor, source: int) -> None:
        if memory and memory not in self.names:
            self._references[memory] = weak_memory(tensor)
        self.names[memory] = source
        if self._reads_records and _computes(func):
            self.of_records.add(memory)
            if self._reads_left_behind:
                self._of_left_behind.add(memory)


class PythonOperators(_OperatorLog):
    """Notes the operators that Python code calls in a backward pass, and their results.

    Each such operator gets a name, made from its own, its integers and the names of its operands;
    so does each result that arrives at a node (`arrived`), made from such operators alone or by
    autograd, and each that a checkpointed block gives for what it saved (`saved`). A pass may do
    what has a name that was planned, and nothing else, through whichever part of the graph it goes.
    """

    def __init__(self, forward: Operators, always: bool) -> None:
        super().__init__()
        self.always = always
        self.names: set[int] = set()
        self.caller: FrameType | None = None
        self.active = False
        self._forward = forward
        self._names_by_python: dict[int, int] = {}  # of memory that Python code has computed
        self._named: dict[int, Any] = {}  # weak references to it, so that no other gets its handle
        self._reads_names: set[int] = set()  # those of the operands of the operator that runs

    def __enter__(self) -> PythonOperators:
        self.active = True
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        _left_behind.update(self._references)
        super().__exit__(*exc)
        self.active = False

    def saved(self, tensor: Tensor) -> Any:
        """The result of a block that has run again, named by the operator that wrote it last."""
        with without_functions():
            return _placed(self._name_of(None, _memory(tensor), tensor), tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        by_python = not self._is_engine(sys._getframe().f_back)
        name, self._reads_records = 0, not by_python
        self._operands.clear()
        if by_python or self._names_by_python:
            with without_functions():
                name = self._name(func, (args, tuple((kwargs or {}).values())), by_python)
        reads_records = self._reads_records
        output = func(*args, **kwargs) if kwargs else func(*args)
        if not getattr(func, "is_view", False):
            with without_functions():
                written = written_operands(func, args, kwargs or {}) if name else ()
                for memory, tensor in self._results(func, written, output):
                    if memory and reads_records and _computes(func):
                        self._references.setdefault(memory, weak_memory(tensor))
                    if memory and (name or memory in self._names_by_python):
                        self._named.setdefault(memory, weak_memory(tensor))
                        self._names_by_python[memory] = name
        return output

    def arrived(self, node: int, cotangents: Sequence[Tensor | None]) -> None:
        """Note what Python code has made of the cotangents at a node."""
        with without_functions():
            for output, cotangent in enumerate(cotangents if self._names_by_python else ()):
                name = 0 if cotangent is None else self._names_by_python.get(_memory(cotangent), 0)
                if name:
                    self.names.add(_number((node, output, name)))

    def _is_engine(self, frame: FrameType | None) -> bool:
        """Whether autograd itself asks, called by `caller` or in a thread of its own."""
        while frame is not None and frame.f_code.co_filename in _AUTOGRAD:
            frame = frame.f_back
        return frame is None or frame is self.caller

    def _name(self, func: Any, operands: Any, by_python: bool) -> int:
        self._reads_names = set()
        call = self._described(func, operands)
        if not by_python:  # a result of autograd is known by those of Python that it is made from
            names = self._reads_names
            return (names.pop() if len(names) == 1 else _number(frozenset(names))) if names else 0
        if func in _MOVES_NOTHING and not self._reads_records:
            return call[0][0][0] if isinstance(operands[0][0], Tensor) else 0
        self.names.add(name := _number((func, call)))
        return name

    def _name_of(self, func: Any, memory: int, tensor: Tensor) -> int:
        arrived = memory in self._references
        self._reads_records |= arrived or memory in self._forward.of_records
        if memory in self._names_by_python:
            name = self._names_by_python[memory]
            self._reads_names.add(name)
            return name
        return _COTANGENT if arrived else self._forward.names.get(memory, 0)


# --- operators --------------------------------------------------------------------------------

_DECISIONS = frozenset({bool, int, str})
_MOVES_NOTHING = frozenset(
    getattr(torch.ops.aten, name).default for name in ("_to_copy", "alias", "detach", "lift_fresh")
)
_READS_NO_VALUE = frozenset(
    overload
    for made in ("zeros", "ones", "empty", "full")
    for packet in (getattr(torch.ops.aten, f"{made}_like"), getattr(torch.ops.aten, f"new_{made}"))
    for overload in [getattr(packet, kind) for kind in packet.overloads()]
)


def _placed(name: int, tensor: Tensor) -> tuple[Any, ...]:
    """A tensor as the name of its memory and its place there."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return name, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
    return name, tensor.dtype


@cache
def _computes(func: Any) -> bool:
    """Whether an operator's results hold something of its operands' values, in other memory."""
    return func not in _READS_NO_VALUE and not getattr(func, "is_view", False)


@cache
def _returns_new_memory(func: Any) -> bool:
    """Whether an operator of ATen declares no result in the memory of an operand."""
    schema = schema_of(func)
    declared = schema is None or schema.is_mutable or func.is_view
    return not declared and func.namespace == "aten"


def _memory(tensor: Tensor) -> int:
    """The handle of a tensor's memory; 0 where it has none of its own."""
    try:
        return memory_of(tensor)
    except (NotImplementedError, RuntimeError):
        return 0


# --- backward passes --------------------------------------------------------------------------


def gradients(
    outputs: Sequence[Place],
    inputs: Sequence[Place],
    cotangents: Sequence[Tensor],
    *,
    retain_graph: bool = True,
    batched: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`, inside the modes that are active; None for what was not used.

    A checkpointed block runs again in the backward pass, and must run as it did before: without
    dropout, or decomposed. Given tensors, `torch.autograd.grad` is itself a function that modes
    may replace, and switches them off while it runs; given edges it is not.
    """
    ends, starts = tuple(map(edge_of, outputs)), tuple(map(edge_of, inputs))
    retain_graph = retain_graph or bool(_watching)

    def run(*cotangents: Tensor) -> tuple[Tensor | None, ...]:
        # What `torch.autograd.grad` does after a tenth of a millisecond of questions.
        given = cotangents, retain_graph, False, starts
        return _watched(run_backward, ends, *given, allow_unreachable=True, accumulate_grad=False)

    try:
        # In this thread on a GPU too, where modes, profiles and frames are as on a CPU.
        with torch.autograd.set_multithreading_enabled(False):
            if batched:
                run = vmap_backward(run, 0, 0, allow_none_pass_through=True)
            return run(*cotangents)
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise UnsupportedModule(
            "a checkpointed block has use_reentrant=True, which gives no gradients but .grad; "
            "write torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or for "
            "Transformers model.gradient_checkpointing_enable("
            'gradient_checkpointing_kwargs={"use_reentrant": False})'
        ) from error


def saved(node: Node, name: str) -> Any:
    """What an operator saved for its backward pass under `name`; raises if it was overwritten."""
    return _watched(getattr, node, saved_name(name))  # a checkpointed block may run again


def run_node(node: Node, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The backward pass of one node, before gradients are summed to the operands' shapes."""
    gradients = _watched(node, *cotangents)
    return gradients if isinstance(gradients, tuple) else (gradients,)


_watching: list[PythonOperators] = []  # what notes the calls of autograd that run now


@contextmanager
def watch_backward(forward: Operators, always: bool = True) -> Iterator[PythonOperators]:
    """Note what Python code does in the backward passes of a program that run within this.

    Not `always`: a pass is run again, and noted, if any Python code has run in it.
    """
    mode = PythonOperators(forward, always)
    _watching.append(mode)
    try:
        yield mode
    finally:
        _watching.remove(mode)


@contextmanager
def planned_backward(forward: Operators | None, planned: frozenset[int]) -> Iterator[None]:
    """Raise ProgramChanged if Python code does what it did not do in the pass that was planned."""
    if forward is None:
        yield
        return
    with watch_backward(forward, always=bool(planned)) as mode:
        yield
    if not mode.names <= planned:
        raise ProgramChanged("the model's backward pass ran other operators than were planned")


def note_arrivals(node: int, cotangents: Sequence[Tensor | None]) -> None:
    """Say what arrived at a node, where Python code may have made it."""
    for mode in _watching[-1:]:
        mode.arrived(node, cotangents)


def _watched(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """A call of autograd. Whoever watches the backward pass notes the Python code that it runs."""
    if not _watching or _watching[-1].active:
        return call(*args, **kwargs)
    mode = _watching[-1]
    if not mode.always and sys.getprofile() is None:  # else somebody else keeps one
        calls = _CallsBack()
        sys.setprofile(calls)
        try:
            result = call(*args, **kwargs)
        finally:
            sys.setprofile(None)
        if not calls.any:
            return result
    mode.caller = sys._getframe()
    try:
        with mode:
            return call(*args, **kwargs)
    finally:
        mode.caller = (
            None  # a frame holds its callers', and so the whole graph with its activations
        )


class _CallsBack:
    """A profile of a call of autograd: whether its C++ code has called Python code."""

    def __init__(self) -> None:
        self.any = self._inside = False

    def __call__(self, frame: FrameType, kind: str, _: Any) -> None:
        if frame.f_code is _RUNS_BACKWARD:
            self._inside = kind == "c_call"
        elif kind == "call" and frame.f_back is not None:
            by = frame.f_back.f_code
            self.any |= by is _watched.__code__ or (by is _RUNS_BACKWARD and self._inside)


_AUTOGRAD = frozenset({torch.autograd.__file__, torch.autograd.graph.__file__})
_RUNS_BACKWARD = run_backward.__code__
