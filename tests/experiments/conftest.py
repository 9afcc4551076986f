"""What tests of the experiments share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

import tacit


@pytest.fixture
def real_data() -> None:
    if not os.environ.get("TACIT_DATA"):
        pytest.skip("TACIT_DATA is not set: no real datasets to read")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A run on a CPU takes one thread, in this process too."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def made_up() -> Callable[[int, tuple[int, ...]], tacit.Records]:
    """So many images whose bright corner tells their parity: there is something to learn."""

    def make(count: int, shape: tuple[int, ...]) -> tacit.Records:
        generator = torch.Generator().manual_seed(count)
        targets = torch.randint(10, (count,), generator=generator)
        inputs = torch.rand(count, *shape, generator=generator)
        side = shape[-1] // 4
        inputs[:, :, :side, :side] += 4 * (targets % 2)[:, None, None, None]
        name = f"{count} made up"
        return tacit.Records(inputs, targets, num_classes=10, public_size=count, name=name)

    return make
