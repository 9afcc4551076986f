"""Shadow memory: one label for every element of every private storage.

A tensor's labels are its own sizes, strides and offset over the labels of its storage. So a view
has the right labels without a rule, and a write through one view is seen through all others.

Storages are known by identity. A storage that died cannot be confused with a new one: this file
holds a weak reference to each storage that it knows, and PyTorch does not reuse the handle of a
storage while a weak reference to it exists. Labels of dead storages are dropped from time to time.

`StorageWeakRef` and the handle of a storage are the only ways PyTorch offers to do this; all uses
of them are in this file. Run on torch 2.13 on the CPU.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tacit.engines.shadow_labels import combine, overlaps, reduce_labels

Origin = TypeVar("Origin")


class _Block(Generic[Origin]):
    """The labels of one storage, one per `itemsize` bytes, and what first made it private."""

    __slots__ = ("itemsize", "labels", "marked", "origin", "storage")

    def __init__(
        self, storage: StorageWeakRef, itemsize: int, labels: Tensor, origin: Origin | None
    ) -> None:
        self.storage = storage
        self.itemsize = itemsize
        self.labels = labels
        self.origin = origin
        self.marked = False

    def resize(self, itemsize: int, size: int) -> None:
        """Count in elements of `itemsize` bytes, and cover at least `size` of them.

        Smaller elements inherit the label of the larger one; a larger one joins the smaller.
        """
        labels = self.labels
        if itemsize < self.itemsize:
            labels = labels.repeat_interleave(self.itemsize // itemsize)
        elif itemsize > self.itemsize:
            ratio = itemsize // self.itemsize
            labels = torch.nn.functional.pad(labels, (0, -labels.numel() % ratio))
            labels = reduce_labels(labels.view(-1, ratio), 1)
        if labels.numel() < size:
            labels = torch.nn.functional.pad(labels, (0, size - labels.numel()))
        self.itemsize = itemsize
        self.labels = labels.contiguous()


class ShadowMemory(Generic[Origin]):
    """The labels of all private storages. A storage without labels is public."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block[Origin]] = {}
        self._sweep_at = 256

    def known(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage may hold something private. Cheap: no label is read."""
        return _handle(tensor) in self._blocks

    def find(self, tensor: Tensor) -> Tensor | None:
        """The labels of a tensor, or None when its storage is public."""
        block = self._blocks.get(_handle(tensor))
        return None if block is None else self._view(block, tensor)

    def open(self, tensor: Tensor, origin: Origin | None = None) -> Tensor:
        """The labels of a tensor, as a view that may be written to."""
        handle = _handle(tensor)
        block = self._blocks.get(handle)
        if block is None:
            storage = tensor.untyped_storage()
            size = -(-storage.nbytes() // tensor.itemsize)
            # Labels outlive a block of inference mode, and are written to after it.
            with torch.inference_mode(False):
                labels = torch.zeros(size, dtype=torch.int32, device=tensor.device)
            block = _Block(StorageWeakRef(storage), tensor.itemsize, labels, origin)
            self._blocks[handle] = block
            if len(self._blocks) >= self._sweep_at:
                self._sweep()
        elif block.origin is None and not block.marked:
            block.origin = origin
        return self._view(block, tensor)

    def mark(self, tensor: Tensor, labels: Tensor) -> None:
        """Set labels on the caller's behalf: nothing made this storage private but the caller."""
        self.write(tensor, labels)
        self._blocks[_handle(tensor)].marked = True

    def write(self, tensor: Tensor, labels: Tensor | int, origin: Origin | None = None) -> None:
        """Set the labels of a tensor, broadcasting them to its shape."""
        if isinstance(labels, int) and labels == 0 and not self.known(tensor):
            return
        shadow = self.open(tensor, origin)
        if isinstance(labels, int):
            shadow.fill_(labels) if not overlaps(tensor) else self._join(shadow, labels)
        elif not overlaps(tensor):
            shadow.copy_(labels.expand(tensor.shape))
        else:
            self._join(shadow, reduce_labels(labels))

    @staticmethod
    def _join(shadow: Tensor, label: Tensor | int) -> None:
        # Several elements share memory, and which of them is written last is not defined.
        old = reduce_labels(shadow)
        new = torch.as_tensor(label, dtype=torch.int32, device=shadow.device)
        dims = [dim for dim in range(shadow.dim()) if shadow.stride(dim) == 0]
        distinct = shadow
        for dim in dims:
            distinct = distinct.narrow(dim, 0, min(1, distinct.shape[dim]))
        distinct.fill_(int(combine(old, new)))

    def remember(self, earlier: ShadowMemory[Origin], label: int) -> None:
        """Give `label` to everything private of an earlier pass that still exists."""
        earlier._sweep()
        for handle, block in earlier._blocks.items():
            if bool((block.labels != 0).any()):
                labels = torch.where(block.labels != 0, label, 0).to(torch.int32)
                held = _Block(block.storage, block.itemsize, labels, block.origin)
                held.marked = True
                self._blocks[handle] = held

    def origin(self, tensor: Tensor) -> Origin | None:
        block = self._blocks.get(_handle(tensor))
        return None if block is None else block.origin

    def alive(self) -> list[tuple[Tensor, Origin | None]]:
        """Label arrays and origins of all storages that still exist."""
        self._sweep()
        return [(block.labels, block.origin) for block in list(self._blocks.values())]

    def _sweep(self) -> None:
        for handle, block in list(self._blocks.items()):
            if block.storage.expired():
                del self._blocks[handle]
        self._sweep_at = max(256, 2 * len(self._blocks))

    @staticmethod
    def _view(block: _Block[Origin], tensor: Tensor) -> Tensor:
        size = -(-tensor.untyped_storage().nbytes() // tensor.itemsize)
        if block.itemsize != tensor.itemsize or block.labels.numel() < size:
            with torch.inference_mode(False):
                block.resize(tensor.itemsize, size)
        return block.labels.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor holds its values in other tensors: jagged, masked or quantised ones."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def parts(tensor: Tensor) -> list[Tensor] | None:
    """The tensors that a wrapper is made of; None if it does not tell."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _handle(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise NotImplementedError(f"no label for each element of {tensor.layout} memory")
    return tensor.untyped_storage()._cdata
