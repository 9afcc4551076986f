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
Python took. Where the path or a position depends on private data, the flow is implicit; it is named
in `looks` and `selections`. What reads or writes memory without PyTorch's dispatcher is not seen,
apart from `numpy`, `tolist`, `__dlpack__`, raw pointers handed out by a private tensor, and private
scalars in a list that becomes a tensor.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tacit.engines import (  # noqa: F401  (these register rules)
    shadow_rules_index,
    shadow_rules_losses,
    shadow_rules_matrix,
    shadow_rules_nn,
)
from tacit.engines.shadow_events import Event, SourceLines, operator_name
from tacit.engines.shadow_labels import SEVERAL, Layout, combine, layout, reduce_labels
from tacit.engines.shadow_memory import ShadowMemory, is_wrapper, parts
from tacit.engines.shadow_rules import (
    ALIASES,
    LOOKS,
    MAY_RAISE,
    METADATA,
    OVERWRITES,
    RULES,
    Call,
    Rule,
    elementwise,
    foreach,
    label_rule,
    names,
)
from tacit.engines.shadow_schema import base_name, bind, flat, pointwise_names
from tacit.engines.torch_internals import call_back_inside, calls_back

__all__ = ["Event", "Layout", "Shadow", "combine", "label_rule", "layout", "reduce_labels"]

#: Methods of a tensor that hand its values to something other than the dispatcher.
_HANDS_OUT_VALUES = names(
    "tolist numpy __array__ __dlpack__ __reduce_ex__ to_dlpack __cuda_array_interface__ "
    "__repr__ __format__ __float__ __int__ __bool__ __index__ __complex__ apply_"
)
#: Methods that hand out its memory: a kernel may read and write there unseen.
_HANDS_OUT_MEMORY = names("data_ptr storage untyped_storage _typed_storage")
#: Functions that read their arguments from this position on without the dispatcher.
_READS_ARGUMENT = {
    "tensor_split": 1,
    "_pack_padded_sequence": 1,
    "map_": 0,
    "map2_": 0,
}
#: Functions that copy scalars out of lists without the dispatcher.
_READS_LISTS = names(
    "tensor as_tensor asarray new_tensor new sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor "
    "sparse_bsr_tensor sparse_bsc_tensor sparse_compressed_tensor __getitem__ __setitem__"
)


#: So many records are not found in order by a random permutation, in one of 40,320 passes at most.
_NOT_BY_CHANCE = 8


class Shadow(TorchDispatchMode):
    """Labels every element that is computed inside `with shadow:`.

    Modes of PyTorch belong to a thread, so what another thread does is not seen. Nor is
    `torch.utils.dlpack.to_dlpack`, which PyTorch shows to no mode (`tensor.__dlpack__` is seen), or
    a look inside a function of the user's that itself checks for `__torch_function__`.

    Attributes:
        meetings: operators that made an element of several records from elements that were not.
        looks: places where Python, or the shape of a tensor, saw a private value.
        selections: places where private data chose rows or positions of several records, or how
            many of them there are.
        reorders: places where public data, which may be drawn anew, chose whose row is where.
        unknown: operators without a rule that had a private operand; their outputs are -1.
        phase: "forward" or "backward", set by the caller and kept in each event.
        on_operator: called as `on_operator(func, has_record, has_several)` for each operator, with
            whether an operand has a label above 0 and whether one has -1.
    """

    #: Without this, PyTorch refuses to run operators such as `torch.cond` under the mode.
    supports_higher_order_operators = True

    def __init__(self, num_records: int) -> None:
        super().__init__()
        if num_records < 1:
            raise ValueError(f"num_records must be at least 1, got {num_records}")
        self.num_records = num_records
        self.phase = "forward"
        self.on_operator: Callable[[Any, bool, bool], None] | None = None
        self._events: dict[str, dict[Event, None]] = {
            "meetings": {},
            "looks": {},
            "selections": {},
            "reorders": {},
            "unknown": {},
        }
        self._memory: ShadowMemory[Event] = ShadowMemory()
        self._counting: dict[int, Tensor] = {}  # what `arange` made, by its storage
        self._watch = _PythonWatch(self)
        self._sources = SourceLines()

    @property
    def meetings(self) -> list[Event]:
        return list(self._events["meetings"])

    @property
    def looks(self) -> list[Event]:
        return list(self._events["looks"])

    @property
    def selections(self) -> list[Event]:
        return list(self._events["selections"])

    @property
    def reorders(self) -> list[Event]:
        return list(self._events["reorders"])

    @property
    def unknown(self) -> list[Event]:
        return list(self._events["unknown"])

    def __enter__(self) -> Shadow:
        super().__enter__()
        self._watch.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._watch.__exit__(*exc)
        super().__exit__(*exc)

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
        with torch._C.DisableTorchFunction():
            labels = labels.detach().to(device=tensor.device, dtype=torch.int32)
            rows = labels.reshape(-1, *[1] * (tensor.dim() - 1))
            self._memory.mark(tensor, rows.expand(tensor.shape))

    def labels(self, tensor: Tensor) -> Tensor:
        """The int32 labels of a tensor, of its shape. Writing to them marks the tensor.

        A view to another element size (`view(dtype)`, `view_as_real`) makes new label memory; ask
        for the labels again after it. A tensor whose elements have no labels (a sparse or nested
        one, a wrapper of others) has one label.
        """
        with torch._C.DisableTorchFunction():
            if _has_elements(tensor):
                return self._memory.open(tensor)
            label = SEVERAL if self._may_be_private(tensor) or not is_wrapper(tensor) else 0
            return torch.full((1,), label, dtype=torch.int32, device=tensor.device)

    def private(self, tensor: Tensor) -> bool:
        """Whether any element of a tensor belongs to a record."""
        with torch._C.DisableTorchFunction():
            if is_wrapper(tensor):
                return any(self.private(inner) for inner in parts(tensor) or ())
            try:
                found = self._memory.find(tensor)
            except (NotImplementedError, RuntimeError):
                return False
            return found is not None and bool((found != 0).any())

    def origin(self, tensor: Tensor) -> Event | None:
        """The operator that first wrote something private into a tensor's memory."""
        return self._memory.origin(tensor)

    def remember(self, earlier: Shadow) -> None:
        """What an earlier pass has left in memory belongs to the last of this one's records."""
        self._memory.remember(earlier._memory, self.num_records)

    def kept(self) -> list[Event]:
        """Operators whose private result is still in memory, once the caller let go of its own.

        Storages that the caller marked do not count. A buffer that was written to does.
        """
        found = self._private_and_alive()
        if not found:
            return []
        gc.collect()  # the slowest step of a certificate, so only where a cycle may hold something
        return self._private_and_alive()

    def _private_and_alive(self) -> list[Event]:
        with torch._C.DisableTorchFunction():
            found: dict[Event, None] = {}
            for labels, origin in self._memory.alive():
                if origin is not None and bool((labels != 0).any()):
                    found[origin] = None
            return list(found)

    # --- one operator -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        try:
            output = func(*args, **kwargs)
        except Exception:
            # The program may catch the error, and go another way.
            self._note_error(operator_name(func), [*args, *kwargs.values()])
            raise
        with torch._C.DisableTorchFunction():
            if getattr(func, "overloadpacket", None) is torch.ops.aten.arange:
                self._counting[output.untyped_storage()._cdata] = output
            if self.phase == "forward":
                self._sources.remember()
            try:
                self._label(func, args, kwargs, output)
            except Exception:  # a kind of tensor that no rule has met
                self._deny(func, args, kwargs, output)
        return output

    def _label(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        operands = _tensors((args, *kwargs.values()))
        opaque = False
        touched = False
        for tensor in operands:
            try:
                if not is_wrapper(tensor):
                    touched = touched or self._memory.known(tensor)
                elif self._hides_private(tensor):
                    touched = opaque = True
            except (NotImplementedError, RuntimeError):
                opaque = True
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator: its branches may reach what is no operand
            self._deny(func, args, kwargs, output)
            return
        if not touched:
            if self.on_operator is not None:
                self.on_operator(func, False, False)
            return
        outputs = [leaf if isinstance(leaf, Tensor) else None for leaf in flat(output)]
        opaque = opaque or any(t is not None and not _has_elements(t) for t in outputs)
        if opaque:
            if any(self._may_be_private(tensor) for tensor in operands):
                self._deny(func, args, kwargs, output)
            return
        name = base_name(schema.name)
        if self._is_alias(func, name, operands, outputs):
            self._note_joined_elements(func, operands[0], outputs)
            self._report(func, operands)
            return
        arguments, read_names, mutated = bind(schema, args, kwargs, name in OVERWRITES)
        if name.endswith("_") and not name.endswith("__"):
            name = name[:-1]
        written: list[Tensor | None] = outputs
        if not any(tensor is not None for tensor in outputs):
            written = list(mutated)
        try:
            call = Call(
                name,
                func,
                arguments,
                written,
                self._memory.find,
                self._set(func),
                read_names,
                backward=self.phase == "backward",
                in_order=self._in_order,
            )
            reads = call.reads()
        except IndexError:
            return
        self._report(func, reads)
        private_reads = [tensor for tensor in reads if self._memory.known(tensor)]
        if not private_reads:
            for target in [*written, *mutated]:
                if target is not None and self._memory.known(target):
                    self._memory.write(target, 0)
            return
        if name in METADATA:
            return
        looks = name in LOOKS and not self._watch.inside_check
        if looks and any(self.private(tensor) for tensor in private_reads):
            self._note("looks", func)
        if name in MAY_RAISE and any(self.private(tensor) for tensor in private_reads):
            self._note("selections", func)
        if not any(tensor is not None for tensor in written):
            return
        self._apply(call, func, private_reads, mutated)

    def _apply(
        self, call: Call, func: Any, private_reads: list[Tensor], mutated: list[Tensor]
    ) -> None:
        rule = self._rule(call)
        written = call.outputs
        # Reading the memory of the operands first: an in-place operator overwrites it below.
        several_before = [self._memory.find(tensor) for tensor in private_reads]
        had_several: bool | None = None
        if any(t is not None and self._memory.known(t) for t in [*written, *mutated]):
            had_several = any(_has_several(labels) for labels in several_before)
        known = rule is not None
        results: list[Any] = []
        if rule is not None:
            try:
                result = rule(call)
                results = list(result) if isinstance(result, (list, tuple)) else [result]
                if len(results) == 1:
                    results = results * len(written)
                if len(results) != len(written):
                    raise ValueError("a rule must give one label tensor per output")
                results = [
                    _expand(label, tensor) for label, tensor in zip(results, written, strict=True)
                ]
            except Exception:
                known = False
        if not known:
            if not any(self.private(tensor) for tensor in private_reads):
                results = [0] * len(written)
            else:
                self._note("unknown", func)
                results = [-1] * len(written)
        elif call.selects and any(self.private(tensor) for tensor in private_reads):
            self._note("selections", func)
        if call.reorders:
            self._note("reorders", func)
        origin = self.event(func)
        for tensor, label in zip(written, results, strict=True):
            if tensor is None or tensor.numel() == 0:
                continue
            try:
                self._memory.write(tensor, 0 if label is None else label, origin)
            except (NotImplementedError, RuntimeError):
                self._note("unknown", func)
        done = {id(tensor) for tensor in written}
        for tensor in mutated:
            if id(tensor) not in done and call.name not in _WRITES_ITSELF:
                label = call.whole()
                results.append(label)
                self._memory.write(tensor, label, origin)
        if known:
            gave_several = any(isinstance(r, Tensor) and _has_several(r) for r in results)
            if gave_several:
                if had_several is None:
                    had_several = any(_has_several(labels) for labels in several_before)
                if not had_several:
                    self._note("meetings", func)

    def _rule(self, call: Call) -> Rule | None:
        rule = RULES.get(call.name)
        if rule is None and call.name.startswith("_foreach_"):
            return foreach
        if rule is None and call.name in pointwise_names():
            return elementwise
        return rule

    def _in_order(self, index: Tensor) -> bool:
        """Whether an index counts its rows: made by `arange`, or like it and not by chance."""
        if index.untyped_storage()._cdata in self._counting:
            return True
        if index.dtype in (torch.bool, torch.uint8) or self.num_records < _NOT_BY_CHANCE:
            return False
        return torch.equal(index.flatten().long(), torch.arange(index.numel(), device=index.device))

    def _set(self, func: Any) -> Callable[[Tensor, Tensor | int], None]:
        return lambda tensor, labels: self._memory.write(tensor, labels, self.event(func))

    def _is_alias(
        self, func: Any, name: str, operands: list[Tensor], outputs: list[Tensor | None]
    ) -> bool:
        """Whether the outputs are views of the operands, so that labels follow by themselves."""
        if torch.Tag.inplace_view in func.tags:
            return True
        if not func.is_view and name not in ALIASES:
            return False
        sources = {tensor.untyped_storage()._cdata for tensor in operands}
        return all(t is None or t.untyped_storage()._cdata in sources for t in outputs)

    def _note_joined_elements(
        self, func: Any, source: Tensor, outputs: list[Tensor | None]
    ) -> None:
        """A view with larger elements joins labels; note it where records meet in one element."""
        for output in outputs:
            if output is None or output.itemsize <= source.itemsize:
                continue
            before = self._memory.find(source)
            had_several = before is not None and _has_several(before)
            after = self._memory.find(output)
            if after is not None and _has_several(after) and not had_several:
                self._note("meetings", func)

    def _deny(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Label all that an operator returns or writes to as several records, and name it."""
        self._note("unknown", func)
        written = _tensors(output)
        if getattr(func, "_schema", None) is not None:
            written += bind(func._schema, args, kwargs, False)[2]
        for tensor in written:
            with suppress(Exception):  # what cannot be labelled is named above all the same
                for inner in (parts(tensor) or []) if is_wrapper(tensor) else [tensor]:
                    self._memory.write(inner, SEVERAL, self.event(func))

    def _hides_private(self, wrapper: Tensor) -> bool:
        """Whether one of the tensors inside of a wrapper is private, or cannot be seen."""
        inner = parts(wrapper)
        return inner is None or any(self.private(tensor) for tensor in inner)

    def _may_be_private(self, tensor: Tensor) -> bool:
        return self._hides_private(tensor) if is_wrapper(tensor) else self.private(tensor)

    def _report(self, func: Any, reads: list[Tensor]) -> None:
        if self.on_operator is None:
            return
        has_record = has_several = False
        for tensor in reads:
            labels = self._memory.find(tensor)
            if labels is not None and labels.numel():
                low, high = (int(bound) for bound in torch.aminmax(labels))
                has_record = has_record or high > 0
                has_several = has_several or low < 0
        self.on_operator(func, has_record, has_several)

    # --- events -----------------------------------------------------------------------------------

    def _note(self, kind: str, func: Any) -> None:
        self._events[kind][self.event(func)] = None

    def _note_error(self, name: str, operands: Any) -> None:
        with torch._C.DisableTorchFunction():
            if any(self._may_be_private(tensor) for tensor in _tensors(operands)):
                where = self._sources.where()
                self._events["looks"][Event(f"the error of {name}", where, self.phase)] = None

    def event(self, func: Any) -> Event:
        return Event(operator_name(func), self._sources.where(), self.phase)


class _PythonWatch(TorchFunctionMode):
    """Notices what the dispatcher does not: values and memory handed to other libraries."""

    def __init__(self, shadow: Shadow) -> None:
        super().__init__()
        self._shadow = shadow
        self.inside_check = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(getattr(func, "__self__", None), "fget", None), "__name__", "")
        if name in _HANDS_OUT_VALUES:
            self._note("looks", name, args[:1])
        elif name in _HANDS_OUT_MEMORY:
            self._note("unknown", name, args[:1])
        elif name in _READS_ARGUMENT:
            self._note("looks", name, [*args[_READS_ARGUMENT[name] :], *kwargs.values()])
        elif func is F.gaussian_nll_loss or (
            func is F.one_hot and _num_classes(*args, **kwargs) >= 0
        ):
            # They read values to refuse those out of range; nothing of them reaches Python.
            self.inside_check = True
            try:
                return func(*args, **kwargs)
            except Exception:
                self._shadow._note_error(name, [*args, *kwargs.values()])
                raise
            finally:
                self.inside_check = False
        elif name in _READS_LISTS:
            data = [*args, *kwargs.values()]
            if name in ("__getitem__", "__setitem__"):  # `x[i, [j, k]]`: i is given as a tensor
                index = args[1]
                data = list(index) if isinstance(index, tuple) else [index]
            lists = [value for value in data if not isinstance(value, Tensor)]
            self._note("looks", name, _scalars_in(lists))
        elif calls_back(func):
            return call_back_inside(self, func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, kind: str, name: str, values: Any) -> None:
        if any(isinstance(value, Tensor) and self._shadow.private(value) for value in values):
            event = Event(f"Tensor.{name}", self._shadow._sources.where(), self._shadow.phase)
            self._shadow._events[kind][event] = None


#: Rules of these operators write the labels of running statistics themselves.
_WRITES_ITSELF = names(
    "native_batch_norm _native_batch_norm_legit cudnn_batch_norm _batch_norm_with_update "
    "_batch_norm_no_update rrelu_with_noise"
)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in flat(values) if isinstance(leaf, Tensor)]


def _scalars_in(value: Any) -> Iterator[Tensor]:
    """Tensors of one element that are somewhere in a list, or in whatever can be read like one."""
    if isinstance(value, Tensor):
        if _has_elements(value) and value.numel() == 1:
            yield value
    elif not isinstance(value, (str, bytes, range, Mapping, np.ndarray)) and (
        hasattr(value, "__len__") and hasattr(value, "__getitem__")
    ):
        with suppress(LookupError, TypeError):  # PyTorch cannot read it either
            for k in range(len(value)):
                yield from _scalars_in(value[k])


def _has_elements(tensor: Tensor) -> bool:
    """Whether each element has a place in the tensor's own memory."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_wrapper(tensor)


def _num_classes(tensor: Tensor, num_classes: int = -1) -> int:
    return num_classes


def _expand(label: Any, tensor: Tensor | None) -> Any:
    if tensor is None or label is None or isinstance(label, int) or tensor.numel() == 0:
        return 0 if label is None else label
    return label.expand(tensor.shape)


def _has_several(labels: Tensor | None) -> bool:
    return labels is not None and labels.numel() > 0 and bool((labels < 0).any())
