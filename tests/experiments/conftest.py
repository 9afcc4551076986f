"""What tests of the experiments share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def real_data() -> None:
    if not os.environ.get("TACIT_DATA"):
        pytest.skip("TACIT_DATA is not set: no real datasets to read")
