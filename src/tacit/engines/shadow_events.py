"""What shadow memory reports: source lines, and values that leave PyTorch's dispatcher.

An event is an operator and the line of the user's program that called it. An operator of the
backward pass is reported with the line of the forward pass that it belongs to. `PythonWatch` sees
the functions that hand values or memory of a tensor to Python or to another library.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tacit import torch_internals
from tacit.engines.shadow_calls import names
from tacit.engines.shadow_labels import has_elements
from tacit.torch_internals import (
    call_back_inside,
    calls_back,
    newest_node_number,
    number_of,
    run_backward,
    running_node,
    schema_of,
)

if TYPE_CHECKING:
    from tacit.engines.shadow import Shadow

#: Methods of a tensor that hand its values to something other than the dispatcher.
_HANDS_OUT_VALUES = names(
    "tolist numpy __array__ __dlpack__ __reduce_ex__ to_dlpack __cuda_array_interface__ "
    "__repr__ __format__ __float__ __int__ __bool__ __index__ __complex__ apply_"
)
#: Methods that hand out its memory: a kernel may read and write there unseen.
_HANDS_OUT_MEMORY = names("data_ptr storage untyped_storage _typed_storage")
#: Functions that read their arguments from this position on without the dispatcher.
_READS_ARGUMENT = {"tensor_split": 1, "_pack_padded_sequence": 1, "map_": 0, "map2_": 0}
#: Functions that copy scalars out of lists without the dispatcher.
_READS_LISTS = names(
    "tensor as_tensor asarray new_tensor new sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor "
    "sparse_bsr_tensor sparse_bsc_tensor sparse_compressed_tensor __getitem__ __setitem__"
)

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.join(_TORCH_FOLDER, "nn", "modules") + os.sep
_CALLS_MODELS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "pytrees.py")
_SKIPPED_FOLDERS = (_TORCH_FOLDER, os.path.dirname(__file__) + os.sep, torch_internals.__file__)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_SITE_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


class SourceLines:
    """Finds the source line of the operator that is running."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[str, int]] = {}  # by the number of the backward node

    def note(self) -> None:
        """Note the source line of the newest backward node."""
        frame = _user_frame()
        if frame is not None:
            line = frame.f_code.co_filename, frame.f_lineno
            self._lines.setdefault(newest_node_number(), line)

    def where(self) -> str:
        """The innermost line outside PyTorch and this package, as `file.py:12: z = z.mean(0)`."""
        frame, node = _user_frame(stop_at_backward=True), running_node()
        line = None if node is None or frame is not None else self._lines.get(number_of(node))
        frame = frame or _user_frame()
        if line is None and frame is not None:
            line = frame.f_code.co_filename, frame.f_lineno
        if line is None:
            return "unknown source line" if node is None else f"backward of {node.name()}"
        filename, number = line
        text = linecache.getline(filename, number).strip()
        return f"{os.path.basename(filename)}:{number}: {text}"


def operator_name(func: Any) -> str:
    """The name of an operator without its overload, such as `aten.native_batch_norm`."""
    schema = schema_of(func)
    return str(func) if schema is None else schema.name.replace("::", ".")


def _user_frame(stop_at_backward: bool = False) -> FrameType | None:
    """The innermost frame outside PyTorch, the standard library and this package.

    Model libraries count as the user's code. With `stop_at_backward`, frames outside a running
    backward pass do not count: they only say who started it. A model that is made of PyTorch's
    modules alone has no such line, and the module's own is the answer.
    """
    frame: FrameType | None = sys._getframe(1)
    inside: FrameType | None = None
    while frame is not None:
        name = frame.f_code.co_filename
        if name == _CALLS_MODELS:
            return inside
        if _is_user_file(name):
            return frame
        if inside is None and name.startswith(_MODULES):
            inside = frame
        if stop_at_backward and frame.f_code is run_backward.__code__:
            return None
        frame = frame.f_back
    return None


@cache
def _is_user_file(name: str) -> bool:
    installed = any(part in name for part in _SITE_PACKAGES)
    skipped = _SKIPPED_FOLDERS if installed else (*_SKIPPED_FOLDERS, _STANDARD_LIBRARY, "<")
    return not name.startswith(skipped)


class PythonWatch(TorchFunctionMode):
    """Notices what the dispatcher does not: values and memory handed to other libraries."""

    def __init__(self, shadow: Shadow) -> None:
        super().__init__()
        self._shadow = shadow
        self.inside_check = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(getattr(func, "__self__", None), "fget", None), "__name__", "")
        if name in _HANDS_OUT_VALUES:
            self._note_private("value_reads", name, args[:1])
        elif name in _HANDS_OUT_MEMORY:
            self._note_private("unknown", name, args[:1])
        elif name in _READS_ARGUMENT:
            self._note_private(
                "value_reads", name, [*args[_READS_ARGUMENT[name] :], *kwargs.values()]
            )
        elif func is F.gaussian_nll_loss or (
            func is F.one_hot and _num_classes(*args, **kwargs) >= 0
        ):
            # They read values to refuse those out of range; nothing of them reaches Python.
            self.inside_check = True
            try:
                return func(*args, **kwargs)
            except Exception:
                self._shadow.note_error(name, [*args, *kwargs.values()])
                raise
            finally:
                self.inside_check = False
        elif name in _READS_LISTS:
            data = [*args, *kwargs.values()]
            if name in ("__getitem__", "__setitem__"):  # `x[i, [j, k]]`: i is given as a tensor
                index = args[1]
                data = list(index) if isinstance(index, tuple) else [index]
            lists = [value for value in data if not isinstance(value, Tensor)]
            self._note_private("value_reads", name, _scalars_in(lists))
        elif calls_back(func):
            return call_back_inside(self, func, args, kwargs)
        return func(*args, **kwargs)

    def _note_private(self, kind: str, name: str, values: Iterable[Any]) -> None:
        if any(isinstance(value, Tensor) and self._shadow.private(value) for value in values):
            self._shadow.note(kind, f"Tensor.{name}")


def _scalars_in(value: Any) -> Iterator[Tensor]:
    """Tensors of one element that are somewhere in a list, or in whatever can be read like one."""
    if isinstance(value, Tensor):
        if has_elements(value) and value.numel() == 1:
            yield value
    elif not isinstance(value, (str, bytes, range, Mapping, np.ndarray)) and (
        hasattr(value, "__len__") and hasattr(value, "__getitem__")
    ):
        with suppress(LookupError, TypeError):  # PyTorch cannot read it either
            for k in range(len(value)):
                yield from _scalars_in(value[k])


def _num_classes(tensor: Tensor, num_classes: int = -1) -> int:
    return num_classes
