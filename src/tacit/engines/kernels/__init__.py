"""GPU kernels, each a PyTorch operator in the namespace `tacit::`.

A kernel that is launched directly is invisible to a tracer: what it wrote while the step was
traced would become a constant of the recording, and the recorded step would add the first batch's
gradients for ever. An operator with a fake implementation is recorded as a call. The operators
mutate nothing, and no output shares memory with an input. Callers ask `fits(...)`, which looks at
device, dtype and shape and never at values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_for_compiler: ContextVar[bool] = ContextVar("_for_compiler", default=False)


@contextmanager
def left_to_the_compiler() -> Iterator[None]:
    """Within it a step is traced for a compiler, which does better with other operators."""
    token = _for_compiler.set(True)
    try:
        yield
    finally:
        _for_compiler.reset(token)


def for_compiler() -> bool:
    """Whether the step is being traced for a compiler."""
    return _for_compiler.get()
