"""Hooks that are not this library's: of one module, and of all modules of the process.

By the numbers of their handles, which PyTorch counts up and never gives out again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.nn.modules import module as torch_module

_NONE: dict[int, Callable] = {}


def foreign_hooks(module: nn.Module) -> dict[int, Callable]:
    """What runs beside this module's forward or backward pass, and may change what it gives."""
    forward, before = module._forward_hooks, module._forward_pre_hooks
    backward, before_that = module._backward_hooks, module._backward_pre_hooks
    if not (forward or before or backward or before_that):
        return _NONE  # asked of every module in every step
    return _foreign(forward, before, backward, before_that)


def process_wide_hooks() -> dict[int, Callable]:
    """Those of `torch.nn.modules.module.register_module_…_hook`, which every module runs."""
    return _foreign(
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
        torch_module._global_backward_hooks,
        torch_module._global_backward_pre_hooks,
    )


# The library's own, and PyTorch's counters of operations, which only look.
_LOOKING = ("tacit", "torch.utils.module_tracker", "torch.utils.flop_counter")


def _is_foreign(hook: Callable) -> bool:
    module = getattr(hook, "__module__", None) or ""
    return not any(module == known or module.startswith(f"{known}.") for known in _LOOKING)


def _foreign(*tables: Mapping[int, Callable]) -> dict[int, Callable]:
    return {number: hook for table in tables for number, hook in table.items() if _is_foreign(hook)}
