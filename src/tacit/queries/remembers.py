"""Does a model remember earlier passes? Then records of one pass are in the gradients of the next.

State in buffers and parameters is compared itself (`keeps_nothing`). A model may also keep it in an
attribute of Python's, which nobody can tell from a harmless note. So the same records are given
twice, with others between them, and must give the same both times. A model that draws from a
generator of its own does not either: copies of it, made at one time, show which it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

Pass = Callable[[nn.Module], Mapping[str, Tensor]]


def remembers(model: nn.Module, one: Pass, between: Pass | None, device: torch.device) -> bool:
    """Whether the pass `one` gives something else after `between`, and not by chance."""
    first = _drawn_alike(one, model, device)
    if between is not None:
        _drawn_alike(between, model, device)
    if _alike(first, _drawn_alike(one, model, device)):
        return False
    try:
        copies = copy.deepcopy(model), copy.deepcopy(model)
    except Exception:  # a model that cannot be copied cannot be asked
        return False
    return _alike(*(_drawn_alike(one, each, device) for each in copies))


def remembering(model: nn.Module) -> str:
    """What to say of such a model."""
    return (
        f"{type(model).__name__} remembers: the same records give something else after others were "
        "seen, so earlier records, without noise, are in later gradients. Take what it keeps from "
        "pass to pass out, or hold it still while it is trained"
    )


def _drawn_alike(one: Pass, model: nn.Module, device: torch.device) -> Mapping[str, Tensor]:
    """With PyTorch's generators as they are now, and set back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return one(model)


def _alike(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """To roundings, tensor by tensor; what is not finite is compared with nothing."""
    for name, wanted in a.items():
        difference, size = ((t.double().norm()) for t in (wanted - b[name], wanted))
        tolerance = 1e-9 if wanted.dtype is torch.float64 else 1e-3
        if wanted.dtype in (torch.float16, torch.bfloat16):
            tolerance = 5e-2
        if bool(difference > tolerance * size):
            return False
    return True
