"""Programs as they were written: nothing compiled, nothing fused, no value of a record read.

A plan is made from the operators of a pass. Whatever hides operators is switched off here, or
replaced by a program that shows them: compiled models, fused attention, fused recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tacit.engines.recurrence import decomposed
from tacit.torch_internals import (
    RECURRENT,
    as_if_compiling,
    call_back_inside,
    calls_back,
    compiler_is_loaded,
    function_modes,
    in_transform,
    without_argument_checks,
    without_fused_layers,
)


@contextmanager
def plain_program(functions: bool = True) -> Iterator[PlainFunctions | None]:
    """Run a forward pass so that the autograd graph shows every operator, and no code reads values.

    - A model under `torch.compile` would be one opaque node: it runs as it was written.
    - Some libraries read values to save work (Transformers drops a mask that is all ones), but not
      while a program is compiled. So they are told that it is: then there is one program, whatever
      the records hold.
    - Distributions read their parameters to refuse those out of range, unless told not to.
    - Fused attention blocks and recurrent layers hide their parameters: they are decomposed.
    - Embeddings with `sparse=True` give dense gradients here: the same numbers.
    - `torch.cond` compiles itself, which a dispatch mode prevents: it is a Python `if`.

    The last three need a mode that sees every function. It is yielded, and tells whether it had
    anything to replace; a program that calls no such function can do without (`functions`).
    """
    with ExitStack() as stack:
        _stop_compiling(stack)
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(as_if_compiling())
        stack.enter_context(without_argument_checks())
        yield stack.enter_context(PlainFunctions()) if functions else None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run a pass as it was written: nothing compiles itself, and `torch.cond` is a Python `if`."""
    with ExitStack() as stack:
        if _stop_compiling(stack):
            stack.enter_context(PlainFunctions(cond_only=True))
        yield


def _stop_compiling(stack: ExitStack) -> bool:
    """Whether there was anything to stop."""
    if not compiler_is_loaded():
        return False
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    return True


class PlainFunctions(TorchFunctionMode):
    """Recurrent layers as linear maps and scans (`recurrence`); no sparse gradients.

    `torch.cond` runs the branch that its predicate chooses. `replaced` tells whether any such
    function was called.
    """

    _cond = torch.ops.higher_order.cond
    _place_of_sparse: ClassVar[dict[Any, int]] = {
        F.embedding: 6,
        F.embedding_bag: 7,
        torch.embedding: 4,
        torch.embedding_bag: 5,
    }

    def __init__(self, cond_only: bool = False) -> None:
        super().__init__()
        self.cond_only = cond_only
        self.replaced = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is self._cond:
            self._tell()
            return self._branch(*args, **kwargs)
        if calls_back(func):
            return call_back_inside(self, func, args, kwargs)
        if self.cond_only:
            return func(*args, **kwargs)
        if func in RECURRENT:
            self._tell()
            # No transform knows what the scan does.
            program = None if in_transform() else decomposed(RECURRENT[func], args)
            if program is not None:
                return program()
            with without_fused_layers():
                return func(*args, **kwargs)
        place = self._place_of_sparse.get(func)
        if place is not None and len(args) > place and args[place]:
            self._tell()
            args = (*args[:place], False, *args[place + 1 :])
        elif place is not None and kwargs.get("sparse"):
            self._tell()
            kwargs = {**kwargs, "sparse": False}
        return func(*args, **kwargs)

    def _tell(self) -> None:
        """Outer modes of this kind do not see what this one has replaced."""
        for mode in (self, *function_modes()):
            if isinstance(mode, PlainFunctions):
                mode.replaced = True

    def _branch(
        self,
        pred: Any,
        true_fn: Callable[..., Any],
        false_fn: Callable[..., Any],
        operands: Sequence[Any] = (),
    ) -> Any:
        with self:
            return true_fn(*operands) if pred else false_fn(*operands)
