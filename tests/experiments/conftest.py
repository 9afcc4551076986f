"""What tests of the experiments share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CLIPLESS = Path(__file__).parents[2] / "experiments" / "clipless"


@pytest.fixture
def clipless_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules are found in experiments/clipless; other folders have files of the same names."""
    names = {path.stem for path in CLIPLESS.glob("*.py")}
    for name in names:
        sys.modules.pop(name, None)
    monkeypatch.syspath_prepend(str(CLIPLESS))
    yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def real_data() -> None:
    if not os.environ.get("TACIT_DATA"):
        pytest.skip("TACIT_DATA is not set: no real datasets to read")
