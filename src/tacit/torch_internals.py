"""Everything that Tacit uses of PyTorch without a public name, in one file.

None of it is a public interface, so no other file reads it, and callers deny what they do not
recognise: a node of an unknown name has no rule and runs once per record.
`tests/test_torch_internals.py` names the versions that this ran on.
"""

from __future__ import annotations

import importlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, _vmap_internals, nn
from torch.autograd import forward_ad as fwAD
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributions import Distribution
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["TorchDispatchMode", "is_traceable_wrapper_subclass"]  # have no public module

Node = Any  # torch.autograd.graph.Node

#: No function mode and no tensor subclass sees what runs inside.
without_functions = torch._C.DisableTorchFunction
#: What is made inside belongs to no `vmap` or `grad` that is running.
outside_transforms = torch._C._DisableFuncTorch
#: The base classes of PyTorch's normalisations, convolutions and dropouts.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm
Convolution = torch.nn.modules.conv._ConvNd
Dropout = torch.nn.modules.dropout._DropoutNd
InstanceNorm = torch.nn.modules.instancenorm._InstanceNorm
Normalisation = torch.nn.modules.batchnorm._NormBase
#: The assertion that a traced program calls.
traced_assertion = torch._assert

#: In-place arithmetic on a list of tensors, in one kernel on a GPU.
copy_each = torch._foreach_copy_
multiply_each = torch._foreach_mul_
divide_each = torch._foreach_div_

#: Some tensors of one type end to end, as one vector; memory of its own unless there is only one.
flattened: Callable[[Sequence[Tensor]], Tensor] = torch._utils._flatten_dense_tensors
#: The pieces of a vector, as views in the shapes of some tensors.
unflattened: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]] = (
    torch._utils._unflatten_dense_tensors
)


# --- memory -----------------------------------------------------------------------------------


def memory_of(tensor: Tensor) -> int:
    """The handle of a tensor's storage. Raises for a tensor without one.

    PyTorch gives no other storage this handle while a `weak_memory` of it exists.
    """
    return tensor.untyped_storage()._cdata


def weak_memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


#: How often a tensor was written to, not counting writes through `.data` and some kernels.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")


# --- modules ----------------------------------------------------------------------------------


class ModuleTables(NamedTuple):
    """The tables of one module, without its children's: what they hold, by name."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, Tensor | None]
    children: dict[str, nn.Module | None]
    unsaved: set[str]  # buffers that `state_dict` leaves out


def tables_of(module: nn.Module) -> ModuleTables:
    """A module's tables, which can be written to.

    `named_parameters` and the like are methods, which a class may override. They also leave out
    entries that are None and second names of a shared tensor.
    """
    unsaved = module._non_persistent_buffers_set
    return ModuleTables(module._parameters, module._buffers, module._modules, unsaved)


#: Two tables of a module: its children, and its parameters.
children_and_parameters = operator.attrgetter("_modules", "_parameters")


def lists_parameters_plainly(modules: Sequence[nn.Module]) -> bool:
    """Whether `parameters` and `named_parameters` of a model are PyTorch's own.

    `modules` are the model, first, and all modules in it, whose `named_modules` they call.
    """
    model = modules[0]
    return (
        set(map(_walk_of, set(map(type, modules)))) == {_NAMED_MODULES}
        and not any("named_modules" in vars(module) for module in modules)
        and all(getattr(type(model), name) is listing for name, listing in _LISTINGS.items())
        and vars(model).keys().isdisjoint(_LISTINGS)
    )


_NAMED_MODULES = nn.Module.named_modules
_walk_of = operator.attrgetter("named_modules")
_LISTINGS = {
    name: getattr(nn.Module, name) for name in ("parameters", "named_parameters", "_named_members")
}


#: The method in which an InstanceNorm normalises.
INSTANCE_NORM_METHOD = "_apply_instance_norm"


def unbatched_rank(norm: InstanceNorm) -> int:
    """The number of axes of a single record, for this InstanceNorm."""
    return norm._get_no_batch_dim()


def convolve(layer: nn.Conv2d, x: Tensor, weight: Tensor) -> Tensor:
    """The layer's convolution with another weight, and its own padding of any kind."""
    return layer._conv_forward(x, weight, layer.bias)


def explicit_padding(layer: Convolution) -> list[int]:
    """The padding as `torch.nn.functional.pad` takes it: the last axis first, before and after."""
    return list(layer._reversed_padding_repeated_twice)


# --- the autograd graph -----------------------------------------------------------------------


class Graph:
    """The autograd graph below some losses: nodes from the losses down to the parameters.

    `signature` describes the nodes, their connections and the shapes of their cotangents.
    `operators` is the caller's note of the operators that ran.
    """

    def __init__(self, losses: Tensor, operators: Any = None) -> None:
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

    def dtypes(self) -> set[torch.dtype]:
        """The types of all cotangents: what the program computes in, wherever it casts."""
        return {m.dtype for node in self.nodes for m in node._input_metadata}

    def num_outputs(self, index: int) -> int:
        return len(self.nodes[index]._input_metadata)

    def edge(self, index: int, output: int) -> GradientEdge | Tensor:
        """The place whose cotangent `torch.autograd.grad` can give."""
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
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    order.reverse()
    return order


def saved_name(name: str) -> str:
    """The attribute of a node under which an operator saved something for its backward pass."""
    return f"_saved_{name}"


def has_saved(node: Node, name: str) -> bool:
    return hasattr(type(node), saved_name(name))


def signed(number: int) -> int:
    """Nodes save negative dimensions as unsigned 64-bit numbers."""
    return number - (1 << 64) if number >= 1 << 63 else number


def is_python_node(node: Node) -> bool:
    """Whether the backward pass is Python code: a user's `torch.autograd.Function`."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def function_of(node: Node) -> type | None:
    """The `torch.autograd.Function` class that a Python node belongs to."""
    return getattr(type(node), "_forward_cls", None)


def number_of(node: Node) -> int:
    return node._sequence_nr()


def newest_node_number() -> int:
    return torch.autograd._get_sequence_nr() - 1


#: The node whose backward pass is running in this thread, or None.
running_node: Callable[[], Node] = torch._C._current_autograd_node

#: What `torch.autograd.grad` runs once it has checked its arguments.
run_backward = torch.autograd.graph._engine_run_backward
#: `torch.vmap` for backward passes, where a gradient may be None.
vmap_backward = _vmap_internals._vmap


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether `register_hook` was called on a leaf."""
    return bool(parameter._backward_hooks)


# --- operators and modes ----------------------------------------------------------------------


def schema_of(func: Any) -> Any:
    """The schema of an operator, with its name and arguments; None for other functions."""
    return getattr(func, "_schema", None)


def written_operands(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes to, as its schema declares."""
    found: list[Any] = []
    for place, name in _written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    schema = schema_of(func)
    arguments = schema.arguments if schema is not None and schema.is_mutable else ()
    written = ((k, a) for k, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write)
    return tuple((place, argument.name) for place, argument in written)


def saves_through_hooks() -> bool:
    """Whether `saved_tensors_hooks` are active that may give anything, with nothing to compare."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return False
    unpack = f"{hooks[1].__module__}.{getattr(hooks[1], '__qualname__', '')}"
    return not unpack.startswith(_TRUSTED_HOOKS)


# Compared (`SavedInBlocks`), or only moved to another device; or a block that is running again.
_TRUSTED_HOOKS = (
    f"{__name__}.SavedInBlocks.",
    "torch.autograd.graph.",
    "torch.utils.checkpoint._recomputation_hook.",
)


class SavedInBlocks:
    """What checkpointed blocks save, compared with what they give when they run again.

    A block that is called inside runs again when autograd, or anyone, reads what it has saved.
    `note(tensor)` describes a tensor that is saved. `read(described, again)` is called for each
    that is read; `again()` gives it, which may run the block, and `read` returns it.
    """

    def __init__(self, note: Callable[[Tensor], Any], read: Callable[[Any, Any], Tensor]) -> None:
        self._note, self._read = note, read

    def __enter__(self) -> None:
        self._hooks = torch_checkpoint._checkpoint_hook
        torch_checkpoint._checkpoint_hook = self._compared  # type: ignore[misc, assignment]

    def __exit__(self, *exc: Any) -> None:
        torch_checkpoint._checkpoint_hook = self._hooks  # type: ignore[misc]

    def _compared(self, frame: Any) -> Any:
        hooks = self._hooks(frame)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook
        hooks.pack_hook = lambda tensor: (self._note(tensor), pack(tensor))
        hooks.unpack_hook = lambda pair: self._read(pair[0], lambda: unpack(pair[1]))
        return hooks


def decomposition_of(func: Any) -> Callable[..., Any] | None:
    """A program of simpler operators that computes what an operator does, or None."""
    if func.namespace != "aten":
        return getattr(func, "impl_aten", None) if func.namespace == "prims" else None
    importlib.import_module("torch._refs")  # on first use, for it is slow; it fills the table
    found = torch._decomp.decomposition_table.get(func)
    return func.decompose if found is None and func._can_decompose() else found


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


@contextmanager
def outside_modes() -> Iterator[None]:
    """No function or dispatch mode sees what runs here: work on labels, not on records."""
    with without_functions(), _disable_current_modes():
        yield


def edge_of(place: GradientEdge | Tensor) -> GradientEdge:
    return get_gradient_edge(place) if isinstance(place, Tensor) else place


def calls_back(func: Any) -> bool:
    """Whether a function that modes handle runs Python code of the user: hooks, a distance."""
    return func in _CALLS_BACK


_CALLS_BACK = frozenset(
    {
        torch.autograd.grad,
        torch.autograd.backward,
        Tensor.backward,
        F.triplet_margin_with_distance_loss,
    }
)


def call_back_inside(mode: TorchFunctionMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function that a mode handles, with the mode active in the code that it calls back.

    PyTorch switches a mode off while it handles a function, and would so in the user's hooks and
    checkpointed blocks. Given edges, the functions of autograd are not handled by modes.
    """
    if func is F.triplet_margin_with_distance_loss:
        distance = kwargs["distance_function"]

        def inside(*operands: Any) -> Any:
            with mode:
                return distance(*operands)

        return func(*args, **kwargs | {"distance_function": None if distance is None else inside})
    if func is Tensor.backward:
        options = {k: v for k, v in kwargs.items() if k != "gradient"}
        with mode:
            return torch.autograd.backward(args[0], kwargs["gradient"], **options)
    is_grad = func is torch.autograd.grad
    outputs, inputs = args if is_grad else (args[0], kwargs["inputs"])
    try:
        ends = [edge_of(place) for place in outputs]
        starts = None if inputs is None else [edge_of(place) for place in inputs]
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


# --- fused kernels and compilers --------------------------------------------------------------

#: PyTorch's fused recurrent functions, and what they compute.
RECURRENT = {
    torch._VF.lstm: "lstm",
    torch._VF.gru: "gru",
    torch._VF.rnn_tanh: "tanh",
    torch._VF.rnn_relu: "relu",
}


def compiler_is_loaded() -> bool:
    """Whether anything can be compiled by `torch.compile`: importing it is slow."""
    return "torch._dynamo" in sys.modules


#: The layers of cuDNN: `flat_weights` makes some tensors views of one buffer.
cudnn_rnn = torch._cudnn_rnn
cudnn_rnn_backward = torch.ops.aten._cudnn_rnn_backward
cudnn_flat_weights = torch._cudnn_rnn_flatten_weight


@contextmanager
def without_fused_layers() -> Iterator[None]:
    """Recurrent layers as programs of simple operators, not those of cuDNN and oneDNN.

    `mkldnn.flags` warns where there is no GPU, and `cudnn.flags` raises where TensorFloat-32 was
    set in PyTorch's newer way.
    """
    enabled = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled[0])
        torch._C._set_cudnn_enabled(enabled[1])


def in_transform() -> bool:
    """Whether `torch.func` or forward-mode differentiation transforms what runs now."""
    return torch._C._functorch.peek_interpreter_stack() is not None or fwAD._current_level >= 0


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """`torch.compiler.is_compiling()` is true inside."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextmanager
def without_argument_checks() -> Iterator[None]:
    """Distributions do not read their parameters to refuse those out of range."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


#: The function modes that are active, the outermost first.
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack


@contextmanager
def swapped(model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Other tensors in the places of a model's parameters and buffers, by their first names.

    Every place of a shared tensor gets the same one.
    """
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    new = {id(own[name]): tensor for name, tensor in tensors.items()}
    places: list[tuple[dict[str, Any], str, Any]] = [
        (table, name, tensor)
        for module in model.modules()
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None and id(tensor) in new
    ]
    try:
        for table, name, tensor in places:
            table[name] = new[id(tensor)]
        yield
    finally:
        for table, name, tensor in places:
            table[name] = tensor


# --- hooks that are not Tacit's, by the numbers of their handles, which are never used again ------

# Tacit's own, and PyTorch's counters of operations, which change nothing.
_HARMLESS = ("tacit.", "torch.utils.module_tracker.", "torch.utils.flop_counter.")


def foreign_hooks(module: nn.Module) -> dict[int, Callable]:
    """Hooks that run with this module's forward or backward pass, and may change its results."""
    forward, before = module._forward_hooks, module._forward_pre_hooks
    backward, before_that = module._backward_hooks, module._backward_pre_hooks
    if not (forward or before or backward or before_that):
        return {}  # asked of every module in every step
    return _foreign(forward, before, backward, before_that)


def process_wide_hooks() -> dict[int, Callable]:
    """Those of `torch.nn.modules.module.register_module_…_hook`, which every module runs."""
    return _foreign(
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )


def _foreign(*tables: Mapping[int, Callable]) -> dict[int, Callable]:
    return {
        number: hook
        for table in tables
        for number, hook in table.items()
        if not f"{getattr(hook, '__module__', None)}.".startswith(_HARMLESS)
    }


# --- FSDP2 ----------------------------------------------------------------------------------------


def _sharding_state(module: nn.Module) -> Any:
    """What `fully_shard` has left on this module; None on one that it was not called for."""
    return getattr(module, "_get_fsdp_state", lambda: None)()


def unsharded_class(value: object) -> type:
    """The class of an object; of a module that `fully_shard` was called for, its class before."""
    is_sharded = isinstance(value, nn.Module) and _sharding_state(value) is not None
    return type(value).__mro__[2] if is_sharded and len(type(value).__mro__) > 2 else type(value)


def sharded_like(parameter: DTensor, part: Tensor) -> DTensor:
    """Numbers of this rank's part as a tensor that is sharded, placed and typed as a parameter is.

    `DTensor.from_local` would move a part that is kept on the CPU to the device of the mesh, and
    takes a hundred times as long.
    """
    local = parameter.to_local()
    own = part.to(local.device, parameter.dtype).view(local.shape)
    return type(parameter)(own, parameter._spec, requires_grad=False)


def require_plain_sharding(model: nn.Module) -> None:
    """Refuse FSDP2's own mixed precision, which is in the hooks that are left out."""
    for name, module in model.named_modules():
        state = _sharding_state(module)
        policy = getattr(state, "_mp_policy", None)
        kinds = [getattr(policy, k, None) for k in ("param_dtype", "reduce_dtype", "output_dtype")]
        if any(kind is not None for kind in kinds):
            raise ValueError(
                f"fully_shard was given a MixedPrecisionPolicy for {name or 'the model'}; leave it "
                "out and use torch.autocast, or weights of the lower precision (model.bfloat16())"
            )


@contextmanager
def without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, modules that `fully_shard` was called for run as the plain modules that they were.

    Its hooks gather weights before a forward pass and free them afterwards, and `fully_shard` gives
    each such module a class of its own, before the original in the order of inheritance.
    """
    hooks: list[tuple[Any, dict[int, Any]]] = []
    classes: list[tuple[nn.Module, type]] = []
    try:
        for module in model.modules():
            state = _sharding_state(module)
            if state is None:
                continue
            for table in (module._forward_pre_hooks, module._forward_hooks):
                hooks.append((table, dict(table)))
                for number, hook in list(table.items()):
                    if getattr(hook, "__self__", None) is state:
                        del table[number]
            classes.append((module, type(module)))
            module.__class__ = unsharded_class(module)
        yield
    finally:
        for table, before in hooks:
            table.clear()
            table.update(before)
        for module, sharding in classes:
            module.__class__ = sharding
