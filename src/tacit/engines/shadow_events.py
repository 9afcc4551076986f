"""What shadow memory reports: an operator and the line of the user's program that called it.

An operator of the backward pass is reported with the line of the forward pass that it belongs to.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from functools import cache
from types import FrameType
from typing import Any

import torch

from tacit.checks.certificate import Event

__all__ = ["Event", "SourceLines"]

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.join(_TORCH_FOLDER, "nn", "modules") + os.sep
_CALLS_MODELS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "pytrees.py")
_SKIPPED_FOLDERS = (_TORCH_FOLDER, os.path.dirname(__file__) + os.sep)
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_SITE_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)


class SourceLines:
    """Finds the source line of the operator that is running."""

    def __init__(self) -> None:
        self._lines: dict[int, tuple[str, int]] = {}

    def remember(self) -> None:
        """Note which line the newest backward node belongs to."""
        frame = _user_frame()
        if frame is not None:
            number = torch.autograd._get_sequence_nr() - 1
            self._lines.setdefault(number, (frame.f_code.co_filename, frame.f_lineno))

    def where(self) -> str:
        """The innermost line outside PyTorch and this package, as `file.py:12: z = z.mean(0)`."""
        frame = _user_frame(stop_at_backward=True)
        if frame is not None:
            return _format_line(frame.f_code.co_filename, frame.f_lineno)
        node = torch._C._current_autograd_node()
        if node is not None and node._sequence_nr() in self._lines:
            return _format_line(*self._lines[node._sequence_nr()])
        frame = _user_frame()
        if frame is not None:
            return _format_line(frame.f_code.co_filename, frame.f_lineno)
        return "unknown source line" if node is None else f"backward of {node.name()}"


def operator_name(func: Any) -> str:
    """The name of an operator without its overload, such as `aten.native_batch_norm`."""
    schema = getattr(func, "_schema", None)
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
        in_backward = frame.f_code.co_name == "_engine_run_backward"
        if stop_at_backward and in_backward and name.startswith(_TORCH_FOLDER):
            return None
        frame = frame.f_back
    return None


@cache
def _is_user_file(name: str) -> bool:
    installed = any(part in name for part in _SITE_PACKAGES)
    skipped = _SKIPPED_FOLDERS if installed else (*_SKIPPED_FOLDERS, _STANDARD_LIBRARY, "<")
    return not name.startswith(skipped)


def _format_line(filename: str, number: int) -> str:
    line = linecache.getline(filename, number).strip()
    return f"{os.path.basename(filename)}:{number}: {line}"
