"""Set-up for the zoo: no downloads, no library warnings, and a torchvision that can be imported."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Alive as long as the process: a library that is collected takes its operators with it.
_declared: list[torch.library.Library] = []


def declare_torchvision_operators() -> None:
    """Declare the operators that `import torchvision` describes, where its wheel cannot load.

    The wheel from the package index is built for CUDA. With the CPU build of PyTorch its compiled
    part does not load, and the import stops at operators that are not there. No model of the zoo
    uses them, so a declaration without an implementation is enough.
    """
    found = importlib.util.find_spec("torchvision")
    assert found is not None, "the zoo needs torchvision; install tacit[dev]"
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

import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Silence what the libraries warn about here; what Tacit warns about is tested elsewhere."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
