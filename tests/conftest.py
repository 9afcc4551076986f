"""For all tests: one thread each, no downloads, and a torchvision that can be imported."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before NumPy and PyTorch are imported, and for the processes that tests start.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

# Alive as long as the process: a library that is collected takes its operators with it.
_declared: list[torch.library.Library] = []


def declare_torchvision_operators() -> None:
    """Declare the operators that `import torchvision` describes, where its wheel cannot load.

    The wheel from the package index is built for CUDA. With the CPU build of PyTorch its compiled
    part does not load, and the import stops at operators that are not there. No test uses them, so
    a declaration without an implementation is enough.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None:
        return
    for folder in found.submodule_search_locations or []:
        for compiled in Path(folder).glob("_C*"):
            try:
                torch.ops.load_library(str(compiled))
            except OSError:
                continue
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


declare_torchvision_operators()


@pytest.fixture
def usual_interrupts() -> Iterator[None]:
    """Ctrl-C as Python has it: libraries that other tests import may have a handler of their own,
    and a process in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before is not None:
        signal.signal(signal.SIGINT, before)
