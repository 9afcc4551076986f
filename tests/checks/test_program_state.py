"""State that a forward pass can write is put back, wherever it is; buffers are left alone."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from tacit.checks.program_state import ProgramState

CPU = torch.device("cpu")
HELD: list[int] = []
COUNT = 0


@dataclass
class Note:
    lines: list[str] = field(default_factory=list)


def helper() -> int:
    """Reached only through the global name that `Everywhere.forward` mentions."""
    global COUNT
    COUNT += 1
    helper.calls = COUNT
    return COUNT


class Everywhere(nn.Module):
    on_class = 0

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.tensor, self.array = 0, torch.zeros(2), np.zeros(2)
        self.note, self.queue, self.table = Note(), deque([1], maxlen=3), {"a": [1]}
        self.register_buffer("buffer", torch.zeros(1))
        cell = 0

        def closure() -> int:
            nonlocal cell
            cell += 1
            return cell

        self.closure = closure

    def forward(self, x):
        type(self).on_class += 1
        self.plain += 1
        self.tensor.add_(1)
        self.array += 1
        self.note.lines.append("called")
        self.queue.append(2)
        self.table["a"].append(2)
        self.table["b"] = 3
        self.new = x
        self.buffer.add_(1)
        HELD.append(1)
        return self.closure() + helper()


def test_everything_that_was_written_is_put_back() -> None:
    model = Everywhere()
    HELD.clear()
    count = COUNT
    state = ProgramState(model, device=CPU)
    first = model(torch.ones(1))
    model(torch.ones(1))
    state.restore()
    assert (type(model).on_class, model.plain, COUNT, HELD) == (0, 0, count, [])
    assert not model.tensor.any()
    assert not model.array.any()
    assert model.note.lines == []
    assert list(model.queue) == [1]
    assert model.table == {"a": [1]}
    assert not hasattr(model, "new")
    assert model(torch.ones(1)) == first  # the closure too
    assert model.buffer == 3  # compared by others, and never put back


@pytest.mark.parametrize(
    "draw",
    [
        lambda own: torch.rand(()),
        lambda own: np.random.rand(),
        lambda own: random.random(),
        lambda own: torch.rand((), generator=own["torch"]),
        lambda own: own["numpy"].random(),
        lambda own: own["older numpy"].rand(),
        lambda own: own["python"].random(),
    ],
)
def test_draws_are_repeated(draw) -> None:
    own = {
        "torch": torch.Generator(),
        "numpy": np.random.default_rng(0),
        "older numpy": np.random.RandomState(0),
        "python": random.Random(0),
    }
    state = ProgramState(own, device=CPU)
    assert not state.drawn()
    first = draw(own)
    assert state.drawn()
    state.restore_draws()
    assert draw(own) == first


def test_a_tensor_that_was_kept_inside_vmap_is_passed_over() -> None:
    class Keeps(nn.Module):
        def forward(self, x):
            self.last = 2 * x
            return x.sum()

    model = Keeps()
    vmap(model)(torch.ones(3, 2))
    state = ProgramState(model, device=CPU)
    kept, model.last = model.last, None
    state.restore()
    assert model.last is kept
