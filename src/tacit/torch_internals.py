"""Everything that Tacit uses of PyTorch without a public name, in one file.

Everything that the engines use of PyTorch without a public name, in one file.

Autograd's nodes tell their names, the shapes of their cotangents and what they saved for the
backward pass. None of this is a public interface, so nothing outside this file reads it, and
whatever is not recognised is denied: a node of an unknown name has no rule and runs once per
record. `tests/engines/test_torch_internals.py` names the versions that this was run on.

Hooks that are not this library's: of one module, and of all modules of the process.

By the numbers of their handles, which PyTorch counts up and never gives out again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, _vmap_internals, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributions import Distribution
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tacit.errors import UnsupportedModule

T = TypeVar("T")
Node = Any  # torch.autograd.graph.Node
_UNSIGNED = 1 << 63


class Graph:
    """The autograd graph below some losses: nodes from the losses down to the parameters.

    `signature` describes the nodes, their connections and the shapes of their cotangents: which of
    the operators that ran (`Operators`) are differentiated, and through what.
    """

    def __init__(self, losses: Tensor, operators: Operators | None = None) -> None:
        root = losses.grad_fn
        self.operators = operators
        self.nodes: list[Node] = _topological(root) if root is not None else []
        self.index: dict[Node, int] = {node: i for i, node in enumerate(self.nodes)}
        self.next: list[tuple[tuple[int, int] | None, ...]] = [
            tuple(
                None if child is None else (self.index[child], output)
                for child, output in node.next_functions
            )
            for node in self.nodes
        ]

    def signature(self) -> tuple[Any, ...]:
        return tuple(
            (
                _SAME.get(node.name(), node.name()),
                *self.next[i],
                *(tuple(m.shape) for m in node._input_metadata),
            )
            for i, node in enumerate(self.nodes)
        )

    def variable(self, index: int) -> Tensor | None:
        """The leaf that a node accumulates into, None for any other node."""
        return getattr(self.nodes[index], "variable", None)

    def shape(self, index: int, output: int) -> tuple[int, ...]:
        """The shape of a node's output, which is the shape of its cotangent."""
        return tuple(self.nodes[index]._input_metadata[output].shape)

    def dtype(self, index: int, output: int) -> torch.dtype:
        return self.nodes[index]._input_metadata[output].dtype

    def num_outputs(self, index: int) -> int:
        return len(self.nodes[index]._input_metadata)

    def edge(self, index: int, output: int) -> Any:
        """What `gradients` takes to give the cotangent at this place."""
        variable = self.variable(index)
        return GradientEdge(self.nodes[index], output) if variable is None else variable


# One operator under several names, depending on whether a dispatch mode is active.
_SAME = {"ReshapeAliasBackward0": "ViewBackward0", "UnsafeViewBackward0": "ViewBackward0"}


def _topological(root: Node) -> list[Node]:
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            for child, _ in node.next_functions:
                if child is not None and child not in seen:
                    stack.append((child, False))
    order.reverse()
    return order


Place = GradientEdge | Tensor


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
    ends, starts = tuple(map(_edge_of, outputs)), tuple(map(_edge_of, inputs))
    retain_graph = retain_graph or bool(_watching)

    def run(*cotangents: Tensor) -> tuple[Tensor | None, ...]:
        # What `torch.autograd.grad` does after a tenth of a millisecond of questions.
        backward = torch.autograd.graph._engine_run_backward
        given = cotangents, retain_graph, False, starts
        return _noted(backward, ends, *given, allow_unreachable=True, accumulate_grad=False)

    try:
        # In this thread on a GPU too, where modes, profiles and frames are as on a CPU.
        with torch.autograd.set_multithreading_enabled(False):
            if batched:
                run = _vmap_internals._vmap(run, 0, 0, allow_none_pass_through=True)
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


def _edge_of(place: Place) -> GradientEdge:
    return get_gradient_edge(place) if isinstance(place, Tensor) else place


def calls_back(func: Any) -> bool:
    """Whether a function that modes handle runs Python code of the user: hooks, a distance."""
    return func in _CALLS_BACK


_CALLS_BACK = frozenset(
    (
        torch.autograd.grad,
        torch.autograd.backward,
        Tensor.backward,
        F.triplet_margin_with_distance_loss,
    )
)


def call_back_inside(mode: TorchFunctionMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that a mode handles, with the mode active in the code that it calls back.

    PyTorch switches a mode off while it handles a function, and would so in the user's hooks and
    checkpointed blocks. Given edges, the functions of autograd are not handled by modes.
    """
    if func is F.triplet_margin_with_distance_loss:
        distance = kwargs["distance_function"]
        inside = None if distance is None else _inside(mode, distance)
        return func(*args, **kwargs | {"distance_function": inside})
    if func is Tensor.backward:
        options = {k: v for k, v in kwargs.items() if k != "gradient"}
        with mode:
            return torch.autograd.backward(args[0], kwargs["gradient"], **options)
    is_grad = func is torch.autograd.grad
    outputs, inputs = args if is_grad else (args[0], kwargs["inputs"])
    try:
        ends = [_edge_of(place) for place in outputs]
        starts = None if inputs is None else [_edge_of(place) for place in inputs]
    except (RuntimeError, AttributeError):
        # One of them needs no gradient, which PyTorch refuses in its own words; or `torch.func.vjp`
        # has left its level, where tensors have no edges and hooks see none of their values.
        return func(*args, **kwargs)
    if any(isinstance(place, Tensor) and place.is_nested for place in outputs):
        return func(*args, **kwargs)  # PyTorch has no edges for these
    if not is_grad:
        for place in inputs or ():
            if isinstance(place, Tensor) and not place.is_leaf:
                place.retain_grad()
        with mode:
            return func(ends, **kwargs | {"inputs": starts})
    with mode:
        found = func(ends, starts, **kwargs | {"materialize_grads": False})
    if not kwargs["materialize_grads"]:
        return found
    return tuple(
        torch.zeros_like(place, requires_grad=kwargs["create_graph"]) if grad is None else grad
        for grad, place in zip(found, inputs, strict=True)
    )


def _inside(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


_numbers: dict[Any, int] = {}


def _number(value: Any) -> int:
    """A number of its own for each value; unlike a hash, no other value has it."""
    return _numbers.setdefault(value, (1 << 42) + len(_numbers))


# Memory that passes over records have written, or were given, and that still exists.
_left: dict[int, StorageWeakRef] = {}
_LEFT_BEHIND, _COTANGENT = -(1 << 40), -(1 << 41)  # names of operands, beside those of records


class _Noted(TorchDispatchMode):
    """Notes operators with their operands and integers, and which memory is computed from records.

    That memory is *left behind* if it outlives the pass: it has one name in all later ones.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, StorageWeakRef] = {}
        self._reads_records = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # programs run uncompiled here anyway
        return False

    def _name_of(self, func: Any, memory: int, tensor: Tensor) -> int:
        """The name of an operand; `_reads_records` is set if it is computed from records."""
        raise NotImplementedError

    def _noted(self, func: Any, value: Any) -> Any:
        """An operand, or several, as a value that is equal for equal operands and for no others.

        To be compared, not only hashed: hash(-1) is hash(-2).
        """
        kind = type(value)
        if kind is list or kind is tuple:
            return tuple(self._noted(func, inner) for inner in value)
        if isinstance(value, Tensor):
            name = self._name_of(func, _memory(value), value)
            if value.layout is torch.strided and not value.is_nested:
                return name, value.shape, value.stride(), value.storage_offset()
            return (name,)
        return value if kind in _DECISIONS else None if value is None else kind


class Operators(_Noted):
    """Notes which operators run, in order, on which operands and with which integers.

    The autograd graph does not show what is done to records before a parameter meets them, or to
    detached tensors. A certificate is for the operators that ran, so a step must run the same ones
    on the same operands: the same straight-line program, whatever way Python took to it. An operand
    is known by the operator that last wrote its memory (or the record's tensor that it is) and by
    its place there. Floats are left out: a rate or a temperature may change in every step, and
    moves no record. So are casts of weights, which autocast keeps from one pass to the next.

    A program that reads what an earlier pass has left behind is another one than a program that
    reads a public tensor in that place. `on_left_behind` is called with each such operand before
    its operator runs.
    """

    def __init__(
        self, records: Sequence[Tensor], on_left_behind: Callable[[Any, Tensor], None] | None = None
    ) -> None:
        super().__init__()
        self._found: list[Any] = []
        self._on_left_behind = on_left_behind
        self._reads_left_behind = False
        with torch._C.DisableTorchFunction():
            for memory in [memory for memory, held in _left.items() if held.expired()]:
                del _left[memory]
            own = {_memory(tensor): tensor for tensor in records}
            self._of_left_behind = _left.keys() - own.keys()
            self.names = dict.fromkeys(_left, _LEFT_BEHIND)
            self.names |= {memory: -1 - k for k, memory in enumerate(own)}
            self.of_records = set(self.names)
            _left.update((memory, _weak(tensor)) for memory, tensor in own.items() if memory)

    @property
    def signature(self) -> tuple[Any, ...]:
        return tuple(self._found)

    def has_left_behind(self, tensor: Tensor) -> bool:
        """Whether something left behind may be in a result of this pass. Told by whole storages."""
        return _memory(tensor) in self._of_left_behind

    def __exit__(self, *exc: Any) -> None:
        _left.update((m, held) for m, held in self._held.items() if m in self.of_records)
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # these questions are not the program's
            self._reads_records = self._reads_left_behind = False
            noted = self._noted(func, (args, tuple(kwargs.items()) if kwargs else None))
            if func in _MOVES_NOTHING and not self._reads_records:
                source = noted[0][0][0] if isinstance(args[0], Tensor) else 0
            else:
                self._found.append((func, noted))
                source = len(self._found)
            written = _written(func, args) if self._reads_records else ()
        output = func(*args, **kwargs) if kwargs else func(*args)
        with torch._C.DisableTorchFunction():
            for each in (*written, *(output if isinstance(output, tuple | list) else (output,))):
                if isinstance(each, Tensor):
                    self._wrote(func, each, source)
        return output

    def _name_of(self, func: Any, memory: int, tensor: Tensor) -> int:
        name = self.names.get(memory, 0)
        if memory in self.of_records:
            self._reads_records = True
            self._reads_left_behind |= memory in self._of_left_behind
            if name == _LEFT_BEHIND and self._on_left_behind is not None:
                self._on_left_behind(func, tensor)
        return name

    def _wrote(self, func: Any, tensor: Tensor, source: int) -> None:
        memory = _memory(tensor)
        if memory and memory not in self.names:
            # PyTorch gives no other memory this handle while a weak reference to it exists.
            self._held[memory] = _weak(tensor)
        self.names[memory] = source
        if self._reads_records and _computes(func):
            self.of_records.add(memory)
            if self._reads_left_behind:
                self._of_left_behind.add(memory)


class OtherOperators(RuntimeError):
    """A pass took another path through the model's code than the one that was planned."""


class PythonOperators(_Noted):
    """Notes the operators that Python code asks for in a backward pass, and what they give.

    A backward pass is the graph's own, but for hooks, a user's `autograd.Function` and checkpointed
    blocks that run again. Each operator that they ask for gets a name, made from its own, its
    integers and the names of its operands; so does each result that arrives at a node (`arrived`),
    made from such operators alone or by autograd. A pass may do what has a name that was planned,
    and nothing else, through whichever part of the graph it goes.
    """

    def __init__(self, forward: Operators, always: bool) -> None:
        super().__init__()
        self.always = always
        self.names: set[int] = set()
        self.caller: FrameType | None = None
        self._forward, self._own = forward, dict[int, int]()
        self._reads_own: set[int] = set()

    def __exit__(self, *exc: Any) -> None:
        _left.update(self._held)
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        asked = not self._is_engine(sys._getframe().f_back)
        name, self._reads_records = 0, not asked
        if asked or self._own:
            with torch._C.DisableTorchFunction():
                name = self._named(func, (args, tuple((kwargs or {}).values())), asked)
        reads_records = self._reads_records
        output = func(*args, **kwargs) if kwargs else func(*args)
        if not getattr(func, "is_view", False):
            with torch._C.DisableTorchFunction():
                several = output if isinstance(output, tuple | list) else (output,)
                for each in (*(_written(func, args) if name else ()), *several):
                    if isinstance(each, Tensor) and (memory := _memory(each)):
                        if reads_records and _computes(func) and memory not in self._held:
                            self._held[memory] = _weak(each)
                        if name or memory in self._own:
                            self._own[memory] = name
        return output

    def arrived(self, node: int, cotangents: Sequence[Tensor | None]) -> None:
        """Note what Python code has made of the cotangents at a node."""
        with torch._C.DisableTorchFunction():
            for output, cotangent in enumerate(cotangents if self._own else ()):
                name = 0 if cotangent is None else self._own.get(_memory(cotangent), 0)
                if name:
                    self.names.add(_number((node, output, name)))

    def _is_engine(self, frame: FrameType | None) -> bool:
        """Whether autograd itself asks, called by `caller` or in a thread of its own."""
        while frame is not None and frame.f_code.co_filename in _AUTOGRAD:
            frame = frame.f_back
        return frame is None or frame is self.caller

    def _named(self, func: Any, operands: Any, asked: bool) -> int:
        self._reads_own = set()
        noted = self._noted(func, operands)
        if not asked:  # a result of autograd's is known by those of Python's that it is made from
            own = self._reads_own
            return (own.pop() if len(own) == 1 else _number(frozenset(own))) if own else 0
        if func in _MOVES_NOTHING and not self._reads_records:
            return noted[0][0][0] if isinstance(operands[0][0], Tensor) else 0
        self.names.add(name := _number((func, noted)))
        return name

    def _name_of(self, func: Any, memory: int, tensor: Tensor) -> int:
        arrived = memory in self._held
        self._reads_records |= arrived or memory in self._forward.of_records
        if memory in self._own:
            self._reads_own.add(self._own[memory])
            return self._own[memory]
        return _COTANGENT if arrived else self._forward.names.get(memory, 0)


_watching: list[PythonOperators] = []  # the passes that `gradients` runs now are noted here
_AUTOGRAD = frozenset({torch.autograd.__file__, torch.autograd.graph.__file__})
_RUNS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


@contextmanager
def noted_backward(forward: Operators, always: bool = True) -> Iterator[PythonOperators]:
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
    """Raise OtherOperators if Python code does what it did not do in the pass that was planned."""
    if forward is None:
        yield
        return
    with noted_backward(forward, always=bool(planned)) as mode:
        yield
    if not mode.names <= planned:
        raise OtherOperators("the model's backward pass ran other operators than were planned")


def note_arrivals(node: int, cotangents: Sequence[Tensor | None]) -> None:
    """Say what arrived at a node, where Python code may have made it."""
    for mode in _watching[-1:]:
        mode.arrived(node, cotangents)


class _CallsBack:
    """A profile of a call of autograd: whether its C++ code has called Python code."""

    def __init__(self) -> None:
        self.any = self._inside = False

    def __call__(self, frame: FrameType, kind: str, _: Any) -> None:
        if frame.f_code is _RUNS_BACKWARD:
            self._inside = kind == "c_call"
        elif kind == "call" and frame.f_back is not None:
            by = frame.f_back.f_code
            self.any |= by is _noted.__code__ or (by is _RUNS_BACKWARD and self._inside)


def _noted(call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """A call of autograd, with the Python code that it runs noted by whoever watches it."""
    if not _watching:
        return call(*args, **kwargs)
    mode = _watching[-1]
    if not mode.always and sys.getprofile() is None:  # else somebody else keeps one
        calls = _CallsBack()
        sys.setprofile(calls)
        try:
            found = call(*args, **kwargs)
        finally:
            sys.setprofile(None)
        if not calls.any:
            return found
    mode.caller = sys._getframe()
    with mode:
        return call(*args, **kwargs)


_DECISIONS = frozenset({bool, int, str})
_MOVES_NOTHING = frozenset(
    {
        torch.ops.aten._to_copy.default,
        torch.ops.aten.alias.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.lift_fresh.default,
    }
)
_READS_NO_VALUE = frozenset(
    overload
    for made in ("zeros", "ones", "empty", "full")
    for packet in (getattr(torch.ops.aten, f"{made}_like"), getattr(torch.ops.aten, f"new_{made}"))
    for overload in [getattr(packet, kind) for kind in packet.overloads()]
)


@cache
def _computes(func: Any) -> bool:
    """Whether an operator's results hold something of its operands' values, in other memory."""
    return func not in _READS_NO_VALUE and not getattr(func, "is_view", False)


def _memory(tensor: Tensor) -> int:
    """The handle of a tensor's memory; 0 where it has none of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def whole_memory(tensor: Tensor) -> Tensor:
    """All elements of the memory that a tensor lies in."""
    return tensor.detach().new_empty(0).set_(tensor.untyped_storage())


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """The operands that an operator writes to."""
    found: list[Any] = []
    for place in _places_written(func):
        value = args[place] if place < len(args) else None
        found += value if isinstance(value, list | tuple) else [value]
    return found


@cache
def _places_written(func: Any) -> tuple[int, ...]:
    schema = getattr(func, "_schema", None)
    arguments = schema.arguments if schema is not None and schema.is_mutable else ()
    return tuple(k for k, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write)


def saved(node: Node, name: str) -> Any:
    """What an operator saved for its backward pass under `name`; raises if it was overwritten."""
    return _noted(getattr, node, f"_saved_{name}")  # a checkpointed block may run again


def has_saved(node: Node, name: str) -> bool:
    return hasattr(type(node), f"_saved_{name}")


def signed(number: int) -> int:
    """Negative dimensions are saved as unsigned 64-bit numbers."""
    return number - 2 * _UNSIGNED if number >= _UNSIGNED else number


def run_node(node: Node, cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The node's own backward pass, before gradients are summed to the shapes of broadcast
    operands."""
    found = _noted(node, *cotangents)
    return found if isinstance(found, tuple) else (found,)


def is_python_node(node: Node) -> bool:
    """Whether the backward pass is Python code: a user's `torch.autograd.Function`."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def function_of(node: Node) -> type | None:
    """The `torch.autograd.Function` class that a Python node belongs to."""
    return getattr(type(node), "_forward_cls", None)


def before_node(node: Node, call: Callable[[Sequence[Tensor | None]], None]) -> Any:
    """Call `call` with the cotangents of a node just before its backward pass; a handle."""
    return node.register_prehook(call)


def after_node(node: Node, call: Callable[[], None]) -> Any:
    """Call `call` just after a node's backward pass; a handle."""
    return node.register_hook(lambda *_: call())


@contextmanager
def outside_modes() -> Iterator[None]:
    """No function or dispatch mode sees what runs here: work on labels, not on records."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether `register_hook` was called on a leaf."""
    return bool(parameter._backward_hooks)


@contextmanager
def plain_program(functions: bool = True) -> Iterator[PlainFunctions | None]:
    """Run a forward pass so that the autograd graph shows every operator, and nothing looks.

    - A model under `torch.compile` would be one opaque node: it runs as it was written.
    - Libraries that look at values to save work (Transformers drops a mask that is all ones) do
      not do so while a program is compiled. The step is compiled later, so it is asked to behave
      that way now: one program, whatever the records hold.
    - Distributions look at their parameters to refuse those out of range, unless told not to.
    - Fused attention blocks and recurrent layers hide their parameters: they are decomposed.
    - Embeddings with `sparse=True` give dense gradients here: the same numbers.
    - `torch.cond` compiles itself, which a dispatch mode prevents: it is a Python `if`.

    The last three need a mode that sees every function. It is yielded, and tells whether it had
    anything to replace; a program that calls no such function can do without (`functions`).
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)
        compiling = torch.compiler._is_compiling_flag
        stack.callback(setattr, torch.compiler, "_is_compiling_flag", compiling)
        torch.compiler._is_compiling_flag = True
        stack.callback(Distribution.set_default_validate_args, Distribution._validate_args)
        Distribution.set_default_validate_args(False)
        yield stack.enter_context(PlainFunctions()) if functions else None


class PlainFunctions(TorchFunctionMode):
    """`lstm`, `gru` and `rnn` without the fused layers of cuDNN and oneDNN; no sparse gradients.

    `torch.cond` runs the branch that its predicate chooses.

    `replaced` tells whether any such function was called.
    """

    _functions = frozenset(
        getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    )
    _cond = torch.ops.higher_order.cond
    _place_of_sparse: ClassVar[dict[Any, int]] = {
        F.embedding: 6,
        F.embedding_bag: 7,
        torch.embedding: 4,
        torch.embedding_bag: 5,
    }

    def __init__(self) -> None:
        super().__init__()
        self.replaced = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is self._cond:
            self._tell()
            return self._branch(*args, **(kwargs or {}))
        if calls_back(func):
            return call_back_inside(self, func, args, kwargs or {})
        place = self._place_of_sparse.get(func)
        if place is not None:
            if len(args) > place:
                if args[place]:
                    self._tell()
                args = (*args[:place], False, *args[place + 1 :])
            elif kwargs and kwargs.get("sparse"):
                self._tell()
                kwargs = {**kwargs, "sparse": False}
        if func in self._functions:
            self._tell()
            # `mkldnn.flags` warns where there is no GPU, and `cudnn.flags` raises where
            # TensorFloat-32 was set in PyTorch's newer way.
            enabled = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
            torch._C._set_mkldnn_enabled(False)
            torch._C._set_cudnn_enabled(False)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                torch._C._set_mkldnn_enabled(enabled[0])
                torch._C._set_cudnn_enabled(enabled[1])
        return func(*args, **(kwargs or {}))

    def _tell(self) -> None:
        """Outer modes of this kind do not see what this one has replaced."""
        for mode in (self, *_get_current_function_mode_stack()):
            if isinstance(mode, PlainFunctions):
                mode.replaced = True

    def _branch(
        self,
        pred: Any,
        true_fn: Callable[..., Any],
        false_fn: Callable[..., Any],
        operands: Sequence[Any] = (),
    ) -> Any:
        with self:
            return true_fn(*operands) if pred else false_fn(*operands)


class _Branches(PlainFunctions):
    """Replaces `torch.cond` alone."""

    _functions = frozenset()
    _place_of_sparse: ClassVar[dict[Any, int]] = {}


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run a pass as it was written: nothing compiles itself, and `torch.cond` is a Python `if`."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it is slow
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_Branches())
        yield


@contextmanager
def swapped(model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Other tensors in the places of a model's parameters and buffers, by their first names.

    Every place of a shared tensor gets the same one.
    """
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    new = {id(own[name]): tensor for name, tensor in tensors.items()}
    tables: list[dict[str, Any]] = [
        table for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    places = [
        (table, name, held)
        for table in tables
        for name, held in table.items()
        if held is not None and id(held) in new
    ]
    try:
        for table, name, held in places:
            table[name] = new[id(held)]
        yield
    finally:
        for table, name, held in places:
            table[name] = held


def compile_graph(graph: Any, example: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """A graph of operators, compiled by Inductor for tensors like these.

    `torch.compile` would have Dynamo read the graph once more, which takes longer than tracing it.
    A tracing context is what the compiler's cache on disk asks for.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PyTorch has to say about itself
        from torch._guards import TracingContext, tracing  # slow to import, and rarely needed
        from torch._inductor import compile as compile_by_inductor
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv())
        with tracing(TracingContext(mode)):
            # Tensors that are not fake yet would get symbols for their sizes.
            fixed: list[Any] = [mode.from_tensor(t, static_shapes=True) for t in example]
            try:
                return compile_by_inductor(graph, fixed)
            except Exception:
                # Inductor's fusion of reductions along different axes takes float32 for the type
                # of every sum, and norms are summed in float64 (2.11).
                return compile_by_inductor(graph, fixed, {"triton.mix_order_reduction": False})


_NONE: dict[int, Callable] = {}


def foreign_hooks(module: nn.Module) -> dict[int, Callable]:
    """What runs beside this module's forward or backward pass, and may change what it gives."""
    forward, before = module._forward_hooks, module._forward_pre_hooks
    backward, before_that = module._backward_hooks, module._backward_pre_hooks
    if not (forward or before or backward or before_that):
        return _NONE  # asked of every module in every step
    return _foreign(forward, before, backward, before_that)


def process_wide_hooks() -> dict[int, Callable]:
    """Those of `torch.nn.modules.module.register_module_…_hook`, which every module runs."""
    return _foreign(
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )


# The library's own, and PyTorch's counters of operations, which only look.
_LOOKING = ("tacit", "torch.utils.module_tracker", "torch.utils.flop_counter")


def _is_foreign(hook: Callable) -> bool:
    module = getattr(hook, "__module__", None) or ""
    return not any(module == known or module.startswith(f"{known}.") for known in _LOOKING)


def _foreign(*tables: Mapping[int, Callable]) -> dict[int, Callable]:
    return {number: hook for table in tables for number, hook in table.items() if _is_foreign(hook)}
