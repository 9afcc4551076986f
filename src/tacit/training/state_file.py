"""A file of plain values and tensors: written whole or not at all, and read without running code.

One safetensors file. Its tensors have their paths in the tree as names; the rest of the tree is
JSON in the file's metadata, with a SHA-256 over all of it. `only_process` keeps a second process
away from the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from tacit.errors import CheckpointRefused

CHECKPOINT = "checkpoint.safetensors"
_FORMAT = "tacit checkpoint 1"
# By device and inode: the descriptor that holds a folder's lock, and how often it was entered.
_locked: dict[tuple[int, int], list[int]] = {}


@contextmanager
def only_process(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Raise CheckpointRefused if another process is inside for the same folder.

    The folder is made, and removed at the end if it is empty. The lock is the kernel's, on the
    folder itself: it leaves no file, and ends with the process, however that ends. The process that
    holds it may enter again. A file system without such locks gets a warning; Windows has none.
    """
    missing = [made for made in (Path(folder), *Path(folder).parents) if not made.exists()]
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        with nullcontext() if os.name == "nt" else _lock(folder):
            yield
    finally:
        with suppress(OSError):  # not empty
            for made in missing:
                made.rmdir()


@contextmanager
def _lock(folder: str | os.PathLike[str]) -> Iterator[None]:
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    status = os.fstat(descriptor)
    key = status.st_dev, status.st_ino
    if key in _locked:
        os.close(descriptor)
    else:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointRefused(
                f"another process is training in {folder}; wait until it ends, or end it"
            ) from None
        except OSError as error:
            warnings.warn(
                f"{folder} cannot be locked ({error.strerror}); see that no other process trains "
                "in it",
                stacklevel=3,
            )
        _locked[key] = [descriptor, 0]
    _locked[key][1] += 1
    try:
        yield
    finally:
        if key in _locked:  # not in a forked process, which holds no lock
            _locked[key][1] -= 1
            if _locked[key][1] == 0:
                os.close(_locked.pop(key)[0])


def _hold_no_lock() -> None:
    """A worker that outlives its parent must not keep the lock."""
    for descriptor, _ in _locked.values():
        os.close(descriptor)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_hold_no_lock)


def write_state(file: Path, state: Mapping[str, Any]) -> None:
    """Write a tree of plain values and tensors into `file`, durably, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encoded(state, "", tensors), separators=(",", ":"), allow_nan=False)
    metadata = {"format": _FORMAT, "state": text, "sha256": _digest(text, tensors)}
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.new")  # one name: a kill leaves one of them at most
    save_file(tensors, draft, metadata)
    with draft.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(draft, file)
    if os.name != "nt":
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_state(file: Path) -> Any:
    """The tree in `file`. Whatever is wrong with it raises one of many errors."""
    raw = file.read_bytes()
    tensors = load(raw)  # checks the header
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    metadata = header["__metadata__"]
    if metadata["format"] != _FORMAT:
        raise ValueError(f"its format is {metadata['format']!r}, and {_FORMAT!r} is known")
    if metadata["sha256"] != _digest(metadata["state"], tensors):
        raise ValueError("its content was changed, or is not whole")
    return _decoded(json.loads(metadata["state"]), tensors)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {len(text)} {text}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go into `tensors` under their paths."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise ValueError(f"{path} is a {value.layout} tensor, which a checkpoint cannot hold")
        tensors[path] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": path}
    if isinstance(value, list | tuple):
        items = [_encoded(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        kind = "counter" if isinstance(value, Counter) else "dict"
        pairs = [[k, _encoded(v, f"{path}/{k!r}", tensors)] for k, v in value.items()]
        return {kind: pairs}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _encoded(value.item(), path, tensors)
    raise ValueError(
        f"{path.lstrip('/')} is a {type(value).__name__}, which a checkpoint cannot hold: give "
        "state_dict() numbers, texts, None and tensors, in lists, tuples and dicts"
    )


_KINDS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "dict": dict, "counter": Counter}


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(_decoded(v, tensors) for v in content)
    return _KINDS[kind]({key: _decoded(v, tensors) for key, v in content})
