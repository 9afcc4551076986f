"""Dropout's masks and augmented views come from a stream that nobody can repeat.

The bound of a step compares neighbours whose other records have the same masks and views. These are
drawn row by row from one stream, so with a record fewer all later rows get others: under a
seed that is known, as `torch.manual_seed(0)` at the top of a script, the sum moves by far more than
one record's share. Under a secret one that is no matter. The rows' draws are independent and of one
distribution, so the step is a mixture over draws that belong to records, and for each of them
neighbours differ by one record's share; what holds of every part of a mixture holds of the mixture,
since the hockey-stick divergence is jointly convex [Balle et al. 2018, Theorem 2].
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tacit.noise import generator_for
from tacit.process_lock import ProcessLock

Result = TypeVar("Result")
_WORDS = 624  # of a Mersenne twister
_one_at_a_time = ProcessLock()


class SecretDraws:
    """Runs steps whose draws from global generators go on a stream of the operating system's.

    Those are PyTorch's on the CPU and on the records' device, NumPy's and Python's, and they are as
    they were after each step. The first step that has records decides: if nothing is drawn in it,
    later ones are only watched, and one that draws from PyTorch's is run again, on that stream;
    nothing has been released by then. Steps that draw wait for each other, whichever threads they
    are in: the generators are the process's.
    """

    def __init__(self) -> None:
        self._draws: bool | None = None
        self._streams: dict[torch.device, Streams] = {}

    def __call__(self, step: Callable[[], Result], records: Tensor) -> Result:
        device = records.device
        if self._draws is False:
            before = _of_torch(device)
            found = step()
            if _same(before, _of_torch(device)):
                return found
            self._draws = True
            with _one_at_a_time:
                _set_torch(before, device)
                return self._on_the_stream(step, records)
        with _one_at_a_time:
            return self._on_the_stream(step, records)

    def _on_the_stream(self, step: Callable[[], Result], records: Tensor) -> Result:
        device = records.device
        held = Streams.now(device)
        stream = self._streams.get(device) or Streams.fresh(device)
        stream.go_on(device)
        try:
            found = step()
        finally:
            self._streams[device] = Streams.now(device)
            held.go_on(device)
        if self._draws is None and len(records) > 0:
            self._draws = not stream.same(self._streams[device])
        return found


@dataclass(frozen=True)
class Streams:
    """Where the global generators are: PyTorch's, NumPy's, Python's."""

    of_torch: list[Tensor]
    of_numpy: tuple
    of_python: tuple

    @classmethod
    def now(cls, device: torch.device) -> Streams:
        return cls(_of_torch(device), np.random.get_state(), random.getstate())  # type: ignore[arg-type]

    @classmethod
    def fresh(cls, device: torch.device) -> Streams:
        """From the operating system: all words of each state, where a seed would be 32 bits."""
        states = [generator_for("cpu", None).get_state()]
        if device.type == "cuda":
            states.append(torch.Generator(device).manual_seed(secrets.randbits(63)).get_state())
        words = np.frombuffer(secrets.token_bytes(8 * _WORDS), dtype=np.uint32)
        of_python = (3, (*map(int, words[_WORDS:]), _WORDS), None)
        return cls(states, ("MT19937", words[:_WORDS].copy(), _WORDS, 0, 0.0), of_python)

    def go_on(self, device: torch.device) -> None:
        _set_torch(self.of_torch, device)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_python)

    def same(self, other: Streams) -> bool:
        alike = self.of_numpy[2:] == other.of_numpy[2:] and bool(
            (self.of_numpy[1] == other.of_numpy[1]).all()
        )
        return alike and self.of_python == other.of_python and _same(self.of_torch, other.of_torch)


def _of_torch(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_torch(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
