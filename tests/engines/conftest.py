"""The mathematics of norms is tested where it is needed: no stack is so small that it is kept."""

import pytest

from tacit.engines import products


@pytest.fixture(autouse=True)
def no_small_stacks(request, monkeypatch):
    """Tests of ghost norms and convolutions ask for them at sizes where rows would be kept."""
    if request.module.__name__.rpartition(".")[2] in ("test_products", "test_convolution"):
        monkeypatch.setattr(products, "_SMALL_STACK", 0)
